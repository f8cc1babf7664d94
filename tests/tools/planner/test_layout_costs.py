"""Costs of links and layers: formulas and flops by hand, other layouts from two traces, and what a step adds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_mm5d.config.groups import with_fields
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.partition.costs import Unit, step_costs
from lightning_mm5d.tools.planner.activation_trace import Trace
from lightning_mm5d.tools.planner.layout_costs import Cluster, LayoutCosts, Link
from lightning_mm5d.tools.planner.profile import Measured
from lightning_mm5d.tools.planner.search import LayoutSearch
from tools.planner.searches import searching
from zoo import CASES

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


def test_devices_compute_longer_beside_each_other_and_messages_take_as_long() -> None:
    cluster = Cluster(nodes=1, ranks=2, memory=1, flops=50.0, memory_bandwidth=10.0, inside=LINK, compute_slowdown=1.5)
    assert cluster.seconds(100.0, 20.0) == pytest.approx(1.5 * (2 + 2))
    assert cluster.link((0, 1)).message(20) == 3.0


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def one() -> LayoutSearch:
    return searching("llama", 4, samples=4, inside=Link(1e-6, 1e9), flops=1e9, memory_bandwidth=1e10)


def kept(trace: Trace) -> int:
    return sum(sum(unit.saved.values()) for unit in trace.units["language"])


def test_a_layer_takes_two_flops_for_each_weight_and_token_and_the_pairs_of_its_mask(one: LayoutSearch) -> None:
    batch = CASES["llama"].make_batch([1] * 2)
    samples, length = batch["input_ids"].shape
    layer = CASES["llama"].build().get_submodule("model.model.layers.0")
    weights = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    work = one.costs.of_one.units["language"][1].work
    assert work.flops == work.trained == 2 * weights * samples * length
    heads_width = layer.self_attn.q_proj.out_features
    pairs = batch["attention_mask"].bool()[:, None].expand(-1, length, -1).tril()
    assert work.attention == 4 * int(pairs.sum()) * heads_width
    assert work.moved > 0


def test_two_traces_give_that_of_other_ranks_and_samples(one: LayoutSearch) -> None:
    plan, costs = one.plan, one.costs
    assert costs.samples == 2
    two = {"language": replace(plan.modalities["language"], tp_size=2)}
    assert kept(costs.trace(two, 2)) == kept(costs.of_two)
    assert kept(costs.trace(plan.modalities, 4)) == 2 * kept(costs.of_one)
    four = {"language": replace(plan.modalities["language"], tp_size=4)}
    assert kept(costs.of_two) > kept(costs.trace(four, 2)) > kept(costs.of_two) / 2


def test_tensor_parallel_ranks_share_products_and_wait_for_sums(one: LayoutSearch) -> None:
    def forward(tp_size: int, link: Link) -> float:
        cluster = replace(one.costs.cluster, inside=link)
        costs = replace(one.costs, cluster=cluster, known={})
        return costs.units("language", Modality(tp_size=tp_size), 2)[1].forward

    free, slow = Link(0.0, 1e30), Link(1.0, 1e30)
    assert forward(1, free) / 2 < forward(2, free) < forward(1, free)
    # two sums of two ranks: a step to scatter and one to gather each
    assert forward(2, slow) - forward(2, free) == pytest.approx(2 * 2)


def test_a_step_of_replicas_waits_for_their_sums_but_not_for_what_a_backward_hides(one: LayoutSearch) -> None:
    def step(link: Link, flops: float) -> float:
        cluster = replace(one.costs.cluster, inside=link, flops=flops)
        costs = replace(one.costs, cluster=cluster, known={})
        return costs.step_time(one.plan, "1f1b", 2, 2, 2).seconds

    free = Link(0.0, 1e30)
    assert step(Link(1e-6, 1e6), 1e12) > 2 * step(free, 1e12)
    slow = step(free, 1e3)
    assert step(Link(1e-6, 1e6), 1e3) == pytest.approx(slow, rel=0.01)


@pytest.mark.parametrize("recomputation", ["none", "full"])
def test_each_end_of_a_message_takes_its_overhead_of_the_forward_and_of_the_backward(recomputation: str) -> None:
    fields = {"language": {"activation_checkpointing": recomputation}}
    link, count = Link(0.0, 1e30, overhead=10.0), 2
    two = searching("llama", 2, fields=fields, inside=link, flops=1e15, memory_bandwidth=1e15)
    plan = two.plan_of({"language": replace(two.plan.modalities["language"], pp_size=2)})
    # both stages are as long as their message, and the second begins when the first has sent
    seconds = two.costs.step_time(plan, "gpipe", 2, count, count).seconds
    assert seconds == pytest.approx(2 * (count + 1) * 10.0, rel=1e-6)
    assert Link(0.0, 1.0, 10.0, 0.5).taken(4) == 12.0


def test_measured_backwards_scale_backwards_and_forwards_alone_scale_both(one: LayoutSearch) -> None:
    plain = one.costs.units("language", Modality(), 2)

    def scaled(*seconds: Measured) -> list[Unit]:
        return one.costs.measured({"language": seconds}, "language").units("language", Modality(), 2)

    forward = sum(unit.forward for unit in plain)
    backward = sum(step_costs(plain, one.costs.step.trainable, False)) - forward
    for seconds, slower in ((Measured(2 * forward, 3 * backward), 3.0), (Measured(2 * forward), 2.0)):
        found = scaled(seconds)
        assert sum(unit.forward for unit in found) == pytest.approx(2 * forward)
        assert sum(step_costs(found, one.costs.step.trainable, False)) == pytest.approx(2 * forward + slower * backward)


def test_what_a_rank_takes_that_computes_alone_takes_longer_beside_others(one: LayoutSearch) -> None:
    cluster, plan = replace(one.costs.cluster, inside=Link(0.0, 1e30)), one.plan
    alone = replace(one.costs, cluster=cluster, known={})
    beside = replace(one.costs, cluster=replace(cluster, compute_slowdown=1.5), known={})

    def step(costs: LayoutCosts) -> float:
        return costs.step_time(plan, "1f1b", 2, 2, 2).seconds

    assert step(beside) == pytest.approx(1.5 * step(alone), rel=1e-6)
    told = {"language": [Measured(1.0, 2.0)] * len(one.costs.rows["language"])}
    slower = step(beside.measured(told, "language", 5.0))
    assert slower == pytest.approx(1.5 * step(alone.measured(told, "language", 5.0)), rel=1e-6)


@pytest.mark.parametrize(
    ("language", "part"),
    [({"dp_size": 2}, 1.0), ({"dp_size": 2, "zero_stage": 1}, 0.5), ({"tp_size": 2}, 0.5), ({"pp_size": 2}, 0.5)],
    ids=["replicas", "zero_stage 1", "tp_size 2", "pp_size 2"],
)
def test_a_rank_takes_its_part_of_a_measured_update_after_the_schedule(language: dict[str, int], part: float) -> None:
    two = searching("llama", 2, inside=Link(0.0, 1e30), flops=1e9, memory_bandwidth=1e10)
    plan = two.plan_of({"language": with_fields(two.plan.modalities["language"], **language)})

    def costs(update: float) -> LayoutCosts:
        return two.costs.measured({}, "language", update)

    def step(update: float) -> float:
        return costs(update).step_time(plan, "1f1b", 2, 2, 2).seconds

    # what is not sharded, as norms, and the larger of two stages make it a little more than half
    assert part <= (step(3.0) - step(1.0)) / 2.0 < part + 0.2 * (part < 1) + 1e-9
    assert costs(3.0).timed(plan, 2).partition.units == costs(1.0).timed(plan, 2).partition.units  # orders stay
    assert two.costs.measured({}, "language").step_time(plan, "1f1b", 2, 2, 2) == two.costs.step_time(
        plan, "1f1b", 2, 2, 2
    )
