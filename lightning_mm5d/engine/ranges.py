"""Names what an action computes and launches, in a profile of PyTorch or, through ``emit_nvtx``, of Nsight."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_mm5d.config.errors import private
from lightning_mm5d.schedule import Action

_is_profiled = private(torch.autograd, "_profiler_enabled")


def named(action: Action) -> AbstractContextManager[Any]:
    """Enter around an action: its range has the name that a timeline shows, such as ``F(language.1, 3)``.

    Without a profiler this costs one call.
    """
    return torch.profiler.record_function(str(action)) if _is_profiled() else nullcontext()
