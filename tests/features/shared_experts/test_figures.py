"""What experts on several ranks cost: bytes that travel and rest, collectives, reads by the host; and their loads.

language: ranks 0 and 1, data parallel, which share five experts.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import DeviceStatsMonitor
from torch import Tensor

from features.shared_experts.expert_case import BATCHED
from features.shared_experts.families import FAMILIES
from host_reads import HostReads
from lightning_mm5d import Modality
from lightning_mm5d.expert_parallel import Load
from lightning_mm5d.features.device_figures import LoadFigures
from lightning_mm5d.layout.layout import even_ranges
from parity.harness import fit, strategy
from ranks import call_ranks

MICROBATCHES, STEPS, WORLD, EXPERTS, FLOAT_BYTES = 2, 2, 2, 5, 8
FAMILY = "glm4_moe"  # its blocks call the shared expert after the others


class Watch(DeviceStatsMonitor):
    """What one rank sees of its steps.

    Attributes:
        events: exchanges that begin (``send``) and end (``wait``), and what the shared expert computes, in order.
        sent: bytes of rows for other ranks.
        rounds: of ranks that agree what comes next.
        held: bytes of experts' parameters, gradients and optimizer states.
        figures: of devices, after each step.
        chosen: experts of tokens in each call, by layer.
        width: of a token.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(cpu_stats=False)
        self.rank, self.rounds, self.sent, self.width = rank, 0, 0, 0
        self.events: list[str] = []
        self.held: dict[str, int] = {}
        self.figures: list[dict[str, float]] = []
        self.chosen: dict[str, list[Tensor]] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for path, module in pl_module.named_modules():
            if path.endswith("mlp.experts"):
                module.register_forward_pre_hook(lambda _, args, path=path: self._routed(path, *args))
            elif path.endswith("shared_experts.gate_proj"):  # its gradient comes after that of its block's result
                module.register_forward_hook(self._shares)

    def _routed(self, path: str, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        self.chosen.setdefault(path, []).append(index)
        self.width = hidden.shape[-1]

    def _shares(self, module: Any, args: Any, result: Tensor) -> None:
        self.events.append("shared")
        result.register_hook(lambda _: self.events.append("shared back"))

    def watching(self) -> Any:
        exchange, gather = dist.all_to_all_single, dist.all_gather_single

        def exchanged(out: Tensor, rows: Tensor, came: list[int], sent: list[int], **rest: Any) -> Any:
            self.sent += sum(n for place, n in enumerate(sent) if place != self.rank) * rows[:1].nbytes
            self.events.append("send")
            work = exchange(out, rows, came, sent, **rest)
            return _Waited(work, self.events)

        def gathered(*args: Any, **rest: Any) -> Any:
            self.rounds += 1
            return gather(*args, **rest)

        return patch.multiple(dist, all_to_all_single=exchanged, all_gather_single=gathered)

    def note_held(self, module: L.LightningModule, optimizer: torch.optim.Optimizer) -> None:
        """Note what lies in memory after a step of the optimizer; a hook would be shown full tensors."""
        held = experts(module)
        self.held["gradients"] = size(p.grad for p in held)
        self.held["parameters"] = size(held)
        self.held["optimizer"] = size(one for p in held for one in optimizer.state[p].values() if one.dim())

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        found = trainer.accelerator.get_device_stats(torch.device("cpu"))
        self.figures.append({key: value for key, value in found.items() if "_tokens_" in key})


class Noted(torch.optim.AdamW):
    """Has what lies in memory noted after a step, where hooks would be shown full tensors."""

    note: Callable[[], None]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        self.note()
        return result


class _Waited:
    def __init__(self, work: Any, events: list[str]) -> None:
        self._work, self._events = work, events

    def wait(self) -> None:
        self._work.wait()
        self._events.append("wait")


def experts(module: L.LightningModule) -> list[Any]:
    return [p for name, p in module.named_parameters() if ".experts." in name]


def size(tensors: Any) -> int:
    return sum({one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in tensors)}.values())


