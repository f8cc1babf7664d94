"""Times of links: what the formulas say by hand."""

from __future__ import annotations

import pytest

from lightning_mm5d.tools.planner.links import Cluster, Link

LINK = Link(latency=1.0, bandwidth=10.0)


def test_collectives_take_what_rings_take() -> None:
    assert LINK.message(20) == 3.0
    # three steps of four ranks, each of a quarter of 40 bytes
    assert LINK.all_gather(4, 40) == LINK.reduce_scatter(4, 40) == LINK.all_to_all(4, 40) == 3 * (1 + 1)
    assert LINK.all_reduce(4, 40) == 12.0
    assert LINK.all_reduce(1, 40) == 0.0


def test_a_group_over_nodes_goes_at_the_pace_of_the_links_between_them() -> None:
    cluster = Cluster(nodes=2, ranks=4, memory=1, inside=LINK, between=Link(2.0, 1.0))
    assert cluster.size == 8
    assert cluster.link((0, 3)) is cluster.link(()) is LINK
    assert cluster.link((3, 4)).latency == 2.0


def test_devices_compute_products_by_flops_and_all_else_by_bytes() -> None:
    cluster = Cluster(nodes=1, ranks=1, memory=1, flops=100.0, efficiency=0.5, memory_bandwidth=10.0)
    assert cluster.seconds(100.0, 20.0) == pytest.approx(2 + 2)
