"""A parameter whose values are elsewhere at the moment: the first use of them has them brought.

It is the same object, of another class for that time. Its data are NaN without memory, so that code which no torch
function sees can neither read freed memory nor pass unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_mm5d.config.errors import private
from lightning_mm5d.sharded.value_functions import TELLING

# a backward from a parameter adds to its gradient
_TELLING = TELLING | {Tensor.untyped_storage, Tensor.data_ptr, Tensor.grad.__set__, torch.autograd.backward}  # type: ignore[union-attr]
_plain = private(torch._C, "DisableTorchFunctionSubclass")


class Closed(nn.Parameter):
    """A parameter without values.

    Attributes:
        opens: brings them, and gives the parameter its class again; or leaves NaN where only shapes are asked for.
        opened: that class.
    """

    opens: Callable[[], None]
    opened: type[nn.Parameter]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # a view of itself is how torch finds the node that accumulates its gradient
        if func not in _TELLING and not (func is Tensor.view_as and args[0] is args[1]):
            closed = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Closed)]
            for one in closed:
                if isinstance(one, Closed):  # another of the same layer may have opened it
                    one.opens()
            if not any(isinstance(one, Closed) for one in closed):
                return func(*args, **kwargs)
        with _plain():
            return func(*args, **kwargs)


def make_closed(parameter: nn.Parameter, shape: Sequence[int], dtype: torch.dtype, opens: Callable[[], None]) -> None:
    """Show NaN of a shape and dtype; `opens` is called before a function uses values, and must call `make_open`."""
    make_open(parameter)
    filler = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    parameter.data = torch.full((), filler, dtype=dtype, device=parameter.device).expand(shape)
    kind = type(parameter)
    parameter.__class__ = Closed
    vars(parameter).update(opens=opens, opened=kind)


def make_open(parameter: nn.Parameter) -> None:
    """Give a parameter its own class again, where it is closed."""
    if isinstance(parameter, Closed):
        parameter.__class__ = vars(parameter).pop("opened")
        del vars(parameter)["opens"]
