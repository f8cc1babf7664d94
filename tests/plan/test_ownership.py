"""Which ranks hold a parameter, which shard of it, and how their gradients add up."""

from __future__ import annotations

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.partition import Encoder, Partition, Parts, StageCut, Unit
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule.graph import StageKey

LANGUAGE, VISION = StageKey("language", 0), StageKey("vision", 0)


def plan(world: int, *, tied: bool = False, **modalities: Modality) -> Plan:
    """A stage for each modality; ``weight`` belongs to the language model, and to the encoder too where it is tied."""
    cuts = {name: StageCut(name, 0, 0, 1) for name in modalities}
    partition = Partition(
        loss_modality="language",
        encoders={name: Encoder((), ()) for name in modalities if name != "language"},
        layers=dict.fromkeys(modalities),
        parts=dict.fromkeys(modalities, Parts()),
        stages={name: (cut,) for name, cut in cuts.items()},
        owners={"weight": tuple(cut.name for cut in cuts.values()) if tied else (LANGUAGE,)},
        units={cut.name: (Unit(1.0, {}),) for cut in cuts.values()},
    )
    layout = Layout.build(modalities, world_size=world, loss_modality="language")
    return Plan(layout, partition, modalities, {"weight": 1})


def test_ranks_are_grouped_by_tensor_parallel_index() -> None:
    found = plan(4, language=Modality(tp_size=2, cp_size=2))
    assert found.ownership.parameters == {LANGUAGE: {"weight"}}
    assert found.ownership.ranks_holding("weight") == (0, 1, 2, 3)
    assert found.ownership.ranks_by_shard("weight") == ((0, 2), (1, 3))
    assert [found.ownership.shard_index("weight", rank) for rank in range(4)] == [0, 1, 0, 1]
    assert found.topology.lead_of_rank == dict.fromkeys(range(4), 0)


def test_gradients_of_context_parallel_ranks_count_with_their_mean() -> None:
    found = plan(4, language=Modality(tp_size=2, cp_size=2)).ownership
    assert {found.gradient_weight("weight", rank) for rank in range(4)} == {0.5}
    assert {found.cp_degree("weight", rank) for rank in range(4)} == {2}
    assert found.cp_degree("another", 0) == 0


def test_a_parameter_of_modalities_with_different_degrees_is_summed_over_all_its_ranks() -> None:
    found = plan(3, tied=True, vision=Modality(), language=Modality(tp_size=2))
    instances = found.topology.instances
    assert sorted([*instances(VISION)[0], *instances(LANGUAGE)[0]]) == [0, 1, 2]
    assert found.ownership.ranks_by_shard("weight") == ((0, 1, 2),)
    assert {rank: found.ownership.gradient_weight("weight", rank) for rank in range(3)} == {
        **dict.fromkeys(instances(VISION)[0], 1.0),
        **dict.fromkeys(instances(LANGUAGE)[0], 0.5),
    }


def test_a_full_parameter_has_one_primary_rank() -> None:
    assert plan(4, language=Modality(tp_size=2, dp_size=2)).ownership.primary_ranks("weight") == (0,)
