"""Any context parallel layout gives the losses, gradients and parameters of the same module on one process.

Ranks are in the order of the modalities: "vision cp 2 | language cp 3" is "vision: ranks 0-1; language: ranks 2-4".
Models that compute their loss, norms or rotary tables in float32 agree to that, those without to float64. The default
run holds each mode, each size, each distribution and each model (`sweeps.covering`), and of combinations with all else
each pair that no other file holds; `exhaustive` holds the rest of the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest

from lightning_mm5d import Modality
from lightning_mm5d.context_parallel.exchange import attention
from parity.harness import fit, strategy
from ranks import call_ranks
from sweeps import covering, swept
from tensor_parallel.layouts import Compared, batches_of, build, check, check_all

MODES: dict[str, dict[str, Any]] = {
    "allgather": {"cp_mode": "allgather"},
    "ring": {"cp_mode": "ring"},
    "ulysses": {"cp_mode": "ulysses"},
    "hybrid": {"cp_mode": "hybrid", "cp_size": 4, "ulysses_size": 2},
    "double ring": {"cp_mode": "ring", "cp_size": 4, "inner_ring_size": 2},
}


MODELS = (("llama_tied", "uniform"), ("bert", "zigzag"), ("gpt2", "makespan_min"))
IN_PLAIN_GROUPS, IN_GROUPS_OF_GROUPS = ("allgather", "ring", "ulysses"), ("hybrid", "double ring")


def check_mode(mode: str, cp_size: int, models: Sequence[tuple[str, str]]) -> None:
    fields = {"cp_size": cp_size, **MODES[mode]}
    runs = [
        Compared(name=name, fields={"language": {**fields, "cp_distribution": how}}, exact=name == "bert")
        for name, how in models
    ]
    check_all(cp_size, *runs)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("mode", "cp_size"), covering(product(IN_PLAIN_GROUPS, (2, 3, 4)), (0,), (1,), kept=[("ring", 2)])
)
def test_one_modality_equals_one_process(mode: str, cp_size: int) -> None:
    """Padded text; four query heads and two key heads, so that heads do not divide by the degrees."""
    check_mode(mode, cp_size, [MODELS[(IN_PLAIN_GROUPS.index(mode) + cp_size) % 3]])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mode", IN_GROUPS_OF_GROUPS)
def test_groups_of_groups_equal_one_process(mode: str) -> None:
    check_mode(mode, 4, MODELS[:1] if mode == "hybrid" else MODELS[1:2])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("mode", "cp_size"),
    [*((mode, size) for mode in IN_PLAIN_GROUPS for size in (2, 3, 4)), *((mode, 4) for mode in IN_GROUPS_OF_GROUPS)],
)
def test_all_models_equal_one_process(mode: str, cp_size: int) -> None:
    check_mode(mode, cp_size, MODELS)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("mode", "how", "names"),
    [
        pytest.param("allgather", "makespan_min", ["gemma3"], marks=pytest.mark.exhaustive),
        ("allgather", "uniform", ["qwen3_vl"]),
        pytest.param("allgather", "uniform", ["qwen2_vl"], marks=pytest.mark.exhaustive),
        ("ring", "zigzag", ["gemma3"]),
        pytest.param("ring", "makespan_min", ["qwen2_vl"], marks=pytest.mark.exhaustive),
        pytest.param("ulysses", "uniform", ["gemma3"], marks=pytest.mark.exhaustive),
        ("ulysses", "makespan_min", ["qwen2_vl"]),
        pytest.param("allgather", "makespan_min", ["qwen2_vl"], marks=pytest.mark.exhaustive),
        pytest.param("allgather", "uniform", ["gemma3"], marks=pytest.mark.exhaustive),
        pytest.param("ring", "zigzag", ["qwen2_vl"], marks=pytest.mark.exhaustive),
        pytest.param("ring", "makespan_min", ["gemma3"], marks=pytest.mark.exhaustive),
        pytest.param("ulysses", "uniform", ["qwen2_vl", "qwen3_vl"], marks=pytest.mark.exhaustive),
        pytest.param("ulysses", "makespan_min", ["gemma3"], marks=pytest.mark.exhaustive),
    ],
)
def test_images_in_text_equal_one_process(mode: str, how: str, names: list[str]) -> None:
    """vision: rank 0; language: ranks 1-2. Gemma 3's images see themselves both ways, and most layers a window."""
    shared = {"cp_size": 2, "cp_mode": mode, "cp_distribution": how}
    check_all(3, *(Compared(name=name, fields={"vision": {}, "language": shared}) for name in names))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("allgather", ["qwen2_5_vl"]),
        ("ring", ["llava"]),
        ("ulysses", ["qwen2_5_vl"]),
        ("items", ["internvl"]),
        pytest.param("allgather", ["llava"], marks=pytest.mark.exhaustive),
        pytest.param("ring", ["qwen2_5_vl"], marks=pytest.mark.exhaustive),
        pytest.param("ulysses", ["llava"], marks=pytest.mark.exhaustive),
        pytest.param("items", ["qwen2_5_vl", "smolvlm", "llava"], marks=pytest.mark.exhaustive),
    ],
)
def test_encoders_equal_one_process(mode: str, names: list[str]) -> None:
    """vision: ranks 0-1; language: rank 2. Batches of images, and images packed into one sequence."""
    vision = {"cp_size": 2, "cp_mode": mode}
    check_all(3, *(Compared(name=name, fields={"vision": vision, "language": {}}) for name in names))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", swept(["qwen2_audio", "whisper"], "whisper"))  # again with recomputation, below
