"""Measures how long the forward of each part of a module takes: the user's own step, run a few times with a clock.

Estimates tell what layers of one modality cost beside each other; how many tokens of which modality pass, and how well
a machine computes which shapes, only a run tells. The whole module runs on one process here, so what is too large for
that is planned from the measurements of a smaller one, or from estimates.

Only forwards are measured. What a backward costs follows from them and from what is trainable, as for estimates.

It refuses a step in which a modality does not run.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.partition.costs import Unit
from lightning_mm5d.partition.find import Found

_WARMUP, _RUNS = 1, 5


def measure(
    module: LightningModule, batch: Any, found: Found, rows: Mapping[str, Sequence[Unit]]
) -> dict[str, list[float]]:
    """Return the seconds that the forward of each unit takes, the median of a few runs.

    What runs before the layers of a modality and what runs after them is measured together, and told apart as the
    estimates have it.

    Args:
        module: the module, whole, on the device that is to be measured.
        batch: one microbatch, there as well.
        found: its modalities.
        rows: the units of each of them, as `units` returns them.

    Raises:
        ConfigError: a modality does not run in the step.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    clock = _Clock(device)
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    arguments = (batch, 0) if takes_index else (batch,)
    runs: list[dict[Any, float]] = []
    with _timed(module, found, clock), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that `self.log` has no trainer
        for _ in range(_WARMUP + _RUNS):
            clock.spent = {}
            clock.time("step", module.training_step, *arguments)
            runs.append(clock.spent)
    spent = {key: statistics.median(run.get(key, 0.0) for run in runs[_WARMUP:]) for key in runs[-1]}
    return {name: _row(name, row, found, spent) for name, row in rows.items()}


def _row(name: str, row: Sequence[Unit], found: Found, spent: Mapping[Any, float]) -> list[float]:
    """The seconds of one modality's units; keys of `spent` are modalities, pairs with a layer, and the step."""
    layers = [spent.get((name, index), 0.0) for index in range(len(row) - 2)]
    whole = spent.get(name, 0.0)
    if name == found.loss_modality:
        whole = spent["step"] - sum(spent.get(other, 0.0) for other in found.encoders)
    if not whole:
        rule = "It does not run in the first microbatch, so its time cannot be measured"
        raise ConfigError(f"modalities.{name}", name, rule, "Use data in which every sample has all modalities")
    around = max(whole - sum(layers), 0.0)
    before, after = row[0].forward, row[-1].forward
    share = before / (before + after) if before + after else 1.0
    return [around * share, *layers, around * (1 - share)]


class _Clock:
    """Adds up what calls take, by key."""

    def __init__(self, device: torch.device) -> None:
        self.spent: dict[Any, float] = {}
        self._device = device
        self._running: set[Any] = set()

    def time(self, key: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function`; a call inside of one with the same key is part of it."""
        if key in self._running:
            return function(*args, **kwargs)
        self._running.add(key)
        start = self._now()
        try:
            return function(*args, **kwargs)
        finally:
            self.spent[key] = self.spent.get(key, 0.0) + self._now() - start
            self._running.discard(key)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@contextmanager
def _timed(root: nn.Module, found: Found, clock: _Clock) -> Generator[None, None, None]:
    """Put the clock in front of the boundaries of encoders and the layers of all modalities."""
    replaced: list[tuple[nn.Module, str, Any]] = []

    def put(owner: nn.Module, method: str, key: Any) -> None:
        had, original = vars(owner).get(method), getattr(owner, method)
        vars(owner)[method] = lambda *args, **kwargs: clock.time(key, original, *args, **kwargs)
        replaced.append((owner, method, had))

    for name, encoder in found.encoders.items():
        for boundary in encoder.boundaries:
            put(root.get_submodule(boundary.path), boundary.method, name)
    for name, path in found.layers.items():
        for index, layer in enumerate(root.get_submodule(path)._modules.values() if path else ()):
            assert layer is not None
            put(layer, "forward", (name, index))
    try:
        yield
    finally:
        for owner, method, had in reversed(replaced):
            if had is None:
                vars(owner).pop(method)
            else:
                vars(owner)[method] = had
