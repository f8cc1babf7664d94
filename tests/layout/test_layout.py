"""Ranks: the order of the axes, shared ranks, who serves whom, packing onto nodes, placements by hand."""

from __future__ import annotations

import itertools
import pickle
import random
from typing import Any

import pytest

from layouts import build, numbers, random_modalities
from lightning_mm5d.config.checks import check
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.layout.layout import Layout, Place, Share, Sizes

ONE = Modality(dp_size=1)


@pytest.fixture(scope="module")
def layouts() -> list[tuple[dict[str, Modality], Layout]]:
    """Possible layouts of up to 32 ranks, of which some cross nodes."""
    rng, found = random.Random(0), []
    while len(found) < 40:
        modalities = random_modalities(rng)
        world, per_node = rng.randrange(1, 33), rng.choice([None, 2, 4, 8])
        try:
            check(modalities, num_microbatches=1, schedule="x")
            layout = Layout.build(modalities, world_size=world, loss_modality="language", ranks_per_node=per_node)
        except ConfigError:
            continue
        found.append((modalities, layout))
    return found


# ------------------------------------------------------------------ order of ranks


def test_tensor_runs_fastest_then_context_then_data_then_pipeline() -> None:
    """language: ranks 0-15."""
    layout = build(16, language=Modality(tp_size=2, cp_size=2, pp_size=2))
    assert layout.sizes("language") == Sizes(dp=2, pp=2, cp=2, tp=2)
    order = [(p.pp, p.dp, p.cp, p.tp) for p in layout.places]
    assert order == list(itertools.product(range(2), repeat=4))
    assert [p.rank for p in layout.places] == list(range(16))
    assert layout.ranks_of("language", pp=1, dp=0) == (8, 9, 10, 11)
    assert layout.ranks_of("language", cp=1, tp=1) == (3, 7, 11, 15)
    assert layout.ranks_of("language", dp=1, pp=0, cp=0, tp=1) == (5,)


def test_modalities_take_consecutive_blocks_in_the_order_of_the_configuration() -> None:
    """vision: ranks 0-1; language: ranks 2-7; audio: rank 8."""
    layout = build(9, vision=Modality(tp_size=2), language=Modality(pp_size=3, tp_size=2), audio=Modality(dp_size=1))
    assert layout.modalities == ("vision", "language", "audio")
    assert [layout.ranks_of(name) for name in layout.modalities] == [(0, 1), (2, 3, 4, 5, 6, 7), (8,)]
    assert layout.rank_of("language", dp=0, pp=2, tp=1) == 7
    assert layout.places_of(8) == (Place(rank=8, node=0, modality="audio", dp=0, pp=0, cp=0, tp=0),)


def test_colocated_modalities_divide_the_owners_ranks_by_their_own_sizes() -> None:
    """language and vision: ranks 0-3."""
    layout = build(4, vision=Modality(colocate_with="language"), language=Modality(tp_size=2, pp_size=2))
    assert layout.sizes("vision") == Sizes(dp=4, pp=1, cp=1, tp=1)
    assert layout.ranks_of("vision") == layout.ranks_of("language") == (0, 1, 2, 3)
    assert [p.modality for p in layout.places_of(3)] == ["vision", "language"]


def test_the_loss_modality_may_be_colocated() -> None:
    """vision: ranks 0-3; language: the same."""
    layout = build(4, vision=Modality(), language=Modality(pp_size=2, colocate_with="vision"))
    assert layout.num_replicas == 2
    assert layout.serves("vision", 3) == (Share(replica=1, start=1, step=2),)


