"""What a user may write: from YAML and the command line, and what is refused with which advice."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser, auto_cli

from lightning_mm5d.config.checks import check
from lightning_mm5d.config.errors import ConfigError, nearest, one_of
from lightning_mm5d.config.groups import PipelineTemplate
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.schedule import check_fields

COUNTS_AS_NO_SIZE = (0, -3, True, 2.0, "2", float("inf"))

YAML = """
modalities:
  vision:
    tp_size: 2
    feeds: [0, 1]
  audio:
    module: [model.audio_tower, model.projector]
    colocate_with: vision
  language:
    pipeline:
      pipeline_template:
        stages: [[layers.0, layers.1], [layers.2]]
"""


def said(modalities: dict[str, Modality] | None = None) -> Any:
    """Stands in for a strategy.

    Args:
        modalities: by name.
    """
    return modalities


def command(*words: str) -> Any:
    return auto_cli(said, args=list(words))


def run(modalities: Any, **changes: Any) -> None:
    rest = {"num_microbatches": 4, "schedule": "1f1b"}
    check(modalities, **{**rest, **changes})


def refusal(modalities: Any, **changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        run(modalities, **changes)
    return caught.value


def refused_vision(**fields: Any) -> ConfigError:
    return refusal({"vision": Modality(**fields), "language": Modality(pp_size=3)})


# ------------------------------------------------------------------ writing it down


def test_yaml_yields_dataclasses_and_the_command_line_overrides_one_field(tmp_path: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(YAML)
    made = command(f"--config={path}", "--modalities.vision.tp_size=4")
    assert made == {
        "vision": Modality(tp_size=4, feeds=[0, 1]),
        "audio": Modality(module=["model.audio_tower", "model.projector"], colocate_with="vision"),
        "language": Modality(
            pipeline={"pipeline_template": PipelineTemplate(stages=[["layers.0", "layers.1"], ["layers.2"]])}
        ),
    }
    run(made)


def test_template_by_counts_comes_from_the_command_line() -> None:
    made = command('--modalities={"a": {"pipeline": {"pipeline_template": {"stages": [2, 3]}}}}')
    assert made["a"].pipeline.pipeline_template == PipelineTemplate(stages=[2, 3])
    assert made["a"].stages == 2


def test_template_by_offsets_comes_from_yaml_and_the_command_line(tmp_path: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("modalities: {a: {pipeline: {pipeline_template: {offsets: [0, 1, -1]}}}}")
    made = command(f"--config={path}")
    assert made == command('--modalities={"a": {"pipeline": {"pipeline_template": {"offsets": [0, 1, -1]}}}}')
    assert made["a"].pipeline.pipeline_template == PipelineTemplate(offsets=[0, 1, -1])
    assert made["a"].stages == 3


def test_print_config_shows_every_field_and_reads_back(tmp_path: Any, capsys: Any) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(YAML)
    with pytest.raises(SystemExit):
        command(f"--config={path}", "--print_config")
    printed = capsys.readouterr().out
    fields = set(inspect.signature(Modality).parameters)
    assert set(yaml.safe_load(printed)["modalities"]["vision"]) == fields
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    assert command(f"--config={again}") == command(f"--config={path}")


def test_help_describes_every_field(capsys: Any) -> None:
    made = ArgumentParser()
    made.add_class_arguments(Modality, "modality")
    made.add_class_arguments(PipelineTemplate, "template")
    with pytest.raises(SystemExit):
        made.parse_args(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "callable whose result leaves",
        "Number of replicas",
        "share each layer",
        "share each sequence",
    ):
        assert words in shown
    for words in ("in the LightningModule", "consume the result", "pipeline stages", "whose ranks this one"):
        assert words in shown
    for words in ("Which layers run in which stage", "One entry per stage", "assigned evenly"):
        assert words in shown


def test_wrong_values_are_kept_until_check() -> None:
    assert Modality(tp_size=0, feeds=[]).tp_size == 0


def test_needs_no_torch() -> None:
    code = "import sys, lightning_mm5d.layout, lightning_mm5d.schedule; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("modality", "stages", "ranks"),
    [
        (Modality(), 1, 1),
        (Modality(pp_size=3, tp_size=2), 3, 6),
        (Modality(pipeline={"pipeline_template": PipelineTemplate(stages=[4, 2])}, cp_size=2), 2, 4),
        (Modality(pipeline={"pipeline_template": PipelineTemplate(offsets=[0, 1, 1, -2]), "pp_chunks": 2}), 2, 2),
        (Modality(pp_size=2, pipeline={"pipeline_template": PipelineTemplate(stages=[["a"], ["b"]])}), 2, 2),
    ],
)
def test_stages_come_from_pp_size_or_the_template(modality: Modality, stages: int, ranks: int) -> None:
    assert (modality.stages, modality.ranks_per_replica) == (stages, ranks)


# ------------------------------------------------------------------ accepted


@pytest.mark.parametrize(
    "modalities",
    [
        {"language": Modality()},
        {"vision": Modality(feeds="all"), "language": Modality(pp_size=3)},
        {"vision": Modality(feeds=[2, 0]), "language": Modality(pp_size=3)},
        {"vision": Modality(colocate_with="language"), "language": Modality(dp_size=2)},
        {"vision": Modality(dp_size=4), "language": Modality(tp_size=2, colocate_with="vision")},
        {
            "vision": Modality(pipeline={"pipeline_template": PipelineTemplate(stages=[["a.b"], ["a.bc"]])}),
            "language": Modality(),
        },
        {"vision": Modality(pipeline={"pipeline_template": PipelineTemplate(offsets=[1, -1])}), "language": Modality()},
        {
            "vision": Modality(module=["a", "b.0"], boundary="model.get_image_features"),
            "language": Modality(),
        },
    ],
)
def test_accepts(modalities: dict[str, Modality]) -> None:
    run(modalities)


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize("size", ["dp_size", "tp_size", "cp_size", "pp_size"])
@pytest.mark.parametrize("value", COUNTS_AS_NO_SIZE)
def test_refuses_sizes_that_are_no_counts(size: str, value: Any) -> None:
    error = refused_vision(**{size: value})
    assert (error.field, error.got) == (f"modalities.vision.{size}", value)
    assert error.fix == ("The nearest is 2" if value in (2.0, "2") else "The nearest is 1")


def test_a_size_in_a_text_is_told_as_a_number() -> None:
    assert refused_vision(tp_size="4").fix == "The nearest is 4"
    assert refused_vision(tp_size="two").fix == "The nearest is 1"


@pytest.mark.parametrize("size", ["tp_size", "cp_size"])
def test_refuses_null_for_sizes_that_are_never_inferred(size: str) -> None:
    assert refused_vision(**{size: None}).field == f"modalities.vision.{size}"


@pytest.mark.parametrize("value", COUNTS_AS_NO_SIZE)
def test_refuses_microbatch_counts_that_are_no_counts(value: Any) -> None:
    assert refusal({"language": Modality()}, num_microbatches=value).field == "batching.num_microbatches"


@pytest.mark.parametrize("value", COUNTS_AS_NO_SIZE)
def test_refuses_microbatch_sizes_that_are_no_counts(value: Any) -> None:
    error = refusal({"language": Modality()}, num_microbatches=None, microbatch_size=value)
    assert error.field == "batching.microbatch_size"


def test_refuses_a_number_of_microbatches_beside_their_size() -> None:
    run({"language": Modality()}, num_microbatches=None, microbatch_size=2)
    error = refusal({"language": Modality()}, num_microbatches=1, microbatch_size=2)
    assert (error.field, error.got, error.fix) == ("batching.microbatch_size", 2, "Set one of the two")


@pytest.mark.parametrize("rest", [{"microbatching": "loader"}, {"schedule": lambda graph: {}}])
def test_refuses_a_size_where_no_batch_decides_on_the_number(rest: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"microbatch_size: got 2.*Set num_microbatches"):
        check_fields({"microbatch_size": 2, **rest})


@pytest.mark.parametrize(("wrong", "meant"), [("1F1B", "1f1b"), ("gpip", "gpipe"), ("1-f-1-b", "1f1b")])
def test_unknown_schedule_suggests_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_fields({"schedule": wrong})
    assert caught.value.field == "schedule"
    assert caught.value.fix.startswith(f"Did you mean {meant!r}? There are gpipe, 1f1b")


def test_refuses_no_modalities() -> None:
    assert refusal({}).field == "modalities"


@pytest.mark.parametrize("name", ["", "a.b", "a b", 3])
def test_refuses_names_that_are_no_words(name: Any) -> None:
    error = refusal({name: Modality(), "language": Modality()})
    assert (error.field, error.got) == ("modalities", name)


def test_refuses_a_plain_dict_as_modality() -> None:
    assert refusal({"language": {"tp_size": 2}}).field == "modalities.language"


def test_refuses_a_template_with_another_number_of_stages() -> None:
    error = refused_vision(pp_size=3, pipeline_template=PipelineTemplate(stages=[2, 2]))
    assert (error.field, error.got) == ("modalities.vision.pp_size", 3)
    assert "pp_size=2" in error.fix


@pytest.mark.parametrize(
    ("stages", "where"),
    [
        ([], ""),
        ("layers", ""),
        ([2, 0], "[1]"),
        ([2, True], "[1]"),
        ([2, ["a"]], ""),
        ([["a"], []], "[1]"),
        ([["a"], [""]], "[1]"),
        ([["a"], ["b."]], "[1]"),
        ([["a"], [3]], "[1]"),
        ([["a", "a"]], "[0]"),
        ([["a"], ["b", "a"]], "[1]"),
        ([["layers"], ["layers.0"]], "[1]"),
        ([["layers.0"], ["layers"]], "[1]"),
    ],
)
def test_refuses_templates_that_are_empty_overlap_or_mix(stages: Any, where: str) -> None:
    error = refused_vision(pipeline_template=PipelineTemplate(stages=stages))
    assert error.field == f"modalities.vision.pipeline.pipeline_template.stages{where}"


@pytest.mark.parametrize(
    ("offsets", "where", "fix"),
    [
        ([], "", "For one stage leave pipeline_template unset"),
        ("1", "", "For one stage leave pipeline_template unset"),
        ([0, 1, 1], "", "Use [0, 1, -1]"),
        ([-1], "", "Use [0]"),
        ([1, -1.0], "[1]", "The nearest is -1"),
        ([True, -1], "[0]", "The nearest is 0"),
        ([1, [-1]], "[1]", "The nearest is 0"),
        ([float("inf"), 0], "[0]", "The nearest is 0"),
    ],
)
def test_refuses_offsets_that_are_no_whole_numbers_or_do_not_sum_to_zero(offsets: Any, where: str, fix: str) -> None:
    error = refused_vision(pipeline_template=PipelineTemplate(offsets=offsets))
    assert (error.field, error.fix) == (f"modalities.vision.pipeline.pipeline_template.offsets{where}", fix)


def test_refuses_a_template_with_both_of_its_fields_or_none() -> None:
    both = refused_vision(pipeline_template=PipelineTemplate(stages=[2, 2], offsets=[0, 0]))
    assert (both.field, both.fix) == ("modalities.vision.pipeline.pipeline_template", "Leave offsets unset")
    neither = refused_vision(pipeline_template=PipelineTemplate())
    assert neither.field == "modalities.vision.pipeline.pipeline_template"
    assert "offsets=[0, 0]" in neither.fix


def test_refuses_a_template_that_is_none() -> None:
    assert refused_vision(pipeline_template=[2, 2]).field == "modalities.vision.pipeline.pipeline_template"


@pytest.mark.parametrize("field", ["module", "boundary"])
@pytest.mark.parametrize("value", ["", "a..b", " a", [], ["a", ""], ["a", "a"], 3])
def test_refuses_paths_that_are_no_paths(field: str, value: Any) -> None:
    assert refused_vision(**{field: value}).field == f"modalities.vision.{field}"


@pytest.mark.parametrize("feeds", [[], [3], [-1], [0, 0], [True], ["0"], "last", 1, None])
def test_refuses_feeds_that_name_no_stage(feeds: Any) -> None:
    error = refused_vision(feeds=feeds)
    assert (error.field, error.got) == ("modalities.vision.feeds", feeds)


def test_feeds_out_of_range_names_the_nearest_stage() -> None:
    assert refused_vision(feeds=[0, 7]).fix == "The nearest to 7 is 2"


@pytest.mark.parametrize("feeds", ["all", [0]])
def test_refuses_feeds_of_the_terminal(feeds: Any) -> None:
    assert refusal({"language": Modality(feeds=feeds)}).field == "modalities.language.feeds"


# ------------------------------------------------------------------ helpers of advice


def test_nearest_looks_below_then_above() -> None:
    assert nearest(5, lambda n: n % 4 == 0) == [4, 8]
    assert nearest(4, lambda n: n % 4 == 0) == [4, 8]
    assert nearest(3, lambda n: n % 4 == 0) == [4]
    assert nearest(-7, lambda n: True) == [1]
    assert nearest(5, lambda n: n == 2) == [2]
    assert nearest(5, lambda n: False) == []
    assert one_of([4, 8]) == "4 or 8"


@pytest.mark.parametrize(
    ("cost", "fix"),
    [
        (0, "Use for instance 1.0"),
        (float("inf"), "Use for instance 1.0"),
        (True, "Use for instance 1.0"),
        ("2", "Use for instance 1.0"),
        ([1.0, -1.0], "Use for instance 1.0"),
        ([1.0], "Give 2, or one number for all"),
    ],
)
def test_refuses_costs_that_are_no_durations_of_its_ranks(cost: Any, fix: str) -> None:
    error = refused_vision(pp_size=2, cost=cost)
    assert (error.field, error.got, error.fix) == ("modalities.vision.cost", cost, fix)


@pytest.mark.parametrize("cost", [2, 0.5, [1, 2.5]])
def test_a_cost_is_a_number_or_one_for_each_rank_from_yaml_too(cost: Any, tmp_path: Any) -> None:
    path = tmp_path / "layout.yaml"
    path.write_text(
        yaml.safe_dump({"modalities": {"language": {"pp_size": 2, "pipeline": {"pp_chunks": 2}, "cost": cost}}})
    )
    modalities = command("--config", str(path))
    assert modalities["language"].cost == cost
    run(modalities)


@pytest.mark.parametrize("modality", ["two", True, None, 2.0])
def test_refuses_a_modality_of_another_type_before_it_reads_its_fields(modality: Any) -> None:
    error = refusal({"language": modality})
    assert (error.field, error.got) == ("modalities.language", modality)
    assert error.fix == "Write for instance Modality(pp_size=2), {'pp_size': 2} or 2"


def test_refuses_modalities_without_names() -> None:
    assert refusal([Modality()]).field == "modalities"


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (["pp", "ddp"], r"placement\[1\]: got 'ddp'.*Did you mean 'dp'"),
        (["pp", 1], r"placement\[1\]: got 1"),
        (["ep", "dp"], r"placement\[0\]: got 'ep'.*those of dp and cp.*Leave ep out"),
        (["pp", "dp", "pp"], r"once.*Use \['pp', 'dp'\]"),
    ],
)
def test_refuses_orders_of_axes_that_are_none(axes: list[Any], words: str) -> None:
    check_fields({"placement": ["dp", "pp", "cp", "tp"]})
    with pytest.raises(ConfigError, match=words):
        check_fields({"placement": axes})
