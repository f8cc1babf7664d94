"""What torch and Python keep once for all threads of a process, exchanged where threads take turns.

A context around layers sets such a value in one microbatch and puts the former one back at its end. Microbatches that
are computed side by side begin and end such contexts in turns, so each must see its own values.

Covered are random generators, the default dtype, and the settings in `SETTINGS`. Not covered are the order of kernels
of ``sdpa_kernel(set_priority=True)``, numbers of threads, environment variables, and globals of the user's own code.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.backends import cuda, cudnn, mkldnn

from lightning_mm5d.data.random_state import all_states, set_torch_states


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (lambda: cudnn.set_flags(_fp32_precision=None), lambda flags: cudnn.set_flags(*flags)),
    (lambda: mkldnn.set_flags(_fp32_precision=None), lambda flags: mkldnn.set_flags(*flags)),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_deterministic, lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1])),
]
"""functions that return a setting, and that change it; those of flags return all that `flags` of torch exchanges"""


class ProcessState:
    """The generators and settings of a process, which belong to one microbatch at a time.

    Args:
        device: whose generators are meant, beside those of the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self) -> Any:
        """Return the states of generators, and the settings."""
        return all_states(self._device), [get() for get, _ in SETTINGS]

    def put(self, state: Any) -> None:
        """Put back what `take` returned; settings that are as they were are not touched."""
        (of_python, of_numpy, of_torch), settings = state
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        set_torch_states(of_torch, self._device)
        for (get, change), value in zip(SETTINGS, settings, strict=True):
            if get() != value:
                change(value)