def test_the_last_stage_of_a_colocated_modality_runs_on_a_pipeline_rank_of_its_owner() -> None:
    """vision: ranks 0-1 and 4-5; audio: ranks 2-3 and 6-7; language: ranks 4-5, 6-7."""
    vision, audio = Modality(pp_size=2, colocate_with="language.0"), Modality(pp_size=2, colocate_with="language.1")
    layout = build(8, vision=vision, audio=audio, language=Modality(pp_size=2))
    assert layout.sizes("vision") == Sizes(dp=2, pp=2, cp=1, tp=1)
    assert layout.ranks_of("vision", pp=1) == layout.ranks_of("language", pp=0) == (4, 5)
    assert layout.ranks_of("audio", pp=1) == layout.ranks_of("language", pp=1) == (6, 7)
    assert layout.ranks_of("vision", pp=0) + layout.ranks_of("audio", pp=0) == (0, 1, 2, 3)
    assert [(p.modality, p.pp, p.dp) for p in layout.places_of(5)] == [("vision", 1, 1), ("language", 0, 1)]
    assert layout.replica_ranks(1) == (1, 3, 5, 7)


def test_modalities_colocated_with_one_pipeline_rank_share_it_and_may_run_as_one() -> None:
    """vision, audio and language.0: rank 0; language.1: rank 1."""
    colocated = Modality(colocate_with="language.0")
    layout = build(2, vision=colocated, audio=colocated, language=Modality(pp_size=2))
    assert [p.modality for p in layout.places_of(0)] == ["vision", "audio", "language"]
    assert layout.same_ranks("vision", "audio")
    assert not layout.same_ranks("vision", "language")


def test_a_modality_colocated_with_the_only_pipeline_rank_runs_as_one_with_its_owner() -> None:
    """vision and language: ranks 0-1."""
    layout = build(2, vision=Modality(colocate_with="language.0"), language=Modality())
    assert layout.sizes("vision").dp == 2
    assert layout.same_ranks("vision", "language")


def test_an_encoder_may_own_the_ranks_of_another_one_and_of_the_loss_modality() -> None:
    """vision: ranks 0-1; audio and the language model's second stage: rank 1; its first: rank 2."""
    audio, language = Modality(colocate_with="vision.1"), Modality(pp_size=2, colocate_with="vision.1")
    layout = build(3, vision=Modality(pp_size=2), audio=audio, language=language)
    assert [layout.ranks_of(name) for name in layout.modalities] == [(0, 1), (1,), (2, 1)]


def test_every_position_is_on_exactly_one_rank(layouts: Any) -> None:
    for modalities, layout in layouts:
        for name, size in layout.axes.items():
            spans = [range(n) for n in (size.dp, size.pp, size.cp, size.tp)]
            ranks = [layout.rank_of(name, dp=d, pp=p, cp=c, tp=t) for d, p, c, t in itertools.product(*spans)]
            assert len(set(ranks)) == len(ranks)
            assert sorted(ranks) == sorted(layout.ranks_of(name))
        own = {name: layout.sizes(name).dp * modality.own_ranks_per_replica for name, modality in modalities.items()}
        owners = [rank for name, count in own.items() for rank in layout.ranks_of(name)[:count]]
        assert sorted(owners) == list(range(layout.size))
        for place in layout.places:
            assert place in layout.places_of(place.rank)
            assert place.node == place.rank // layout.ranks_per_node
            at = place._asdict()
            assert layout.rank_of(place.modality, **{a: at[a] for a in Sizes._fields}) == place.rank


def test_ranks_ascend_along_every_axis(layouts: Any) -> None:
    for _, layout in layouts:
        for name in layout.modalities:
            for pp in range(layout.sizes(name).pp):
                ranks = layout.ranks_of(name, pp=pp)
                assert list(ranks) == sorted(ranks)


def test_positions_outside_a_modality_are_a_bug() -> None:
    layout = build(2, language=Modality())
    with pytest.raises(AssertionError):
        layout.rank_of("language", dp=2, pp=0)


def test_layouts_compare_and_pickle() -> None:
    layout = build(2, language=Modality())
    assert layout.places
    assert pickle.loads(pickle.dumps(layout)) == layout


# ------------------------------------------------------------------ who serves whom


