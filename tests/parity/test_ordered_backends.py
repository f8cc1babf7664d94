"""Layouts and schedules equal one process where operations run in the order of issue, as on NCCL.

The backends are those of `nccl_order`: a stream for each communicator, or one for the whole device. A run that would
hang on NCCL fails here, and tells all that is pending.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_mm5d import Modality
from lightning_mm5d.schedule import SCHEDULES
from nccl_order import NAMES
from parity import test_parity, test_schedules, test_shared_ranks, test_split_backward
from parity.harness import fit, strategy
from ranks import call_ranks
from zoo import CASES

SERIAL = NAMES[1]
# fields of the encoder and of the language model, ranks
SHARDED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "vision | language tp 2": ({}, {"tp_size": 2}, 3),
    "vision tp 2 | language pp 2 tp 2": ({"tp_size": 2}, {"pp_size": 2, "tp_size": 2}, 6),
    "vision dp 2 | language tp 2": ({"dp_size": 2}, {"tp_size": 2, "dp_size": 1}, 4),
    "vision on each rank of language pp 2 tp 2": ({"colocate_with": "language"}, {"pp_size": 2, "tp_size": 2}, 4),
}


class _Backends(Callback):
    """Notes on which backend a run trains."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.found.add(dist.get_backend())


def _train(rank: int, name: str, which: str, schedule: str) -> tuple[list[float], set[str]]:
    case = CASES[name]
    encoder, language, world = SHARDED[which]
    *encoders, loss_modality = case.modalities
    fields = {**dict.fromkeys(encoders, encoder), loss_modality: language}
    modalities = {key: Modality(**{**case.modality_paths.get(key, {}), **value}) for key, value in fields.items()}
    batches = [case.batch(test_parity.SAMPLES, seed=step) for step in range(test_parity.STEPS)]
    module, backends = test_parity.build(name, "none"), _Backends()
    chosen = strategy(modalities, num_microbatches=4, schedule=schedule)
    recorder = fit(module, batches, chosen, world, callbacks=[backends])
    return recorder.losses, backends.found


def _check_sharded(name: str, which: str, schedule: str, backend: str) -> None:
    """The second loss is of parameters that the first step has changed."""
    expected = torch.tensor(test_parity.reference(name, "none")[0].losses)
    for losses, found in call_ranks(SHARDED[which][2], _train, name, which, schedule):
        torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-6, atol=1e-7)
        assert found == {backend}


@pytest.mark.usefixtures("float64")
def test_layouts_equal_one_process_on_a_serial_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_BACKEND", SERIAL)
    test_parity.check("handwritten", "{e} dp 1 | language dp 2", "none")
    test_parity.check("handwritten", "{e} with language pp 2", "none")
    test_shared_ranks.check("handwritten", test_shared_ranks.laid_out("handwritten", test_shared_ranks.ONE_ENCODER[2]))
    _check_sharded("llava", "vision dp 2 | language tp 2", "1f1b", SERIAL)


@pytest.mark.usefixtures("float64")
def test_split_backwards_in_a_v_equal_one_process_with_a_stream_for_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_BACKEND", NAMES[0])
    test_schedules.test_schedules_with_accumulation_and_clipping_equal_one_process("zbv", "none")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("which", test_parity.ENCODER_LAYOUTS)
@pytest.mark.parametrize("name", test_parity.WITH_ENCODERS)
def test_all_layouts_with_encoders(name: str, which: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_BACKEND", backend)
    test_parity.test_layouts_with_encoders_equal_one_process(name, which)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("which", test_parity.SINGLE_LAYOUTS)
@pytest.mark.parametrize("name", test_parity.SINGLE)
def test_all_layouts_of_one_modality(name: str, which: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_BACKEND", backend)
    test_parity.check(name, which, "none")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_schedules(schedule: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_BACKEND", backend)
    for variant in ("none", "encoder"):
        test_schedules.test_schedules_with_accumulation_and_clipping_equal_one_process(schedule, variant)
    for name in ("gpt2", "t5", "handwritten_two"):
        test_split_backward.assert_parity(name, "none", schedule)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("which", test_shared_ranks.LAYOUTS)
def test_all_shared_ranks(which: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_BACKEND", backend)
    name = "handwritten_two" if "audio" in which else "handwritten"
    for schedule in ("1f1b", "gpipe"):
        test_shared_ranks.check(name, test_shared_ranks.laid_out(name, which), schedule=schedule)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("which", SHARDED)
@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_all_sharded_layouts(
    name: str, which: str, schedule: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_BACKEND", backend)
    _check_sharded(name, which, schedule, backend)
