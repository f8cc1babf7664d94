"""Puts a function in front of the boundaries of encoders and the layers of all modalities."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_mm5d.partition.found import Encoder
from lightning_mm5d.partition.parts import Parts


@contextmanager
def watched(
    root: nn.Module, encoders: Mapping[str, Encoder], parts: Mapping[str, Parts], call: Callable[..., Any]
) -> Generator[None, None, None]:
    """Until the end of the context, run ``call(key, function, *args, **kwargs)`` in place of each of these calls.

    Args:
        root: the LightningModule.
        encoders: by name; the key of their boundaries is the name.
        parts: of each modality by name; the key of a part is the name and its index.
        call: is given the original function.
    """
    replaced: list[tuple[nn.Module, str, Any]] = []

    def put(owner: nn.Module, method: str, key: Any) -> None:
        had, original = vars(owner).get(method), getattr(owner, method)
        vars(owner)[method] = partial(call, key, original)
        replaced.append((owner, method, had))

    for name, encoder in encoders.items():
        for boundary in encoder.boundaries:
            put(root.get_submodule(boundary.path), boundary.method, name)
    for name, several in parts.items():
        for index, path in enumerate(several.paths):
            put(root.get_submodule(path), "forward", (name, index))
    try:
        yield
    finally:
        for owner, method, had in reversed(replaced):
            if had is None:
                vars(owner).pop(method)
            else:
                vars(owner)[method] = had