@pytest.mark.parametrize(
    ("vision", "language", "shares"),
    [
        (2, 2, [(Share(0, 0, 1),), (Share(1, 0, 1),)]),
        (4, 2, [(Share(0, 0, 2),), (Share(0, 1, 2),), (Share(1, 0, 2),), (Share(1, 1, 2),)]),
        (2, 4, [(Share(0, 0, 1), Share(1, 0, 1)), (Share(2, 0, 1), Share(3, 0, 1))]),
        (1, 3, [(Share(0, 0, 1), Share(1, 0, 1), Share(2, 0, 1))]),
    ],
)
def test_encoders_with_other_replica_counts_split_or_gather(vision: int, language: int, shares: Any) -> None:
    layout = build(vision + language, vision=Modality(dp_size=vision), language=Modality(dp_size=language))
    assert [layout.serves("vision", dp) for dp in range(vision)] == shares
    assert [layout.serves("language", dp) for dp in range(language)] == [(Share(d, 0, 1),) for d in range(language)]


def test_every_microbatch_is_served_once_by_each_modality(layouts: Any) -> None:
    microbatches = 12
    for _, layout in layouts:
        for name in layout.modalities:
            served = [
                (share.replica, microbatch, dp)
                for dp in range(layout.sizes(name).dp)
                for share in layout.serves(name, dp)
                for microbatch in range(share.start, microbatches, share.step)
            ]
            every = itertools.product(range(layout.num_replicas), range(microbatches))
            assert sorted((r, m) for r, m, _ in served) == list(every)
            assert all(layout.instance_of(name, r, m) == dp for r, m, dp in served)


def test_ranks_of_a_replica_are_those_of_every_instance_that_serves_it() -> None:
    """vision: ranks 0-3; audio: rank 4; language: ranks 5-8."""
    layout = build(9, vision=Modality(dp_size=4), audio=Modality(dp_size=1), language=Modality(dp_size=2, pp_size=2))
    assert layout.replica_ranks(0) == (0, 1, 4, 5, 7)
    assert layout.replica_ranks(1) == (2, 3, 4, 6, 8)
    assert layout.replicas_of_rank(4) == (0, 1)
    assert layout.replicas_of_rank(3) == (1,)


def test_replicas_and_ranks_agree_both_ways(layouts: Any) -> None:
    for _, layout in layouts:
        pairs = {(r, rank) for r in range(layout.num_replicas) for rank in layout.replica_ranks(r)}
        assert pairs == {(r, rank) for rank in range(layout.size) for r in layout.replicas_of_rank(rank)}


def test_modalities_run_as_one_only_where_they_are_divided_alike_in_one_stage() -> None:
    """vision, audio, text and language: ranks 0-3; other: ranks 4-5."""
    layout = build(
        6,
        vision=Modality(tp_size=2, colocate_with="language"),
        audio=Modality(colocate_with="language"),
        text=Modality(pp_size=2, colocate_with="language"),
        language=Modality(tp_size=2, dp_size=2),
        other=Modality(dp_size=1, tp_size=2),
    )
    assert layout.same_ranks("vision", "language")
    for apart in (("audio", "language"), ("text", "language"), ("text", "text"), ("other", "language")):
        assert not layout.same_ranks(*apart)


# ------------------------------------------------------------------ nodes


def test_blocks_move_so_that_none_straddles_a_node() -> None:
    """nodes of 4; vision: rank 7; language: ranks 0-3; audio: ranks 4-6."""
    language, audio = Modality(dp_size=1, tp_size=2, cp_size=2), Modality(dp_size=1, tp_size=3)
    layout = build(8, per_node=4, vision=ONE, language=language, audio=audio)
    assert layout.straddling == ()
    assert [layout.ranks_of(name) for name in layout.modalities] == [(7,), (0, 1, 2, 3), (4, 5, 6)]


def test_what_cannot_be_packed_keeps_its_order_and_is_named() -> None:
    """nodes of 4; language: ranks 0-2, 3-5, 6-8, 9-11."""
    layout = build(12, per_node=4, language=Modality(tp_size=3))
    assert layout.ranks_of("language") == tuple(range(12))
    assert layout.straddling == (("language", "tp", (3, 4, 5)), ("language", "tp", (6, 7, 8)))


