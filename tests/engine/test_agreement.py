"""Ranks that state unequal things all get one error that names them, in any order, also where some stay away."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_mm5d.config.errors import RankLostError, RankMismatchError
from lightning_mm5d.engine import agreement as agreement_module
from lightning_mm5d.engine.agreement import Agreement, differences
from ranks import run_ranks


def test_differences_name_the_ranks_and_the_fewest_first() -> None:
    stated = {0: {"a": 1, "b": [2]}, 1: {"a": 1, "b": [2]}, 2: {"a": 4, "b": [2]}, 3: {"a": 1, "b": [3], "c": "x"}}
    assert differences(stated) == (
        "ranks disagree: rank 2 has a 4, ranks 0, 1 and 3 have 1; rank 3 has b [3], ranks 0, 1 and 2 have [2]; "
        "rank 3 has c x, ranks 0, 1 and 2 have null"
    )


def test_many_differences_are_counted() -> None:
    message = differences({rank: {f"name {index}": rank for index in range(9)} for rank in range(2)})
    assert message.endswith("; 4 more differences")


def _agreement(rank: int, name: str, world: int = 3, limit: float = 30) -> Agreement:
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, multi_tenant=True)
    return Agreement(dist.PrefixStore(name, store), rank=rank, world_size=world, timeout=timedelta(seconds=limit))


def _message(agreement: Agreement, what: str, **stated: object) -> str:
    try:
        agreement.check(what, stated)
    except (RankMismatchError, RankLostError) as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


def _checks(rank: int) -> list[str]:
    first = _agreement(rank, "first")
    found = [_message(first, "size", size=2), _message(first, "size", size=2 + (rank == 1))]
    if rank == 2:
        time.sleep(0.7)  # others wait for it, and see it come
    found.append(_message(first, "size", size=rank))
    found.append(_message(_agreement(rank, "first"), "model" if rank == 2 else "data", size=rank))
    found.append(_message(_agreement(rank, "world", 4 if rank == 1 else 3), "ranks", ranks=rank == 1))
    late = _agreement(rank, "away", limit=4 if rank else 30)  # a rank may be held up for a while
    if rank == 0:
        time.sleep(4.6)  # and it serves the store
    found.append(_message(late, "start") if rank else "")
    return found


def test_every_rank_hears_who_states_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0-2, without any process group."""
    monkeypatch.setattr(agreement_module, "_GRACE_S", 1.0)
    monkeypatch.setattr(agreement_module, "_COMES_S", 1.0)
    results = run_ranks(3, _checks)
    for rank, found in enumerate(results):
        assert found[0] == "agreed"
        assert found[1] == "RankMismatchError: ranks disagree: rank 1 has size 3, ranks 0 and 2 have 2"
        assert found[2] == "RankMismatchError: ranks disagree: rank 0 has size 0, rank 1 has 1, rank 2 has 2"
        assert found[3] == "RankMismatchError: ranks disagree: rank 2 has next check model, ranks 0 and 1 have data"
        assert found[4] == "RankMismatchError: ranks disagree: rank 1 has ranks true, ranks 0 and 2 have false"
        if rank:
            assert found[5] == "RankLostError: rank 0 did not come to the check of start within 0:00:04"


class Late(dist.HashStore):  # type: ignore[misc]
    """A store that a rank comes to between two looks of another."""

    def add(self, key: str, amount: int) -> int:
        return 0 if key.endswith("come") else super().add(key, amount)


def test_a_rank_may_come_at_any_time() -> None:
    agreement = Agreement(Late(), rank=0, world_size=1, timeout=timedelta(seconds=5))
    assert _message(agreement, "x") == "agreed"


def test_one_rank_agrees_with_itself() -> None:
    assert _message(Agreement(dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=1)), "x") == "agreed"


@pytest.mark.parametrize("value", [float("nan"), object()])
def test_statements_are_json(value: object) -> None:
    agreement = Agreement(dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=1))
    if isinstance(value, float):
        agreement.check("x", {"value": value})
    else:
        with pytest.raises(TypeError):
            agreement.check("x", {"value": value})
