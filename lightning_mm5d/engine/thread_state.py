"""What torch and Python keep for each thread, taken from one thread into another.

Grad mode, autocast, modes that see functions or operations, hooks on what autograd saves, the device, its stream and
context variables are of one thread. A microbatch that a thread of its own computes must see those of the schedule's.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import overrides
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _python_dispatch

from lightning_mm5d.config.errors import private

_function_modes = private(overrides, "_get_current_function_mode_stack")
_operation_modes = private(_python_dispatch, "_get_current_dispatch_mode_stack")
_top_hooks = private(torch._C._autograd, "_top_saved_tensors_default_hooks")


class ThreadState:
    """The state of the thread that makes this object.

    Args:
        device: where it computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, kinds = device, {"cpu", device.type}
        self._variables = contextvars.copy_context()
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        ]
        self._caches = torch.is_autocast_cache_enabled()
        self._function_modes, self._operation_modes = _function_modes(), _operation_modes()
        self._hooks = _top_hooks(True)
        self._threads = torch.get_num_threads()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` in the present thread, a new one, as if it were the other."""
        self._variables.run(self._called, function)

    def _called(self, function: Callable[[], None]) -> None:
        torch.set_num_threads(self._threads)
        if self._stream is not None:
            torch.cuda.set_device(self._device)
        # never decremented: copies of weights are kept until the outermost context of the other thread ends
        torch.autocast_increment_nesting()
        for kind, is_on, dtype in self._autocast:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._caches)
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._hooks is not None:
                stack.enter_context(saved_tensors_hooks(*self._hooks))
            for modes, room in ((self._function_modes, overrides), (self._operation_modes, _python_dispatch)):
                for mode in modes:
                    private(room, "_push_mode")(mode)
                    stack.callback(private(room, "_pop_mode"))
            function()
