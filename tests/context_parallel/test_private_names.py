"""The private names of torch and transformers are where this library looks, and an error says where one has moved."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig
from transformers.utils import output_capturing

from lightning_mm5d.context_parallel.hooks import layer_attention
from lightning_mm5d.sharded import torch_internals


def test_the_collector_holds_what_a_model_records() -> None:
    assert layer_attention.collector().get() is None


def test_a_config_takes_the_name_of_an_attention() -> None:
    config = LlamaConfig()
    layer_attention.name_attention(config, "eager")
    assert layer_attention.attention_name(config) == "eager"


def test_the_hooks_are_those_that_pack_what_autograd_saves() -> None:
    def same(x: Tensor) -> Tensor:
        return x

    assert torch_internals.saved_tensor_hooks() is None
    with saved_tensors_hooks(same, same):
        assert torch_internals.saved_tensor_hooks() == (same, same)


@pytest.mark.parametrize(
    ("owner", "name", "read"),
    [
        (output_capturing, "_active_collector", layer_attention.collector),
        (torch._C._autograd, "_top_saved_tensors_default_hooks", torch_internals.saved_tensor_hooks),
    ],
    ids=["collector", "hooks"],
)
def test_a_name_that_has_moved_is_an_error(
    owner: Any, name: str, read: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(ImportError, match=name):
        read()


def test_a_config_without_the_name_of_an_attention_is_an_error() -> None:
    config = SimpleNamespace()
    for use in (layer_attention.attention_name, lambda one: layer_attention.name_attention(one, "eager")):
        with pytest.raises(ImportError, match="_attn_implementation"):
            use(config)
    assert not vars(config)
