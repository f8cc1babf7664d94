"""The private names of torch and transformers on which sequences of sharded layers depend, one function for each.

Neither library has a public way to read them. Each function raises `ImportError` where its name has moved.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, cast

import torch
from transformers.utils import output_capturing

from lightning_mm5d.config.errors import private

_SETTING = "_attn_implementation"


def collector() -> ContextVar[dict[str, Any] | None]:
    """Return the variable with the records that a transformers model collects now, such as router logits."""
    return cast("ContextVar[dict[str, Any] | None]", private(output_capturing, "_active_collector"))


def attention_name(config: Any) -> str | None:
    """Return the name of the attention that a transformers config chooses."""
    return cast("str | None", private(config, _SETTING))


def name_attention(config: Any, name: str | None) -> None:
    """Choose an attention, for a config and all that it sets together with itself."""
    private(config, _SETTING)
    setattr(config, _SETTING, name)


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return the pair of functions that packs and unpacks what autograd saves now; None where nothing does."""
    found = private(torch._C._autograd, "_top_saved_tensors_default_hooks")(True)
    return cast("tuple[Any, Any] | None", found)
