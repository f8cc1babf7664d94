"""The ranks that tests call."""

from __future__ import annotations

import ranks


def _index(rank: int) -> int:
    return rank


def _called(rank: int) -> list[int]:
    return ranks.call_ranks(2, _index)


def _called_and_ended(rank: int) -> list[int]:
    try:
        return _called(rank)
    finally:
        ranks.POOL.close()


def test_a_rank_has_a_pool_of_its_own() -> None:
    assert ranks.call_ranks(2, _index) == [0, 1]
    assert ranks.run_ranks(1, _called_and_ended) == [[0, 1]]
    assert ranks.call_ranks(2, _index) == [0, 1]
