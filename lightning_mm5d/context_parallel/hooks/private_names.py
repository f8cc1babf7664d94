"""The private names of torch and transformers that sequences of sharded layers need, each behind one function.

Neither library has a public way to read them. Every function raises `RuntimeError` where its name has moved: a default
would silently lose records or gradients.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, cast

import torch
from transformers.utils import output_capturing

_SETTING = "_attn_implementation"


def collector() -> ContextVar[dict[str, Any] | None]:
    """Return the variable with the records that a transformers model collects now, such as router logits."""
    return cast("ContextVar[dict[str, Any] | None]", _read(output_capturing, "_active_collector"))


def attention_name(config: Any) -> str | None:
    """Return the name of the attention that a transformers config chooses."""
    return cast("str | None", _read(config, _SETTING))


def name_attention(config: Any, name: str | None) -> None:
    """Choose an attention, for a config and all that it sets together with itself."""
    _read(config, _SETTING)
    setattr(config, _SETTING, name)


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return the pair of functions that packs and unpacks what autograd saves now; None where nothing does."""
    found = _read(torch._C._autograd, "_top_saved_tensors_default_hooks")(True)
    return cast("tuple[Any, Any] | None", found)


def _read(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        of = getattr(owner, "__name__", type(owner).__name__)
        raise RuntimeError(
            f"{of}.{name} has moved (torch {torch.__version__}). cp_size > 1 needs it: use the versions of torch and "
            "transformers that this version of lightning_mm5d was tested with, or cp_size=1"
        ) from error
