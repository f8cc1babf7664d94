"""What ranks hold together is gathered in host memory, one tensor at a time, whatever device messages need.

The meta device stands for a GPU: what is copied from it gets zeros, and its bytes alive are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mm5d.checkpoint import optimizer_state
from lightning_mm5d.checkpoint.module_state import collect_module, restore_full
from lightning_mm5d.sharded.remote_value import Guard, is_remote
from lightning_mm5d.stage import drop_parameters
from tensor_parallel.handmade import Model, cut, model_plan

CPU, GPU = torch.device("cpu"), torch.device("meta")
aten = torch.ops.aten


class Accelerator(TorchDispatchMode):
    """Counts the bytes alive on the device that the meta device stands for; what was there before is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default and args[0].is_meta and kwargs.get("device") == CPU:
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        if func is aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            return args[0]
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        result = func(*args, **kwargs)
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.is_meta and one.untyped_storage()._cdata not in given:
                storage = one.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices of messages that were sent or received; all arrive at once."""
    found: list[torch.device] = []
    for name in ("send", "recv"):
        monkeypatch.setattr(dist, name, lambda message, peer: found.append(message.device))
    return found


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("trains", [True, False])
def test_a_full_state_costs_a_device_one_tensor(trains: bool, messages: list[torch.device]) -> None:
    """language: ranks 0-1, tp_size=2; rank 0 saves while its shards are on the GPU, or in host memory after a run."""
    module, plan = model_plan(2, 4, 2, tp_size=2)
    full = {name: value.shape for name, value in module.state_dict().items()}
    largest = max(map(nbytes, module.state_dict().values()))
    total = sum(map(nbytes, module.state_dict().values()))
    cut(plan, module, 0)
    if trains:
        module.to(GPU)
    with Accelerator() as accelerator:
        state = collect_module(module, plan, 0, wire=GPU)
    assert {name: value.shape for name, value in state.items()} == full
    gathered = [value for name, value in state.items() if value.shape != module.state_dict(keep_vars=True)[name].shape]
    assert gathered
    assert {value.device for value in gathered} == {CPU}
    assert set(messages) == {GPU}
    assert 0 < accelerator.peak <= largest < total / 2


def test_states_of_an_optimizer_cost_a_device_those_of_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    module, plan = model_plan(2, 4, 2, tp_size=2)
    cut(plan, module, 0)
    optimizer = torch.optim.Adam(module.parameters())
    asked = []

    def receive(src: int, device: torch.device) -> Any:
        asked.append(device)
        return {"step": torch.ones(()), "exp_avg": torch.empty(1000, device=device)}

    monkeypatch.setattr(optimizer_state, "receive_tree", receive)
    with Accelerator() as accelerator:
        state = optimizer_state.collect_optimizer(optimizer, module, plan, 0, GPU)["state"]
    assert len(asked) > 2
    assert set(asked) == {GPU}
    assert {value["exp_avg"].device for value in state.values()} == {CPU}
    assert accelerator.peak == 1000 * torch.get_default_dtype().itemsize


def test_a_module_leaves_the_device_before_it_is_gathered(
    messages: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, plan = model_plan(2, 4, 2, tp_size=2)
    cut(plan, module, 0)
    when: list[int] = []
    monkeypatch.setattr(Model, "cpu", lambda self: when.append(len(messages)) or self)
    with Accelerator() as accelerator:
        restore_full(module, plan, 0, wire=GPU)
    assert when == [0]
    assert messages
    assert 0 < accelerator.peak <= max(map(nbytes, module.state_dict().values()))
    assert {value.device for value in module.state_dict().values()} == {CPU}


def test_a_module_that_is_moved_gives_parameters_of_other_ranks_no_memory() -> None:
    """A change of the dtype stands for one of the device: `Module.cpu`, `to` and `double` take the same way."""
    module = nn.Sequential(*[nn.Linear(2048, 2048, bias=False, dtype=torch.float32) for _ in range(4)])
    drop_parameters(module, [f"{index}.weight" for index in range(1, 4)], CPU, Guard(str))
    process = psutil.Process()
    before = process.memory_info().rss
    for move in (nn.Module.double, nn.Module.float, lambda one: one.to(torch.float64), lambda one: one.to(CPU)):
        move(module)
        with torch._C.DisableTorchFunctionSubclass():
            memory = [one.untyped_storage().nbytes() for one in module.parameters()]
        assert all(map(is_remote, [*module.parameters()][1:]))
        assert memory[1:] == [one.element_size() for one in [*module.parameters()][1:]]
    # its own 16 MiB and their double; the others would be 96 MiB
    assert process.memory_info().rss - before < 60 * 2**20
