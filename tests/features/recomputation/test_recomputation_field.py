"""What `activation_checkpointing` may say, from YAML and the command line, and which layers it chooses."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from jsonargparse import auto_cli

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import MemoryOptions
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.recomputation.fields import SELECTIVE, check, recomputed_layers

FORMS: list[Any] = [
    "none",
    "full",
    "selective",
    {"fraction": 0.5},
    {"every": 2},
    {"layers": [0, 3]},
    {"selective": ["aten.mm", "aten::bmm"]},
    {"per_stage": ["full", {"every": 2}]},
]


def said(modalities: dict[str, Modality] | None = None) -> Any:
    """Stands in for a strategy.

    Args:
        modalities: by name.
    """
    return modalities


def refusal(value: Any, schedule: str = "1f1b", **sizes: Any) -> str:
    modalities = {"language": Modality(memory=MemoryOptions(activation_checkpointing=value), **{"pp_size": 2, **sizes})}
    with pytest.raises(ConfigError) as caught:
        check({"modalities": modalities, "schedule": schedule})
    assert caught.value.field.startswith("modalities.language.memory.activation_checkpointing")
    return str(caught.value)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_can_be_written_in_yaml_and_on_the_command_line(form: Any, tmp_path: Any) -> None:
    file = tmp_path / "layout.yaml"
    file.write_text(
        yaml.safe_dump({"modalities": {"language": {"pp_size": 2, "memory": {"activation_checkpointing": form}}}})
    )
    words = yaml.safe_dump(form, default_flow_style=True).removesuffix("...\n").strip()
    override = [
        "--modalities={language: {pp_size: 2}}",
        f"--modalities.language.memory.activation_checkpointing={words}",
    ]
    for options in ([f"--config={file}"], override):
        found = auto_cli(said, args=options)["language"].memory.activation_checkpointing
        assert found == form
        check({"modalities": {"language": Modality(pp_size=2, memory={"activation_checkpointing": found})}})


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("ful", "Did you mean 'full'"),
        (True, "Use 'full'"),
        (None, "Use 'full'"),
        ({}, "Leave one"),
        ({"every": 2, "fraction": 0.5}, "Leave one"),
        ({"fractions": 0.5}, "Did you mean 'fraction'"),
        ({"fraction": 1.5}, "Use 1.0"),
        ({"fraction": float("nan")}, "Use 0.5"),
        ({"fraction": True}, "0 to 1"),
        ({"every": 0}, "at least 1"),
        ({"every": 2.0}, "whole number"),
        ({"layers": 3}, "Use [3]"),
        ({"layers": [0, -1]}, "counted from 0"),
        ({"layers": [1, 1]}, "listed twice"),
        ({"selective": []}, "at least one"),
        ({"selective": "aten.mm"}, "['aten.mm']"),
        ({"selective": ["mm"]}, "'aten.mm'"),
        ({"per_stage": ["full"]}, "Give 2 entries instead of 1"),
        ({"per_stage": "full"}, "Give 2 entries"),
        ({"per_stage": ["full", {"per_stage": ["full"]}]}, "no stages of its own"),
        ({"per_stage": ["full", {"every": 0}]}, "per_stage[1].every"),
        ({"per_stage": ["full", {"items": 4}]}, "Use {'items': 4} in place of per_stage"),
        ({"items": 0}, "at least 1"),
        ({"items": 2.0}, "whole number"),
        ({"items": 4}, "this modality is none. Use 'full'"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_advice(value: Any, advice: str) -> None:
    assert advice in refusal(value)


@pytest.mark.parametrize(
    "fields",
    [
        {"cp_size": 2},
        {"ep_size": 2},
        {"tp_size": 4, "tensor": {"tp_mode": "2d"}},
        {"tp_size": 2, "tensor": {"sequence_parallel": True}},
        {"tp_size": 2, "pipeline": {"interleaved_microbatches": 2}},
    ],
    ids=str,
)
def test_chunks_of_items_are_refused_where_ranks_compute_together_on_all_items(fields: dict[str, Any]) -> None:
    vision = Modality(memory={"activation_checkpointing": {"items": 4}}, **fields)
    with pytest.raises(ConfigError, match="ranks compute together on all items") as caught:
        check({"modalities": {"vision": vision, "language": Modality()}})
    assert caught.value.field == "modalities.vision.memory.activation_checkpointing"


def test_stages_are_those_of_the_schedule_with_all_their_chunks() -> None:
    assert "Give 4 entries instead of 2" in refusal({"per_stage": ["full", "none"]}, schedule="zbv")
    assert "Give 4 entries instead of 2" in refusal({"per_stage": ["full", "none"]}, pp_chunks=2)


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("none", []),
        ("full", [0, 1, 2, 3, 4]),
        ({"fraction": 0.5}, [1, 3, 4]),
        ({"fraction": 0.2}, [4]),
        ({"fraction": 0.01}, [4]),
        ({"fraction": 0}, []),
        ({"fraction": 1.0}, [0, 1, 2, 3, 4]),
        ({"every": 1}, [0, 1, 2, 3, 4]),
        ({"every": 2}, [1, 3]),
        ({"layers": [4, 0]}, [0, 4]),
        ({"per_stage": ["full", {"layers": [1]}]}, [0, 1, 2, 4]),
        ({"per_stage": ["none", {"every": 2}]}, [4]),
        ({"items": 7}, [0, 1, 2, 3, 4]),
    ],
)
def test_layers_are_chosen_evenly_and_counted_from_0(value: Any, chosen: list[int]) -> None:
    kept = recomputed_layers("field", value, [3, 2])
    assert [index for index, one in enumerate(kept) if one is not None] == chosen


def test_operations_may_be_written_as_torch_does() -> None:
    kept = recomputed_layers("field", {"selective": ["aten::mm", "aten.bmm.default", "torch.ops.aten.addmm"]}, [1])
    assert kept == (("aten.mm", "aten.bmm", "aten.addmm"),)
    assert recomputed_layers("field", "selective", [1]) == (SELECTIVE,)


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ({"layers": [0, 5]}, "The nearest to 5 is 4"),
        ({"every": 6}, "Use at most 5"),
        ({"per_stage": ["full", {"layers": [2]}]}, "per_stage[1].layers"),
    ],
)
def test_layers_that_are_not_there_are_refused(value: Any, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recomputed_layers("field", value, [3, 2])
    assert advice in str(caught.value)
