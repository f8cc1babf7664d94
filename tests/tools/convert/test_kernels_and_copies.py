"""Switches of kernels and interleaved copies of other systems: said where our checks take them, listed where not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_mm5d import MultimodalStrategy
from lightning_mm5d.tools.convert.conversion import read_configuration
from lightning_mm5d.tools.convert.knobs import Conversion

SWITCHES = ("enable_flash_attention", "enable_fused_normalization", "enable_jit_fused")
SEQUENCES = {"enable_sequence_parallelism": True}


def hybrid(**said: Any) -> dict[str, Any]:
    return {"tp_size": 2, "pp_size": 1, "precision": "fp32", **said}


def left_out(found: Conversion) -> dict[str, str]:
    """Knobs without an equal in this configuration, and why."""
    return {entry.name: entry.about for entry in found.of("costs")}


def made(found: Conversion) -> MultimodalStrategy:
    """The strategy, whose own checks take the converted fields."""
    return MultimodalStrategy(**found.strategy)


@pytest.mark.parametrize(
    ("said", "fields", "reasons"),
    [
        ({}, {"compute": {"kernels": ["sdpa", "rms_norm"], "compile": True}}, {}),
        # both share sequences over the ranks of cp_size
        (
            {**SEQUENCES, "sp_size": 2},
            {"cp_size": 2, "context": {"cp_mode": "ulysses"}, "compute": {"kernels": ["rms_norm"], "compile": True}},
            {"enable_flash_attention": "kernels of its own, with cp_size above 1"},
        ),
        (
            {**SEQUENCES, "sequence_parallelism_mode": "split_gather"},
            {"tensor": {"sequence_parallel": True}, "compute": {"kernels": ["sdpa", "rms_norm"]}},
            {"enable_jit_fused": "With sequence_parallel"},
        ),
    ],
)
def test_says_switches_of_kernels_where_they_go_with_the_rest(
    said: dict[str, Any], fields: dict[str, Any], reasons: dict[str, str]
) -> None:
    one_by_one = read_configuration(hybrid(**said, **dict.fromkeys(SWITCHES, True)))
    at_once = read_configuration(hybrid(**said, enable_all_optimization=True, enable_jit_fused=False))
    attention = [one for one in fields["compute"]["kernels"] if one != "rms_norm"]  # whatever norms the model has
    compute = {key: value for key, value in fields["compute"].items() if key != "kernels"}
    of_all = {**fields, "compute": {**compute, **({"kernels": attention} if attention else {})}}
    norms = {"enable_fused_normalization": "norms like Llama's alone"}
    for found, said_in, why in ((one_by_one, fields, reasons), (at_once, of_all, {**norms, **reasons})):
        assert found.strategy["modalities"]["model"] == {"tp_size": 2, "pp_size": 1, **said_in}
        assert made(found).modalities["model"].compute.compile is said_in["compute"].get("compile", False)
        missing = left_out(found)
        assert missing.keys() == why.keys()
        assert all(words in missing[name] for name, words in why.items())
    assert {entry.name for entry in at_once.of("mapped")} >= {"enable_all_optimization"}


@pytest.mark.parametrize("off", [False, 0, []])
def test_switches_that_are_off_say_nothing(off: Any) -> None:
    found = read_configuration(hybrid(enable_all_optimization=off, **dict.fromkeys(SWITCHES, off)))
    assert found.strategy["modalities"]["model"] == {"tp_size": 2, "pp_size": 1}
    assert [entry.name for entry in found.of("always")] == ["enable_all_optimization", *SWITCHES]


def test_switches_of_a_whole_plugin_are_for_each_modality_that_takes_them() -> None:
    found = read_configuration(
        {
            "encoder_plugins": {"vision": {"tp_size": 1}},
            "language_model_plugin": {"tp_size": 1, "sp_size": 2, "sequence_parallelism_mode": "ring_attn"},
            "num_microbatches": 2,
            "enable_flash_attention": True,
            "enable_fused_normalization": True,
            "enable_jit_fused": False,
        }
    )
    modalities = made(found).modalities
    assert modalities["vision"].compute.kernels == ["sdpa", "rms_norm"]
    assert modalities["language"].compute.kernels == ["rms_norm"]
    (entry,) = found.of("costs")
    assert entry.name == "enable_flash_attention"
    assert entry.about.startswith("language: ")
    assert "with cp_size above 1" in entry.about
    said = [dict(entry.fields) for entry in found.of("mapped") if entry.name == "enable_fused_normalization"]
    assert [list(fields) for fields in said] == [
        ["modalities.vision.compute.kernels"],
        ["modalities.language.compute.kernels"],
    ]


def test_from_config_warns_of_a_kernel_that_a_modality_refuses() -> None:
    given = hybrid(**SEQUENCES, sp_size=2, enable_flash_attention=True)
    with pytest.warns(UserWarning, match="no equal|Trainer") as caught:
        MultimodalStrategy.from_config(given)
    (said,) = (str(one.message) for one in caught if "no equal" in str(one.message))
    assert said.startswith("enable_flash_attention=True has no equal")
    assert "kernels of its own" in said


def mindformers(
    copies: int = 1, slices: int = 1, *, others: Mapping[str, Any] | None = None, **sizes: Any
) -> dict[str, Any]:
    return {
        "parallel_config": {"model_parallel": 2, **sizes},
        "model": {"model_config": {"fine_grain_interleave": slices, "use_flash_attention": False}},
        "micro_batch_interleave_num": copies,
        **(others or {}),
    }


PIPELINE = {"pipeline_stage": 2, "micro_batch_num": 4}


@pytest.mark.parametrize(
    ("given", "count", "number"),
    [
        (mindformers(2), 2, 2),
        (mindformers(2, micro_batch_num=4), 2, 2),  # one stage splits nothing but into copies
        (mindformers(2, **PIPELINE), 2, 8),
        (mindformers(3, **PIPELINE), 3, 12),
        (mindformers(1, 2, **PIPELINE), 2, 4),
        (mindformers(2, context_parallel=2, model_parallel=1), 2, 2),
        (mindformers(2, expert_parallel=2, model_parallel=1, **PIPELINE), 2, 8),
        (mindformers(1, 1, **PIPELINE), 1, 4),
    ],
)
def test_says_copies_of_microbatches(given: dict[str, Any], count: int, number: int) -> None:
    found = read_configuration(given)
    strategy = made(found)
    assert strategy.modalities["model"].pipeline.interleaved_microbatches == count
    assert strategy.num_microbatches == number
    said = [fields["num_microbatches"] for entry in found.entries if "num_microbatches" in (fields := entry.fields)]
    assert set(said) <= {number}
    assert left_out(found) == {}


@pytest.mark.parametrize(
    ("given", "number", "reasons"),
    [
        (mindformers(2, model_parallel=1), 1, {"micro_batch_interleave_num": "there are none"}),
        (
            mindformers(2, others={"swap_config": {"swap": True}}),
            1,
            {"micro_batch_interleave_num": "offload='activations'"},
        ),
        (mindformers(1, 2), 1, {"fine_grain_interleave": "It divides num_microbatches=1"}),
        (mindformers(1, 3, **PIPELINE), 4, {"fine_grain_interleave": "It divides num_microbatches=4"}),
        (mindformers(2, 2, **PIPELINE), 8, {"fine_grain_interleave": "micro_batch_interleave_num says"}),
    ],
)
def test_lists_copies_that_do_not_go_with_the_rest(given: dict[str, Any], number: int, reasons: dict[str, str]) -> None:
    found = read_configuration(given)
    assert made(found).num_microbatches == number
    missing = {name.rpartition(".")[2]: about for name, about in left_out(found).items()}
    assert missing.keys() == reasons.keys()
    assert all(words in missing[name] for name, words in reasons.items())


def test_slices_do_nothing_without_model_parallel_ranks() -> None:
    found = read_configuration(mindformers(1, 2, model_parallel=1, context_parallel=2))
    assert made(found).modalities["model"].pipeline.interleaved_microbatches == 1
    assert "model.model_config.fine_grain_interleave" in {entry.name for entry in found.of("always")}


def test_says_the_flash_attention_of_a_model_config() -> None:
    section = {"model": {"model_config": {"use_flash_attention": True}}}
    found = read_configuration({"parallel_config": {"model_parallel": 2}, **section})
    assert made(found).modalities["model"].compute.kernels == ["sdpa"]
    shared = read_configuration({"parallel_config": {"context_parallel": 2}, **section})
    assert made(shared).modalities["model"].compute.kernels is None
    assert list(left_out(shared)) == ["model.model_config.use_flash_attention"]


def test_says_the_order_of_axes() -> None:
    outside = read_configuration(hybrid(dp_outside=True))
    assert outside.strategy["placement"] == ["dp", "pp", "cp", "tp"]
    assert made(outside).modalities["model"].tp_size == 2
    assert "placement" not in read_configuration(hybrid(dp_outside=False)).strategy
    experts = read_configuration({**hybrid(moe_dp_outside=True), "ep_size": 1})
    assert list(left_out(experts)) == ["moe_dp_outside"]


@pytest.mark.parametrize(
    "given",
    [
        hybrid(pp_size=2, microbatch_size=3),
        {"language_model_plugin": {"tp_size": 1}, "microbatch_size": 3},
        {"HeterogeneousParallelPlugin": {"tp_size": 2, "microbatch_size": 3, "precision": "fp32"}},
    ],
)
def test_says_the_size_of_a_microbatch_where_their_number_is_not_said(given: dict[str, Any]) -> None:
    found = read_configuration(given)
    assert made(found).microbatch_size == 3
    (entry,) = (entry for entry in found.entries if entry.name == "microbatch_size")
    assert entry.fields == {"batching.microbatch_size": 3}
