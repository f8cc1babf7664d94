"""Two tensor parallel ranks as threads of one process, for modules that are tried in great numbers.

Each thread runs one rank's forward and backward; sums and gathers meet at a barrier. What a module computes whole, with
the gradients of its parameters and inputs, is compared with what the two make of it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.sharded.collectives import TensorGroup, Wait
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.stage import TorchEncoders
from lightning_mm5d.tensor_parallel.apply import TensorParallel
from lightning_mm5d.tensor_parallel.plan_lookup import plans_of
from lightning_mm5d.tensor_parallel.resolve import Division, resolve

LIMIT_S = 60
Result = tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]


class ThreadGroup(TensorGroup):
    """One of two ranks that are threads."""

    def __init__(self, index: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.index, self._slots, self._barrier = index, slots, barrier
        self.size, self.factor, self.moved, self.is_silent, self.hand_over = 2, 1, 0.0, False, None

    def _both(self, tensor: Tensor) -> list[Tensor]:
        self._slots[self.index] = tensor.detach().clone()
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def start_sum(self, tensor: Tensor, *, in_place: bool = False) -> Wait:
        first, second = self._both(tensor)
        return lambda: first + second

    def start_gather(self, local: Tensor, dim: int, lengths: Any, *, exact: bool = False) -> Wait:
        parts = self._both(local)
        return lambda: torch.cat(parts, dim)


class Root(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"one": module})


def computed(module: nn.Module, inputs: Mapping[str, Any]) -> Result:
    """All tensors that a call returns, and the gradients of parameters and inputs of a number made of the first."""
    given = {
        name: value.clone().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    outputs = _tensors(module(**given))
    (outputs[0] * torch.linspace(-1, 1, outputs[0].shape[-1])).square().sum().backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    of_inputs = {name: x.grad for name, x in given.items() if isinstance(x, Tensor) and x.grad is not None}
    return [one.detach() for one in outputs], gradients, of_inputs


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result.full() if isinstance(result, Sharded) else result]
    return [tensor for one in result if isinstance(one, (Tensor, tuple, list)) for tensor in _tensors(one)]


def divided(module: nn.Module, inputs: Mapping[str, Any]) -> tuple[Division, list[Result]]:
    """The division of a module over two ranks, and what each of them computes; no results where it stays whole.

    Raises:
        RuntimeError: of a rank.
    """
    ranks = [Root(deepcopy(module)) for _ in range(2)]
    division = resolve(ranks[0], plans_of(ranks[0]), lambda name: ("all", 2))
    if not division.roles:
        return division, []
    slots, barrier = [None, None], threading.Barrier(2, timeout=LIMIT_S)
    results: list[Any] = [None, None]
    for index, root in enumerate(ranks):  # syntax trees are made by one thread at a time
        TensorParallel(root, division, {"all": ThreadGroup(index, slots, barrier)})
        TorchEncoders(root, division.roles)

    def run(index: int) -> None:
        try:
            results[index] = computed(ranks[index].model["one"], inputs)
        except Exception as error:
            results[index] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [one for one in results if isinstance(one, Exception)]
    for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    return division, results


def differences(module: nn.Module, inputs: Mapping[str, Any], tolerance: float = 1e-9) -> list[str] | None:
    """What two ranks compute otherwise than the whole `module`, by name; None where the module stays whole."""
    outputs, gradients, of_inputs = computed(deepcopy(module), inputs)
    division, ranks = divided(module, inputs)
    if not ranks:
        return None
    found: dict[str, None] = {}

    def compare(name: str, got: Tensor | None, wanted: Tensor) -> None:
        scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
        if got is None or got.shape != wanted.shape or not torch.allclose(got, wanted, 0.0, tolerance * scale):
            found[name] = None

    for index, (own, parts, fed) in enumerate(ranks):
        for place, wanted in enumerate(outputs):
            compare(f"result {place}", own[place] if place < len(own) else None, wanted)
        for name, wanted in of_inputs.items():
            compare(f"gradient of the input {name}", fed.get(name), wanted)
        for name, wanted in gradients.items():
            full = f"model.one.{name}"
            if full in division.shards:
                wanted, got = division.shards[full].cut(wanted, index), parts.get(name)
            elif full in division.shared:
                summands = [rank[1][name] for rank in ranks if name in rank[1]]
                got = torch.stack(summands).sum(0) if summands else None
            else:
                got = parts.get(name)
            compare(f"gradient of {name}", got, wanted)
    return list(found)
