"""Runs on the pretended device equal one process on the CPU; `pretended_cuda` says what they would show.

ranks 0-1, or 0-2 where an encoder stands before two stages; each has a device of its own.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import DeviceStatsMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import pretended_cuda
from features.toys import CLASSES, PAIR, PIPE, SHARED, Layout, Run, Toy, alone, figures
from lightning_mm5d import Modality
from lightning_mm5d.features.sharded_checkpoints.own_shards import HostCopies, Item
from parity.harness import fit, strategy
from ranks import run_ranks
from zoo import CASES

pytestmark = pytest.mark.exhaustive
STEPS = 2
SPLIT = {"num_microbatches": 2}
LAYOUTS: dict[str, tuple[str, dict[str, Modality], dict[str, Any]]] = {
    "vision | language": ("llava", {"vision": Modality(), "language": Modality()}, SPLIT),
    "vision on language dp 2": (
        "llava",
        {"vision": Modality(colocate_with="language"), "language": Modality(dp_size=2)},
        SPLIT,
    ),
    **{
        name: ("llama", {"language": Modality(**fields)}, options)
        for name, fields, options in (
            ("pp 2", {"pp_size": 2}, SPLIT),
            ("zbv", {"pp_size": 2}, {"num_microbatches": 4, "schedule": "zbv"}),
            ("tp 2", {"tp_size": 2}, {}),
            ("tp 2 in a ring", {"tp_size": 2, "tensor": {"sequence_parallel": "ring"}}, SPLIT),
            ("dp 2", {"dp_size": 2}, SPLIT),
            ("zero 1", {"dp_size": 2, "sharding": {"zero_stage": 1}}, SPLIT),
            ("zero 3", {"dp_size": 2, "sharding": {"zero_stage": 3}}, SPLIT),
            ("cp 2", {"cp_size": 2}, SPLIT),
            ("cp 2, ulysses", {"cp_size": 2, "context": {"cp_mode": "ulysses"}}, SPLIT),
            ("recomputed", {"pp_size": 2, "memory": {"activation_checkpointing": "full"}}, SPLIT),
            ("offloaded", {"pp_size": 2, "memory": {"offload": "activations"}}, SPLIT),
            (
                "zero 3, offloaded",
                {
                    "dp_size": 2,
                    "sharding": {"zero_stage": 3},
                    "memory": {"offload": ["activations", "optimizer"]},
                },
                SPLIT,
            ),
        )
    },
}


def trained(rank: int, name: str) -> Any:
    case, modalities, options = LAYOUTS[name]
    pretended_cuda.enter()
    batches = [CASES[case].batch(4, seed=step) for step in range(STEPS)]
    recorder = fit(CASES[case].build(), batches, strategy(modalities, **options), 2, "gpu")
    return recorder.losses, recorder.gradients


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_and_gradients_equal_one_process(name: str) -> None:
    case = CASES[LAYOUTS[name][0]]
    one = fit(case.build(), [case.batch(4, seed=step) for step in range(STEPS)], max_steps=STEPS)
    for losses, gradients in run_ranks(2, trained, name):
        torch.testing.assert_close(losses, one.losses, rtol=1e-6, atol=1e-7)
        for found, expected in zip(gradients, one.gradients, strict=True):
            assert found
            for parameter, gradient in found.items():
                torch.testing.assert_close(gradient, expected[parameter], rtol=1e-5, atol=1e-7)


class Ordinary(Toy):
    """Does what users do on a GPU: it reads, moves, logs and gathers numbers of the device and of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.correct = MeanMetric(), MulticlassAccuracy(num_classes=CLASSES, average="micro")
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        loss = self.loss(batch)
        self.log("on the device", loss, prog_bar=True)
        self.log("on the host", loss.detach().cpu(), on_step=False, on_epoch=True, sync_dist=True)
        self.mean(loss.detach())
        self.log("mean", self.mean)
        self.count += 1
        return {"loss": loss, "copy": loss.detach().cpu()}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch)
        loss = F.cross_entropy(logits, batch["label"])
        self.correct(logits, batch["label"])
        self.log("correct", self.correct, on_epoch=True)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(logits))
        self.kept.append(loss.cpu())
        return {"logits": logits.cpu()}

    def on_validation_epoch_end(self) -> None:
        mean = torch.stack(self.kept).mean()
        self.kept.clear()
        self.log("mean of the host", mean, sync_dist=True)
        self.log("gathered", self.all_gather(mean).mean())
        assert self.trainer.strategy.reduce_boolean_decision(True)


