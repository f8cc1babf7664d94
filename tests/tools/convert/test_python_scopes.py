"""Names of a script have the value that they have where a plugin is made, in functions too, or none that is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_mm5d import MultimodalStrategy
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.tools.convert.conversion import read_configuration

SIZED = "pp_size=1, precision='fp32')"
MULTIMODAL = """
from cornstarch.plugin import ModalParallelPlugin, MultimodalParallelPlugin

def pretrain(name):
    vision = ModalParallelPlugin(
        tp_size=2,
        pipeline_template=PipelineTemplate(
            model_name=PipelineTemplate.get_model_name(encoder),
            modules_per_stage=[PipelineTemplate.get_modules(encoder)],
        ),
    )
    language = ModalParallelPlugin(tp_size=1)
    num_microbatches = 8
    plugin = MultimodalParallelPlugin(
        encoder_plugins={"vision": vision}, language_model_plugin=language, num_microbatches=num_microbatches,
        microbatch_size=2, precision=None,
    )
    booster = Booster(plugin=plugin)

if __name__ == "__main__":
    tyro.cli(pretrain)
"""
HYBRID = """
def pretrain(model_name: str):
    policy = get_autopolicy(model_name)
    num_microbatches = 4
    plugin = HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=num_microbatches, parallel_output=False)
    plugin.precision = None
"""
UNLIKE = """
def main():
    model_name = PipelineTemplate.get_model_name(model)
    modules = PipelineTemplate.get_modules(model)
    template1 = PipelineTemplate(model_name, [modules])
    template2 = PipelineTemplate(model_name, [["h.0"], ["h.1", "head"]])
    plugin = HeterogeneousParallelPlugin(tp_size=2, microbatch_size=4, precision="fp32")
    plugin.set_pipelines(pipelines=TEMPLATES, num_microbatches={template1: 6, template2: 2})
"""


def of(text: str, folder: Path) -> Any:
    (folder / "train.py").write_text(text)
    return read_configuration(folder / "train.py")


def test_plugins_that_a_function_names_make_a_strategy(tmp_path: Path) -> None:
    made = of(MULTIMODAL, tmp_path)
    assert made.strategy == {
        "modalities": {"vision": {"tp_size": 2, "pp_size": 1}, "language": {"tp_size": 1}},
        "batching": {"num_microbatches": 8},
    }
    assert made.trainer == {"precision": "32-true"}
    assert MultimodalStrategy(**made.strategy).modalities["vision"].tp_size == 2


def test_what_is_set_on_a_plugin_after_it_is_made_counts(tmp_path: Path) -> None:
    made = of(HYBRID, tmp_path)
    assert made.strategy["batching"] == {"num_microbatches": 4}
    assert made.trainer == {"precision": "32-true"}


@pytest.mark.parametrize(
    ("templates", "model", "microbatches"),
    [
        ("[template1, template1]", {"tp_size": 2, "dp_size": 2}, 6),
        ("[template1]", {"tp_size": 2, "dp_size": 1}, 6),
        (
            "[template2, template2]",
            {"tp_size": 2, "pipeline": {"pipelines": [{"stages": [1, 1]}] * 2, "speeds": [2, 2]}},
            2,
        ),
    ],
)
def test_pipelines_that_are_set_by_template_are_said(
    templates: str, model: dict[str, Any], microbatches: int, tmp_path: Path
) -> None:
    made = of(UNLIKE.replace("TEMPLATES", templates), tmp_path)
    assert made.strategy == {"modalities": {"model": model}, "batching": {"num_microbatches": microbatches}}
    MultimodalStrategy(**made.strategy)


def test_parts_of_the_modules_of_a_model_are_refused_by_their_line(tmp_path: Path) -> None:
    text = UNLIKE.replace("TEMPLATES", "[template1, template2]").replace('["h.0"]', "modules[:8]")
    with pytest.raises(ConfigError, match=r"modules\[:8\].*Line 6 computes it"):
        of(text, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        f"tp = 1\ndef main(tp):\n    HybridParallelPlugin(tp_size=tp, {SIZED}",
        f"tp = 1\nif big:\n    tp = 2\nHybridParallelPlugin(tp_size=tp, {SIZED}",
        f"tp = 1\nfor tp in sizes:\n    pass\nHybridParallelPlugin(tp_size=tp, {SIZED}",
        f"tp = 1\ntp += 1\nHybridParallelPlugin(tp_size=tp, {SIZED}",
        f"sizes = dict(tp=1)\nsizes['tp'] = 2\nHybridParallelPlugin(tp_size=sizes['tp'], {SIZED}",
        f"sizes = dict(tp=1)\nsizes.update(tp=2)\nHybridParallelPlugin(tp_size=sizes['tp'], {SIZED}",
        f"tp, pp = 1, 2\ntp, pp = pp, tp\nHybridParallelPlugin(tp_size=tp, {SIZED}",
        f"tp = 1\ndef grow():\n    global tp\n    tp = 2\ndef main():\n    HybridParallelPlugin(tp_size=tp, {SIZED}",
        f"while True:\n    tp = 1\n    HybridParallelPlugin(tp_size=tp + more, {SIZED}",
    ],
)
def test_a_name_that_may_have_another_value_is_not_read(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only a run|computes it"):
        of(text, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        f"tp = 1\nHybridParallelPlugin(tp_size=tp, {SIZED}\ntp = 2",
        f"with open(path) as file:\n    tp = 1\nHybridParallelPlugin(tp_size=tp, {SIZED}",
        f"if big:\n    tp = 1\n    HybridParallelPlugin(tp_size=tp, {SIZED}",
        f"class Run:\n    def start(self):\n        tp = 1\n        return HybridParallelPlugin(tp_size=tp, {SIZED}",
        f"def main():\n    return HybridParallelPlugin(tp_size=tp, {SIZED}\ntp = 1",
    ],
)
def test_a_name_has_its_value_where_it_is_used(text: str, tmp_path: Path) -> None:
    assert of(text, tmp_path).strategy["modalities"]["model"]["tp_size"] == 1


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))


@pytest.mark.parametrize("text", [LAUGHS, MERGES, "parallel_config: &a {model_parallel: *a}", "parallel: &a [*a]"])
def test_aliases_that_have_no_end_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"{text}\n" if "parallel" in text else f"parallel_config: {{}}\n{text}")
    with pytest.raises(ConfigError, match="With its aliases written out"):
        read_configuration(tmp_path / "config.yaml")


def test_names_that_have_no_end_are_refused(tmp_path: Path) -> None:
    lists = "a0 = [1]\n" + "".join(f"a{n} = [{', '.join([f'a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    with pytest.raises(ConfigError, match="With its aliases written out"):
        of(f"{lists}parallel = dict(pipeline=2)", tmp_path)
    mapping: dict[str, Any] = {}
    mapping["parallel"] = mapping
    with pytest.raises(ConfigError, match="or no end"):
        read_configuration(mapping)


def test_an_alias_that_a_file_needs_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "parallel_config: {data_parallel: &dp 2}\nparallel: {dataset_strategy: [*dp, 1]}"
    )
    assert read_configuration(tmp_path / "config.yaml").strategy["modalities"] == {"model": {"dp_size": 2}}
