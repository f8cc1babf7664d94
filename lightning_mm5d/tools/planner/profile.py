"""Measures the forward and the backward of each layer in a few runs of the user's own step, and the optimizers' step.

Estimates compare layers of one modality. Only a run shows how many tokens of each modality pass and how fast a machine
computes which shapes. The full module runs in one process, so a model that is too large for one is planned from the
measurements of a smaller model, or from estimates.

A layer's backward lasts from the gradient of its output to the gradient of its input, because autograd finishes a layer
before it begins an earlier one. Where the input needs no gradient, it lasts until the next backward begins, or the step
ends. A step in which a modality does not run is refused.

Puts a function in front of the boundaries of encoders and the layers of all modalities, and hooks on tensors.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.partition.costs import Unit
from lightning_mm5d.partition.parts import Parts
from lightning_mm5d.partition.step_uses import Encoder, Structure
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.tools.planner.hollow_tensors import OptimizerStates


@dataclass
class Work:
    """What the forward of one unit computes on one rank.

    Attributes:
        flops: of matrix products and convolutions, without attention.
        trained: of these, the ones with a trained weight.
        attention: flops of fused attentions; half of all pairs where they are told to be causal, else what masks allow.
        moved: bytes that all other operations read and write.
        keys: bytes of the keys and values that attentions take.
        key_sums: bytes of these in the type in which ranks add up their gradients.
        queries: bytes of the queries and the results of attentions.
        heads: of the queries of attentions.
        key_heads: of their keys.
        routed: bytes of the rows that travel to experts.
    """

    flops: float = 0.0
    trained: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    keys: float = 0.0
    routed: float = 0.0
    key_sums: float = 0.0
    queries: float = 0.0
    heads: float = 0.0
    key_heads: float = 0.0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, share: float, seen: float, repeated: int) -> None:
        """Add a fused attention.

        Args:
            query: [B, H, Sq, D].
            key: [B, G, Sk, D].
            value: [B, G, Sk, Dv].
            share: what a rank has of the heads.
            seen: share of the pairs of a query and a key that a mask allows.
            repeated: how often each head of keys is there.
        """
        pairs, widths = query.numel() // query.shape[-1] * key.shape[-2], query.shape[-1] + value.shape[-1]
        numbers = (key.numel() + value.numel()) * share / repeated
        self.attention += 2 * pairs * widths * share * seen
        self.keys += numbers * key.element_size()
        self.key_sums += numbers * max(key.element_size(), 4)
        self.queries += query.numel() / query.shape[-1] * widths * query.element_size() * share
        self.heads += query.shape[1] * share
        self.key_heads += key.shape[1] * share / repeated


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
    places: list[tuple[nn.Module, str, Any]] = [
        (root.get_submodule(boundary.path), boundary.method, name)
        for name, encoder in encoders.items()
        for boundary in encoder.boundaries
    ]
    places += [
        (root.get_submodule(path), "forward", (name, index))
        for name, several in parts.items()
        for index, path in enumerate(several.paths)
    ]
    with ExitStack() as undo:
        for owner, method, key in places:
            undo.callback(put(owner, method, partial(call, key, getattr(owner, method))))
        yield


def step_arguments(module: LightningModule, batch: Any) -> tuple[Any, ...]:
    """Return what the module's `training_step` takes for its first batch."""
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return (batch, 0) if takes_index else (batch,)


_WARMUP, _RUNS = 1, 5


class Measured(NamedTuple):
    """Seconds of one unit, or of all units of a modality together.

    Attributes:
        forward: of its forward.
        backward: of its backward; 0 where only forwards are known, or it has none.
    """

    forward: float
    backward: float = 0.0


