"""Groups of NCCL are split in few collectives that all ranks make equally; groups of gloo make none."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_mm5d import Modality
from lightning_mm5d.engine import run_groups as module
from lightning_mm5d.engine.run_groups import Groups, Wish, communicators, disjoint, wanted_groups
from lightning_mm5d.layout import Layout
from lightning_mm5d.tools.planner.outcomes import sketched_plan
from ranks import run_ranks

DEVICE = torch.device("cuda", 0)


def wishes_of(world: int, **modalities: Modality) -> list[Wish]:
    layout = Layout.build(modalities, world_size=world, loss_modality="language")
    return wanted_groups(sketched_plan(layout, modalities))


LAYOUTS = {
    "two replicas": (2, {"language": Modality(cost=1.0)}),
    "two replicas of two stages": (4, {"language": Modality(pp_size=2, cost=1.0)}),
    "sharded over replicas": (4, {"language": Modality(zero_stage=3, cost=1.0)}),
    "fewer encoders": (6, {"vision": Modality(dp_size=2, cost=1.0), "language": Modality(dp_size=4, cost=1.0)}),
    "context and tensor parallel": (8, {"language": Modality(tp_size=2, cp_size=2, cost=1.0)}),
    "64 ranks": (
        64,
        {"vision": Modality(dp_size=8, tp_size=2, cost=1.0), "language": Modality(tp_size=2, pp_size=3, cost=1.0)},
    ),
    "512 ranks": (
        512,
        {"vision": Modality(dp_size=32, tp_size=4, cost=1.0), "language": Modality(tp_size=4, pp_size=3, cost=1.0)},
    ),
}


class Recorder:
    """`torch.distributed` of one rank under NCCL: what it does on the communicator of all ranks, in order.

    A group that is not split is one of gloo, and its members split nothing; as torch has it, the ranks outside split
    all the same while the default group has a device.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[Any] = []
        self.groups: list[Any] = []
        self.ctas: list[tuple[str, int | None]] = []
        self.group = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=DEVICE))
        self.ProcessGroupNCCL = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=None)))

    def get_rank(self) -> int:
        return self.rank

    def get_backend_config(self) -> str:
        return "cuda:nccl"

    def new_group(self, ranks: list[int], timeout: Any, backend: str | None, group_desc: str | None) -> Any:
        assert backend == "gloo", "on NCCL every group is split"
        if self.rank not in ranks and self.group.WORLD.bound_device_id is not None:
            self.calls.append("no colour")
        return self._made(ranks)

    def split_group(self, split_ranks: list[list[int]], timeout: Any, pg_options: Any, group_desc: Any) -> Any:
        self.calls.append(split_ranks)
        own = next((ranks for ranks in split_ranks if self.rank in ranks), None)
        if own is None:
            return None
        self.ctas.append((group_desc, None if pg_options is None else pg_options.config.max_ctas))
        return self._made(own)

    def _made(self, ranks: list[int]) -> Any:
        made = SimpleNamespace(ranks=tuple(ranks))
        self.groups.append(made)
        return made


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def make(rank: int, wishes: list[Wish]) -> tuple[Recorder, Groups]:
        recorder = Recorder(rank)
        monkeypatch.setattr(module, "dist", recorder)
        groups = Groups(timedelta(seconds=1))
        monkeypatch.setattr(groups, "_agree", lambda plans: None)
        groups.make(wishes)
        return recorder, groups

    return make


@pytest.mark.parametrize("name", LAYOUTS)
def test_members_and_others_call_the_same_collectives(name: str, recorded: Any) -> None:
    world, modalities = LAYOUTS[name]
    wishes = wishes_of(world, **modalities)
    ranks = range(world) if world <= 64 else Random(0).sample(range(world), 32)
    calls = []
    for rank in ranks:
        recorder, groups = recorded(rank, wishes)
        calls.append(recorder.calls)
        for wish in wishes:
            group = groups.get(wish.ranks, wish.tag, wish.backend)
            assert (None if group is None else group.ranks) == (wish.ranks if rank in wish.ranks else None)
        assert all(ctas == (4 if desc.endswith("scending") else None) for desc, ctas in recorder.ctas)
    assert all(each == calls[0] for each in calls)
    assert len(calls[0]) == communicators(wishes)[1]
    assert all(len(wish.ranks) > 1 for wish in wishes), "a rank alone needs no group"


def test_512_ranks_make_few_splits() -> None:
    wishes = wishes_of(512, **LAYOUTS["512 ranks"][1])
    most, splits = communicators(wishes)
    assert len([wish for wish in wishes if wish.backend != "gloo"]) > 400
    assert splits <= 6
    assert most <= 6, "and that of all ranks"


@pytest.mark.parametrize("seed", range(20))
def test_splits_share_no_rank_and_are_hardly_more_than_the_groups_of_a_rank(seed: int) -> None:
    rng = Random(seed)
    wishes = [Wish(tuple(sorted(rng.sample(range(24), rng.choice([2, 2, 3, 8])))), str(i)) for i in range(40)]
    lists = disjoint(wishes)
    assert sorted(wish for together in lists for wish in together) == sorted(wishes)
    for together in lists:
        assert max(Counter(rank for wish in together for rank in wish.ranks).values()) == 1
    assert len(lists) <= 2 * communicators(wishes)[0]


class _Splits:
    """Stands for NCCL's communicator of all ranks; counts who takes part in its splits."""

    supports_splitting = True
    count = 0

    def perform_nocolor_split(self, device: torch.device) -> None:
        self.count += 1


def _splits_of_gloo_groups(rank: int) -> tuple[int, int, bool]:
    """The splits of this rank for a gloo group of ranks 0 and 1, made by torch's own code: by `Groups`, and plainly."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    default, splits = dist.group.WORLD, _Splits()
    assert default is not None
    default.bound_device_id = DEVICE
    distributed_c10d._get_split_source = lambda _: splits
    groups = Groups(timedelta(seconds=30))
    group = groups.get([0, 1], "small", backend="gloo")
    ours, is_kept = splits.count, default.bound_device_id == DEVICE
    if group is not None:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total == 2
    dist.new_group([0, 1], backend="gloo")
    default.bound_device_id = None  # there is no such device for what ends the processes
    return ours, splits.count - ours, is_kept


def test_a_gloo_group_of_some_ranks_splits_no_communicator() -> None:
    """ranks 0-1 in the group, rank 2 outside; torch's plain `new_group` has rank 2 split"""
    assert run_ranks(3, _splits_of_gloo_groups) == [(0, 0, True), (0, 0, True), (0, 1, True)]


def test_groups_are_made_in_one_place() -> None:
    """Lightning's own are of all ranks, of which none is left outside to split; a dry run has no other ranks."""
    making = re.compile(r"\b(?:new_group|split_group|new_subgroups\w*|init_device_mesh|DeviceMesh)\(")
    package = Path(module.__file__).parents[1]
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if making.search(path.read_text())}
    assert found == {"engine/run_groups.py", "tools/dryrun/answered.py"}