def test_clips_of_audio_equal_one_process(name: str) -> None:
    """audio: ranks 0-1; language: ranks 2-3."""
    audio = {"cp_size": 2, **({"cp_mode": "items"} if name == "qwen2_audio" else {})}
    check(name, {"audio": audio, "language": {"cp_size": 2}}, 4, exact=name == "whisper")


@pytest.mark.usefixtures("float64")
def test_models_of_ones_own_equal_one_process() -> None:
    """vision: ranks 0-1; audio: ranks 2-3; language: ranks 4-5. They call torch's attention."""
    fields = {
        "vision": {"cp_size": 2},
        "audio": {"cp_size": 2, "cp_mode": "items"},
        "language": {"cp_size": 2, "cp_mode": "ring"},
    }
    check("handwritten_two", fields, 6, exact=True)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "fields", "world", "options"),
    [
        pytest.param(
            "llama_tied",
            {"language": {"cp_size": 2, "tp_size": 2}},
            4,
            {"gradient_clip_val": 0.01},
            marks=pytest.mark.exhaustive,
        ),
        ("llama", {"language": {"cp_size": 2, "tp_size": 2, "sequence_parallel": True}}, 4, {}),
        pytest.param(
            "bert", {"language": {"cp_size": 2, "tp_size": 2}}, 4, {"exact": True}, marks=pytest.mark.exhaustive
        ),
        ("gpt2", {"language": {"cp_size": 3, "dp_size": 1, "pp_size": 2}}, 6, {"schedule": "zero_bubble"}),
        ("llama_tied", {"language": {"cp_size": 2, "dp_size": 2}}, 4, {"replicas": 2, "gradient_clip_val": 0.01}),
        pytest.param(
            "gemma3",
            {"vision": {"cp_size": 2, "cp_mode": "items"}, "language": {"cp_size": 2, "pp_size": 2}},
            6,
            {"variant": "encoder", "accumulate_grad_batches": 2},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "qwen2_vl",
            {"vision": {"tp_size": 2}, "language": {"cp_size": 2, "tp_size": 2, "sequence_parallel": True}},
            6,
            {"variant": "projector_only", "accumulate_grad_batches": 2},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "qwen3_vl",
            {"vision": {}, "language": {"cp_size": 2, "pp_size": 2}},
            5,
            {"schedule": "gpipe"},
            marks=pytest.mark.exhaustive,
        ),
        ("llava", {"vision": {"cp_size": 2, "dp_size": 1}, "language": {"dp_size": 2}}, 4, {"replicas": 2}),
        ("llava", {"vision": {"cp_size": 3}, "language": {"cp_size": 2, "cp_mode": "ulysses"}}, 5, {}),
        (
            "llava",
            {"vision": {"cp_size": 2, "colocate_with": "language"}, "language": {"cp_size": 2}},
            2,
            {"gradient_clip_val": 0.01},
        ),
        ("llava", {"vision": {"colocate_with": "language"}, "language": {"cp_size": 2}}, 2, {"variant": "language"}),
        pytest.param(
            "llava",
            {"vision": {"tp_size": 2, "colocate_with": "language"}, "language": {"cp_size": 2, "tp_size": 2}},
            4,
            {},
            marks=pytest.mark.exhaustive,
        ),
        ("clip", {"vision": {"cp_size": 2}, "language": {"cp_size": 2}}, 4, {"exact": True}),
        pytest.param(
            "blip_2",
            {"vision": {"cp_size": 2}, "language": {"cp_size": 2, "pp_size": 2}},
            6,
            {"schedule": "auto"},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_context_parallelism_combines_with_all_else(
    name: str, fields: dict[str, Any], world: int, options: dict[str, Any]
) -> None:
    check(name, fields, world, **options)


def recompute(module: L.LightningModule) -> None:
    module.model.gradient_checkpointing_enable({"use_reentrant": False})
    module.train()


def recompute_within(module: L.LightningModule) -> None:
    module.model.gradient_checkpointing_enable({"use_reentrant": True})
    module.train()


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore")
def test_layers_that_are_computed_again_for_their_backward_see_the_same_split() -> None:
    shared = {"language": {"cp_size": 2, "cp_mode": "ring"}}
    check_all(
        2,
        Compared(name="llama_tied", fields=shared, prepare=recompute),
        Compared(name="gpt2", fields=shared, prepare=recompute_within),
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.exhaustive
def test_layers_without_a_cache_that_are_computed_again_see_the_same_split() -> None:
    check("bert", {"language": {"cp_size": 2}}, 2, prepare=recompute_within, exact=True)


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.exhaustive
def test_layers_of_stages_that_are_computed_again_see_the_same_split() -> None:
    """vision: rank 0; language: cp ranks 1-2 and 3-4."""
    fields = {"vision": {}, "language": {"cp_size": 2, "pp_size": 2}}
    check("gemma3", fields, 5, prepare=recompute)


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", swept(["whisper", "qwen2_vl"], "qwen2_vl"))
def test_attention_without_a_mask_that_is_computed_again_sees_the_same_split(name: str) -> None:
    """audio or vision: ranks 0-1; language: ranks 2-3. Towers, packed towers and attention to another sequence."""
    if name == "whisper":
        fields: dict[str, Any] = {"audio": {"cp_size": 2}, "language": {"cp_size": 2}}
        check(name, fields, 4, prepare=recompute_within, exact=True)
    else:
        fields = {"vision": {"cp_size": 2, "cp_mode": "items"}, "language": {"cp_size": 2}}
        check(name, fields, 4, prepare=recompute)


def sizes_of_rings(rank: int) -> set[tuple[int, ...]]:
    seen, ring = set(), attention.Ring

    def noted(local: Any, split: Any, groups: Any, device: Any) -> Any:
        seen.add(tuple(group.size for group in groups))
        return ring(local, split, groups, device)

    with patch.object(attention, "Ring", noted):
        for inner in (None, 2, 4):
            language = Modality(cp_size=4, context={"cp_mode": "ring", "inner_ring_size": inner})
            fit(build("llama_tied"), batches_of("llama_tied", 1), strategy({"language": language}), 4)
    return seen


@pytest.mark.usefixtures("float64")
def test_an_inner_ring_has_the_size_that_is_given_and_else_that_of_a_node() -> None:
    """language: ranks 0-3 on one node; outer and inner rings of two, or one ring."""
    assert call_ranks(4, sizes_of_rings) == [{(2, 2), (4,)}] * 4
