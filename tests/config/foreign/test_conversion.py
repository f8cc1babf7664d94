"""Configurations of other systems: each knob is in a table, in the docs, and ends up in a field that exists."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_mm5d import ConfigError, Modality, MultimodalStrategy, PipelineTemplate
from lightning_mm5d.config.foreign import colossalai, colossalai_legacy, cornstarch, mindformers
from lightning_mm5d.config.foreign.conversion import read_configuration
from lightning_mm5d.config.foreign.converted_yaml import as_yaml
from lightning_mm5d.config.foreign.knobs import Knob

PAGE = Path(__file__).parents[3] / "docs" / "coming_from.md"
TABLES: dict[str, Sequence[Knob]] = {
    "HybridParallelPlugin": colossalai.KNOBS,
    "MoeHybridParallelPlugin": colossalai.MOE_KNOBS,
    "parallel = dict(...)": colossalai_legacy.KNOBS,
    "MultimodalParallelPlugin": cornstarch.KNOBS,
    "ModalParallelPlugin": cornstarch.MODAL_KNOBS,
    "HeterogeneousParallelPlugin": cornstarch.UNLIKE_KNOBS,
    "MindFormers": mindformers.KNOBS,
}
AMP = "initial_scale min_scale growth_factor backoff_factor growth_interval hysteresis max_scale max_norm"
KERNELS = "enable_fused_normalization enable_flash_attention enable_jit_fused"
HYBRID = f"""
tp_size pp_size sp_size precision zero_stage enable_all_optimization {KERNELS} enable_sequence_parallelism
sequence_parallelism_mode parallel_output num_microbatches microbatch_size {AMP} broadcast_buffers ddp_bucket_cap_mb
find_unused_parameters check_reduction gradient_as_bucket_view static_graph zero_bucket_size_in_m cpu_offload
communication_dtype overlap_communication custom_policy pp_style num_model_chunks scheduler_nodes num_layers_per_stage
gradient_checkpoint_config enable_metadata_cache make_vocab_size_divisible_by dp_outside overlap_p2p overlap_allgather
fp8_communication use_fp8 inner_ring_size"""
# the arguments of each constructor, in their order; the keys of each section of MindFormers
ARGUMENTS = {
    "HybridParallelPlugin": HYBRID,
    "MoeHybridParallelPlugin": HYBRID.replace("pp_size sp", "pp_size ep_size sp")
    .replace(" dp_outside", " moe_dp_outside")
    .replace(" inner_ring_size", ""),
    "MultimodalParallelPlugin": f"encoder_plugins language_model_plugin precision {KERNELS} num_microbatches "
    f"microbatch_size {AMP} parallel_output make_vocab_size_divisible_by",
    "ModalParallelPlugin": "tp_size sp_size sequence_parallelism_mode pipeline_template cpu_offload custom_policy",
    "HeterogeneousParallelPlugin": f"tp_size microbatch_size precision {KERNELS} {AMP}",
}
SECTIONS = {
    "parallel_config": "data_parallel model_parallel context_parallel expert_parallel pipeline_stage micro_batch_num "
    "seq_split_num use_seq_parallel optimizer_shard gradient_aggregation_group vocab_emb_dp context_parallel_algo "
    "ulysses_degree_in_cp mem_coeff",
    "recompute_config": "recompute select_recompute parallel_optimizer_comm_recompute select_comm_recompute "
    "mp_comm_recompute recompute_slice_activation select_recompute_exclude select_comm_recompute_exclude",
    "swap_config": "swap layer_swap op_swap default_prefetch",
    "parallel": "parallel_mode full_batch search_mode enable_parallel_optimizer gradients_mean enable_alltoall "
    "strategy_ckpt_save_file parallel_optimizer_config pipeline_config strategy_ckpt_config loss_repeated_mean "
    "dataset_strategy",
}
ZBV = """
import colossalai
STAGES = 2
parser.add_argument("--tp")
plugin = HybridParallelPlugin(
    STAGES, pp_size=STAGES, zero_stage=1, precision="bf16", num_microbatches=2 * STAGES, pp_style="zbv",
    num_model_chunks=2, num_layers_per_stage=[2, 3, 3, 2], communication_dtype=torch.bfloat16, scheduler_nodes=None,
    gradient_checkpoint_config=PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[2, 1, 0, 3]),
    cpu_offload=True, zero_bucket_size_in_m=3, max_norm=1.0, dp_outside=False,
)
raise SystemExit("is never run")
""".replace("torch.bfloat16", "'bf16'")
LEGACY = """
from colossalai.legacy.amp import AMP_TYPE
BATCH_SIZE = 4
SIZE = 2 ** 3 // 4
parallel = dict(pipeline=dict(size=2), tensor=SIZE)
NUM_MICRO_BATCHES = parallel["pipeline"]["size"] * 2
fp16 = dict(mode=AMP_TYPE.NAIVE)
clip_grad_norm = 1.0
model = dict(type=Model(), num_chunks=2)
"""
CORNSTARCH = """
encoder_plugins:
  vision: {tp_size: 2, pipeline_template: [[module.embeddings, module.layers.0, projector]]}
  audio: {tp_size: 1, sp_size: 1, sequence_parallelism_mode: ring_attn}
