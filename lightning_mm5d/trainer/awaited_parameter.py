"""A parameter of which a rank has a part, while hooks of users see full ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_mm5d.sharded.remote_value import plain
from lightning_mm5d.sharded.value_functions import TELLING

Kind = Literal["values", "gradients", "states"]
_GRAD: Any = Tensor.grad
_GET_GRAD, _SET_GRAD = _GRAD.__get__, _GRAD.__set__
_TELLING = TELLING - {_GET_GRAD}


class Awaited(nn.Parameter):
    """A parameter that shows its full shape, and whose first use gathers it.

    Attributes:
        opens: gathers values or gradients.
    """

    opens: Callable[[Kind], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TELLING:
            found = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Awaited)), None)
            if found is not None:
                found.opens("gradients" if func in (_GET_GRAD, _SET_GRAD) else "values")
        with plain():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            self.opens("values")
            with plain():
                memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)
