"""Checkpoints of experts that ranks share move to any other layout, bit by bit, and runs go on from them.

One family with a language model alone. Each run trains two steps and saves; each move loads that under another layout
and saves again before its first step. Sharded checkpoints and full files are moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from checkpoint.moves import AFTER, BEFORE, assert_same_bits, saved
from lightning_mm5d import Modality
from parity.harness import fit, strategy
from ranks import call_ranks

from .families import FAMILIES

NAME = "qwen3_moe"
# fields of the language model, ranks, replicas
LAYOUTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "one": ({}, 1, 1),
    "ep 2": ({"dp_size": 2, "ep_size": 2}, 2, 2),
    "ep 4": ({"dp_size": 4, "ep_size": 4}, 4, 4),
    "ep 3": ({"dp_size": 3, "ep_size": 3}, 3, 1),
    "ep 2 of 4": ({"dp_size": 4, "ep_size": 2}, 4, 4),
    "tp 2": ({"tp_size": 2}, 2, 1),
    "ep 2, tp 2": ({"dp_size": 2, "ep_size": 2, "tp_size": 2}, 4, 2),
    "ep 2, tp 2 in experts": ({"dp_size": 2, "ep_size": 2, "tp_size": 2, "expert_tp_size": 2}, 4, 2),
    "ep 2, pp 2": ({"dp_size": 2, "ep_size": 2, "pp_size": 2}, 4, 2),
    "zero 3": ({"dp_size": 2, "zero_stage": 3}, 2, 2),
    "ep 2, zero 3": ({"dp_size": 2, "ep_size": 2, "zero_stage": 3}, 2, 2),
    "ep 2 of cp 2": ({"cp_size": 2, "ep_size": 2}, 2, 1),
}
FEW = ["ep 4", "tp 2", "zero 3"]


class SavedAgain(Callback):
    """Saves before the first step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def built(seed: int) -> Any:
    module = FAMILIES[NAME].build(seed)
    vars(module)["configure_optimizers"] = lambda: torch.optim.AdamW(module.parameters(), lr=1e-3, amsgrad=True)
    return module


def train(
    rank: int, which: str, folder: Path | None, ckpt_path: Path | None, again: Path | None, kind: str
) -> list[float]:
    """Train under a layout, as one of its ranks; return the losses."""
    torch.set_default_dtype(torch.float64)
    fields, world, replicas = LAYOUTS[which]
    callbacks: list[Callback] = [] if again is None else [SavedAgain(again)]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, every_n_epochs=BEFORE))
    case = FAMILIES[NAME]
    recorder = fit(
        built(0 if ckpt_path is None else 1),
        [case.batch(4)] * max(replicas, fields.get("dp_size", 1)),
        strategy({"language": Modality(**fields)}, checkpoint=kind),
        world,
        in_order=True,
        max_epochs=BEFORE + AFTER,
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        ckpt_path=ckpt_path,
    )
    return recorder.losses


def trained(which: str, folder: Path, kind: str = "sharded") -> list[float]:
    return call_ranks(LAYOUTS[which][1], train, which, folder, None, None, kind)[0]


def moved(source: Path, target: str, again: Path, kind: str = "sharded") -> list[float]:
    return call_ranks(LAYOUTS[target][1], train, target, None, source, again, kind)[0]


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, (dict, list, tuple)):
            yield from flat(value, f"{path}.{key}")
        else:
            yield f"{path}.{key}", value


def assert_same_files(one: Path, other: Path) -> None:
    """Compare weights and optimizer states of two full files, bit by bit."""
    first, second = (torch.load(path, weights_only=False) for path in (one, other))
    for part in ("state_dict", "optimizer_states"):
        expected, got = dict(flat(first[part])), dict(flat(second[part]))
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            assert torch.equal(value, got[name]) if torch.is_tensor(value) else value == got[name], name


def check_moves(sources: list[str], targets: list[str], kind: str, folder: Path) -> None:
    compare = assert_same_bits if kind == "sharded" else assert_same_files
    wrong = []
    for source in sources:
        losses = trained(source, folder / source, kind)
        for target in targets:
            again = folder / f"{source} to {target}.ckpt"
            got = moved(saved(folder / source), target, again, kind)
            try:
                compare(saved(folder / source), again)
                torch.testing.assert_close(got, losses[BEFORE:], rtol=1e-6, atol=1e-6)
            except AssertionError as error:
                wrong.append(f"{source} to {target}: {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.usefixtures("float64")
def test_experts_of_two_ranks_move_to_other_layouts_and_back_bit_by_bit(tmp_path: Path) -> None:
    """language: ranks 0-1 with ep_size=2; then four ranks, tensor parallel ranks, ranks that share all"""
    check_moves(["ep 2"], FEW, "sharded", tmp_path)
    check_moves(["tp 2"], ["ep 2"], "sharded", tmp_path)


@pytest.mark.usefixtures("float64")
def test_a_full_file_of_experts_loads_on_one_rank_and_comes_back(tmp_path: Path) -> None:
    """language: ranks 0-1 with ep_size=2; then one rank"""
    check_moves(["ep 2"], ["one"], "full", tmp_path)
    check_moves(["one"], ["ep 2"], "full", tmp_path / "back")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_experts_move_between_all_layouts(kind: str, tmp_path: Path) -> None:
    check_moves([*LAYOUTS], [*LAYOUTS], kind, tmp_path)