language_model_plugin:
  tp_size: 1
  sp_size: 2
  sequence_parallelism_mode: ring_attn
  context_parallel_distribution_mode: ContextParallelDistributionMode.ZIGZAG
  pipeline_template:
    model_name: transformers.LlamaForCausalLM
    modules_per_stage: [[model.embed_tokens, model.layers.0, model.layers.1], [model.layers.2, model.norm, lm_head]]
num_microbatches: 4
microbatch_size: 1
precision: bf16
"""
MINDFORMERS = """
seed: 0
use_parallel: True
parallel:
  parallel_mode: 1
  full_batch: True
  enable_parallel_optimizer: True
  parallel_optimizer_config: {gradient_accumulation_shard: True, optimizer_weight_shard_size: 2}
  pipeline_config: {pipeline_interleave: True, pipeline_scheduler: 1f1b}
parallel_config:
  data_parallel: &dp 2
  model_parallel: 2
  context_parallel: 4
  context_parallel_algo: hybrid_cp
  ulysses_degree_in_cp: 2
  pipeline_stage: 2
  micro_batch_num: 4
  use_seq_parallel: True
  vocab_emb_dp: False
recompute_config: {recompute: [[2, 0], [1, 1]], select_recompute: True, mp_comm_recompute: True}
model: {model_config: {num_layers: 10, pp_interleave_num: 2, offset: [[0, 1], [1, 0]], hidden_size: 64}, arch: {}}
"""
SMALL = {
    "zbv.py": ZBV,
    "legacy.py": LEGACY,
    "cornstarch.yaml": CORNSTARCH,
    "mindformers.yaml": MINDFORMERS,
    "moe.json": '{"tp_size": 1, "pp_size": 1, "ep_size": 2, "precision": "fp32", "fp8_communication": true}',
    "unlike.yaml": "HeterogeneousParallelPlugin: {tp_size: 2, microbatch_size: 1, precision: fp32, num_microbatches: "
    "[3, 1], pipelines: [{modules_per_stage: [[emb, h.0], [h.1, head]]}, [[emb, h.0, h.1, head]]]}",
    "modal.yaml": "ModalParallelPlugin: {tp_size: 2}",
    "colocated.yaml": "EncodersColocatedMultimodalParallelPlugin: {encoder_plugins: {vision: {tp_size: 1}, audio: "
    "{tp_size: 1}}, language_model_plugin: {tp_size: 1}, num_microbatches: 2, microbatch_size: 1}",
}


@pytest.fixture(params=SMALL)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    path.write_text(SMALL[request.param])
    return path


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what LightningCLI calls


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def row(knob: Knob) -> str:
    """The knob's line in the docs."""
    ours = {"always": "nothing to say", "elsewhere": "not of the strategy"}.get(knob.effect, "no equal")
    if knob.ours:
        ours = ", ".join(f"`{one.removeprefix('modality.').removeprefix('strategy.')}`" for one in knob.ours)
    about = knob.about if knob.effect != "results" else f"{knob.about}. `from_config` refuses it"
    return f"| `{knob.name}` | {ours} | {about} |"


def tops(table: Sequence[Knob]) -> list[str]:
    return list(dict.fromkeys(knob.name.partition(".")[0] for knob in table))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_tables_have_every_argument_in_the_order_of_the_constructor(name: str) -> None:
    true = ARGUMENTS[name].split()
    assert tops(TABLES[name])[: len(true)] == true


@pytest.mark.parametrize("section", SECTIONS)
def test_tables_have_every_key_of_a_section(section: str) -> None:
    known = {knob.name.removeprefix(f"{section}.").partition(".")[0] for knob in mindformers.KNOBS}
    assert set(SECTIONS[section].split()) <= known


