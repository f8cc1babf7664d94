"""Moves of a checkpoint from one layout to another: who saves it, who loads it, and what must come out.

Every run trains on the same batch in each step. A run of a layout saves after two steps and goes on for three. A move
loads that checkpoint under another layout, saves it again before its first step, and goes on for three steps too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_mm5d import Modality
from lightning_mm5d.features.sharded_checkpoints.directory import CheckpointDirectory, StoredTensors
from lightning_mm5d.features.sharded_checkpoints.sharded_save import OWN_PREFIX
from parity.harness import fit, strategy
from zoo import CASES

BEFORE, AFTER = 2, 3  # steps
# fields of every encoder, fields of the language model, number of ranks
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "one": ({"colocate_with": "language"}, {}, 1),
    "all dp 2": ({"colocate_with": "language"}, {}, 2),
    "e | l": ({}, {}, 2),
    "e | l pp 2": ({}, {"pp_size": 2}, 3),
    "e | l pp 3": ({}, {"pp_size": 3}, 4),
    "e pp 2 | l pp 2": ({"pp_size": 2}, {"pp_size": 2}, 4),
    "e dp 2 | l dp 1": ({"dp_size": 2}, {"dp_size": 1}, 3),
    "e dp 1 | l dp 2": ({"dp_size": 1}, {"dp_size": 2}, 3),
    "e with l pp 2": ({"colocate_with": "language"}, {"pp_size": 2}, 2),
    "e | l tp 2": ({}, {"tp_size": 2}, 3),
    "e tp 2 | l tp 2": ({"tp_size": 2}, {"tp_size": 2}, 4),
    "all tp 2": ({"colocate_with": "language", "tp_size": 2}, {"tp_size": 2}, 2),
    "e | l cp 2": ({}, {"cp_size": 2}, 3),
}
# all on the same ranks; z1 stands for zero_stage=1
SHARING: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    name: ({"colocate_with": "language", **sharing, **tensor}, {**sharing, **fields}, world)
    for name, sharing, fields, world, tensor in (
        ("z1", {"zero_stage": 1}, {}, 2, {}),
        ("z2, 3 ranks", {"zero_stage": 2}, {}, 3, {}),
        ("z3", {"zero_stage": 3}, {}, 2, {}),
        ("z3, 4 ranks", {"zero_stage": 3}, {}, 4, {}),
        ("z2, 2 of 4 ranks", {"zero_stage": 2, "dp_shard_size": 2}, {}, 4, {}),
        ("z3, 2 of 4 ranks", {"zero_stage": 3, "dp_shard_size": 2}, {}, 4, {}),
        ("z1, tp 2", {"zero_stage": 1}, {"tp_size": 2}, 4, {"tp_size": 2}),
        ("z3, tp 2", {"zero_stage": 3}, {"tp_size": 2}, 4, {"tp_size": 2}),
        ("z2, l pp 2", {"zero_stage": 2}, {"pp_size": 2}, 4, {}),
        ("z3, l pp 2", {"zero_stage": 3}, {"pp_size": 2}, 4, {}),
    )
}
# blocks on grids, of the model whose layers can be in blocks
GRIDS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "e | l 2d": ({}, {"tp_size": 4, "tp_mode": "2d"}, 5),
    "all 2d": ({"colocate_with": "language", "tp_size": 4, "tp_mode": "2d"}, {"tp_size": 4, "tp_mode": "2d"}, 4),
    "e with l 3d": ({"colocate_with": "language"}, {"tp_size": 8, "tp_mode": "3d"}, 8),
    "e with l 2.5d": ({"colocate_with": "language"}, {"tp_size": 8, "tp_mode": "2.5d", "tp_depth": 2}, 8),
    "z3, l 2d": ({"colocate_with": "language", "zero_stage": 3}, {"tp_size": 4, "tp_mode": "2d", "zero_stage": 3}, 8),
}
LAYOUTS |= SHARING | GRIDS
MODELS = ("llava", "qwen2_vl", "whisper")


class Optimized(Callback):
    """Keeps losses, and saves where it is told to before the first step."""

    def __init__(self, again: Path | None = None) -> None:
        self.again = again

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.again is not None:
            trainer.save_checkpoint(self.again)


def optimizer_of(name: str, module: torch.nn.Module) -> torch.optim.Optimizer:
    parameters = [one for _, one in sorted(module.named_parameters()) if one.requires_grad]
    if name == "qwen2_vl":
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True)
    groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "lr": 0.002}]
    return torch.optim.AdamW(groups, lr=0.001, amsgrad=name == "whisper")


def run(
    name: str,
    which: str,
    folder: Path | None = None,
    ckpt_path: Path | None = None,
    again: Path | None = None,
    **options: Any,
) -> list[float]:
    """Train one model under a layout, as one of its ranks; return the losses."""
    torch.set_default_dtype(torch.float64)
    case = CASES[name]
    encoder, language, world = LAYOUTS[which]
    replicas = 2 if which in ("e dp 1 | l dp 2", "z2, l pp 2", "z3, l pp 2", "z3, l 2d") else 1
    *encoders, last = case.modalities
    fields = {**dict.fromkeys(encoders, encoder), last: language}
    modalities = {key: Modality(**{**case.modality_paths.get(key, {}), **value}) for key, value in fields.items()}
    module = case.build(seed=0 if ckpt_path is None else 1)
    vars(module)["configure_optimizers"] = lambda: optimizer_of(name, module)
    callbacks: list[Callback] = [Optimized(again)]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=BEFORE))
    chosen = strategy(modalities, num_microbatches=2, **{"checkpoint": "sharded", **options})
    recorder = fit(
        module,
        [case.batch(4)] * replicas,
        chosen,
        world,
        use_distributed_sampler=replicas > 1,
        max_epochs=BEFORE + AFTER,
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        ckpt_path=ckpt_path,
    )
    return recorder.losses


def saved(folder: Path) -> Path:
    """Return the checkpoint that a run with this folder saves after `BEFORE` steps."""
    return folder / f"epoch={BEFORE - 1}.ckpt"


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a sharded checkpoint and the tensors of its optimizers, by stored name."""
    stored = StoredTensors(CheckpointDirectory(path))
    return {name: stored.read(name) for name in stored.names() if not name.startswith(OWN_PREFIX)}


def assert_same_bits(one: Path, other: Path) -> None:
    """Compare all tensors of two checkpoints, bit by bit."""
    first, second = tensors(one), tensors(other)
    assert sorted(first) == sorted(second)
    different = [name for name, value in first.items() if not torch.equal(value, second[name])]
    assert not different, different
