"""Proposals for modules: costs as the planner of a run sees them, and a layout that can be pasted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import auto_cli

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality, PipelineTemplate
from lightning_mm5d.config.tables import as_text
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.partition import partition
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.tools.planner.proposal import Proposal, propose
from zoo import CASES, apply_freeze

COUNT = 8


def planned(module: Any, modalities: Mapping[str, Modality], world: int) -> Plan:
    cut = partition(module, modalities)
    layout = Layout.build(modalities, world_size=world, loss_modality=cut.loss_modality)
    sizes = {name: p.numel() for name, p in module.named_parameters(remove_duplicate=False)}
    return Plan(layout, cut, modalities, sizes)


def proposal(
    name: str, fields: dict[str, dict[str, Any]], world: int, *, freeze: str = "none", **rest: Any
) -> tuple[Proposal, Any]:
    case = CASES[name]
    module = case.build()
    apply_freeze(module, case, freeze)
    modalities = {key: Modality(**case.modality_paths.get(key, {}), **value) for key, value in fields.items()}
    plan = planned(module, modalities, world)
    return propose(plan, module, **{"schedule": "1f1b", "num_microbatches": COUNT, **rest}), module


def read(modalities: dict[str, Modality]) -> Any:
    """Stands in for a strategy.

    Args:
        modalities: by name.
    """
    return modalities


@pytest.mark.parametrize("freeze", ["none", "encoder", "projector_only"])
@pytest.mark.parametrize("durations", [None, {"vision": 3.0, "audio": 1.0, "language": 8.0}])
def test_what_the_search_predicts_is_what_a_run_of_the_proposal_is_simulated_to_take(
    freeze: str, durations: dict[str, float] | None, tmp_path: Path
) -> None:
    """Read back from what is to be pasted, as a user would."""
    fields: dict[str, dict[str, Any]] = {"vision": {}, "audio": {}, "language": {"pp_size": 2}}
    found, module = proposal("handwritten_two", fields, 4, freeze=freeze, durations=durations)
    (tmp_path / "modalities.yaml").write_text(found.as_yaml())
    (tmp_path / "config.yaml").write_text("modalities: modalities.yaml")
    pasted = auto_cli(read, args=[f"--config={tmp_path / 'config.yaml'}"])
    assert pasted == found.found.modalities
    makespan = planned(module, pasted, 4).graphs.simulate("1f1b", COUNT, module).makespan
    assert makespan == pytest.approx(found.proposed.outcome.simulation.makespan)
    # costs that are written down have six digits
    assert makespan == pytest.approx(found.found.makespan, rel=1e-5)


def test_a_proposal_is_no_worse_than_what_was_configured() -> None:
    found, _ = proposal("handwritten_two", {"vision": {}, "audio": {}, "language": {}}, 3)
    assert found.proposed.pace < found.configured.pace
    assert any(modality.colocate_with for modality in found.found.modalities.values())


def test_durations_of_whole_modalities_decide_how_many_ranks_each_has() -> None:
    fields: dict[str, dict[str, Any]] = {"vision": {}, "language": {"pp_size": 3}}
    slow, _ = proposal("handwritten", fields, 4, durations={"vision": 9.0, "language": 3.0})
    quick, _ = proposal("handwritten", fields, 4, durations={"vision": 1.0, "language": 3.0})
    ranks = [one.found.modalities["vision"].ranks_per_replica for one in (slow, quick)]
    assert ranks == [3, 1]
    assert quick.found.modalities["vision"].cost == 1.0
    assert sum(quick.found.modalities["language"].cost) == pytest.approx(3.0)


def test_measured_costs_of_pipeline_ranks_are_those_of_their_layers() -> None:
    """language: its second rank was three times as slow as its first, with as many layers."""
    fields = {"vision": {"cost": 2.0}, "language": {"pp_size": 2, "cost": [1.0, 3.0]}}
    found, _ = proposal("handwritten", fields, 3)
    assert found.configured.outcome.simulation.busy[2] == pytest.approx(COUNT * 3 * 3.0)
    language = found.found.modalities["language"]
    assert language.pipeline_template.stages[-1] == 1
    assert sum(language.cost) == pytest.approx(4.0, rel=1e-5)


def test_replicas_are_those_of_the_configuration() -> None:
    """Two replicas of three ranks each."""
    found, _ = proposal("handwritten", {"vision": {}, "language": {"dp_size": 2, "pp_size": 2}}, 6)
    assert found.found.modalities["language"].dp_size == 2
    assert found.proposed.plan.layout.num_replicas == 2
    assert found.proposed.num_microbatches == 2 * COUNT
    unset, _ = proposal("handwritten", {"vision": {}, "language": {"pp_size": 2}}, 6)
    assert unset.configured.plan.layout.num_replicas == 2
    assert unset.proposed.plan.layout.num_replicas == 1


def test_refuses_replicas_that_do_not_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match="must divide the 5 ranks") as caught:
        proposal("handwritten", {"vision": {"dp_size": 1}, "language": {"dp_size": 2, "pp_size": 2}}, 5)
    assert caught.value.field == "modalities.language.dp_size"


@pytest.mark.parametrize(("cost", "durations"), [(None, {"vision": 1.0}), (2.0, None), (2.0, {"language": 1.0})])
def test_refuses_durations_of_some_modalities_only(cost: float | None, durations: dict[str, float] | None) -> None:
    with pytest.raises(ConfigError, match="estimated in another unit") as caught:
        proposal("handwritten", {"vision": {"cost": cost}, "language": {}}, 2, durations=durations)
    assert caught.value.field == "cost"


def test_what_is_said_replaces_what_was_configured() -> None:
    """A LightningCLI lays files over another field by field."""
    fields = {
        "vision": {},
        "language": {"pp_size": 2, "pp_chunks": 2, "pipeline_template": PipelineTemplate(offsets=[0] * 4)},
    }
    found, _ = proposal("handwritten", fields, 3)
    said = found.as_json()["modalities"]["language"]
    assert said["pp_chunks"] == 1
    assert said["pipeline_template"]["offsets"] is None


def test_the_report_names_every_rank_and_what_to_paste() -> None:
    found, _ = proposal("handwritten_two", {"vision": {}, "audio": {}, "language": {}}, 3)
    text = as_text(found.page())
    assert "configured" in text
    assert "audio 0-1, language 0-1" in text
    block = yaml.safe_load(text[text.index("modalities:") :])["modalities"]
    assert block == found.as_json()["modalities"]
    assert block["audio"]["colocate_with"] == "language"


def test_as_json_holds_both_layouts() -> None:
    found, _ = proposal("handwritten", {"vision": {}, "language": {"pp_size": 2}}, 3)
    said = found.as_json()
    assert list(said) == ["modalities", "proposed", "configured", "placed", "simulated", "unit", "memory"]
    assert said["proposed"]["makespan"] <= said["configured"]["makespan"]
    assert set(said["proposed"]) == {"replicas", "makespan", "idle", "busiest", "pace"}


def test_of_ranks_that_share_a_stage_the_page_shows_the_first() -> None:
    found, _ = proposal("handwritten_two", {"vision": {}, "audio": {}, "language": {"tp_size": 2}}, 4)
    ranks = as_text([found.page()[-2]]).splitlines()
    assert [line.split()[0] for line in ranks] == ["rank", *map(str, sorted(found.proposed.outcome.simulation.busy))]
    assert len(ranks) == 4