@pytest.mark.parametrize("name", TABLES)
def test_every_field_that_a_table_names_exists(name: str) -> None:
    known = {
        "modality": {field.name for field in fields(Modality)} | {"*"},
        "strategy": set(inspect.signature(MultimodalStrategy).parameters),
        "trainer": set(inspect.signature(pl.Trainer).parameters),
    }
    named = {ours for knob in TABLES[name] for ours in knob.ours}
    parts = {tuple(ours.split(".")[:2]) for ours in named}
    assert [part for part in parts if part[1] not in known[part[0]]] == []
    assert len({knob.name for knob in TABLES[name]}) == len(TABLES[name])


def test_the_docs_have_a_row_for_every_knob_and_no_other() -> None:
    rows = {line for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    wanted = {row(knob) for table in TABLES.values() for knob in table}
    assert (sorted(wanted - rows), sorted(rows - wanted)) == ([], [])


@pytest.mark.usefixtures("quiet")
def test_a_converted_file_makes_the_same_strategy_as_from_config(file: Path) -> None:
    text = as_yaml(read_configuration(file))
    settings = yaml.safe_load(text)["trainer"]
    written = MultimodalStrategy(**settings["strategy"]["init_args"])
    assert written.modalities == MultimodalStrategy.from_config(file).modalities
    names = [entry.name for entry in read_configuration(file).entries]
    comments = "".join(line for line in text.splitlines() if line.startswith("#"))
    assert [name for name in names if name not in comments] == []


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
                "zero_stage": 1,
                "pp_chunks": 2,
                "pipeline_template": {"stages": [2, 3, 3, 2]},
                # the plugin counts by rank: stages 0 and 3 are on rank 0
                "activation_checkpointing": {
                    "per_stage": [{"layers": [0, 1]}, {"layers": [0]}, {"layers": [0, 1, 2]}, "none"]
                },
                "offload": "optimizer",
                "communication_dtype": {"gradients": "bfloat16"},
            }
        },
        "main_params": "float32",
        "num_microbatches": 4,
        "schedule": "zbv",
        "bucket_bytes": 3 * 2**21,
    }
    assert made.trainer == {"precision": "bf16-true", "gradient_clip_val": 1.0}


def test_says_an_older_file_and_lists_names_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(LEGACY)
    made = read_configuration(tmp_path / "config.py")
    assert made.strategy == {
        "modalities": {"model": {"pp_size": 2, "tp_size": 2, "pp_chunks": 2}},
        "num_microbatches": 4,
        "schedule": "interleaved",
    }
    assert made.trainer == {"precision": "16-mixed", "gradient_clip_val": 1.0}
    assert [entry.name for entry in made.of("elsewhere")] == ["BATCH_SIZE", "SIZE"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"size": 4, "mode": "2d"}, {"tp_size": 4, "tp_mode": "2d"}),
        ({"size": 8, "mode": "2.5d", "depth": 2}, {"tp_size": 8, "tp_mode": "2.5d", "tp_depth": 2}),
        ({"size": 8, "mode": "3d"}, {"tp_size": 8, "tp_mode": "3d"}),
        ({"size": 2, "mode": "1d", "depth": 1}, {"tp_size": 2}),
    ],
)
def test_says_each_mode_of_tensor_parallelism(said: Any, expected: Any) -> None:
    found = colossalai_legacy.convert_legacy({"parallel": {"tensor": said}})
    assert found.strategy["modalities"] == {"model": expected}
    assert MultimodalStrategy.from_config({"parallel": {"tensor": said}}).modalities["model"] == Modality(**expected)


def test_says_unlike_pipelines_with_their_shares() -> None:
    made = read_configuration(yaml.safe_load(SMALL["unlike.yaml"]))
    assert made.strategy["num_microbatches"] == 2
    model = {"tp_size": 2, "pipelines": [{"stages": [1, 1]}, {"stages": [2]}], "speeds": [3, 1]}
    assert made.strategy["modalities"] == {"model": model}
    templates = [PipelineTemplate(stages=[1, 1]), PipelineTemplate(stages=[2])]
    found = MultimodalStrategy(**made.strategy).modalities["model"]
    assert found == Modality(tp_size=2, pipelines=templates, speeds=[3, 1])


@pytest.mark.parametrize("counts", [[2, 1], [1], [4, 0]])
def test_refuses_shares_that_have_no_mean(counts: list[int]) -> None:
    given = yaml.safe_load(SMALL["unlike.yaml"])
    given["HeterogeneousParallelPlugin"]["num_microbatches"] = counts
    with pytest.raises(ConfigError, match="num_microbatches"):
        read_configuration(given)