def used(run: Run, **options: Any) -> dict[str, Any]:
    monitors = {"callbacks": [DeviceStatsMonitor(), ModelCheckpoint(run.folder, save_last=True)]}
    trainer = run.trainer(
        logger=CSVLogger(run.folder), log_every_n_steps=1, enable_checkpointing=True, **monitors, **options
    )
    loaders = {"pin_memory": run.layout is not None}
    trainer.fit(Ordinary(), run.training(16, **loaders), run.loader(16, **loaders))
    found = {name: value for name, value in figures(trainer).items() if not name.startswith("DeviceStats")}
    predicted = torch.cat([*trainer.predict(Ordinary(), run.loader(8))])  # type: ignore[list-item]
    again = run.trainer(max_epochs=2, **options)
    again.fit(Ordinary(), run.training(16), run.loader(16), ckpt_path=run.folder / "last.ckpt")
    return {"figures": found, "predicted": predicted, "resumed": figures(again)}


def used_on_gpus(rank: int, run: Run, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    warnings.simplefilter("ignore")
    pretended_cuda.enter()
    found = used(run, accelerator="gpu", **options)
    return f"cuda:{torch.cuda.current_device()}", found


USES: dict[str, tuple[Layout, dict[str, Any], float]] = {
    "pair": (PAIR, {}, 1e-6),
    "pipe": (PIPE, {"accumulate_grad_batches": 2}, 1e-6),
    "shared": (SHARED, {"gradient_clip_val": 0.1}, 1e-6),
    "bf16": (PIPE, {"precision": "bf16-mixed"}, 0.03),
    "16": (SHARED, {"precision": "16-mixed"}, 0.01),
}


@pytest.mark.parametrize("name", USES)
def test_what_users_do_on_gpus_gives_the_numbers_of_one_process(name: str, tmp_path: Path) -> None:
    layout, options, tolerance = USES[name]
    plain = {key: value for key, value in options.items() if key != "precision"}
    one = alone(lambda run: used(run, **plain), tmp_path / "one")
    ranks = run_ranks(layout.world, used_on_gpus, Run(layout, {}, tmp_path / "ranks"), options)
    assert [device for device, _ in ranks] == [f"cuda:{rank}" for rank in range(layout.world)]
    for rank, (_, found) in enumerate(ranks):
        kept = {"on the device", "mean", "gathered"} if layout.replicas > 1 else set()
        for key in ("figures", "resumed"):
            for figure, value in one[key].items():
                if figure not in kept:
                    assert found[key][figure] == pytest.approx(value, rel=tolerance, abs=tolerance), (key, figure)
        expected = one["predicted"][rank :: layout.replicas] if layout.replicas > 1 else one["predicted"]
        torch.testing.assert_close(found["predicted"].cpu(), expected, rtol=tolerance, atol=tolerance)


def copied_beside(rank: int) -> list[bool]:
    """What a checkpoint in memory copies while the device computes, and whether it was there before anybody waited."""
    pretended_cuda.enter()
    weight = torch.nn.Parameter(torch.ones(3, 4, device="cuda"))
    optimizer = torch.optim.Adam([weight], lr=0.1)

    def step() -> None:
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    step()
    copies, found = HostCopies(beside=True), list[bool]()
    for _ in range(2):
        states = [Item.whole(key, value) for key, value in optimizer.state[weight].items()]
        items = [Item.whole("weight", weight.detach())]
        values = [one.tensor.cpu().clone() for one in (*items, *states)]
        taken = copies.take(items, states, [optimizer])
        found.append(torch.equal(taken[0].tensor, values[0]))
        step()
        copies.ready()
        found.append(all(torch.equal(one.tensor, value) for one, value in zip(taken, values, strict=True)))
        found.append(taken[0].tensor.is_pinned())
    copies.close()
    step()
    return found


def test_states_are_copied_to_pinned_memory_beside_what_the_device_computes_and_before_the_next_step() -> None:
    assert run_ranks(1, copied_beside) == [[False, True, True] * 2]
