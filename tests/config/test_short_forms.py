"""Modalities in short forms: numbers of stages, mappings of fields, and a command line's options."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_mm5d import BatchingOptions, ConfigError, Modality, MultimodalStrategy, PipelineTemplate


def test_modalities_are_numbers_of_stages_mappings_or_modalities() -> None:
    made = MultimodalStrategy(
        modalities={
            "vision": 1,
            "audio": Modality(tp_size=2),
            "language": {"pipeline": {"pipeline_template": {"stages": [2, 3]}}, "tp_size": 2},
        }
    )
    assert made.modalities == {
        "vision": Modality(pp_size=1),
        "audio": Modality(tp_size=2),
        "language": Modality(tp_size=2, pipeline={"pipeline_template": PipelineTemplate(stages=[2, 3])}),
    }


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Modality(tp_sise=2), "Modality.tp_sise: got 2. There is no such field. Did you mean 'tp_size'?"),  # type: ignore[call-arg]
        (
            lambda: PipelineTemplate(stags=[1]),  # type: ignore[call-arg]
            "PipelineTemplate.stags: got [1]. There is no such field. Did you mean 'stages'?",
        ),
        (
            lambda: BatchingOptions(microbatch_sise=1),  # type: ignore[call-arg]
            "BatchingOptions.microbatch_sise: got 1. There is no such field. Did you mean 'microbatch_size'?",
        ),
        (
            lambda: MultimodalStrategy(shedule="gpipe"),
            "shedule: got 'gpipe'. The strategy has no such field. Did you mean 'schedule'?",
        ),
    ],
)
def test_constructors_name_the_field_that_is_nearest_to_an_unknown_one(
    made: Callable[[], object], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        made()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (0, "modalities.language.pp_size: got 0"),
        (True, "modalities.language: got True. A modality is a Modality, a mapping"),
        ({"tp": 2}, "modalities.language.tp: got 2. There is no such field. Did you mean 'tp_size'?"),
        ({"tp_size": "x"}, "modalities.language.tp_size: got 'x'"),
        (
            {"pipeline": {"pipeline_template": {"stags": [1]}}},
            "modalities.language.pipeline.pipeline_template.stags: got [1]",
        ),
        (
            Modality(pipeline={"pipelines": [{"stages": [1, 3]}, {"stags": [2]}]}),
            "modalities.language.pipeline.pipelines[1].stags: got [2]",
        ),  # type: ignore[list-item]
        (
            {"pipeline": {"pipeline_template": [1, 2]}},
            "modalities.language.pipeline.pipeline_template: got [1, 2]. It is a PipelineTemplate",
        ),
    ],
)
def test_refuses_short_forms_by_the_path_of_the_field(said: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MultimodalStrategy(modalities={"language": said})
    assert str(caught.value).startswith(message)


def test_a_lightning_cli_reads_numbers_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def cli(*options: str) -> Any:
        fixed = ["--trainer.strategy=lightning_mm5d.MultimodalStrategy", "--trainer.accelerator=cpu"]
        monkeypatch.setattr(sys, "argv", ["train.py", *fixed, *options])
        options_of_cli: Any = {"run": False, "save_config_callback": None, "seed_everything_default": False}
        return LightningCLI(BoringModel, **options_of_cli).trainer.strategy

    prefix = "--trainer.strategy.modalities"
    made = cli(f"{prefix}={{vision: 1, language: {{tp_size: 2}}}}", f"{prefix}.language.pp_size=2")
    assert made.modalities == {"vision": Modality(pp_size=1), "language": Modality(tp_size=2, pp_size=2)}
    assert cli(f"{prefix}={{vision: 1}}", f"{prefix}.language=3").modalities["language"] == Modality(pp_size=3)
