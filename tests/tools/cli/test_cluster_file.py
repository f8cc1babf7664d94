"""The file of a cluster: what is refused, and what `mm5d doctor --links` writes is read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.tools.cli.cluster_file import as_yaml, device_here, measure_links, read_cluster
from lightning_mm5d.tools.planner.layout_costs import Cluster, Link

GOOD = "nodes: 2, ranks: 4, memory: 80GiB"
LINKS = "links: {inside: {latency: 5e-6, bandwidth: 3e11}}"


def read(tmp_path: Path, text: str) -> Cluster:
    (tmp_path / "cluster.yaml").write_text("{" + text + "}")
    return read_cluster(tmp_path / "cluster.yaml")


def test_a_file_is_read_with_numbers_as_people_write_them(tmp_path: Path) -> None:
    found = read(tmp_path, f"{GOOD}, {LINKS}, flops: 989e12, efficiency: 0.4")
    assert (found.size, found.memory, found.flops, found.efficiency) == (8, 80 * 2**30, 989e12, 0.4)
    assert found.inside == Link(5e-6, 3e11)
    assert found.between == Cluster(nodes=1, ranks=1, memory=1).between
    (tmp_path / "again.yaml").write_text(as_yaml(found))
    assert read_cluster(tmp_path / "again.yaml") == found


def test_overheads_of_messages_are_optional_and_may_be_nothing(tmp_path: Path) -> None:
    link = "inside: {latency: 5e-6, bandwidth: 3e11, overhead: 1e-3, overhead_per_byte: 0}"
    found = read(tmp_path, f"{GOOD}, links: {{{link}}}")
    assert found.inside == Link(5e-6, 3e11, 1e-3, 0.0)
    assert found.between.overhead == 0.0


def test_ranks_slow_each_other_down_only_where_the_file_says_so(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD).compute_slowdown == 1.0
    assert read(tmp_path, f"{GOOD}, compute_slowdown: 1.08").compute_slowdown == 1.08


def test_a_device_stands_for_its_numbers_and_others_beside_it_count_first(tmp_path: Path) -> None:
    by_name = read(tmp_path, "nodes: 2, ranks: 4, device: NVIDIA H100 80GB HBM3")
    assert (by_name.flops, by_name.memory_bandwidth, by_name.memory) == (989.4e12, 3.35e12, 80 * 10**9)
    assert by_name.efficiency == 0.4
    changed = read(tmp_path, "nodes: 2, ranks: 4, device: H100, memory: 70GiB, efficiency: 0.5, flops: 1e15")
    assert (changed.flops, changed.memory, changed.efficiency) == (1e15, 70 * 2**30, 0.5)
    assert changed.memory_bandwidth == 3.35e12


def test_a_gpu_of_this_machine_has_the_speeds_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, speeds in {
        "NVIDIA H200": {"flops": 989.4e12, "memory_bandwidth": 4.8e12, "efficiency": 0.4},
        "Quadro": {},
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert device_here() == speeds
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_here() == {}


DEVICE = "cluster.device: got 'H1000'. Peaks are known of GB200, B200, "
SLOWDOWN = "cluster.compute_slowdown: got 0.9. It is a number from 1 to 1000. Write for instance 1.05"
LATENCY = "cluster.links.inside.latency: got 0. It is a number from 1e-12 to 1000. Write for instance 5e-6"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("nodes: 2, ranks: 4", "cluster.memory: got None"),
        ("nodes: 0, ranks: 4, memory: 1GiB", "cluster.nodes: got 0"),
        (f"{GOOD}, link: 1", "cluster.link: got 1"),
        (f"{GOOD}, links: 3", "cluster.links: got 3"),
        (f"{GOOD}, links: {{inside: {{latency: 1}}}}", "cluster.links.inside.bandwidth: got None"),
        (f"{GOOD}, links: {{inside: {{latency: -1, bandwidth: 1}}}}", "cluster.links.inside.latency: got -1"),
        ("nodes: 2, ranks: 4, device: H1000", DEVICE),
        ("nodes: 2, ranks: 4, device: null", "cluster.memory: got None"),
        (f"{GOOD}, efficiency: 40", "cluster.efficiency: got 40"),
        (f"{GOOD}, flops: fast", "cluster.flops: got 'fast'"),
        (
            f"{GOOD}, flops: 1e-300",
            "cluster.flops: got '1e-300'. It is a number from 1 to 1e+20. Write for instance 400e12",
        ),
        (f"{GOOD}, compute_slowdown: 0.9", SLOWDOWN),
        (f"{GOOD}, compute_slowdown: .inf", "cluster.compute_slowdown: got inf"),
        (f"{GOOD}, compute_slowdown: true", "cluster.compute_slowdown: got True"),
        (f"{GOOD}, flops: .inf", "cluster.flops: got inf"),
        (f"{GOOD}, memory_bandwidth: .nan", "cluster.memory_bandwidth: got nan"),
        (f"{GOOD}, links: {{inside: {{latency: 0, bandwidth: 1}}}}", LATENCY),
        (
            f"{GOOD}, links: {{inside: {{latency: 1, bandwidth: 1, overhead: -1}}}}",
            "cluster.links.inside.overhead: got -1",
        ),
        ("nodes: 1000000, ranks: 100000, memory: 1GiB", "cluster.nodes * ranks: got 100000000000"),
        (f"nodes: 2, ranks: 4, memory: {'9' * 400}", "cluster.memory: got 999"),
        ("nodes: 2, ranks: 4, memory: much", "cluster.memory: got 'much'"),
    ],
)
def test_refuses_what_describes_no_cluster(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    assert str(raised.value).startswith(field)


def test_links_of_two_processes_are_measured_here(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    assert measure_links(file) == 0
    found = read_cluster(file)
    assert (found.nodes, found.ranks) == (1, 2)
    assert 0 < found.inside.latency < 1
    assert found.inside.bandwidth > 1e6
    assert 0 <= found.inside.overhead < 1
    written = yaml.safe_load(capfd.readouterr().out)
    assert written["nodes"] == 1
    assert written["compute_slowdown"] == found.compute_slowdown >= 1.0


@pytest.mark.parametrize("text", ["", "[1, 2]", "nodes: [1"], ids=["nothing", "a list", "no YAML"])
def test_a_file_that_maps_nothing_is_told_of_by_its_option(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"--cluster: got '{file}'"):
        read_cluster(file)
