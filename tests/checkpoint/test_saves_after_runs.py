"""A checkpoint that is saved after a run, by hand: on all ranks it is right, on one alone it ends in one error."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from features.toys import PAIR, Run, Toy, together
from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.config.errors import RankLostError


def saved(run: Run, *ranks: int) -> str:
    """What becomes of a save after a run, which these ranks call."""
    trainer = run.trainer(max_steps=1)
    trainer.fit(Toy(), run.training())
    if trainer.global_rank not in ranks:
        return "left"
    try:
        trainer.save_checkpoint(run.folder / "after.ckpt")
    except RankLostError as error:
        return str(error)
    return "saved"


def saved_by_rank_0(run: Run) -> str:
    return saved(run, 0)


def saved_by_all(run: Run) -> str:
    return saved(run, 0, 1)


def test_a_save_of_rank_0_alone_names_the_rank_that_does_not_come(tmp_path: Path) -> None:
    """vision: rank 0; language: rank 1"""
    found, left = together(PAIR, saved_by_rank_0, tmp_path, watchdog=timedelta(seconds=5))
    assert left == "left"
    assert "trainer.save_checkpoint after a run: rank 1 said nothing" in found
    assert "Call it on all ranks, not under trainer.is_global_zero" in found
    assert not (tmp_path / "after.ckpt").exists()


def test_a_save_of_all_ranks_writes_the_file(tmp_path: Path) -> None:
    """vision: rank 0; language: rank 1"""
    assert together(PAIR, saved_by_all, tmp_path) == ["saved", "saved"]
    assert (tmp_path / "after.ckpt").exists()


def test_a_save_after_a_failure_names_its_cause_where_other_ranks_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = MultimodalStrategy({"language": Modality()})

    def lost(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(strategy, "_module", lost)
    with pytest.raises(RuntimeError, match="Connection closed"):
        strategy.full_state_dict()
    cause = {"line": "rank 0 was interrupted by SIGINT"}
    monkeypatch.setattr(strategy, "_guard", SimpleNamespace(monitor=SimpleNamespace(cause=cause)))
    with pytest.raises(RankLostError, match="no checkpoint is written: rank 0 was interrupted by SIGINT"):
        strategy.full_state_dict()
