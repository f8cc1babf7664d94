"""What was made of tensors a moment ago, for layers that ask for the same: all of a model get the same tables.

A tensor is known by its identity and its version, so one that is written to is another one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Recent:
    """The results used last, and the tensors that they were made of.

    Args:
        kept: how many.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._found: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()

    def get(self, tensors: tuple[Tensor | None, ...], others: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return what `make` made of these tensors and other values (anything hashable), or let it make it."""
        versions = ((id(x), x._version if x is not None and not x.is_inference() else 0) for x in tensors)
        # what is made in inference mode cannot be used to train
        key = (torch.is_inference_mode_enabled(), *versions, *others)
        if key in self._found:
            self._found.move_to_end(key)
        else:
            self._found[key] = make(), tensors  # a tensor that is kept keeps its id
            if len(self._found) > self._kept:
                self._found.popitem(last=False)
        return self._found[key][0]
