"""Lengths of axes: inference from the world, worlds that do not fit, replicas that do not pair up."""

from __future__ import annotations

import random

import pytest

from layouts import build, numbers, random_modalities, refusal
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.layout.layout import Layout

WORLD = "Trainer(devices=..., num_nodes=...)"


def test_unset_replicas_share_one_value_that_fills_the_world() -> None:
    """vision: ranks 0-3; audio: ranks 4-5; language: ranks 6-9."""
    layout = build(10, vision=Modality(dp_size=4), audio=Modality(), language=Modality(tp_size=2))
    assert [layout.sizes(name).dp for name in layout.modalities] == [4, 2, 2]


def test_a_remainder_names_the_sizes_below_and_above() -> None:
    error = refusal(8, vision=Modality(), language=Modality(tp_size=2))
    assert (error.field, error.got) == (WORLD, 8)
    assert error.rule == "The modalities (vision: 1 * dp_size + language: 2 * dp_size) fill a multiple of 3 ranks"
    assert error.fix == "Nearest that fit: 6 or 9 ranks"


def test_a_remainder_beside_set_sizes_counts_them() -> None:
    error = refusal(8, vision=Modality(dp_size=1), language=Modality(tp_size=4))
    assert "fill 1 plus a multiple of 4 ranks" in error.rule
    assert error.fix == "Nearest that fit: 5 or 9 ranks"


def test_a_world_that_is_too_small_names_the_smallest_and_colocation() -> None:
    error = refusal(1, vision=Modality(), language=Modality())
    assert error.fix == "Nearest that fit: 2 ranks, or let modalities share ranks with colocate_with"


def test_one_rank_holds_everything_when_colocated() -> None:
    """vision, audio, language: rank 0."""
    colocated = Modality(colocate_with="language")
    layout = build(1, vision=colocated, audio=colocated, language=Modality())
    assert [p.modality for p in layout.places_of(0)] == ["vision", "audio", "language"]


def test_sizes_that_are_all_set_must_fill_the_world() -> None:
    error = refusal(8, vision=Modality(dp_size=2), language=Modality(dp_size=2, tp_size=2))
    assert (error.field, error.fix) == (WORLD, "Use 6 ranks")


def test_refuses_replicas_that_do_not_pair_up() -> None:
    error = refusal(7, vision=Modality(dp_size=3), language=Modality(dp_size=4))
    assert (error.field, error.got) == ("modalities.vision.dp_size", 3)
    assert error.rule == "It must divide the dp_size 4 of 'language', or be a multiple of it"
    assert error.fix == "Use dp_size=2 (-1 ranks) or 4 (+1 ranks)"


def test_inferred_replicas_that_do_not_pair_up_name_the_worlds_that_do() -> None:
    error = refusal(7, vision=Modality(), language=Modality(dp_size=4))
    assert error.field == "modalities.vision.dp_size"
    assert error.rule.startswith("The inferred dp_size must divide the dp_size 4")
    assert error.fix == "Nearest that fit: 6 or 8 ranks"


def test_a_colocated_modality_that_does_not_pair_up_is_told_a_product() -> None:
    """12 ranks: vision 3 replicas of 4, language 2 of 6."""
    colocated = Modality(tp_size=4, colocate_with="language")
    error = refusal(12, vision=colocated, language=Modality(dp_size=2, tp_size=6))
    assert error.field == "modalities.vision.dp_size"
    assert error.fix == "A product pp_size * cp_size * tp_size of 3 or 6 would fit"


def test_a_loss_modality_that_is_colocated_is_the_one_to_change() -> None:
    colocated = Modality(tp_size=3, colocate_with="vision")
    error = refusal(12, vision=Modality(dp_size=6, tp_size=2), language=colocated)
    assert error.field == "modalities.language.dp_size"
    assert error.fix == "A product pp_size * cp_size * tp_size of 2 or 4 would fit"


def test_colocated_modalities_that_no_world_can_hold_are_refused_by_their_sizes() -> None:
    colocated = Modality(tp_size=2, dp_size=3, colocate_with="language")
    error = refusal(4, vision=colocated, language=Modality(dp_size=2, tp_size=2), audio=Modality())
    assert error.field == "modalities.vision.dp_size"
    assert "dp_size=2" in error.fix


def test_colocated_modalities_with_unset_owners_get_the_worlds_that_divide() -> None:
    error = refusal(4, vision=Modality(tp_size=3, colocate_with="language"), language=Modality())
    assert error.field == "modalities.vision"
    assert error.fix == "Nearest that fit: 3 or 6 ranks"


def test_the_worlds_that_an_error_names_do_fit() -> None:
    rng, named = random.Random(1), 0
    while named < 100:
        modalities, world = random_modalities(rng), rng.randrange(1, 65)
        try:
            Layout.build(modalities, world_size=world, loss_modality="language")
        except ConfigError as error:
            if "Nearest that fit" not in error.fix:
                continue
            named += 1
            for fits in numbers(error.fix):
                assert Layout.build(modalities, world_size=fits, loss_modality="language").size == fits
            for other in range(min(numbers(error.fix)) + 1, max(numbers(error.fix))):
                with pytest.raises(ConfigError):
                    Layout.build(modalities, world_size=other, loss_modality="language")


# ------------------------------------------------------------------ colocated with a pipeline rank


def test_only_own_ranks_of_a_colocated_modality_count() -> None:
    """vision: ranks 0-3 and 4-5; language: ranks 4-9; audio: those of language's last stage."""
    vision = Modality(pp_size=3, colocate_with="language.0")
    layout = build(10, vision=vision, language=Modality(pp_size=3), audio=Modality(colocate_with="language.2"))
    assert [layout.sizes(name).dp for name in layout.modalities] == [2, 2, 2]


def test_a_world_beside_own_ranks_of_a_colocated_modality_names_what_fits() -> None:
    vision = Modality(pp_size=3, colocate_with="language.0")
    error = refusal(8, vision=vision, language=Modality(pp_size=3))
    assert error.rule == "The modalities (vision: 2 * dp_size + language: 3 * dp_size) fill a multiple of 5 ranks"
    assert error.fix == "Nearest that fit: 5 or 10 ranks"


def test_a_colocated_modality_takes_the_replicas_of_its_owner_where_these_are_given() -> None:
    vision = Modality(pp_size=2, colocate_with="audio.0")
    layout = build(7, vision=vision, audio=Modality(dp_size=2), language=Modality(pp_size=3))
    assert layout.sizes("vision").dp == 2
    assert refusal(8, vision=vision, audio=Modality(dp_size=2), language=Modality(dp_size=2)).fix == "Use 6 ranks"


def test_refuses_other_replicas_than_those_of_the_owner() -> None:
    vision = Modality(dp_size=2, pp_size=2, colocate_with="language.0")
    error = refusal(9, vision=vision, language=Modality(pp_size=2))
    assert (error.field, error.got) == ("modalities.vision.dp_size", 2)
    assert error.rule == "Its last stage shares the ranks of 'language.0', of which there are 3 replicas"
    assert build(6, vision=vision, language=Modality(pp_size=2)).sizes("language").dp == 2


def test_an_owner_that_does_not_pair_up_is_named_instead_of_the_colocated_modality() -> None:
    vision = Modality(colocate_with="audio.0")
    error = refusal(7, vision=vision, audio=Modality(dp_size=3), language=Modality(dp_size=4))
    assert error.field == "modalities.audio.dp_size"
