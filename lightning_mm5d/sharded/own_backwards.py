"""Backwards that users' code calls itself, which are refused where their gradients would be wrong without a word.

A schedule adds up the gradients of a step in parameters while it runs. What a backward in ``training_step`` gives to
parameters would be among them, where one process zeroes it after the step. A backward that is told its `inputs` reaches
neither gradients that a schedule has taken before, nor those of parameters on other ranks. `torch.autograd.grad` of a
parameter that works on parts of sequences gives the gradient of this rank's parts.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.sharded.removable import meanwhile

ORIGINALS: dict[str, FunctionType] = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}
"""of `torch.autograd`, whatever stands in their places later on"""


def torchs_own(name: str = "backward") -> Callable[..., Any]:
    """Return a function of `torch.autograd`, which shows itself to `__torch_function__` whatever stands in its place.

    It gives to that what its module has under its name, and tensors of ranks know torch's own alone. Call what is
    returned at once: whatever else the module has is as it is now.
    """
    original = ORIGINALS[name]
    known = {**original.__globals__, name: original}
    return FunctionType(original.__code__, known, name, original.__defaults__, original.__closure__)


class StepBackwards:
    """Refuses backwards in a training step, in the threads that run it; a schedule has backwards of its own."""

    def __init__(self) -> None:
        self._threads = set[int]()

    @contextmanager
    def refused(self, partial: Mapping[int, str]) -> Iterator[None]:
        """Enter around a schedule, in which backwards between `begun` and its end are refused.

        Args:
            partial: names of the parameters, by id, whose gradient is the sum of what several ranks have of it.

        Raises:
            ConfigError: the step calls a backward, or asks for the gradient of such a parameter.
        """
        with replaced(self._backward), replaced(functools.partial(self._gradients, partial), "grad"):
            yield

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Enter around a run of the step."""
        thread = threading.get_ident()
        self._threads.add(thread)
        try:
            yield
        finally:
            self._threads.discard(thread)

    def _backward(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() in self._threads:
            raise ConfigError(
                "training_step",
                "a call of backward()",
                "With automatic optimization Lightning drops what a step's own backward gives to parameters, and here "
                "it would be added to the gradients of the loss",
                "Take gradients by torch.autograd.grad(loss, inputs), or set self.automatic_optimization = False",
            )
        original(*args, **kwargs)

    def _gradients(
        self, partial: Mapping[int, str], original: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        tensors = [inputs] if isinstance(inputs, torch.Tensor) else [*inputs]
        names = [partial[id(tensor)] for tensor in tensors if id(tensor) in partial]
        if names and threading.get_ident() in self._threads:
            rule = "Ranks share the sequences that it works on, and each has the gradient of its own part"
            fix = "Set cp_size to 1 and sequence_parallel to false, or ask for that of a tensor that the step computes"
            raise ConfigError("training_step", f"torch.autograd.grad(..., {names[0]})", rule, fix)
        return original(outputs, tensors, *args, **kwargs)


@contextmanager
def without_inputs(field: str, rule: str, fix: str) -> Iterator[None]:
    """Enter around backwards that must reach all parameters.

    Args:
        field: what calls them, for the error.
        rule: why it must.
        fix: what works instead.

    Raises:
        ConfigError: one of them is told which `inputs` to give gradients to.
    """

    def checked(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if kwargs.get("inputs") is not None or len(args) > 5:  # by its position
            raise ConfigError(field, "backward(inputs=...)", rule, fix)
        original(*args, **kwargs)

    with replaced(checked):
        yield


@contextmanager
def replaced(function: Callable[..., Any], name: str = "backward") -> Iterator[None]:
    """Enter around code that calls `function` in place of a function of `torch.autograd`, which is its first argument.

    Args:
        function: what is called.
        name: of what is replaced, ``backward`` or ``grad``.
    """
    original = getattr(torch.autograd, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        return (torchs_own(name) if original is ORIGINALS[name] else original)(*args, **kwargs)

    replacement = functools.wraps(original)(functools.partial(function, called))
    with meanwhile(torch.autograd, **{name: replacement}):
        yield
