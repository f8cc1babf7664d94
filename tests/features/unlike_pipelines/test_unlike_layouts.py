"""Where the ranks of unlike pipelines are, and how many microbatches replicas take."""

from __future__ import annotations

import pytest

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.layout import Layout
from lightning_mm5d.layout.layout import shared_out


def build(world: int, **modalities: Modality) -> Layout:
    return Layout.build(modalities, world_size=world, loss_modality="language")


def test_positions_that_a_short_pipeline_lacks_take_no_rank() -> None:
    """replica 0: ranks 0, 2, 4, 6; replica 1: ranks 1, 3, 5."""
    layout = build(7, language=Modality(pipeline={"pipelines": [4, 3]}))
    assert [layout.ranks_of("language", dp=dp) for dp in range(2)] == [(0, 2, 4, 6), (1, 3, 5)]
    assert layout.ranks_of("language", pp=3) == (6,)
    assert [(place.rank, place.pp, place.dp) for place in layout.places] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
        (4, 2, 0),
        (5, 2, 1),
        (6, 3, 0),
    ]
    assert layout.microbatches(7) == (8, 6)


def test_a_longer_pipeline_may_come_later_and_be_tensor_parallel() -> None:
    """replica 0: ranks 0-1; replica 1: ranks 2-3, 4-5, 6-7."""
    layout = build(8, language=Modality(pipeline={"pipelines": [1, 3]}, tp_size=2))
    assert [layout.ranks_of("language", dp=dp) for dp in range(2)] == [(0, 1), (2, 3, 4, 5, 6, 7)]
    assert layout.rank_of("language", dp=1, pp=2, tp=1) == 7


def test_other_modalities_have_as_many_replicas() -> None:
    """vision: ranks 0-1; language: ranks 2, 4, 6 and 3, 5; or vision with the first ranks of language."""
    layout = build(7, vision=Modality(), language=Modality(pipeline={"pipelines": [3, 2]}))
    assert [layout.replica_ranks(replica) for replica in range(2)] == [(0, 2, 4, 6), (1, 3, 5)]
    layout = build(5, vision=Modality(colocate_with="language.0"), language=Modality(pipeline={"pipelines": [3, 2]}))
    assert [layout.replica_ranks(replica) for replica in range(2)] == [(0, 2, 4), (1, 3)]
    assert layout.ranks_of("vision") == (0, 1)
    with pytest.raises(ConfigError, match=r"Nearest that fit: 7 ranks"):
        build(8, vision=Modality(), language=Modality(pipeline={"pipelines": [3, 2]}))
    with pytest.raises(ConfigError, match=r"modalities.vision.dp_size: got 1.*Use dp_size=2"):
        build(6, vision=Modality(dp_size=1), language=Modality(pipeline={"pipelines": [3, 2]}))


def test_speeds_decide_how_many_microbatches_a_replica_takes() -> None:
    assert build(2, language=Modality(dp_size=2, pipeline={"speeds": [3.0, 1.0]})).microbatches(4) == (6, 2)
    assert build(7, language=Modality(pipeline={"pipelines": [4, 3], "speeds": [1, 1]})).microbatches(4) == (4, 4)
    assert build(4, language=Modality(dp_size=2, pp_size=2)).microbatches(4) == (4, 4)
    assert build(7, language=Modality(pipeline={"pipelines": {"min": 3}})).microbatches(1) == (1, 1)


def test_what_is_shared_out_is_all_of_it_and_each_gets_one_at_least() -> None:
    assert shared_out(14, [4, 3]) == [8, 6]
    assert shared_out(9, [2, 2, 3]) == [3, 2, 4]
    assert shared_out(3, [100, 1, 1]) == [1, 1, 1]
    for size in range(4, 40):
        assert sum(shared_out(size, [7, 0.1, 3, 2.5])) == size