def trained(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    case = FAMILIES[FAMILY].implemented(BATCHED)
    module, watch = case.make_module(), Watch(rank)
    whole = size(experts(module))
    batches = [case.make_batch([0] * MICROBATCHES * 2) for _ in range(STEPS * WORLD)]
    language = strategy({"language": Modality(ep_size=WORLD)}, num_microbatches=MICROBATCHES)
    optimizer = Noted(module.parameters(), lr=1e-3)
    optimizer.note = lambda: watch.note_held(module, optimizer)
    module.configure_optimizers = lambda: optimizer
    with watch.watching(), HostReads() as seen:
        fit(module, batches, language, WORLD, in_order=True, callbacks=[watch])
    names = ("events", "rounds", "sent", "width", "held", "figures", "chosen")
    return {name: getattr(watch, name) for name in names} | {"whole": whole, "reads": dict(seen.found)}


@cache
def run() -> list[dict[str, Any]]:
    return call_ranks(WORLD, trained)


def test_bytes_that_travel_are_those_of_rows_whose_experts_are_elsewhere() -> None:
    ranks, needed = run(), 0
    for rank, (found, (start, stop)) in enumerate(zip(ranks, even_ranges(EXPERTS, WORLD), strict=True)):
        for index in (index for calls in found["chosen"].values() for index in calls):
            away = ((index < start) | (index >= stop)).sum().item()
            needed += 4 * away * found["width"] * FLOAT_BYTES  # there and back, forward and backward
        assert found["chosen"], rank
    assert sum(found["sent"] for found in ranks) == needed


def test_a_rank_keeps_its_experts_alone() -> None:
    for found, (start, stop) in zip(run(), even_ranges(EXPERTS, WORLD), strict=True):
        own = found["whole"] * (stop - start) // EXPERTS
        assert found["held"] == {"gradients": own, "parameters": own, "optimizer": 2 * own}


def test_a_layer_exchanges_twice_each_way_and_reads_the_host_once() -> None:
    for found in run():
        layers, actions = len(found["chosen"]), MICROBATCHES * STEPS
        calls = layers * actions
        assert found["events"].count("send") == found["events"].count("wait") == 4 * calls
        assert found["rounds"] == 2 * calls + 2 * actions  # one more as an action ends
        file = "features/shared_experts/shared_experts.py"
        reads = {key: count for key, count in found["reads"].items() if key.startswith(file)}
        # the first step is watched for indices of rows, and that watch makes its reads
        assert reads.pop(f"{file} _dispatched: tolist") == calls - layers * MICROBATCHES
        assert not reads, reads


def test_the_shared_expert_computes_while_results_are_under_way_and_their_gradients() -> None:
    for found in run():
        forward = ["send", "wait", "send", "shared", "wait"]
        backward = ["send", "shared back", "wait", "send", "wait"]
        layers = len(found["chosen"])
        later = (forward * layers + backward * layers) * MICROBATCHES * (STEPS - 1)
        assert found["events"][-len(later) :] == later  # what watches the first step looks at results at once


def test_devices_figures_are_the_loads_of_a_step() -> None:
    ranks = run()
    for step in range(STEPS):
        calls, loads = slice(step * MICROBATCHES, (step + 1) * MICROBATCHES), []
        for path in ranks[0]["chosen"]:
            chosen = Counter(
                e for found in ranks for one in found["chosen"][path][calls] for e in one.flatten().tolist()
            )
            loads.append(Load.of([chosen[e] for e in range(EXPERTS)], even_ranges(EXPERTS, WORLD)))
        wanted = LoadFigures.of(loads)._asdict()
        for found in ranks:
            assert found["figures"][step] == {
                f"mm5d/rank{rank}/language.0/{name}": pytest.approx(value)
                for rank in range(WORLD)
                for name, value in wanted.items()
            }


def test_loads_of_nothing_are_zero_and_even_ones_are_one() -> None:
    assert LoadFigures.of([]) == LoadFigures.of([Load.of([0, 0], [(0, 1), (1, 2)])]) == LoadFigures()
    even, uneven = (Load.of(rows, [(0, 2), (2, 4)]) for rows in ([3, 3, 3, 3], [6, 2, 1, 3]))
    assert LoadFigures.of([even]) == (3, 1, 6, 1)
    assert LoadFigures.of([even, uneven]) == (3, 2, 6, pytest.approx(8 / 6))
