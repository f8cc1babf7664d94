"""What sequences cannot be shared with is refused by name, before a process group where it can be known, on all ranks.

Where processes run, ranks 0-1 share each sequence. A rank that went on alone would wait for the others: each run has a
limit of time, and what is refused is refused in less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from features.refusals.test_own_norms import REFUSALS
from features.toys import Layout, Run, together
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.layout.layout import Layout as Ranks
from parity.harness import fit, strategy
from tensor_parallel.layouts import batches_of, build
from zoo.case import FIRST_TEXT_ID, VOCABULARY, Batch, TinyModule
from zoo.handwritten import Layer, OwnLayers
from zoo.text import IDS, LLAMA

SHARED = {"language": Modality(cp_size=2)}
TINY: dict[str, Any] = LLAMA | {"num_hidden_layers": 2}


# --- what is written ---


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cp_size": 0}, "cp_size: got 0. It is a whole number of at least 1"),
        ({"cp_size": -2}, "The nearest is 1"),
        ({"cp_size": True}, "cp_size: got True"),
        ({"cp_size": "2"}, "cp_size: got '2'"),
        ({"cp_size": None}, "cp_size: got None"),
        (
            {"cp_size": 2, "cp_mode": "rings"},
            "cp_mode: got 'rings'. It is one of allgather, ring, ulysses, hybrid, items",
        ),
        ({"cp_mode": "rings"}, "Did you mean 'ring'?"),
        ({"cp_size": 2, "context": {"cp_mode": None}}, "cp_mode: got None"),
        ({"cp_size": 2, "cp_distribution": "zig-zag"}, "Did you mean 'zigzag'?"),
        ({"cp_size": 2, "cp_distribution": 3}, "cp_distribution: got 3. It is one of uniform, zigzag, makespan_min"),
        (
            {"cp_size": 4, "ulysses_size": 2},
            "ulysses_size: got 2. It is the size of the inner groups of cp_mode='hybrid'",
        ),
        ({"cp_size": 4, "cp_mode": "ring", "ulysses_size": 2}, "and cp_mode is 'ring'"),
        (
            {"cp_size": 4, "inner_ring_size": 2},
            "inner_ring_size: got 2. It is the size of the inner rings of cp_mode='ring'",
        ),
        (
            {"cp_size": 4, "cp_mode": "ring", "inner_ring_size": 3},
            "Inner rings are of equal sizes, so it divides cp_size=4. Use 1 or 2 or 4",
        ),
        ({"cp_size": 4, "cp_mode": "ring", "inner_ring_size": 0}, "inner_ring_size: got 0"),
        ({"cp_size": 4, "cp_mode": "hybrid"}, "ulysses_size: got None. It divides cp_size=4"),
        ({"cp_size": 4, "cp_mode": "hybrid", "ulysses_size": 4}, "Use 2"),
        ({"cp_size": 4, "cp_mode": "hybrid", "ulysses_size": 1}, "Use 2"),
        ({"cp_size": 6, "cp_mode": "hybrid", "ulysses_size": 4}, "Use 2 or 3"),
        ({"cp_size": 4, "cp_mode": "hybrid", "ulysses_size": True}, "ulysses_size: got True"),
        ({"cp_size": 4, "cp_mode": "hybrid", "ulysses_size": "2"}, "ulysses_size: got '2'"),
        ({"cp_size": 3, "cp_mode": "hybrid", "ulysses_size": 3}, "cp_size=3 has no such divisor"),
        ({"cp_size": 2, "cp_mode": "hybrid"}, "or a cp_size such as 4"),
        (
            {"cp_size": 2, "cp_mode": "items"},
            "cp_mode: got 'items'. Items are whole images, frames or clips of an encoder",
        ),
    ],
    ids=str,
)
def test_words_that_mean_nothing_are_refused_with_their_path(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy({"language": Modality(**fields)})
    assert str(caught.value).startswith("modalities.language.")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"cp_size": 1, "cp_mode": "hybrid"},
        {"cp_size": 4, "cp_mode": "hybrid", "ulysses_size": 2},
        {"cp_size": 6, "cp_mode": "hybrid", "ulysses_size": 3},
        {"cp_size": 3, "cp_mode": "ulysses", "cp_distribution": "uniform"},
    ],
    ids=str,
)
def test_words_that_fit_are_taken(fields: dict[str, Any]) -> None:
    strategy({"vision": Modality(cp_size=2, context={"cp_mode": "items"}), "language": Modality(**fields)})


def test_sizes_that_do_not_fit_the_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"language: 3 \* dp_size"):
        Ranks.build({"language": Modality(cp_size=3)}, world_size=4, loss_modality="language")


# --- models, before any process group ---


def refused(module: L.LightningModule, modalities: dict[str, Modality] = SHARED) -> str:
    """What a run says that would start two processes by itself."""
    with pytest.raises(ConfigError) as caught:
        fit(module, batches_of("llama", 1), strategy(dict(modalities), start_method="fork"), 2)
    assert not torch.distributed.is_initialized()
    return str(caught.value)


def dropping(name: str, field: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4} if name == "gpt2" else TINY
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **IDS | sizes, **{field: 0.1}))

    return make


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "dropout of attention weights in llama": (
        dropping("llama", "attention_dropout"),
        ("model.model.layers.0.self_attn", "attention_dropout=0.1", "Set attention_dropout=0.0"),
    ),
    "dropout of attention weights in gpt2": (
        dropping("gpt2", "attn_pdrop"),
        ("model.transformer.h.0.attn", "Set attn_pdrop=0.0"),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_drop_out_attention_weights_are_refused_by_the_path_of_the_module(name: str) -> None:
    make, said = MODELS[name]
    message = refused(TinyModule(make(), use_cache=False))
    assert message.startswith("modalities.language.cp_size: got 2. "), message
    assert "cp_size=1" in message
    for words in said:
        assert words in message


class Manual(TinyModule):
    def __init__(self) -> None:
        super().__init__(build("llama").model, use_cache=False)
        self.automatic_optimization = False


def test_manual_optimization_is_refused() -> None:
    module, chosen = Manual(), strategy(dict(SHARED))
    chosen.__dict__["layout"] = Ranks.build(SHARED, world_size=2, loss_modality="language")
    with pytest.raises(ConfigError, match="automatic_optimization"):
        REFUSALS.check(module, chosen.plan(module), torch.device("cpu"))


# --- layers of one's own ---


LANGUAGE = {"language": Modality(cp_size=2, module=["embedding", "layers", "head"])}


class Unlisted(OwnLayers):
    """Its layers are no list."""

    def __init__(self) -> None:
        super().__init__(lambda: Layer(causal=True))
        self.first, self.second = self.layers
        self.layers = None


def test_layers_that_are_no_list_are_refused() -> None:
    fields = Modality(cp_size=2, module=["embedding", "first", "second", "head"])
    message = refused(Unlisted(), {"language": fields})
    assert "modalities.language.cp_size: got 2. 'language' has no list of layers" in message


# --- what only running shows, on all ranks ---


def tokens(length: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(FIRST_TEXT_ID, VOCABULARY, (4, length), generator=generator)}


def attempt(run: Run, module: L.LightningModule, batches: list[Any], plain: bool = False) -> str:
    """The error of a run, and that it came at once."""
    began = time.monotonic()
    modalities = (run.layout or Layout({}, 1)).modalities
    try:
        fit(module, batches, strategy(modalities, num_microbatches=1), 2)
    except ConfigError as error:
        assert time.monotonic() - began < 20
        return str(error)
    return "no error"


class Calling(TinyModule):
    """Calls its model as `call` says."""

    def __init__(self, call: Callable[[Any, Batch], Tensor], **config: Any) -> None:
        super().__init__(build("llama").model)
        self.call = call
        for key, value in config.items():
            setattr(self.model.config, key, value)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.call(self.model, batch)


def with_the_keys_of_an_earlier_call(model: Any, batch: Batch) -> Tensor:
    ids = batch["input_ids"]
    first = model(ids[:, :8], use_cache=True)
    return model(ids[:, 8:], past_key_values=first.past_key_values).logits.mean()


def with_one_token_behind_an_earlier_call(model: Any, batch: Batch) -> Tensor:
    ids = batch["input_ids"]
    with torch.no_grad():
        first = model(ids[:, :8], use_cache=True)
    return model(ids[:, 8:9], past_key_values=first.past_key_values).logits.mean()


def with_a_mask_of_another_length(model: Any, batch: Batch) -> Tensor:
    size = batch["input_ids"].shape[1] + 3
    mask = torch.ones(1, 1, size, size).tril().bool()
    return model(batch["input_ids"], attention_mask=mask, use_cache=False).logits.mean()


def dropping_weights_after_all(model: Any, batch: Batch) -> Tensor:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return model(batch["input_ids"], use_cache=False).logits.mean()


CALLS: dict[Callable[[Any, Batch], Tensor], str] = {
    with_the_keys_of_an_earlier_call: "past_key_values",
    with_one_token_behind_an_earlier_call: "past_key_values",
    with_a_mask_of_another_length: "attention_mask",
    dropping_weights_after_all: "dropout=0.1",
}


def test_calls_that_need_what_other_ranks_have_are_refused_on_all_ranks() -> None:
    def scenario(run: Run) -> dict[str, str]:
        return {call.__name__: attempt(run, Calling(call), batches_of("llama", 1)) for call in CALLS}

    for errors in together(Layout(SHARED, 2), scenario):
        for call, said in CALLS.items():
            error = errors[call.__name__]
            assert error.startswith("modalities.language.cp_size: got"), f"{call.__name__}: {error}"
            assert said in error


class Dropping(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(dim=2)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return hidden + out.transpose(1, 2).flatten(-2)


def test_dropout_that_a_layer_gives_torchs_attention_is_refused_on_all_ranks() -> None:
    def scenario(run: Run) -> str:
        return attempt(run, OwnLayers(lambda: Dropping(causal=True)), [tokens(12)])

    for dropout in together(Layout(LANGUAGE, 2), scenario):
        assert "dropout=0.1" in dropout


class Again(Layer):
    """Computes its own inside again for the backward."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__(causal=True)
        self.is_reentrant = is_reentrant

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, hidden, use_reentrant=self.is_reentrant)


def test_torchs_attention_that_is_computed_again_in_the_midst_of_a_layer_is_refused_on_all_ranks() -> None:
    def scenario(run: Run) -> list[str]:
        made = [partial(Again, is_reentrant=is_reentrant) for is_reentrant in (True, False)]
        return [attempt(run, OwnLayers(layer), [tokens(12)]) for layer in made]

    for errors in together(Layout(LANGUAGE, 2), scenario):
        for error in errors:
            assert "activation checkpointing inside of a layer" in error