def test_says_a_plugin_per_modality() -> None:
    made = read_configuration(yaml.safe_load(CORNSTARCH))
    assert made.strategy == {
        "modalities": {
            "vision": {"tp_size": 2, "pp_size": 1},
            "audio": {"tp_size": 1},
            "language": {
                "tp_size": 1,
                "cp_size": 2,
                "cp_mode": "allgather",
                "cp_distribution": "zigzag",
                "pipeline_template": {"stages": [2, 1]},
            },
        },
        "main_params": "float32",
        "num_microbatches": 4,
    }


def test_says_the_sections_of_mindformers() -> None:
    made = read_configuration(yaml.safe_load(MINDFORMERS))
    assert made.strategy == {
        "modalities": {
            "model": {
                "dp_size": 2,
                "tp_size": 2,
                "cp_size": 4,
                "pp_size": 2,
                "pp_chunks": 2,
                "pipeline_template": {"stages": [2, 3, 3, 2]},
                "activation_checkpointing": {
                    "per_stage": [{"layers": [0, 1]}, "selective", {"layers": [0]}, {"layers": [0]}]
                },
                "cp_mode": "hybrid",
                "ulysses_size": 2,
                "sequence_parallel": True,
                "zero_stage": 2,
                "dp_shard_size": 2,
            }
        },
        "num_microbatches": 4,
        "schedule": "interleaved",
    }


def sized(**said: Any) -> dict[str, Any]:
    return {"tp_size": 2, "pp_size": 1, "precision": "fp32", **said}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"sequence_parallelism_mode": "split_gather"}, {"sequence_parallel": True}),
        ({"sequence_parallelism_mode": "ring"}, {"sequence_parallel": True}),
        ({"sp_size": 4}, {"cp_size": 4, "cp_mode": "ulysses"}),
        (
            {"sequence_parallelism_mode": "ring_attn", "sp_size": 4, "inner_ring_size": 2},
            {"cp_size": 4, "cp_mode": "ring", "cp_distribution": "zigzag", "inner_ring_size": 2},
        ),
    ],
)
def test_says_each_mode_of_sequence_parallelism(said: Any, expected: Any) -> None:
    made = read_configuration(sized(enable_sequence_parallelism=True, **said))
    assert made.strategy["modalities"]["model"] == {"tp_size": 2, "pp_size": 1, **expected}


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
        ({"parallel_config": {"model_paralel": 2}}, "parallel_config.model_paralel", "'model_parallel'"),
        ({"parallel_config": {}, "recompute_confg": {}}, "recompute_confg", "'recompute_config'"),
        ({"encoder_plugins": {"vision": {"tp": 1}}, "num_microbatches": 1}, "encoder_plugins.vision.tp", "'tp_size'"),
        (
            {"language_model_plugin": {"tp_size": 1, "sp_size": 2}, "num_microbatches": 1},
            "language_model_plugin.sequence_parallelism_mode",
            "ring_attn",
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
        ("parallel = dict(pipeline=args.pp, tensor=2)", "Line 1 computes it"),
        ("parallel = dict(pipeline=9 ** 9 ** 9)", "Line 1 computes it"),
        ("parallel = open('/tmp/never').write('x')", "no `parallel"),
        ("paralel = dict(pipeline=2)", "Did you mean 'paralel' to be 'parallel'?"),
        ("HybridParallelPlugin(**sizes)", "only a run could tell"),
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


def test_comments_cannot_become_settings() -> None:
    given = {"parallel_config": {"data_parallel": 1}, "output_dir": "a\ntrainer: {devices: 9}"}
    given["parallel"] = {"search_mode": "x\nseed_everything: 1"}
    assert list(yaml.safe_load(as_yaml(read_configuration(given)))) == ["trainer"]


def test_modalities_are_numbers_of_stages_mappings_or_modalities() -> None:
    made = MultimodalStrategy(
        modalities={
            "vision": 1,
            "audio": Modality(tp_size=2),
            "language": {"pipeline_template": {"stages": [2, 3]}, "tp_size": 2},
        }
    )
    assert made.modalities == {
        "vision": Modality(pp_size=1),
        "audio": Modality(tp_size=2),
        "language": Modality(tp_size=2, pipeline_template=PipelineTemplate(stages=[2, 3])),
    }


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (0, "modalities.language.pp_size: got 0"),
        (True, "modalities.language: got True. A modality is a Modality, a mapping"),
        ({"tp": 2}, "modalities.language.tp: got 2. There is no such field. Did you mean 'tp_size'?"),
        ({"tp_size": "x"}, "modalities.language.tp_size: got 'x'"),
        ({"pipeline_template": {"stags": [1]}}, "modalities.language.pipeline_template.stags: got [1]"),
        ({"pipeline_template": [1, 2]}, "modalities.language.pipeline_template: got [1, 2]. It is a PipelineTemplate"),
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
