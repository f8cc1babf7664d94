"""Checkpoints move between grids and one process: the same bits, and the same losses and weights afterwards.

"2d" is "language: ranks 0-3", "2.5d" and "3d" are "language: ranks 0-7"; "one" is the strategy on one rank, and None
plain Lightning without it. A run saves after two steps and goes on for three; its states are those of AdamW.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from checkpoint.moves import AFTER, BEFORE, Optimized, assert_same_bits, optimizer_of, saved
from lightning_mm5d import Modality
from lightning_mm5d.checkpoint.full_file import load_full
from parity.harness import fit, strategy
from ranks import call_ranks
from zoo import CASES

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "2d": {"tp_size": 4, "tp_mode": "2d"},
    "2.5d": {"tp_size": 8, "tp_mode": "2.5d", "tp_depth": 2},
    "3d": {"tp_size": 8, "tp_mode": "3d"},
    "tp 3": {"tp_size": 3},
}


class Trained(NamedTuple):
    """Losses of a run's steps, and its weights at the end where rank 0 has all of them."""

    losses: list[float]
    weights: dict[str, Tensor]


class Ask(NamedTuple):
    """A run: which files it writes (``full`` or ``sharded``), where, and what it begins with.

    Attributes:
        kind: of checkpoint.
        folder: for checkpoints after two steps.
        load: a checkpoint.
        again: where it is saved before the first step.
    """

    kind: str
    folder: Path | None = None
    load: Path | None = None
    again: Path | None = None


def run(rank: int, which: str | None, asks: list[Ask]) -> list[Trained]:
    """One rank's runs of one layout."""
    return [_run(which, ask) for ask in asks]


def _run(which: str | None, ask: Ask) -> Trained:
    case = CASES["bert"]  # which computes in float64 throughout
    module = case.build(seed=0 if ask.load is None else 1)
    vars(module)["configure_optimizers"] = lambda: optimizer_of("bert", module)
    chosen: Any = "auto"
    if which is not None:
        chosen = strategy({"language": Modality(**LAYOUTS[which])}, num_microbatches=2, checkpoint=ask.kind)
    callbacks: list[Any] = [Optimized(ask.again)]
    if ask.folder is not None:
        callbacks.append(ModelCheckpoint(ask.folder, filename="{epoch}", save_top_k=-1, every_n_epochs=BEFORE))
    recorder = fit(
        module,
        [case.batch(6)],
        chosen,
        1 if which is None else LAYOUTS[which].get("tp_size", 1),
        max_epochs=BEFORE + AFTER,
        callbacks=callbacks,
        enable_checkpointing=ask.folder is not None,
        ckpt_path=ask.load,
    )
    has_all = which is None or ask.kind == "full"
    weights = {name: value.clone() for name, value in module.state_dict().items()} if has_all else {}
    return Trained(recorder.losses, weights)


def on_ranks(which: str, *asks: Ask) -> list[Trained]:
    results: list[Trained] = call_ranks(LAYOUTS[which].get("tp_size", 1), run, which, list(asks))[0]
    return results


def assert_trained(found: Trained, expected: Trained, where: str) -> None:
    """Compare losses after the checkpoint, and the weights at the end."""
    torch.testing.assert_close(
        found.losses[-AFTER:], expected.losses[BEFORE:], rtol=1e-8, atol=1e-8, msg=lambda m: f"{where}: {m}"
    )
    for name, value in found.weights.items():
        torch.testing.assert_close(
            value, expected.weights[name], rtol=1e-8, atol=1e-8, msg=lambda m, name=name: f"{where}, {name}: {m}"
        )


def assert_same_file(one: Path, other: Path) -> None:
    """Compare weights and states of optimizers of two full checkpoints, bit by bit."""
    first, second = load_full(one), load_full(other)
    for key in ("state_dict", "optimizer_states"):
        _assert_equal(first[key], second[key], f"{other.name}: {key}")


def _assert_equal(one: Any, other: Any, where: str) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            _assert_equal(value, other[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for index, value in enumerate(one):
            _assert_equal(value, other[index], f"{where}.{index}")
    else:
        assert one == other, where


@pytest.mark.usefixtures("float64")
def test_a_grid_goes_on_from_checkpoints_of_one_process_and_saves_the_same(tmp_path: Path) -> None:
    expected = _run(None, Ask("full", tmp_path / "plain"))
    (found,) = on_ranks("one", Ask("sharded", tmp_path / "one"))
    assert_trained(found, expected, "one rank")
    sources = {"full": saved(tmp_path / "plain"), "sharded": saved(tmp_path / "one")}
    again = {kind: tmp_path / f"{kind}.ckpt" for kind in sources}
    results = on_ranks("2d", *(Ask(kind, None, path, again[kind]) for kind, path in sources.items()))
    for result, kind in zip(results, sources, strict=True):
        assert_trained(result, expected, kind)
    assert_same_file(sources["full"], again["full"])
    assert_same_bits(sources["sharded"], again["sharded"])


def check_moves(tmp_path: Path, grids: list[str]) -> None:
    """Move checkpoints from one process to a grid, from there to the next one, and back to one process."""
    plain, other = tmp_path / "plain", tmp_path / "one"
    expected = _run(None, Ask("full", plain))
    (found,) = on_ranks("one", Ask("sharded", other))
    assert_trained(found, expected, "one rank")
    sources = {"full": saved(plain), "sharded": saved(other)}
    for grid in grids:
        into = {kind: tmp_path / f"{grid} {kind}" for kind in sources}
        again = {kind: tmp_path / f"{grid} {kind} again.ckpt" for kind in sources}
        results = on_ranks(
            grid,
            *(Ask(kind, into[kind]) for kind in sources),
            *(Ask(kind, None, path, again[kind]) for kind, path in sources.items()),
        )
        for result, kind in zip(results, ("trained", "trained", *sources), strict=True):
            assert_trained(result, expected, f"{grid}, {kind}")
        assert_same_file(sources["full"], again["full"])
        assert_same_bits(sources["sharded"], again["sharded"])
        sources = {kind: saved(folder) for kind, folder in into.items()}  # the next one goes on from this one's
    back, last = tmp_path / "back.ckpt", tmp_path / "last.ckpt"
    assert_trained(_run(None, Ask("full", None, sources["full"], back)), expected, "back in one process")
    assert_same_file(sources["full"], back)
    for which in ("one", "tp 3"):
        (found,) = on_ranks(which, Ask("sharded", None, sources["sharded"], last.with_stem(which)))
        assert_trained(found, expected, f"back in {which}")
        assert_same_bits(sources["sharded"], last.with_stem(which))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("grids", [["2d"], ["3d", "2d", "2.5d"], ["2.5d", "3d"]], ids=", ".join)
def test_grids_go_on_from_checkpoints_of_each_other(grids: list[str], tmp_path: Path) -> None:
    check_moves(tmp_path, grids)