def test_tensor_parallel_groups_stay_whole_where_context_parallel_blocks_are_larger_than_a_node() -> None:
    """nodes of 4; vision: rank 8; language: ranks 0-7, tensor parallel pairs inside nodes; audio: rank 9."""
    layout = build(10, per_node=4, vision=ONE, language=Modality(dp_size=1, tp_size=2, cp_size=4), audio=ONE)
    assert [(s.modality, s.axis) for s in layout.straddling] == [("language", "cp")]
    assert layout.ranks_of("language") == tuple(range(8))


def test_colocated_blocks_are_packed_with_their_owners() -> None:
    """nodes of 4; audio: ranks 4-5; vision and language: ranks 0-3."""
    vision, language = Modality(dp_size=2, tp_size=2), Modality(tp_size=4, colocate_with="vision")
    layout = build(6, per_node=4, audio=Modality(dp_size=2), vision=vision, language=language)
    assert layout.straddling == ()
    assert layout.ranks_of("language") == layout.ranks_of("vision") == (0, 1, 2, 3)
    assert layout.ranks_of("audio") == (4, 5)


def test_own_ranks_of_a_colocated_modality_are_packed_like_others() -> None:
    """nodes of 4; vision: ranks 0-2 and 8-10; language: ranks 4-6 and 8-10; audio: ranks 3, 7, 11."""
    vision = Modality(dp_size=1, pp_size=2, colocate_with="language.1", tp_size=3)
    layout = build(12, per_node=4, audio=Modality(dp_size=3), vision=vision, language=Modality(tp_size=3, pp_size=2))
    assert layout.straddling == ()
    assert layout.ranks_of("vision") == (0, 1, 2, 8, 9, 10)


def test_powers_of_two_always_pack_into_full_nodes() -> None:
    rng, packed = random.Random(2), 0
    while packed < 20:
        modalities = {
            name: Modality(dp_size=1, tp_size=2 ** rng.randrange(3), cp_size=2 ** rng.randrange(2), pp_size=pp)
            for name, pp in (("vision", 1), ("audio", rng.randrange(1, 4)), ("language", rng.randrange(1, 4)))
        }
        world = sum(m.ranks_per_replica for m in modalities.values())
        if world % 8 == 0 and world > 8:
            packed += 1
            layout = Layout.build(modalities, world_size=world, loss_modality="language", ranks_per_node=8)
            assert layout.straddling == ()


# ------------------------------------------------------------------ placement by hand


def placed(placement: list[Any]) -> Layout:
    modalities = {"vision": Modality(), "language": Modality(tp_size=2)}
    return Layout.build(modalities, world_size=6, loss_modality="language", ranks_per_node=2, placement=placement)


def test_a_placement_maps_slots_to_ranks() -> None:
    """nodes of 2; vision: ranks 4-5; language: ranks 0-3."""
    layout = placed([4, 5, 0, 1, 2, 3])
    assert layout.ranks_of("vision") == (4, 5)
    assert layout.ranks_of("language", dp=1) == (2, 3)
    assert [p.node for p in layout.places_of(5)] == [2]
    assert placed([0, 3, 1, 2, 4, 5]).straddling == (("language", "tp", (1, 2)),)


def test_a_placement_may_reverse_pipeline_stages() -> None:
    layout = Layout.build(
        {"language": Modality(pp_size=2)}, world_size=4, loss_modality="language", placement=[2, 3, 0, 1]
    )
    assert layout.ranks_of("language", pp=0) == (2, 3)


@pytest.mark.parametrize(
    ("placement", "near"),
    [
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]),
        ([0, 1, 2, 2, 4, 5], [0, 1, 2, 4, 5, 3]),
        ([0, 1, 2, 3, 4, 6], [0, 1, 2, 3, 4, 5]),
        ([0, 1, 2, 3, 4, 5, 5], [0, 1, 2, 3, 4, 5]),
        ([0, True, 2, 3, 4, 5], [0, 2, 3, 4, 5, 1]),
    ],
)
def test_refuses_placements_that_are_no_permutation(placement: list[Any], near: list[int]) -> None:
    with pytest.raises(ConfigError, match="each of the ranks 0 to 5 once") as caught:
        placed(placement)
    assert (caught.value.field, caught.value.fix) == ("placement", f"The nearest is {near}")


