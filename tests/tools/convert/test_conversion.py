"""Configurations of other systems become fields of ours, in files that a LightningCLI reads and in Python."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_mm5d import Modality, MultimodalStrategy, PipelineTemplate
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.tools.convert import colossalai
from lightning_mm5d.tools.convert.conversion import as_yaml, read_configuration
from tools.convert.foreign_files import CORNSTARCH, LEGACY, MINDFORMERS, SMALL, ZBV, sized


@pytest.fixture(params=SMALL)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    path.write_text(SMALL[request.param])
    return path


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.usefixtures("quiet")
def test_a_converted_file_makes_the_same_strategy_as_from_config(file: Path) -> None:
    text = as_yaml(read_configuration(file))
    settings = yaml.safe_load(text)["trainer"]
    written = MultimodalStrategy(**settings["strategy"]["init_args"])
    assert written.modalities == MultimodalStrategy.from_config(file).modalities
    names = [entry.name for entry in read_configuration(file).entries]
    comments = "".join(line for line in text.splitlines() if line.startswith("#"))
    assert [name for name in names if name not in comments] == []


@pytest.mark.parametrize(
    "given",
    [
        {"parallel_config": {"model_parallel": None, "pipeline_stage": 2, "micro_batch_num": None}},
        {"parallel": {"pipeline": 2, "tensor": {"size": None}}, "gradient_accumulation": None},
        {"ModalParallelPlugin": {"tp_size": None, "pipeline_template": [["layers.0"], ["layers.1"]]}},
    ],
    ids=["mindformers", "legacy", "cornstarch"],
)
def test_a_knob_without_a_value_is_listed_and_says_nothing(given: dict[str, Any]) -> None:
    conversion = read_configuration(given)
    assert None not in {value for one in conversion.entries for value in one.fields.values() if one.got is None}
    assert MultimodalStrategy(**conversion.strategy).modalities["model"].tp_size == 1
    assert "It asks for nothing" in as_yaml(conversion)


@pytest.mark.usefixtures("quiet")
def test_a_converted_file_is_read_by_a_lightning_cli(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "ours.yaml"
    conversion = read_configuration(file)
    out.write_text(as_yaml(conversion))
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(out), "--trainer.accelerator=cpu"])
    cli = LightningCLI(
        BoringModel,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
    )
    made = MultimodalStrategy(**conversion.strategy)
    assert isinstance(cli.trainer.strategy, MultimodalStrategy)
    assert cli.trainer.strategy.modalities == made.modalities
    assert (cli.trainer.strategy.schedule, cli.trainer.strategy.num_microbatches) == (
        made.schedule,
        made.num_microbatches,
    )


def test_says_a_hybrid_plugin_of_a_script_that_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ZBV)
    made = read_configuration(tmp_path / "train.py")
    assert made.strategy == {
        "modalities": {
            "model": {
                "tp_size": 2,
                "pp_size": 2,
                "sharding": {"zero_stage": 1},
                "pipeline": {"pp_chunks": 2, "pipeline_template": {"stages": [2, 3, 3, 2]}},
                "memory": {
                    "activation_checkpointing": {
                        "per_stage": [{"layers": [0, 1]}, {"layers": [0]}, {"layers": [0, 1, 2]}, "none"]
                    },
                    "offload": "optimizer",
                },
                "communication": {"communication_dtype": {"gradients": "bfloat16"}},
            }
        },
        "numerics": {"main_params": "float32"},
        "batching": {"num_microbatches": 4},
        "schedule": "zbv",
        "launch": {"bucket_bytes": 3 * 2**21},
    }
    assert made.trainer == {"precision": "bf16-true", "gradient_clip_val": 1.0}


def test_says_an_older_file_and_lists_names_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(LEGACY)
    made = read_configuration(tmp_path / "config.py")
    assert made.strategy == {
        "modalities": {"model": {"pp_size": 2, "tp_size": 2, "pipeline": {"pp_chunks": 2}}},
        "batching": {"num_microbatches": 4},
        "schedule": "interleaved",
    }
    assert made.trainer == {"precision": "16-mixed", "gradient_clip_val": 1.0}
    assert [entry.name for entry in made.of("elsewhere")] == ["BATCH_SIZE", "SIZE"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"size": 4, "mode": "2d"}, {"tp_size": 4, "tensor": {"tp_mode": "2d"}}),
        ({"size": 8, "mode": "2.5d", "depth": 2}, {"tp_size": 8, "tensor": {"tp_mode": "2.5d", "tp_depth": 2}}),
        ({"size": 8, "mode": "3d"}, {"tp_size": 8, "tensor": {"tp_mode": "3d"}}),
        ({"size": 2, "mode": "1d", "depth": 1}, {"tp_size": 2}),
    ],
)
def test_says_each_mode_of_tensor_parallelism(said: Any, expected: Any) -> None:
    found = colossalai.convert_legacy({"parallel": {"tensor": said}})
    assert found.strategy["modalities"] == {"model": expected}
    assert MultimodalStrategy.from_config({"parallel": {"tensor": said}}).modalities["model"] == Modality(**expected)


def test_says_unlike_pipelines_with_their_shares() -> None:
    made = read_configuration(yaml.safe_load(SMALL["unlike.yaml"]))
    assert made.strategy["batching"] == {"num_microbatches": 2}
    model = {"tp_size": 2, "pipeline": {"pipelines": [{"stages": [1, 1]}, {"stages": [2]}], "speeds": [3, 1]}}
    assert made.strategy["modalities"] == {"model": model}
    templates = [PipelineTemplate(stages=[1, 1]), PipelineTemplate(stages=[2])]
    found = MultimodalStrategy(**made.strategy).modalities["model"]
    assert found == Modality(tp_size=2, pipeline={"pipelines": templates, "speeds": [3, 1]})


def test_says_a_plugin_per_modality() -> None:
    made = read_configuration(yaml.safe_load(CORNSTARCH))
    assert made.strategy == {
        "modalities": {
            "vision": {"tp_size": 2, "pp_size": 1},
            "audio": {"tp_size": 1},
            "language": {
                "tp_size": 1,
                "cp_size": 2,
                "context": {"cp_mode": "allgather", "cp_distribution": "zigzag"},
                "pipeline": {"pipeline_template": {"stages": [2, 1]}},
            },
        },
        "numerics": {"main_params": "float32"},
        "batching": {"num_microbatches": 4},
    }


@pytest.mark.usefixtures("quiet")
def test_says_multiples_of_a_vocabulary_where_ranks_share_it() -> None:
    name = "make_vocab_size_divisible_by"
    plugin = {"pp_size": 1, "precision": "fp32", name: 64}
    found = MultimodalStrategy.from_config({"HybridParallelPlugin": {"tp_size": 2, **plugin}}).modalities["model"]
    assert found == Modality(tp_size=2, pp_size=1, tensor={"make_vocab_size_divisible_by": 64})
    alone = read_configuration({"HybridParallelPlugin": {"tp_size": 1, **plugin}})
    assert alone.strategy["modalities"]["model"] == {"tp_size": 1, "pp_size": 1}
    assert [entry.name for entry in alone.of("costs")] == [name]
    vision = {"encoder_plugins": {"vision": {"tp_size": 2}}, "num_microbatches": 1, name: 128}
    both = read_configuration({**vision, "language_model_plugin": {"tp_size": 4}})
    assert both.strategy["modalities"] == {"vision": {"tp_size": 2}, "language": {"tp_size": 4, "tensor": {name: 128}}}
    assert [entry.name for entry in read_configuration(vision).of("always")] == [name]
    with pytest.raises(ConfigError, match=f"{name}: got 0"):
        read_configuration({"HybridParallelPlugin": {"tp_size": 2, **plugin, name: 0}})


def test_says_the_sections_of_mindformers() -> None:
    made = read_configuration(yaml.safe_load(MINDFORMERS))
    assert made.strategy == {
        "modalities": {
            "model": {
                "dp_size": 2,
                "tp_size": 2,
                "cp_size": 4,
                "pp_size": 2,
                "pipeline": {"pp_chunks": 2, "pipeline_template": {"stages": [2, 3, 3, 2]}},
                "memory": {
                    "activation_checkpointing": {
                        "per_stage": [{"layers": [0, 1]}, "selective", {"layers": [0]}, {"layers": [0]}]
                    }
                },
                "context": {"cp_mode": "hybrid", "ulysses_size": 2},
                "tensor": {"sequence_parallel": True},
                "sharding": {"zero_stage": 2, "dp_shard_size": 2},
            }
        },
        "batching": {"num_microbatches": 4},
        "schedule": "interleaved",
    }


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"sequence_parallelism_mode": "split_gather"}, {"tensor": {"sequence_parallel": True}}),
        ({"sequence_parallelism_mode": "ring"}, {"tensor": {"sequence_parallel": "ring"}}),
        ({"sp_size": 4}, {"cp_size": 4, "context": {"cp_mode": "ulysses"}}),
        (
            {"sequence_parallelism_mode": "ring_attn", "sp_size": 4, "inner_ring_size": 2},
            {"cp_size": 4, "context": {"cp_mode": "ring", "cp_distribution": "zigzag", "inner_ring_size": 2}},
        ),
    ],
)
def test_says_each_mode_of_sequence_parallelism(said: Any, expected: Any) -> None:
    made = read_configuration(sized(enable_sequence_parallelism=True, **said))
    assert made.strategy["modalities"]["model"] == {"tp_size": 2, "pp_size": 1, **expected}


@pytest.mark.usefixtures("quiet")
def test_knobs_without_a_value_ask_for_nothing() -> None:
    """Whatever becomes of a knob otherwise: without a value it asks for nothing, and no field is set to null."""
    given = {"custom_policy": None, "use_fp8": None, "overlap_p2p": None, "num_microbatches": None}
    conversion = read_configuration(sized(tp_size=2, **given))
    assert {entry.name for entry in conversion.of("always")} >= given.keys()
    assert MultimodalStrategy.from_config(sized(tp_size=2, **given)).modalities["model"].tp_size == 2


def test_says_a_zero_without_parallel(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("zero = dict(level=3)\nBATCH_SIZE = 4")
    made = read_configuration(tmp_path / "config.py")
    assert made.strategy == {"modalities": {"model": {"sharding": {"zero_stage": 3}}}}
    assert read_configuration({"zero": {"level": 2}}).strategy["modalities"]["model"] == {"sharding": {"zero_stage": 2}}
    (tmp_path / "config.py").write_text("zero = dict(model_config=dict(shard_strategy=TensorShardStrategy()))")
    assert read_configuration(tmp_path / "config.py").strategy == made.strategy


def test_precision_that_is_null_leaves_parameters_as_they_are() -> None:
    assert read_configuration(sized(precision=None)).trainer == {"precision": "32-true"}
    assert read_configuration({"tp_size": 2, "pp_size": 1}).trainer == {"precision": "16-mixed"}


def test_says_the_671b_model_of_mindformers_with_its_layer_for_a_further_token() -> None:
    counts = [3, *[4] * 12, 3, 2, 0]
    given = {
        "parallel_config": {"data_parallel": 16, "model_parallel": 4, "pipeline_stage": 16, "expert_parallel": 8},
        "recompute_config": {"recompute": counts, "select_recompute": False},
        "model": {"model_config": {"num_layers": 61, "mtp_depth": 1, "offset": [*[1] * 15, -1]}},
    }
    model = read_configuration(given).strategy["modalities"]["model"]
    assert model["pipeline"]["pipeline_template"] == {"stages": [*[4] * 15, 1]}
    each = [{"layers": list(range(count))} if count else "none" for count in counts]
    assert model["memory"]["activation_checkpointing"] == {"per_stage": each}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"select_recompute": [2, 1, 0]}, {"per_stage": ["selective", "selective", "none"]}),
        (
            {"select_recompute": [2, 1, 0], "recompute": [0, 1, 0]},
            {"per_stage": ["selective", {"layers": [0]}, "none"]},
        ),
        ({"select_recompute": [2, 1, 0], "recompute": True}, "full"),
        ({"select_recompute": ["feed_forward\\.mul"]}, "selective"),
    ],
)
def test_says_lists_of_recomputed_layers(said: Any, expected: Any) -> None:
    given = {"parallel_config": {"pipeline_stage": 3}, "recompute_config": said}
    model = read_configuration(given).strategy["modalities"]["model"]
    assert model["memory"] == {"activation_checkpointing": expected}


def test_a_layout_that_mindspore_would_find_is_left_to_the_planner() -> None:
    for given in ({"parallel": {"parallel_mode": 2}}, {"parallel": {"parallel_mode": "SEMI_AUTO_PARALLEL"}}):
        (entry,) = read_configuration(given).of("costs")
        assert "`mm5d plan` searches one" in entry.about
    said = {"parallel": {"parallel_mode": 1}, "parallel_config": {"model_parallel": 2}}
    assert read_configuration(said).of("costs") == ()


def test_stages_that_the_section_parallel_alone_says_split_batches_and_have_schedules() -> None:
    scheduled = {"pipeline_stages": 2, "pipeline_config": {"pipeline_scheduler": "gpipe"}}
    made = read_configuration({"parallel": scheduled, "parallel_config": {"model_parallel": 2, "micro_batch_num": 4}})
    model = {"tp_size": 2, "pp_size": 2}
    assert made.strategy == {"modalities": {"model": model}, "schedule": "gpipe", "batching": {"num_microbatches": 4}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"parallel": {"pipeline_stages": 4}, "parallel_config": {"pipeline_stage": 2}},
            r"pipeline_stages?: got \d\. parallel\S*\.pipeline_stages? says \d of the same\. Leave one of them out",
        ),
        (
            {
                "parallel": {"grad_accumulation_step": 4},
                "runner_config": {"gradient_accumulation_steps": 2},
                "parallel_config": {},
            },
            r"runner_config.gradient_accumulation_steps: got 2\. parallel.grad_accumulation_step says 4",
        ),
    ],
)
def test_refuses_knobs_that_contradict_each_other(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_configuration(given)
    equal = {"parallel": {"pipeline_stages": 2}, "parallel_config": {"pipeline_stage": 2}}
    assert read_configuration(equal).strategy["modalities"]["model"] == {"pp_size": 2}


@pytest.mark.parametrize(
    ("plugin", "given", "modality", "trainer"),
    [
        ("TorchDDPPlugin", {"bucket_cap_mb": 2}, {}, {}),
        ("LowLevelZeroPlugin", {}, {"sharding": {"zero_stage": 1}}, {"precision": "16-mixed"}),
        (
            "LowLevelZeroPlugin",
            {"stage": 2, "precision": "bf16", "cpu_offload": True, "max_norm": 1.0, "reduce_bucket_size_in_m": 1},
            {"sharding": {"zero_stage": 2}, "memory": {"offload": "optimizer"}},
            {"precision": "bf16-true", "gradient_clip_val": 1.0},
        ),
        (
            "GeminiPlugin",
            {"precision": "bf16", "offload_optim_frac": 1.0, "offload_param_frac": 0.0, "tp_size": 2},
            {"tp_size": 2, "sharding": {"zero_stage": 3}, "memory": {"offload": ["optimizer"]}},
            {"precision": "bf16-true"},
        ),
        ("GeminiPlugin", {"shard_param_frac": 0.0}, {"sharding": {"zero_stage": 2}}, {"precision": "16-mixed"}),
    ],
)
def test_plugins_for_replicas_say_what_replicas_share(
    plugin: str, given: dict[str, Any], modality: dict[str, Any], trainer: dict[str, Any]
) -> None:
    made = read_configuration({plugin: given} if given else {plugin: {}})
    assert made.strategy["modalities"]["model"] == modality
    assert made.trainer == trainer
    assert {entry.name for entry in made.entries} >= given.keys()
    is_bf16 = given.get("precision") == "bf16"
    assert made.strategy.get("numerics", {}) == ({"main_params": "float32"} if is_bf16 else {})
    MultimodalStrategy(**made.strategy)


def test_main_parameters_are_left_out_where_a_plugin_has_none() -> None:
    made = read_configuration({"LowLevelZeroPlugin": {"precision": "bf16", "master_weights": False}})
    assert "numerics" not in made.strategy


def test_a_stage_that_a_plugin_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stage: got 3\. The plugin has stages 1 and 2"):
        read_configuration({"LowLevelZeroPlugin": {"stage": 3}})


def test_a_script_that_chooses_a_plugin_is_that_of_the_one_which_shards(tmp_path: Path) -> None:
    chosen = "if kind == 'zero':\n    plugin = LowLevelZeroPlugin(initial_scale=scale)\nelse:\n"
    (tmp_path / "train.py").write_text(f"{chosen}    plugin = HybridParallelPlugin(tp_size=2, pp_size=1)\n")
    assert read_configuration(tmp_path / "train.py").source == "ColossalAI HybridParallelPlugin"
    (tmp_path / "one.py").write_text("plugin = LowLevelZeroPlugin(stage=2, initial_scale=2**5)\n")
    found = read_configuration(tmp_path / "one.py")
    assert found.strategy["modalities"]["model"]["sharding"] == {"zero_stage": 2}
    (tmp_path / "two.py").write_text(f"{chosen}    plugin = GeminiPlugin()\n")
    with pytest.raises(ConfigError, match="LowLevelZeroPlugin in line 2, GeminiPlugin in line 4"):
        read_configuration(tmp_path / "two.py")
