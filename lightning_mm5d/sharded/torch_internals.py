"""The private names of torch that sharded tensors build on; each raises an ImportError where it has moved."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lightning_mm5d.config.errors import private


def as_plain_tensors() -> AbstractContextManager[None]:
    """Return a context in which torch functions take tensor subclasses for plain tensors."""
    return private(torch._C, "DisableTorchFunctionSubclass")()


def in_backward() -> bool:
    """Whether this thread runs a backward."""
    return private(torch._C, "_current_graph_task_id")() >= 0


def backward_frees_graph() -> bool:
    """Whether the running backward is the last one through its graph."""
    return not private(torch._C._autograd, "_get_current_graph_task_keep_graph")()


def is_view(x: Tensor) -> bool:
    """Whether autograd knows `x` as a view of another tensor."""
    return private(x, "_is_view")()


def assert_on_device(condition: Tensor) -> None:
    """Fail on the device where the 0-dim `condition` is false, without waiting for it here."""
    private(torch, "_assert_async")(condition)
