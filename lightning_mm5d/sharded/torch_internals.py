"""The private names of torch that sharded tensors build on, each of which raises an ImportError where it has moved.

Collectives of one tensor have the names that torch 2.13 gave them; torch 2.11 and 2.12 know them by older ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _python_dispatch, checkpoint
from torch.utils._pytree import tree_map_only

from lightning_mm5d.config.errors import private


class _Ended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        raise RuntimeError("trying to differentiate twice a function that was marked with @once_differentiable")


def ends_graph(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark the backward of an autograd function as without a graph: a gradient of what it returns is an error.

    torch's `once_differentiable` does so only where gradients that come in have a graph. Without that, a gradient that
    depends on what the forward has saved would be taken for a constant.
    """

    @functools.wraps(backward)
    def ended(ctx: Any, *gradients: Tensor | None) -> Any:
        with torch.no_grad():
            returned = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return returned
        return tree_map_only(Tensor, lambda gradient: _Ended.apply(gradient.detach().requires_grad_()), returned)

    return ended


def as_plain_tensors() -> AbstractContextManager[None]:
    """Return a context in which torch functions take tensor subclasses for plain tensors."""
    return private(torch._C, "DisableTorchFunctionSubclass")()


def number_of_backward() -> int:
    """The number of the backward that this thread runs; -1 without one."""
    return private(torch._C, "_current_graph_task_id")()


def in_backward() -> bool:
    """Whether this thread runs a backward."""
    return number_of_backward() >= 0


def backward_frees_graph() -> bool:
    """Whether the running backward is the last one through its graph."""
    return not private(torch._C._autograd, "_get_current_graph_task_keep_graph")()


def is_view(x: Tensor) -> bool:
    """Whether autograd knows `x` as a view of another tensor."""
    return private(x, "_is_view")()


def version_of(x: Tensor) -> int:
    """How often `x` has been written in place; 0 in inference mode, in which torch does not count."""
    return 0 if x.is_inference() else x._version


@contextmanager
def writes_counted() -> Iterator[None]:
    """Enter where tensors are made whose writes torch counts, as it does not those of inference mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    is_grad_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
        yield


def assert_on_device(condition: Tensor) -> None:
    """Fail on the device where the 0-dim `condition` is false, without waiting for it here."""
    private(torch, "_assert_async")(condition)


def is_held_once(x: Tensor) -> bool:
    """Whether the Python object `x` alone keeps its memory: no view, no other node of a graph, nothing saved of it.

    Other Python references to the same object do not count, so `x` is one that the caller has just been given.
    """
    uses = private(torch._C, "_storage_Use_Count")(private(x.untyped_storage(), "_cdata"))
    return private(x, "_use_count")() == 1 and uses == 2 and not is_view(x)  # of the tensor, and of its storage here


def number_in_backward(x: Tensor) -> int:
    """The number of the node that made `x`; of the nodes that are ready, a backward runs the one with the largest."""
    return private(x.grad_fn, "_sequence_nr")()


_FIRST_NUMBER = "mm5d: number when made"


def renumber_in_backward(x: Tensor, number: int) -> None:
    """Give the node that made `x` another number, which changes when it runs and never what it computes."""
    node: Any = x.grad_fn
    node.metadata.setdefault(_FIRST_NUMBER, number_in_backward(x))
    private(node, "_set_sequence_nr")(number)


def number_when_made(node: Any) -> int:
    """Return the number that a node of a graph had at first; those of nodes that were made later are larger."""
    number = node.metadata.get(_FIRST_NUMBER)
    return private(node, "_sequence_nr")() if number is None else number


def is_observed() -> bool:
    """Whether a mode sees all operations, as selective checkpointing does, which keeps results of some."""
    return bool(private(_python_dispatch, "_get_current_dispatch_mode_stack")())


class Watching(_python_dispatch.TorchDispatchMode):
    """A mode that only watches: it sees operations within `unobserved`, too."""


@contextmanager
def unobserved() -> Generator[None, None, None]:
    """Enter a context in which no mode sees operations, but for those that only watch."""
    modes = private(_python_dispatch, "_get_current_dispatch_mode_stack")()
    with private(_python_dispatch, "_disable_current_modes")(), ExitStack() as stack:
        for mode in modes:
            if isinstance(mode, Watching):
                stack.enter_context(mode)
        yield


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return the pair of functions that packs and unpacks what autograd saves now; None where nothing does."""
    return private(torch._C._autograd, "_top_saved_tensors_default_hooks")(True)


def in_checkpoint() -> bool:
    """Whether torch's checkpoint runs the code around, and keeps nothing of what autograd saves."""
    hooks = saved_tensor_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__name__


_GATHER, _SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)


def all_gather_single(
    gathered: Tensor, local: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> dist.Work | None:
    """Gather `local` ``[n, ...]`` of all ranks of a group into `gathered` ``[ranks * n, ...]``."""
    return getattr(dist, _GATHER)(gathered, local, group=group, async_op=async_op)


def reduce_scatter_single(
    local: Tensor, sent: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
) -> dist.Work | None:
    """Sum `sent` ``[ranks * n, ...]`` over a group, of which each rank gets its part ``[n, ...]`` in `local`."""
    return getattr(dist, _SCATTER)(local, sent, group=group, async_op=async_op)
