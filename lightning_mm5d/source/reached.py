"""The code of a user's step: its own, and that of methods and functions beside it that it names."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType

from torch import nn

from lightning_mm5d.source.names import names
from lightning_mm5d.source.trees import Source, function_of, method_of


def reached(source: Source, cls: type, step: str) -> Iterator[FunctionType]:
    """Yield the code of `step`, and the methods and functions beside it that it names, directly or through others."""
    first = method_of(cls, step)
    waiting, known = [first] if first is not None else [], set[FunctionType]()
    while waiting:
        function = waiting.pop()
        if function in known:
            continue
        known.add(function)
        yield function
        for name in names(source, function) or ():
            beside = function_of(function.__globals__.get(name))
            own = method_of(cls, name) if not hasattr(nn.Module, name) or name == "forward" else None
            waiting += [
                one
                for one in (own, beside)
                if one is not None and one.__module__.partition(".")[0] not in ("torch", "lightning", "transformers")
            ]
