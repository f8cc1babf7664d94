"""Loads a folder with transformers and with deferred weights, and compares every tensor; builders of tiny models."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_mm5d import from_pretrained
from lightning_mm5d.features.deferred_init.deferred_init import DeferredInit
from lightning_mm5d.features.deferred_init.deferred_weights import DeferredWeights
from lightning_mm5d.features.deferred_init.pretrained import PretrainedSource

SMALL: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32,
}  # fmt: skip
EXPERTS = SMALL | {"moe_intermediate_size": 8}

Load = Callable[..., nn.Module]


def llama(**options: Any) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **options))


def bert() -> transformers.BertForMaskedLM:
    own = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    return transformers.BertForMaskedLM(transformers.BertConfig(**own))


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """The folder with the tensors of its file changed, or named otherwise."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in change(load_file(file)).items()}
    save_file(tensors, file, {"format": "pt"})
    return folder


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    parameters = module.named_parameters(remove_duplicate=False)
    return dict(parameters) | dict(module.named_buffers(remove_duplicate=False))


def deferred(build: Callable[[], nn.Module]) -> tuple[nn.Module, DeferredWeights]:
    """A module whose weights are in files or yet to be made."""
    torch.manual_seed(1)
    with DeferredInit() as recorder:
        module = build()
    return module, recorder.weights(module)


def assert_same(
    cls: Any, folder: Path, change: Callable[[Any], Any] = lambda model: model, **options: Any
) -> list[str]:
    """Assert that deferred weights are those that transformers loads, and in the same types and ties.

    Args:
        cls: a model class.
        folder: to load.
        change: what the user does with the model then.
        options: of ``from_pretrained``.

    Returns:
        the names of what lies in files.
    """
    torch.manual_seed(1)
    expected = change(cls.from_pretrained(folder, **options))
    drawn = torch.rand(2)
    module, weights = deferred(lambda: change(from_pretrained(cls, folder, **options)))
    weights = pickle.loads(pickle.dumps(weights))
    assert weights.unknown == ()
    made: dict[str, Tensor] = {}
    weights.materialize(module, lambda names, value: made.update(dict.fromkeys(names, value.clone())))
    assert torch.equal(torch.rand(2), drawn)
    source = PretrainedSource(weights.stored)
    made |= {name: source.read(name) for name in source.names()}
    theirs, ours = tensors_of(expected), tensors_of(module)
    assert list(theirs) == list(ours)
    for name, wanted in theirs.items():
        assert ours[name].is_meta, f"{name} takes memory"
        assert made[name].dtype == ours[name].dtype == wanted.dtype, name
        assert ours[name].requires_grad == wanted.requires_grad, name
        assert torch.equal(made[name], wanted), name
    for name in source.names():
        region = [(size // 3, size - size // 4) for size in source.shape(name)]
        assert torch.equal(source.read(name, region), theirs[name][tuple(slice(*bounds) for bounds in region)]), name
    assert _ties(theirs) == _ties(ours)
    assert module.training == expected.training
    return source.names()


def _ties(tensors: dict[str, Tensor]) -> set[frozenset[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {frozenset(tied) for tied in names.values()}
