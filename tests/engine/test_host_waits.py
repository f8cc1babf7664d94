"""No step asks the host to wait for the device inside a schedule, once each structure of microbatches was seen.

ranks 0-1: two stages, an encoder and a language model, one layer over both, or replicas that share rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from host_reads import HostReads, PretendedDevice
from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.engine.engine import Engine
from lightning_mm5d.trainer.cut_module import CutModule
from parity.harness import fit, strategy
from ranks import run_ranks
from zoo import CASES
from zoo.case import pad_right

SPLIT = {"vision": Modality(), "language": Modality()}
RECOMPUTED = {"vision": Modality(), "language": Modality(memory={"activation_checkpointing": "full"})}
LAYOUTS: dict[str, tuple[str, dict[str, Modality], dict[str, Any]]] = {
    "encoder | language": ("llava", SPLIT, {"loss_weight": "tokens"}),
    "recomputed": ("llava", RECOMPUTED, {"schedule": "gpipe"}),
    "zero bubble": ("llama", {"language": Modality(pp_size=2)}, {"schedule": "zbv"}),
    "interleaved": ("llama", {"language": Modality(pp_size=2, pipeline={"pp_chunks": 2})}, {"schedule": "interleaved"}),
    "tp": ("llama", {"language": Modality(tp_size=2)}, {}),
    "rows": ("llama", {"language": Modality(dp_size=2, sharding={"zero_stage": 3})}, {}),
}
ON_A_CPU_ALONE = {
    "sharded/class_operations.py check_targets",  # a GPU asserts on the device
    "tensor_parallel/apply.py forward",  # a GPU gets NaN, which the first step reports
    "engine/codec.py messages",  # of gloo, whose messages are in host memory
}


def trained(rank: int) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    execute = Engine.execute
    for name, (case, modalities, options) in LAYOUTS.items():
        reads, steps = Counter[str](), []

        def watched(self: Engine, *args: Any, reads: Counter[str] = reads, steps: list[int] = steps, **kw: Any) -> None:
            steps.append(len(steps))
            with HostReads() as seen:
                execute(self, *args, **kw)
            if len(steps) > 1:
                reads.update(seen.found)

        Engine.execute = watched  # type: ignore[method-assign]
        model = CASES[case]
        fit(model.build(), [model.batch(4, seed=step) for step in range(3)], strategy(modalities, **options), 2)
        assert len(steps) == 3
        found[name] = dict(reads)
    Engine.execute = execute  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="module")
def reads() -> list[Mapping[str, Mapping[str, int]]]:
    return run_ranks(2, trained)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_action_waits_for_the_device(layout: str, reads: list[Mapping[str, Mapping[str, int]]]) -> None:
    for rank, found in enumerate(reads):
        waits = {where: count for where, count in found[layout].items() if where.split(":")[0] not in ON_A_CPU_ALONE}
        assert not waits, f"rank {rank}"


WRITES_BUFFERS = {"qwen2_vl"}  # in its forward, so that its first batch is compared once more
PADDED = {"llava": SPLIT, "qwen2_vl": SPLIT, "llama": {"language": Modality(pp_size=2)}}


def asked(rank: int) -> dict[str, tuple[dict[str, int], int]]:
    """What models ask of a padded batch in steps of known structure: waits, and questions that the host answers."""
    found: dict[str, tuple[dict[str, int], int]] = {}
    execute = Engine.execute
    for name, modalities in PADDED.items():
        device, steps = PretendedDevice(), list[bool]()

        def moved(self: Any, batch: Any, *args: Any, device: PretendedDevice = device, **kw: Any) -> Any:
            with device:
                return tree_map(lambda x: device.moved(x) if isinstance(x, torch.Tensor) else x, batch)

        def watched(
            self: Engine, step: Any, *args: Any, device: PretendedDevice = device, steps: list[bool] = steps, **kw: Any
        ) -> None:
            steps.append(step.trains)
            if steps[-2:] == [False, True]:  # what the first step and its comparisons learn of a structure waits
                device.found.clear()
                device.answered = 0
            execute(self, step, *args, **kw)

        MultimodalStrategy.batch_to_device = moved  # type: ignore[method-assign]
        Engine.execute = watched  # type: ignore[method-assign]
        CutModule.host_copies = lambda self, device=device: device  # type: ignore[method-assign,misc]
        case, unwatch = CASES[name], device.watch_collectives()
        batches = [_padded(case.batch(4, seed=step)) for step in range(3)]
        options = {"num_microbatches": 2, "loss_weight": "samples"}
        fit(case.build(), batches, strategy(modalities, **options), 2)
        unwatch()
        assert steps == [True, *[False] * (1 + (name in WRITES_BUFFERS)), True, False, True]
        found[name] = dict(device.found), device.answered
    return found


def _padded(batch: dict[str, Any]) -> dict[str, Any]:
    """`pad_right`, and rows of other fields that have one number for each token."""
    rows = batch["input_ids"].shape
    return {key: F.pad(x, (0, 2)) if x.shape == rows else x for key, x in batch.items()} | pad_right(batch, 0)


def test_questions_of_models_about_padded_batches_are_answered_by_the_host() -> None:
    for rank, found in enumerate(run_ranks(2, asked)):
        for name, (waits, answered) in found.items():
            assert not waits, f"rank {rank}, {name}"
            assert answered or (rank, name) == (0, "llava"), "whose encoder asks nothing"


def test_a_wait_is_found_and_named() -> None:
    def read(tensor: torch.Tensor) -> None:
        code = compile(
            "float(t), bool(t), t.tolist(), t[t > 0], torch.tensor([1.0])", host_file("engine/made_up.py"), "eval"
        )
        eval(code, {"t": tensor, "torch": torch})

    with HostReads() as seen:
        read(torch.ones(1))
        torch.ones(()).item()  # of the user's own
    kinds = {name.split(": ")[1] for name in seen.found}
    assert kinds >= {"_local_scalar_dense", "tolist", "index by a mask", "tensor"}
    assert all(name.startswith("engine/made_up.py ") for name in seen.found)


def host_file(name: str) -> str:
    """The path of a file of the package, which need not exist."""
    import lightning_mm5d

    return f"{lightning_mm5d.__path__[0]}/{name}"
