"""Sharing ranks: whose they may be, and sizes that must agree."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_mm5d.config.checks import check
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality, colocated_dp


def run(modalities: dict[str, Modality]) -> None:
    check(modalities, num_microbatches=4, schedule="1f1b")


def refusal(modalities: dict[str, Modality]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        run(modalities)
    return caught.value


@pytest.mark.parametrize(
    ("owners", "field", "fix"),
    [
        ({"vision": "vision", "language": None}, "vision", "Use 'language'"),
        ({"vision": "langage", "language": None}, "vision", "Use 'language'"),
        ({"vision": "x", "audio": None, "language": None}, "vision", "There are audio, language"),
        ({"language": "language"}, "language", "Leave it unset"),
        ({"vision": ["language"], "language": None}, "vision", "Use 'language'"),
        ({"vision": "audio", "audio": "language", "language": None}, "vision", "colocate_with='language'"),
        ({"vision": "language", "language": "vision"}, "vision", "Leave it unset for 'language'"),
        (
            {"vision": "audio", "audio": "language", "language": "audio"},
            "vision",
            "Leave it unset for 'audio'",
        ),
        ({"vision": "audio", "audio": "x", "language": None}, "vision", "Leave it unset for 'audio'"),
    ],
)
def test_refuses_colocation_with_nothing_itself_or_a_chain(owners: Any, field: str, fix: str) -> None:
    error = refusal({name: Modality(colocate_with=owner) for name, owner in owners.items()})
    assert error.field == f"modalities.{field}.colocate_with"
    assert fix in error.fix


def test_a_pipeline_rank_of_another_modality_may_be_shared() -> None:
    modality = Modality(pp_size=3, tp_size=2, colocate_with="language.1")
    assert modality.owner == ("language", 1)
    assert (modality.ranks_per_replica, modality.own_ranks_per_replica) == (6, 4)
    assert Modality(colocate_with="language").own_ranks_per_replica == 0
    assert Modality(pp_size=3).own_ranks_per_replica == 3
    run({"vision": modality, "language": Modality(pp_size=2, tp_size=2)})


@pytest.mark.parametrize(
    ("owners", "fix"),
    [
        ({"vision": "langage.0", "language": None}, "Use 'language'"),
        ({"vision": "vision.0", "language": None}, "Use 'language'"),
        ({"vision": "language.-1", "language": None}, "Use 'language'"),
        ({"vision": "language.2", "language": None}, "The nearest is 'language.1'"),
        ({"vision": "audio.0", "audio": "language.1", "language": None}, "Use colocate_with='language.1'"),
        ({"vision": "audio", "audio": "language.1", "language": None}, "Use colocate_with='language.1'"),
        ({"vision": "language.0", "language": "vision.0"}, "Leave it unset for 'language'"),
    ],
)
def test_refuses_pipeline_ranks_that_are_not_there_or_are_shared_already(owners: Any, fix: str) -> None:
    error = refusal({name: Modality(pp_size=2, colocate_with=owner) for name, owner in owners.items()})
    assert error.field == "modalities.vision.colocate_with"
    assert fix in error.fix


@pytest.mark.parametrize("size", ["tp_size", "cp_size", "dp_size"])
def test_refuses_colocation_with_a_pipeline_rank_of_other_sizes(size: str) -> None:
    colocated = Modality(**{size: 4}, colocate_with="language.0")
    error = refusal({"vision": colocated, "language": Modality(**{size: 2})})
    assert (error.field, error.got) == (f"modalities.vision.{size}", 4)
    assert error.fix == f"Use {size}=2, or leave colocate_with unset"


def test_a_modality_colocated_with_a_pipeline_rank_may_leave_its_replicas_unset() -> None:
    run({"vision": Modality(colocate_with="language.0"), "language": Modality(dp_size=2)})
    run({"vision": Modality(dp_size=2, colocate_with="language.0"), "language": Modality()})


def test_refuses_colocated_sizes_that_do_not_divide_the_owners_ranks() -> None:
    colocated = Modality(tp_size=5, colocate_with="language")
    error = refusal({"vision": colocated, "language": Modality(dp_size=4, tp_size=2)})
    assert error.field == "modalities.vision"
    assert "8 ranks of 'language'" in error.rule
    assert error.fix == "A product of 4 or 8 would fit"


def test_refuses_a_colocated_dp_size_that_does_not_fill_the_owners_ranks() -> None:
    colocated = Modality(dp_size=3, tp_size=2, colocate_with="language")
    error = refusal({"vision": colocated, "language": Modality(dp_size=4, tp_size=2)})
    assert (error.field, error.got) == ("modalities.vision.dp_size", 3)
    assert "dp_size=4" in error.fix


def test_colocated_replicas_fill_the_owners_ranks() -> None:
    assert colocated_dp("vision", Modality(tp_size=2, cp_size=2, colocate_with="language"), 12) == 3