@pytest.mark.parametrize(
    ("placement", "axis", "name"), [([1, 0, 2, 3, 4, 5], "dp", "vision"), ([0, 1, 3, 2, 4, 5], "tp", "language")]
)
def test_refuses_placements_whose_ranks_descend_along_an_axis(placement: Any, axis: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"ascend along {axis}, and in '{name}'") as caught:
        placed(placement)
    assert caught.value.fix == "[0, 1, 2, 3, 4, 5] would do"
    modalities = {"language": Modality(cp_size=2, tp_size=2)}
    with pytest.raises(ConfigError, match="ascend along cp") as caught:  # tensor parallel groups are neighbours
        Layout.build(modalities, world_size=4, loss_modality="language", placement=[0, 2, 1, 3])
    assert caught.value.fix == "[0, 1, 2, 3] would do"
    with pytest.raises(ConfigError) as caught:
        placed(placement)
    assert placed(numbers(caught.value.fix)).size == 6


# ------------------------------------------------------------------ placements by the order of axes


def ordered(order: list[str], world_size: int, **modalities: Modality) -> Layout:
    return Layout.build(modalities, world_size=world_size, loss_modality="language", placement=order)


@pytest.mark.parametrize("order", [*itertools.permutations(("pp", "dp", "cp", "tp"))])
def test_axes_lie_in_the_order_of_a_placement_outermost_first(order: tuple[str, ...]) -> None:
    """language: ranks 2-17; vision: ranks 0-1."""
    sizes = {"dp": 2, "pp": 2, "cp": 2, "tp": 2}
    modalities = {"vision": ONE, "audio": ONE, "language": Modality(**{f"{axis}_size": 2 for axis in sizes})}
    if order.index("tp") < order.index("cp"):
        with pytest.raises(ConfigError, match="with cp before tp"):
            ordered([*order], 18, **modalities)
        return
    layout = ordered([*order], 18, **modalities)
    strides = {axis: 2 ** (3 - at) for at, axis in enumerate(order)}
    for place in layout.places:
        if place.modality == "language":
            assert place.rank == 2 + sum(strides[axis] * getattr(place, axis) for axis in sizes)
    assert (layout.ranks["vision"], layout.ranks["audio"]) == ((0,), (1,))
    if order == ("pp", "dp", "cp", "tp"):
        assert layout == build(18, **modalities)


def test_axes_of_one_rank_need_no_name() -> None:
    """language: ranks 0-3, those of stage 0 are 0 and 2."""
    assert ordered(["dp", "pp"], 4, language=Modality(pp_size=2)).ranks_of("language", pp=0) == (0, 2)
    assert ordered(["dp", "cp", "pp"], 4, language=Modality(pp_size=2)).ranks_of("language", pp=0) == (0, 2)


def test_modalities_that_share_ranks_each_lie_in_that_order() -> None:
    """language: ranks 2-5, stages (2, 4) and (3, 5); vision: ranks 0-1, then those of stage 0; audio: ranks 2-5."""
    layout = ordered(
        ["dp", "pp", "tp"],
        6,
        vision=Modality(pp_size=2, colocate_with="language.0"),
        audio=Modality(tp_size=2, colocate_with="language"),
        language=Modality(pp_size=2),
    )
    assert [layout.ranks_of("language", pp=pp) for pp in (0, 1)] == [(2, 4), (3, 5)]
    assert [layout.ranks_of("vision", pp=pp) for pp in (0, 1)] == [(0, 1), (2, 4)]
    assert [layout.ranks_of("audio", dp=dp) for dp in (0, 1)] == [(2, 3), (4, 5)]


def test_refuses_an_order_that_lacks_an_axis_with_ranks() -> None:
    with pytest.raises(ConfigError, match=r"placement: got \['tp'\].*'language' has pp 2, dp 2") as caught:
        ordered(["tp"], 8, language=Modality(pp_size=2, tp_size=2))
    assert caught.value.fix == "Use for instance ['pp', 'dp', 'tp']"
