"""Keeps the copies that autocast makes of weights over all microbatches of a step.

Autocast can cast a trained weight once and keep the copy until its outermost context ends. Lightning's context has that
switched off, because copies made for an evaluation have no graph; and it ends with its microbatch. So every microbatch
in flight would keep copies of its own for its backward. Here a context around the step lets all microbatches use one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def kept_casts(device: torch.device) -> AbstractContextManager[Any]:
    """Enter around a training step; autocast is on or off in it as it is outside."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


@contextmanager
def casting_once(context: Callable[[], AbstractContextManager[Any]], device: torch.device) -> Iterator[None]:
    """Enter what `context` returns around a microbatch of a training step; autocast in it keeps its copies."""
    with context():
        if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
            torch.set_autocast_cache_enabled(True)  # until the context ends, which sets it back
        yield
