"""The strategy under LightningCLI: from YAML, from the command line, from both, from sub-files, and printed again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from launching.job import Module
from lightning_mm5d import Modality, MultimodalStrategy, PipelineTemplate

EVERY_FIELD = """
seed_everything: 7
trainer:
  accelerator: cpu
  devices: 7
  logger: false
  strategy:
    class_path: lightning_mm5d.MultimodalStrategy
    init_args:
      modalities:
        vision:
          module: encoder
          boundary: encoder
          feeds: all
          dp_size: 1
          tp_size: 1
          cp_size: 1
          pp_size: 3
          pp_chunks: 1
        audio:
          module: [hearing, projector]
          boundary: projector.forward
          feeds: [0, 2]
          colocate_with: vision
          pp_size: 3
        language:
          pipeline_template:
            stages:
              - [layers.0]
              - [layers.1, layers.2]
              - [layers.3]
              - [layers.4]
      schedule: gpipe
      num_microbatches: 8
      microbatching: loader
      loss_weight: tokens
      placement: [6, 5, 4, 3, 2, 1, 0]
      start_method: spawn
      process_group_backend: gloo
      timeout: "0:02:00"
"""
PARSED = {
    "vision": Modality(module="encoder", boundary="encoder", feeds="all", dp_size=1, pp_size=3),
    "audio": Modality(
        module=["hearing", "projector"],
        boundary="projector.forward",
        feeds=[0, 2],
        colocate_with="vision",
        pp_size=3,
    ),
    "language": Modality(
        pipeline={
            "pipeline_template": PipelineTemplate(
                stages=[["layers.0"], ["layers.1", "layers.2"], ["layers.3"], ["layers.4"]]
            )
        }
    ),
}
SMALL = """
trainer:
  accelerator: cpu
  devices: 3
  logger: false
  strategy:
    class_path: lightning_mm5d.MultimodalStrategy
    init_args:
      modalities:
        vision:
          module: encoder
        language: {}
"""


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """LightningCLI calls what jsonargparse has deprecated, and its seed is left in the environment: taken out again."""
    before = dict(os.environ)
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"
    yield
    os.environ.clear()
    os.environ.update(before)


def parse(tmp_path: Path, text: str, *arguments: str) -> tuple[MultimodalStrategy, Any]:
    """The strategy that the trainer gets, and the command line that made it."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "--config", str(path), *arguments])
        cli = LightningCLI(Module, run=False, save_config_callback=None, seed_everything_default=7)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, MultimodalStrategy)
    return strategy, cli


def test_every_field_can_be_set_in_yaml(tmp_path: Path) -> None:
    strategy, cli = parse(tmp_path, EVERY_FIELD)
    assert strategy.modalities == PARSED
    assert strategy.layout.size == 7
    assert strategy.layout.ranks["language"] == (3, 2, 1, 0)
    given = cli.config.trainer.strategy.init_args
    assert (strategy.schedule, strategy.num_microbatches) == ("gpipe", 8)
    assert (strategy.microbatching, strategy.loss_weight) == ("loader", "tokens")
    assert (given.start_method, given.process_group_backend) == ("spawn", "gloo")
    assert given.timeout == timedelta(minutes=2)


@pytest.mark.parametrize("path", ["trainer.strategy.init_args.modalities", "trainer.strategy.modalities"])
def test_one_field_of_a_modality_is_overridden_on_the_command_line(tmp_path: Path, path: str) -> None:
    strategy, _ = parse(tmp_path, SMALL, f"--{path}.language.pp_size=2")
    assert strategy.modalities == {"vision": Modality(module="encoder"), "language": Modality(pp_size=2)}


def test_functions_of_a_batch_are_given_by_import_path(tmp_path: Path) -> None:
    path = __name__
    options = (f"--trainer.strategy.loss_weight={path}.weigh", f"--trainer.strategy.microbatching={path}.halves")
    strategy, _ = parse(tmp_path, SMALL, *options)
    assert (strategy.loss_weight, strategy.microbatching) == (weigh, halves)


def weigh(batch: Any) -> Any:
    return len(batch)


def halves(batch: Any, count: int) -> Any:
    return [batch]


def test_a_modality_is_added_on_the_command_line(tmp_path: Path) -> None:
    strategy, _ = parse(tmp_path, SMALL, "--trainer.strategy.modalities.audio.module=hearing")
    assert strategy.modalities["audio"] == Modality(module="hearing")


def test_modalities_come_from_a_file_of_their_own(tmp_path: Path) -> None:
    whole = yaml.safe_load(EVERY_FIELD)
    arguments = whole["trainer"]["strategy"]["init_args"]
    (tmp_path / "layout.yaml").write_text(yaml.safe_dump(arguments["modalities"]))
    arguments["modalities"] = "layout.yaml"
    strategy, _ = parse(tmp_path, yaml.safe_dump(whole))
    assert strategy.modalities == PARSED


def test_the_registered_name_takes_the_defaults(tmp_path: Path) -> None:
    strategy, _ = parse(tmp_path, "trainer: {accelerator: cpu, devices: 2, logger: false, strategy: mm5d}")
    assert strategy.modalities == {"model": Modality()}
    assert strategy.layout.num_replicas == 2


def test_a_printed_configuration_gives_the_same_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(tmp_path, EVERY_FIELD, "--print_config")
    printed = capsys.readouterr().out
    strategy, cli = parse(tmp_path, printed)
    assert strategy.modalities == PARSED
    with pytest.raises(SystemExit):
        parse(tmp_path, printed, "--print_config")
    assert capsys.readouterr().out == printed
    assert cli.config.trainer.strategy.init_args.timeout == timedelta(minutes=2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--trainer.strategy.modalities.vision.pp_sise=2", "pp_sise"),
        ("--trainer.strategy.schedule=1f1c", "schedule: got '1f1c'"),
        ("--trainer.strategy.num_microbatches=0", "num_microbatches: got 0"),
        ("--trainer.strategy.microbatching=both", "microbatching"),
    ],
)
def test_a_wrong_field_is_named(
    tmp_path: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ValueError)) as caught:
        parse(tmp_path, SMALL, override)
    assert message in str(caught.value) + capsys.readouterr().err


@pytest.mark.parametrize(("field", "value"), [("module", "encoder"), ("pp_size", "2")])
def test_a_field_of_a_modality_that_no_file_has_says_how_to_write_it(tmp_path: Path, field: str, value: str) -> None:
    text = "trainer: {accelerator: cpu, devices: 2, logger: false, strategy: lightning_mm5d.MultimodalStrategy}"
    with pytest.raises(ValueError, match=f"Write modalities={{language: {{{field}: {value}}}}}"):
        parse(tmp_path, text, f"--trainer.strategy.modalities.language.{field}={value}")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("pipeline", "[2]", "modalities.vision.pipeline: got \\[2\\]. It is a group of fields"),
        ("pipeline.pipelines", "[1, x]", "pipeline.pipelines: got .* It is of another type. Write a value of list"),
        ("communication.communication_dtype", "[1]", "communication_dtype: got .* It is of another type"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_by_its_field(tmp_path: Path, field: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(tmp_path, SMALL, f"--trainer.strategy.modalities.vision.{field}={value}")