def medians(runs: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return for each modality the seconds of each unit, the median of the runs."""
    return {name: list(map(median, zip(*(run[name] for run in runs), strict=True))) for name in runs[0]}


def measure(
    module: LightningModule, batch: Any, model: Structure, rows: Mapping[str, Sequence[Unit]]
) -> dict[str, list[Measured]]:
    """Run the step of the module a few times; return the seconds of each unit, by modality.

    What comes before the first layer of a modality is one unit, and all else around its layers another; their backwards
    are measured together, and get shares of that time by their estimates. Gradients are added up, as those of
    microbatches are, and dropped in the end.

    Args:
        module: the full module, on the device that is to be measured.
        batch: one microbatch, there as well.
        model: its modalities.
        rows: the units of each of them, as `units` returns them.

    Raises:
        ConfigError: a modality does not run in the step.
    """
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    clock = _Clock(device)
    arguments = step_arguments(module, batch)
    forwards, backwards = list[dict[str, list[float]]](), list[dict[str, list[float]]]()
    with watched(module, model.encoders, model.parts, clock.time), warnings.catch_warnings(), ExitStack() as stack:
        for parameter in module.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        warnings.simplefilter("ignore")  # `self.log` warns without a trainer
        for _ in range(_WARMUP + _RUNS):
            clock.spent, clock.begun = {}, {}
            result = clock.time("step", module.training_step, *arguments)
            forwards.append({name: _row(name, row, model, clock) for name, row in rows.items()})
            spent = clock.backward(_loss_of(result))
            backwards.append({name: _shared(row, *_backward_of(name, row, model, spent)) for name, row in rows.items()})
    forward, backward = medians(forwards[_WARMUP:]), medians(backwards[_WARMUP:])
    return {name: list(map(Measured, forward[name], backward[name])) for name in rows}


def measure_update(states: OptimizerStates, parameters: Mapping[str, nn.Parameter]) -> float:
    """Return the seconds of a step of the optimizers, the median of a few.

    They step on copies of the parameters, with gradients of their own: nothing of the module changes. Under Adam that
    takes four times the memory of the parameters.

    Args:
        states: the optimizers.
        parameters: that have a gradient, by name, on the device that is to be measured.

    Raises:
        Exception: there is too little memory, or an optimizer of somebody's does not step on other parameters.
    """
    clock = _Clock(next((parameter.device for parameter in parameters.values()), torch.device("cpu")))
    copies = {name: nn.Parameter(torch.ones_like(parameter)) for name, parameter in parameters.items()}
    for parameter in copies.values():
        parameter.grad = torch.ones_like(parameter)
    optimizers, seconds = states.optimizers_of(copies), list[float]()
    for _ in range(_WARMUP + _RUNS):
        clock.spent = {}
        for optimizer in optimizers:
            clock.time("update", optimizer.step)
        seconds.append(clock.spent.get("update", 0.0))
    return median(seconds[_WARMUP:])


def _loss_of(result: Any) -> Tensor | None:
    """The loss in what a step returned, where it has one to go back from; a manual step has gone back itself."""
    loss = result.get("loss") if isinstance(result, Mapping) else result
    return loss if isinstance(loss, Tensor) and loss.requires_grad else None


def _row(name: str, row: Sequence[Unit], model: Structure, clock: _Clock) -> list[float]:
    """The seconds of one modality's units; keys of the clock are modality, (modality, layer index) and ``"step"``."""
    spent, begun = clock.spent, clock.begun
    layers = [spent.get((name, index), 0.0) for index in range(len(row) - 2)]
    key, inside = (name, ()) if name != model.loss_modality else ("step", tuple(model.encoders))
    total = spent.get(key, 0.0) - sum(spent.get(other, 0.0) for other in inside)
    if not total:
        rule = "It does not run in the first microbatch, so its time cannot be measured"
        raise ConfigError(f"modalities.{name}", name, rule, "Use data in which every sample has all modalities")
    around, first = max(total - sum(layers), 0.0), begun.get((name, 0))
    if first is None:
        return _shared(row, around, layers)
    earlier = (spent[other] for other in inside if begun.get(other, first) < first)
    before = min(max(first - begun[key] - sum(earlier), 0.0), around)
    return [before, *layers, around - before]


def _backward_of(
    name: str, row: Sequence[Unit], model: Structure, spent: Mapping[Any, float]
) -> tuple[float, Sequence[float]]:
    """The seconds of one modality's backward around its layers, and of each of them; keys of `spent` as in `_row`."""
    layers = [spent.get((name, index), 0.0) for index in range(len(row) - 2)]
    return spent.get(name, 0.0) + (spent.get("step", 0.0) if name == model.loss_modality else 0.0), layers


def _shared(row: Sequence[Unit], around: float, layers: Sequence[float]) -> list[float]:
    """The seconds of all units, where those before and after the layers took `around` together."""
    before, after = row[0].forward, row[-1].forward
    share = before / (before + after) if before + after else 1.0
    return [around * share, *layers, around * (1 - share)]


class _Clock:
    """Adds up the seconds of calls by key, and then those of the backwards of what they returned.

    Attributes:
        spent: seconds of calls, by key.
        begun: when the first of them began.
    """

    def __init__(self, device: torch.device) -> None:
        self.spent: dict[Any, float] = {}
        self.begun: dict[Any, float] = {}
        self._device = device
        self._running: list[Any] = []
        self._watched: dict[int, Tensor] = {}
        self._backward: dict[Any, float] = {}
        self._going_back: Any = None
        self._since = 0.0

    def time(self, key: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `function` and count its time; a nested call with the same key counts once."""
        if key in self._running:
            return function(*args, **kwargs)
        around = self._running[-1] if self._running else None
        self._ends(around, (args, kwargs))
        self._running.append(key)
        start = self._now()
        self.begun.setdefault(key, start)
        try:
            result = function(*args, **kwargs)
        finally:
            self.spent[key] = self.spent.get(key, 0.0) + self._now() - start
            self._running.pop()
        self._ends(key, result)
        return result

    def backward(self, loss: Tensor | None) -> dict[Any, float]:
        """Go back from a loss; return the seconds of the backwards by the keys of the calls."""
        self._backward, self._going_back, self._since = {}, "step", self._now()
        if loss is not None:
            loss.backward()
        self._turns(None)
        self._watched.clear()
        return self._backward

    def _ends(self, key: Any, tree: Any) -> None:
        """Have the backward of `key` begin with the gradients of what is in `tree`, but for what another call made."""
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None and id(tensor) not in self._watched:
                self._watched[id(tensor)] = tensor
                tensor.register_hook(partial(self._turns, key))

    def _turns(self, key: Any, _: Tensor | None = None) -> None:
        """End the backward that runs, and begin that of `key`."""
        now = self._now()
        self._backward[self._going_back] = self._backward.get(self._going_back, 0.0) + now - self._since
        self._going_back, self._since = key, now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
