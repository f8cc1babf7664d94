"""Families on grids of ranks compute what they compute on one: losses, every gradient, parameters after three steps.

All ranks hold one model together, as 2 x 2 (2d), 2 x 2 x 2 (2.5d, 3d), or with uneven panels 3 x 3 (2d). All families
of a grid run one after the other in the same processes.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.grids.block import AXES, GridShape
from lightning_mm5d.features.grids.grid_operations import Line
from lightning_mm5d.features.grids.layers_in_blocks import Grids
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.tensor_parallel.plan_lookup import plans_of
from lightning_mm5d.tensor_parallel.resolve import Division, resolve
from ranks import run_ranks
from tensor_parallel.families import (
    FAMILIES,
    FLOAT32,
    GROUPED,
    IDS,
    TEXT,
    VISION,
    Family,
    Root,
    labelled_pixels,
    made,
    tokens,
)
from tensor_parallel.test_families import Step, train

GRIDS: dict[str, Modality] = {
    "2d": Modality(tp_size=4, tensor={"tp_mode": "2d"}),
    "2.5d": Modality(tp_size=8, tensor={"tp_mode": "2.5d", "tp_depth": 2}),
    "3d": Modality(tp_size=8, tensor={"tp_mode": "3d"}),
    "2d, 3 x 3": Modality(tp_size=9, tensor={"tp_mode": "2d"}),
}
ODD: dict[str, Any] = {"hidden_size": 33, "num_attention_heads": 3, "intermediate_size": 51}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def three() -> dict[str, Any]:
    return tokens(samples=3)


def five() -> dict[str, Any]:
    return tokens(samples=5)


def three_pictures() -> dict[str, Any]:
    return {"pixel_values": torch.randn(3, 3, 12, 12), "labels": torch.tensor([0, 1, 2])}


# widths, heads, a vocabulary of 67 and samples that two do not divide
UNEVEN = {
    "uneven llama": Family(
        made(
            "LlamaForCausalLM",
            "LlamaConfig",
            **(GROUPED | ODD | {"hidden_size": 35, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6}),
        ),
        three,
        FLOAT32,
        {"use_cache": False},
    ),
    "uneven groups": Family(
        made(
            "LlamaForCausalLM",
            "LlamaConfig",
            **(GROUPED | ODD | {"hidden_size": 45, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 6}),
        ),
        three,
        FLOAT32,
        {"use_cache": False},
    ),
    "uneven gpt2": Family(
        made(
            "GPT2LMHeadModel",
            "GPT2Config",
            **IDS,
            **{"n_embd": 33, "n_layer": 2, "n_head": 3, "n_positions": 32, "n_inner": 51},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        ),
        five,  # more than the 4 parts of rows in 3d, which do not divide them
        FLOAT32,
        {"use_cache": False},
    ),
    "uneven bert": Family(made("BertForMaskedLM", "BertConfig", **(TEXT | ODD | UNDROPPED)), three),
    "uneven vit": Family(
        made("ViTForImageClassification", "ViTConfig", **(VISION | ODD | UNDROPPED), num_labels=3), three_pictures
    ),
}
MODELS = FAMILIES | UNEVEN
REFUSED = {
    "one head": Family(
        made("LlamaForCausalLM", "LlamaConfig", **(GROUPED | {"num_attention_heads": 1, "num_key_value_heads": 1})),
        tokens,
    ),
    "dropped paths": Family(
        made("Dinov2ForImageClassification", "Dinov2Config", **VISION, drop_path_rate=0.1), labelled_pixels
    ),
}
FEW = ("llama", "gpt2", "bert", "vit", "clip")
MORE = ("opt", "qwen3", "gemma3_text", "mistral", "roberta", "siglip", "dinov2", "phi3", "gpt_neox", "llama_eager")


def layers_of(root: nn.Module) -> list[str]:
    """The layers of all lists that are in no other list."""
    modules = root.named_modules()
    lists = [path for path, one in modules if isinstance(one, nn.ModuleList) and "feature_extractor" not in path]
    lists = [path for path in lists if "parametrizations" not in path]
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    return [f"{path}.{name}" for path in outer for name, _ in root.get_submodule(path).named_children()]


def divided_on(root: Root, modality: Modality) -> Division:
    shape, layers = GridShape.of(modality), layers_of(root)
    assert shape is not None

    def parts(path: str, degree: int) -> int:
        return shape.side if any(f"{path}.".startswith(f"{layer}.") for layer in layers) else degree

    division = resolve(root, plans_of(root), lambda name: ("all", shape.size), parts=parts)
    return Grids(root, {"all": shape}, {"all": layers}).divided(division, ())


def run(rank: int, names: list[str], modality: Modality) -> tuple[dict[str, list[Step]], str | None]:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    shape, group, lines = GridShape.of(modality), TensorGroup(dist.group.WORLD), {}
    assert shape is not None
    for axis in AXES:
        for line in shape.lines(axis):
            if len(line) > 1:
                made = dist.new_group(list(line))
                if rank in line:
                    lines[axis] = Line(made)
    done: dict[str, list[Step]] = {}
    for name in names:
        try:
            division = divided_on(MODELS[name].build(), modality)
            done[name] = train(MODELS[name], division, group, lines={"all": lines})
        except BaseException:
            dist.destroy_process_group()
            return done, f"{name}: {traceback.format_exc()}"
    return done, None


def check(grid: str, names: tuple[str, ...]) -> None:
    modality = GRIDS[grid]
    for rank, (done, why) in enumerate(run_ranks(modality.tp_size, run, list(names), modality)):
        assert why is None, why
        for name in names:
            family = MODELS[name]
            expected = train(family)
            for step, (loss, gradients) in enumerate(done[name]):
                wanted_loss, wanted = expected[step]
                where = f"{grid}, {name}, rank {rank}, step {step}"
                assert loss == pytest.approx(wanted_loss, rel=family.tolerance), where
                assert set(gradients) == set(wanted), where
                scale = max(float(gradient.abs().max()) for gradient in wanted.values())
                for key, gradient in wanted.items():
                    largest = max(float(gradient.abs().max()), 1e-3 * scale)
                    difference = float((gradients[key] - gradient).abs().max()) / largest
                    assert difference <= family.tolerance, f"{where}, {key}: {difference}"


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        ("2d", ("bert", "clip", "uneven llama", "wav2vec2")),
        pytest.param("2d", ("llama", "gpt2", "vit"), marks=pytest.mark.exhaustive),
        ("2.5d", ("uneven vit",)),
        ("3d", ("uneven gpt2",)),
        pytest.param("3d", ("clip",), marks=pytest.mark.exhaustive),
    ],
)
def test_families_on_a_grid_train_like_whole_ones(grid: str, names: tuple[str, ...]) -> None:
    check(grid, names)


@pytest.mark.exhaustive
@pytest.mark.parametrize("grid", GRIDS)
def test_more_families_on_a_grid_train_like_whole_ones(grid: str) -> None:
    check(grid, (*FEW, *MORE, *UNEVEN) if grid != "2d, 3 x 3" else ("llama", "bert", "vit", "opt", *UNEVEN))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("chatglm", "would be tokens"),
        ("mixtral", "experts"),
        ("t5", "parameter beside"),
        ("swin", "parameter beside"),
        ("falcon_heads", "no plan|beside|divides|arguments"),
        ("one head", "1 heads cannot be shared by 2 ranks"),
        ("dropped paths", "drops whole samples"),
    ],
)
def test_what_cannot_be_in_blocks_is_refused_by_name(name: str, why: str) -> None:
    root: Any = (FAMILIES | REFUSED)[name].build()
    with pytest.raises(ConfigError, match=why):
        divided_on(root, GRIDS["2d"])


@pytest.mark.parametrize(("kind", "rate"), [(nn.Dropout1d, 0.1), (nn.Dropout1d, 0.0), (nn.Dropout, 0.1)])
def test_dropout_of_whole_tokens_is_refused_by_name(kind: type[nn.Module], rate: float) -> None:
    root: Any = FAMILIES["llama"].build()
    root.get_submodule(layers_of(root)[0]).dropout = kind(rate)
    if kind is nn.Dropout1d and rate:
        with pytest.raises(ConfigError, match=r"dropout.*Dropout1d drops whole samples or tokens"):
            divided_on(root, GRIDS["2d"])
    else:
        divided_on(root, GRIDS["2d"])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_gated_unit_with_adapters_is_no_mixing_code() -> None:
    peft = pytest.importorskip("peft")
    root: Any = FAMILIES["phi3"].build()
    root.model = peft.get_peft_model(root.model, peft.LoraConfig(r=2, target_modules=["gate_up_proj", "down_proj"]))
    division = divided_on(root, GRIDS["2d"])
    assert division.in_blocks["all"].costs.plan.adapters


def test_a_norm_over_samples_is_refused_by_name() -> None:
    root: Any = FAMILIES["llama"].build()
    layer = layers_of(root)[0]
    root.get_submodule(layer).input_layernorm = nn.BatchNorm1d(32)
    with pytest.raises(ConfigError, match="input_layernorm"):
        divided_on(root, GRIDS["2d"])
