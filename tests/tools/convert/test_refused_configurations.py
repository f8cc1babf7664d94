"""Configurations of other systems that are refused, by the path of the knob, and files that are never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_mm5d import ConfigError, MultimodalStrategy
from lightning_mm5d.tools.convert.conversion import as_yaml, read_configuration
from tools.convert.foreign_files import SMALL, sized


@pytest.mark.parametrize("counts", [[2, 1], [1], [4, 0]])
def test_refuses_shares_that_have_no_mean(counts: list[int]) -> None:
    given = yaml.safe_load(SMALL["unlike.yaml"])
    given["HeterogeneousParallelPlugin"]["num_microbatches"] = counts
    with pytest.raises(ConfigError, match="num_microbatches"):
        read_configuration(given)


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        (sized(tp_sise=2), "tp_sise", "Did you mean 'tp_size'?"),
        (sized(tp_size="two"), "tp_size", "whole number"),
        ({"tp_size": 2}, "pp_size", "The plugin needs its pp_size"),
        (sized(sp_size=2), "sp_size", "without enable_sequence_parallelism"),
        (sized(pp_size=2), "num_microbatches", "or microbatch_size"),
        (sized(pp_size=2, num_microbatches=2, pp_style="zbv"), "num_model_chunks", "Use 2"),
        (sized(pp_size=2, num_microbatches=2, num_layers_per_stage=3), "num_layers_per_stage", "lists whole numbers"),
        (sized(precision="tf32"), "precision", "fp16, bf16, fp32"),
        (sized(gradient_checkpoint_config=0.5), "gradient_checkpoint_config", "a section"),
        ({"parallel": {"pipeline": 2, "tensr": 2}}, "parallel.tensr", "Did you mean 'tensor'?"),
        ({"parallel": {"tensor": {"size": 2, "mode": "4d"}}}, "parallel.tensor.mode", "1d, 2d, 2.5d, 3d, sequence"),
        ({"parallel": {"tensor": 4}}, "parallel.tensor.mode", "without a mode"),
        ({"parallel": {"tensor": {"size": 4}}}, "parallel.tensor.mode", "mode='1d'"),
        ({"zero": {"level": 4}}, "zero", "1, 2 or 3"),
        ({"parallel_config": {"model_paralel": 2}}, "parallel_config.model_paralel", "'model_parallel'"),
        ({"parallel_config": {}, "recompute_confg": {}}, "recompute_confg", "'recompute_config'"),
        ({"encoder_plugins": {"vision": {"tp": 1}}, "num_microbatches": 1}, "encoder_plugins.vision.tp", "'tp_size'"),
        (
            {"language_model_plugin": {"tp_size": 1, "sp_size": 2}, "num_microbatches": 1},
            "language_model_plugin.sequence_parallelism_mode",
            "ring_attn",
        ),
        (sized(tp_size=10**30), "tp_size", "whole number"),
        (sized(pp_size=2, num_microbatches=2, num_layers_per_stage=[10**30, 1]), "num_layers_per_stage", "of 0 to"),
        (sized(enable_flash_attention="yes"), "enable_flash_attention", "true or false"),
        (
            sized(gradient_checkpoint_config={"gradient_checkpointing_ratio": "half"}),
            "gradient_checkpoint_config.gradient_checkpointing_ratio",
            "a number",
        ),
        ({"LowLevelZeroPlugin": {"master_weights": "x"}}, "master_weights", "true or false"),
        ({"LowLevelZeroPlugin": {"stage": True}}, "stage", "stages 1 and 2"),
        ({"GeminiPlugin": {"shard_param_frac": "half"}}, "shard_param_frac", "a number"),
        ({"GeminiPlugin": {"tp_size": "two", "enable_fused_normalization": True}}, "tp_size", "whole number"),
        ({"parallel": {"pipeline": 2}, "model": {"num_chunks": True}}, "model.num_chunks", "whole number"),
        ("a\0b", "config", "cannot be read"),
        ({"zero": {"level": 2}, "fp16": "naive"}, "fp16", "maps names to values"),
        (
            {"parallel_config": {}, "recompute_config": {"recompute": "false"}},
            "recompute_config.recompute",
            "true or false",
        ),
        (
            {"parallel_config": {"pipeline_stage": 2}, "recompute_config": {"recompute": [-1, 2]}},
            "recompute_config.recompute",
            "at least 0 layers",
        ),
        ({"nothing": 1}, "config", "ColossalAI, Cornstarch or MindFormers"),
        ({}, "config", "ColossalAI, Cornstarch or MindFormers"),
        ([], "config", "a file or a mapping"),
    ],
)
def test_refuses_what_no_table_knows_and_what_a_plugin_refuses(given: Any, field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_configuration(given)
    assert caught.value.field.replace("FILE", "config") == field
    assert words in str(caught.value)


def test_from_config_refuses_what_results_depend_on_and_warns_of_the_rest() -> None:
    with pytest.raises(ConfigError, match=r"use_fp8: got True\. It has no equal.*custom_policy"):
        MultimodalStrategy.from_config(sized(use_fp8=True, custom_policy="MyPolicy"))
    with pytest.warns(UserWarning, match="no equal|Trainer") as caught:
        made = MultimodalStrategy.from_config(sized(overlap_p2p=False, max_norm=1.0), schedule="gpipe")
    said = [str(one.message) for one in caught]
    assert any("overlap_p2p=False has no equal" in one for one in said)
    assert any("Trainer(gradient_clip_val=1.0, precision='32-true')" in one for one in said)
    assert (made.schedule, made.modalities["model"].tp_size) == ("gpipe", 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parallel = dict(pipeline=args.pp, tensor=1)", "Line 1 computes it"),
        ("parallel = dict(pipeline=9 ** 9 ** 9)", "Line 1 computes it"),
        ("parallel = open('/tmp/never').write('x')", "no `parallel"),
        ("paralel = dict(pipeline=2)", "Did you mean 'paralel' to be 'parallel'?"),
        ("HybridParallelPlugin(**sizes)", "only a run could tell"),
        ("HybridParallelPlugin(tp_size=1, pp_size=1, max_norm=...)", "Line 1 computes it"),
        ("HybridParallelPlugin(tp_size=1, pp_size=1)\nHybridParallelPlugin(tp_size=2, pp_size=1)", "several plugins"),
        ("parallel = (", "It is no Python"),
        ("(" * 500 + ")" * 500, "It is no Python"),
    ],
)
def test_refuses_python_that_only_a_run_could_read(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_configuration(tmp_path / "config.py")
    assert words in str(caught.value)


@pytest.mark.parametrize("value", ["2024-13-45", "!!int x", "!!float x", "!!bool x", "!!timestamp x"])
def test_refuses_yaml_whose_values_are_none_of_their_kind(value: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"tp_size: {value}\npp_size: 1\n")
    with pytest.raises(ConfigError, match="It is no YAML"):
        read_configuration(tmp_path / "config.yaml")


def test_comments_cannot_become_settings() -> None:
    given = {"parallel_config": {"data_parallel": 1}, "output_dir": "a\ntrainer: {devices: 9}"}
    given["parallel"] = {"search_mode": "x\nseed_everything: 1"}
    assert list(yaml.safe_load(as_yaml(read_configuration(given)))) == ["trainer"]
