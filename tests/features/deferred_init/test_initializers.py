"""A module of the meta device initialises itself, to what an ordinary construction gives where that is possible."""

from __future__ import annotations

import pytest
import torch
from torch import UntypedStorage, nn
from torch.nn.utils import parametrizations
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.deferred_init import journal
from lightning_mm5d.features.deferred_init.construction import initialize_meta
from lightning_mm5d.features.deferred_init.recorded import Memory
from zoo import CASES

from .construction import Build, assert_equal_modules, materialized, seed_all

LLAMA_CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
)
NO_INITIALISER = {"handwritten_dual"}  # a scale in a module without reset_parameters


@pytest.mark.parametrize("name", sorted(CASES.keys() - NO_INITIALISER))
def test_families_of_the_zoo_initialise_themselves_as_ever(name: str) -> None:
    seed_all()
    expected = CASES[name].make_module()
    state = torch.get_rng_state()
    with torch.device("meta"):
        module = CASES[name].make_module()
    seed_all()
    materialized(module, initialize_meta(module))
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal_modules(module, expected)


def on_meta(build: Build) -> nn.Module:
    with torch.device("meta"):
        return build()


class Table(nn.Module):
    """Computes its buffer and initialises its weight in `reset_parameters`, as its constructor does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 4))
        self.register_buffer("ramp", torch.empty(4), persistent=False)
        self.register_buffer("window", torch.empty(7)[:6], persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight)
        self.ramp.copy_(torch.arange(4) / 4)
        self.window.copy_(torch.hann_window(6))


MODULES: dict[str, Build] = {
    "linear": lambda: nn.Linear(3, 4),
    "embedding": lambda: nn.Embedding(4, 3, padding_idx=1),
    "transformer": lambda: nn.TransformerDecoderLayer(8, 2, 16),
    "attention": lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4, add_bias_kv=True),
    "recurrent": lambda: nn.ModuleList([nn.LSTM(3, 4, 2, proj_size=2), nn.GRUCell(3, 4)]),
    "norms": lambda: nn.Sequential(nn.BatchNorm2d(3), nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.RMSNorm(3)),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose1d(2, 2, 2), nn.PReLU()),
    "other": lambda: nn.Sequential(nn.Bilinear(2, 3, 4), nn.EmbeddingBag(5, 3), nn.Embedding(3, 2)),
    "own": Table,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "bfloat16": lambda: nn.Linear(3, 4, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_of_torch_initialise_themselves_as_ever(name: str) -> None:
    seed_all()
    expected = MODULES[name]()
    module = on_meta(MODULES[name])
    seed_all()
    materialized(module, initialize_meta(module))
    assert_equal_modules(module, expected)


@pytest.mark.parametrize("name", ["llava", "whisper", "clip"])
def test_nothing_of_a_family_is_left_undefined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = journal._initial_storage

    def poisoned(memory: Memory) -> UntypedStorage:
        storage = made(memory)
        if memory.initial is None:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)  # NaN of any dtype
            poisoned_memories.append(storage.nbytes())
        return storage

    poisoned_memories: list[int] = []
    monkeypatch.setattr(journal, "_initial_storage", poisoned)
    seed_all()
    expected = CASES[name].make_module()
    module = on_meta(CASES[name].make_module)
    seed_all()
    materialized(module, initialize_meta(module))
    assert poisoned_memories
    assert_equal_modules(module, expected)


def test_a_transformers_model_that_was_changed_initialises_its_parts() -> None:
    def build() -> nn.Module:
        model = LlamaForCausalLM(LLAMA_CONFIG)
        model.lm_head = nn.Linear(16, 5)
        model.extra = nn.Linear(2, 2)
        return model

    module = on_meta(build)
    assert module.model.embed_tokens.weight.is_meta
    seed_all()
    materialized(module, initialize_meta(module))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert tensor.isfinite().all(), name
    assert module.lm_head.weight.std() < 0.03  # the model's own standard deviation is 0.02
    assert module.model.rotary_emb.inv_freq[0] == 1


def test_a_tied_tensor_gets_the_value_of_the_first_module() -> None:
    def build() -> nn.Module:
        module = nn.Module()
        module.embedding = nn.Embedding(6, 4, padding_idx=0)
        module.head = nn.Linear(4, 6, bias=False)
        module.head.weight = module.embedding.weight
        return module

    seed_all()
    expected = build()
    module = on_meta(build)
    seed_all()
    materialized(module, initialize_meta(module))
    assert_equal_modules(module, expected)


def test_only_what_is_asked_for_is_initialised() -> None:
    module = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    weights = initialize_meta(module, ["1.weight", "1.bias"])
    assert weights.names == {"1.weight", "1.bias"}
    materialized(module, weights)
    assert module[0].weight.is_meta
    assert not module[1].weight.is_meta


def test_refuses_a_tensor_that_nothing_initialises() -> None:
    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2))
        module[0].register_parameter("scale", nn.Parameter(torch.ones(2)))
        return module

    with pytest.raises(ConfigError, match=r"0\.scale: got .* give Linear a method reset_parameters that writes scale"):
        initialize_meta(on_meta(build))


def test_refuses_an_initialiser_that_writes_a_part() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4))

        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight[:2])

    with pytest.raises(ConfigError, match="weight: got 'a tensor of the meta device that no init"):
        initialize_meta(on_meta(Half))


def test_refuses_adapters_whose_constructor_cannot_be_repeated() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    module = on_meta(lambda: inject_adapter_in_model(LoraConfig(target_modules=["0"]), nn.Sequential(nn.Linear(2, 2))))
    with pytest.raises(ConfigError, match=r"0: got 'Linear on the meta device'.*peft"):
        initialize_meta(module)


def test_transformers_marks_what_it_has_initialised_by_the_name_that_is_built_on() -> None:
    model = LlamaForCausalLM(LLAMA_CONFIG)
    model.init_weights()
    assert all("_is_hf_initialized" in vars(part) for part in model.modules())
