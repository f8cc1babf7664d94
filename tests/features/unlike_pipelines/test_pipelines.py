"""What may be said of unlike pipelines and speeds, what is refused beside them, and pipelines for a number of ranks."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import auto_cli

from lightning_mm5d import MultimodalStrategy
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.groups import PipelineTemplate, path_of
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.unlike_pipelines.pipelines import completed
from lightning_mm5d.schedule.builders import check_fields

TEMPLATE = PipelineTemplate(stages=[1, 1])


def refusal(modalities: dict[str, Modality], **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_fields({"modalities": modalities, **fields})
    return str(caught.value)


def said(modalities: dict[str, Modality] | None = None) -> Any:
    """Stands in for a strategy.

    Args:
        modalities: by name.
    """
    return modalities


def lengths(pipelines: Any, world: int, **fields: Any) -> tuple[int, ...]:
    """The pipelines of a number of ranks, equal ones too."""
    found = completed({"language": Modality(pipeline={"pipelines": pipelines}, **fields)}, world)["language"]
    return found.lengths or (found.pp_size or 1,) * (found.dp_size or 1)


@pytest.mark.parametrize(
    ("pipelines", "fields", "path"),
    [
        ([], {}, "pipeline.pipelines"),
        ([4, 0], {}, "pipeline.pipelines[1]"),
        ([4, True], {}, "pipeline.pipelines[1]"),
        ([4, TEMPLATE], {}, "pipeline.pipelines[1]"),
        ([3, PipelineTemplate(stages=7)], {}, "pipeline.pipelines[1]"),  # type: ignore[arg-type]
        ([PipelineTemplate(stages=5)] * 2, {}, "pipeline.pipelines[0].stages"),  # type: ignore[arg-type]
        ([PipelineTemplate(stages=5)] * 2, {"cost": [1.0]}, "pipeline.pipelines[0].stages"),  # type: ignore[arg-type]
        ([PipelineTemplate()], {}, "pipeline.pipelines[0]"),
        ([PipelineTemplate(stages=[["layers.0"], ["layers.1"]])], {}, "pipeline.pipelines[0].stages"),
        ({"max": 3}, {}, "pipeline.pipelines.min"),
        ({"min": 3, "max": 2}, {}, "pipeline.pipelines.max"),
        ({"least": 3}, {}, "pipeline.pipelines"),
        ("4+3", {}, "pipeline.pipelines"),
        ([4, 3], {"dp_size": 3}, "dp_size"),
        ([4, 3], {"pp_size": 4}, "pp_size"),
        ([4, 3], {"pipeline_template": TEMPLATE}, "pipeline.pipeline_template"),
        ([4, 3], {"pp_chunks": 2}, "pipeline.pp_chunks"),
        ([4, 3], {"ep_size": 2}, "ep_size"),
        ([4, 3], {"ep_size": 4, "cp_size": 2}, "ep_size"),
        ([4, 3], {"zero_stage": 1}, "sharding.zero_stage"),
        ([4, 3], {"zero_stage": 3}, "sharding.zero_stage"),
        ([4, 3], {"dp_shard_size": 2}, "sharding.dp_shard_size"),
        ({"min": 3}, {"dp_shard_size": 2}, "sharding.dp_shard_size"),
        ({"min": 3}, {"dp_shard_size": 4, "cp_size": 2}, "sharding.dp_shard_size"),
        ([4, 3], {"zero_stage": 3, "cp_size": 2}, "sharding.zero_stage"),
        ([4, 3], {"interleaved_microbatches": 2, "tp_size": 2}, "pipeline.interleaved_microbatches"),
        ([4, 3], {"tp_size": 4, "tp_mode": "2d"}, "tensor.tp_mode"),
        ([4, 3], {"cache_features": "features"}, "memory.cache_features"),
        ([4, 3], {"offload": "activations"}, "memory.offload"),
        ([4, 3], {"cost": 1.0}, "cost"),
        ([4, 3], {"activation_checkpointing": {"per_stage": ["full", "none"]}}, "memory.activation_checkpointing"),
        ([4, 3], {"speeds": [1.0]}, "pipeline.speeds"),
        ([4, 3], {"speeds": [1.0, 0.0]}, "pipeline.speeds[1]"),
        ({"min": 3}, {"speeds": [1.0, 2.0]}, "pipeline.speeds"),
        (None, {"speeds": [1.0, 2.0]}, "pipeline.speeds"),
    ],
)
def test_what_does_not_go_with_unlike_pipelines_is_refused(pipelines: Any, fields: Any, path: str) -> None:
    message = refusal({"language": Modality(pipeline={"pipelines": pipelines}, **fields)})
    assert message.startswith(f"modalities.language.{path}: ")


def test_what_counts_on_equal_pipelines_of_another_modality_is_refused() -> None:
    language = Modality(pipeline={"pipelines": [4, 3]})
    for field, value in (("colocate_with", "language"), ("colocate_with", "language.1"), ("feeds", [0])):
        message = refusal({"vision": Modality(**{field: value}), "language": language})
        assert message.startswith(f"modalities.vision.{path_of(field)}: ")
    message = refusal({"language": language, "talker": Modality(feeds_from="language")})
    assert message.startswith("modalities.talker.feeds_from: ")
    for field, value in (("zero_stage", 1), ("dp_shard_size", 2), ("ep_size", 2), ("cache_features", "features")):
        message = refusal({"vision": Modality(**{field: value}), "language": language})
        assert message.startswith(f"modalities.vision.{path_of(field)}: ")


def test_one_modality_says_how_many_replicas_any_number_of_ranks_has() -> None:
    for other in ({"min": 2}, [2, 1]):
        message = refusal(
            {
                "vision": Modality(pipeline={"pipelines": other}),
                "language": Modality(pipeline={"pipelines": {"min": 3}}),
            }
        )
        assert message.startswith("modalities.")
        assert "pipelines: got {'min': " in message
        assert "as in [" in message


@pytest.mark.parametrize(
    ("fields", "options", "path"),
    [
        ({"zero_stage": 1}, {}, "modalities.model.sharding.zero_stage"),
        ({"ep_size": 2}, {}, "modalities.model.ep_size"),
        ({"cp_size": 2, "ep_size": 4}, {}, "modalities.model.ep_size"),
        ({}, {"schedule": "interleaved"}, "schedule"),
    ],
)
@pytest.mark.parametrize("pipelines", [[2, 1], {"min": 1}], ids=["listed", "minimum"])
def test_refusals_come_when_the_strategy_is_made(
    pipelines: Any, fields: dict[str, Any], options: dict[str, Any], path: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{path}: got .*modalities\.model\.pipeline\.pipelines"):
        MultimodalStrategy({"model": Modality(pipeline={"pipelines": pipelines}, **fields)}, **options)
    assert not torch.distributed.is_initialized()


def test_what_counts_on_equal_numbers_of_microbatches_is_refused() -> None:
    unlike, speeds = (
        {"model": Modality(pipeline={"pipelines": [2, 1]})},
        {"model": Modality(dp_size=2, pipeline={"speeds": [2, 1]})},
    )
    assert refusal(unlike, schedule="zbv").startswith("schedule: got 'zbv'")
    assert refusal(unlike, schedule=lambda graph: {}).startswith("schedule: ")
    assert refusal(speeds, schedule=lambda graph: {}).startswith("schedule: ")
    assert refusal(speeds, microbatching="loader").startswith("batching.microbatching: ")
    assert refusal(speeds, num_microbatches=None, microbatch_size=2).startswith("batching.microbatch_size: ")
    assert refusal(unlike, placement=["pp", "dp"]).startswith("placement: ")
    assert refusal(speeds, timeline="timeline.json").startswith("timeline: ")
    check_fields({"modalities": speeds, "schedule": "interleaved"})


@pytest.mark.parametrize("text", ["[4, 3]", "{min: 3}", "[{stages: [1, 3]}, {offsets: [0, 0, 0]}]"])
def test_pipelines_are_read_from_yaml(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"modalities: {{language: {{pipeline: {{pipelines: {text}}}}}}}")
    found = auto_cli(said, args=[f"--config={path}"])
    check_fields({"modalities": found})
    assert completed(found, 7)["language"].lengths in [(4, 3), (2, 3)]


def test_any_number_of_ranks_from_the_minimum_on_has_pipelines() -> None:
    assert [lengths({"min": 3}, world) for world in (3, 5, 6, 7, 8, 11)] == [
        (3,),
        (5,),
        (3, 3),
        (4, 3),
        (4, 4),
        (4, 4, 3),
    ]
    for shortest in range(1, 6):
        for world in range(shortest, 60):
            found = lengths({"min": shortest}, world)
            assert sum(found) == world
            assert shortest <= min(found)
            assert max(found) <= max(found[-1] + 1, shortest)


def test_pipelines_of_equal_length_are_equal_replicas() -> None:
    found = completed({"language": Modality(pipeline={"pipelines": {"min": 3}})}, 6)["language"]
    assert found == Modality(dp_size=2, pp_size=3)


def test_numbers_of_ranks_beyond_the_longest_pipelines_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Nearest that fit: 4 or 6 ranks"):
        lengths({"min": 3, "max": 4}, 5)
    with pytest.raises(ConfigError, match="Nearest that fit: 3 ranks"):
        lengths({"min": 3}, 2)
    with pytest.raises(ConfigError, match="Nearest that fit: 6 or 8 ranks"):
        lengths({"min": 3}, 7, tp_size=2)


@pytest.mark.parametrize("beside", range(4))
@pytest.mark.parametrize("width", [1, 2, 3])
def test_every_number_of_ranks_has_the_most_replicas_that_use_all_of_them(width: int, beside: int) -> None:
    """`beside` ranks of vision in each replica, and `width` for each stage of language."""
    for shortest, world in product(range(1, 5), range(1, 40)):
        modalities = {"language": Modality(tp_size=width, pipeline={"pipelines": {"min": shortest}})}
        if beside:
            modalities["vision"] = Modality(tp_size=beside)
        most = world // (shortest * width + beside)
        fits = [count for count in range(1, most + 1) if (world - count * beside) % width == 0]
        if not fits:
            with pytest.raises(ConfigError) as caught:
                completed(modalities, world)
            nearest = re.findall(r"\d+", str(caught.value).split("Nearest that fit:")[1])
            assert all(completed(modalities, int(one)) for one in nearest)
            continue
        found = completed(modalities, world)["language"]
        sizes = found.lengths or (found.pp_size or 1,) * (found.dp_size or 1)
        assert len(sizes) == max(fits), (shortest, world)
        assert sum(sizes) * width + len(sizes) * beside == world
        assert shortest <= min(sizes) <= max(sizes) <= min(sizes) + 1


def test_other_modalities_have_their_ranks_in_each_replica() -> None:
    found = completed({"vision": Modality(tp_size=2), "language": Modality(pipeline={"pipelines": {"min": 2}})}, 9)
    assert found["language"].lengths == (3, 2)
