"""Any tensor parallel layout gives the losses, gradients and parameters of the same module on one process.

Ranks are in the order of the modalities: "vision tp 2 | language tp 3" is "vision: ranks 0-1; language: ranks 2-4".
The default run holds each layout of one modality and each model (`sweeps.covering`), and bridges between degrees of
each kind (to more ranks, to fewer, no multiple). Combinations whose pairs other files hold too are `exhaustive`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import lightning as L
import pytest

from lightning_mm5d import TensorParallelPlan, register_tensor_parallel_plan
from sweeps import covering, swept
from tensor_parallel.layouts import check

ONE: dict[str, tuple[dict[str, Any], int]] = {
    "tp 2": ({"tp_size": 2}, 2),
    "tp 3, uneven heads and vocabulary": ({"tp_size": 3}, 3),
    "tp 2 with sequence shards": ({"tp_size": 2, "sequence_parallel": True}, 2),
    "tp 2, pp 2": ({"tp_size": 2, "pp_size": 2}, 4),
    "tp 2, pp 2 with sequence shards": ({"tp_size": 2, "pp_size": 2, "sequence_parallel": True}, 4),
}
# the degrees of a bridge: both ways, to more ranks and to fewer, also where one is no multiple of the other
BRIDGES = {"1 to 2": (1, 2), "2 to 4": (2, 4), "4 to 2": (4, 2), "3 to 2": (3, 2), "4 to 1": (4, 1), "2 to 2": (2, 2)}
SHARED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "vision tp 1 beside language tp 2": ({"tp_size": 1}, {"tp_size": 2}, 2),
    "vision tp 2 within language tp 2": ({"tp_size": 2}, {"tp_size": 2}, 2),
    "vision tp 2 beside language tp 4": ({"tp_size": 2}, {"tp_size": 4}, 4),
    "vision tp 2 beside language tp 1": ({"tp_size": 2}, {"tp_size": 1, "dp_size": 2}, 2),
    "vision tp 1 beside language tp 2, pp 2": ({"tp_size": 1}, {"tp_size": 2, "pp_size": 2}, 4),
    "sequence shards in both": (
        {"tp_size": 2, "sequence_parallel": True},
        {"tp_size": 2, "sequence_parallel": True},
        2,
    ),
}
MORE_SHARED = (
    *("vision tp 1 beside language tp 2", "vision tp 2 within language tp 2"),
    "vision tp 2 beside language tp 4",
)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "which"),
    covering(
        product(["llama_tied", "gpt2", "t5", "bert"], ONE),
        (0,),
        (1,),
        kept=[("llama_tied", "tp 2 with sequence shards")],
    ),
)
def test_one_modality_equals_one_process(name: str, which: str) -> None:
    fields, world = ONE[which]
    if name == "t5" and "pp" in which:
        check(name, {"encoder": {}, "language": fields}, world + 1, exact=True)
        return
    check(name, {"language": fields}, world, exact=name in ("bert", "t5"))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("which", swept(BRIDGES, "2 to 4", "4 to 2", "4 to 1", "2 to 2"))
def test_modalities_of_unlike_degrees_equal_one_process(which: str) -> None:
    vision, language = BRIDGES[which]
    check("llava", {"vision": {"tp_size": vision}, "language": {"tp_size": language}}, vision + language)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("which", swept(SHARED, *MORE_SHARED))
def test_modalities_on_the_same_ranks_equal_one_process(which: str) -> None:
    vision, language, world = SHARED[which]
    fields = {"vision": {"colocate_with": "language", **vision}, "language": language}
    check("llava", fields, world, replicas=language.get("dp_size", 1))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "fields", "world", "options"),
    [
        pytest.param(
            "qwen2_vl",
            {"vision": {"tp_size": 2, "pp_size": 2}, "language": {"tp_size": 2}},
            6,
            {"variant": "projector_only", "schedule": "zero_bubble", "accumulate_grad_batches": 2},
            marks=pytest.mark.exhaustive,
        ),
        (
            "gemma3",
            {"vision": {"tp_size": 2}, "language": {"tp_size": 2, "pp_size": 2, "sequence_parallel": True}},
            6,
            {"variant": "encoder", "gradient_clip_val": 0.01},
        ),
        pytest.param(
            "whisper",
            {"audio": {"tp_size": 3}, "language": {"tp_size": 2}},
            5,
            {"schedule": "auto", "gradient_clip_val": 0.01, "exact": True},
            marks=pytest.mark.exhaustive,
        ),
        ("blip_2", {"vision": {"tp_size": 2, "dp_size": 1}, "language": {"dp_size": 2}}, 4, {"replicas": 2}),
        ("llava", {"vision": {"tp_size": 2}, "language": {"tp_size": 2, "pp_size": 2}}, 6, {"schedule": "zbv"}),
        ("llama_tied", {"language": {"tp_size": 2, "dp_size": 2}}, 4, {"replicas": 2, "gradient_clip_val": 0.01}),
        pytest.param(
            "clip",
            {"vision": {"tp_size": 2}, "language": {"tp_size": 3}},
            5,
            {"exact": True},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "qwen2_audio",
            {"audio": {"tp_size": 2}, "language": {"tp_size": 2}},
            4,
            {"variant": "language"},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensor_parallelism_combines_with_all_else(
    name: str, fields: dict[str, Any], world: int, options: dict[str, Any]
) -> None:
    check(name, fields, world, **options)


def recompute(module: L.LightningModule) -> None:
    module.model.gradient_checkpointing_enable({"use_reentrant": True})
    module.train()


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", swept(["llama_tied", "t5"], "t5"))
def test_layers_that_are_recomputed_by_a_backward_within_the_backward_equal_one_process(name: str) -> None:
    fields: dict[str, Any] = {"tp_size": 2, **({"sequence_parallel": True} if name == "llama_tied" else {})}
    check(name, {"language": fields}, 2, prepare=recompute, exact=name == "t5")


@pytest.mark.usefixtures("float64", "new_ranks")
def test_a_layer_of_the_users_own_is_divided_as_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """vision: ranks 0-1; language: ranks 2-4."""
    monkeypatch.setattr("lightning_mm5d.tensor_parallel.plan_lookup._REGISTERED", {})
    register_tensor_parallel_plan(
        "Layer",
        TensorParallelPlan(
            column={"qkv": ("heads", "heads", "heads"), "up": ("width",)},
            row={"out": ("heads",), "down": ("width",)},
            heads="heads",
        ),
    )
    fields = {"vision": {"tp_size": 2}, "language": {"tp_size": 3, "sequence_parallel": True}}
    check("handwritten", fields, 5, exact=True)


FULL: dict[str, tuple[dict[str, Any], int, int]] = {
    "tp 2": ({}, 2, 1),
    "tp 2 with sequence shards": ({"sequence_parallel": True}, 2, 1),
    "two replicas": ({}, 4, 2),
    "tp 2 with the tokens in halves": ({"cp_size": 2}, 4, 1),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("which", swept(FULL, "tp 2", "tp 2 with the tokens in halves"))
def test_embeddings_that_each_rank_holds_in_full_equal_one_process(which: str) -> None:
    """language: ranks 0-1, or ranks 0-3 as two replicas or with the tokens in halves."""
    more, world, replicas = FULL[which]
    check("llama", {"language": {"tp_size": 2, "shard_embedding": False, **more}}, world, replicas=replicas)
