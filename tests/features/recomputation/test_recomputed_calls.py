"""A layer that runs again in its backward does what it did, and leaves nothing behind; on one process."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_mm5d import Modality
from lightning_mm5d.features.recomputation.feature import Recompute
from lightning_mm5d.partition import StageCut, partition
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.remote_value import Guard
from lightning_mm5d.stage import Runtime, StageView

WIDTH = 4


class Layer(nn.Module):
    """Writes buffers in three ways, draws by three generators, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("table", torch.arange(3.0))
        self.calls = 0

    def forward(self, hidden: Tensor, *, scale: Tensor | None = None) -> tuple[Tensor, None]:
        self.calls += 1
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        if random.random() < 0.5:
            hidden = hidden * 2
        if np.random.rand() < 0.5:
            hidden = hidden / 3
        inner = torch.relu_(self.up(self.norm(hidden) + self.mean * self.count))
        hidden = self.down(self.dropout(inner)) + hidden
        return (hidden if scale is None else hidden * scale), None


class Model(nn.Module):
    """Four layers, each given its hidden state as an argument or by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.double()

    def forward(self, hidden: Tensor) -> Tensor:
        scale = torch.full((WIDTH,), 1.5, dtype=torch.float64)
        for index, layer in enumerate(self.layers):
            hidden = (layer(hidden=hidden, scale=scale) if index == 2 else layer(hidden, scale=scale))[0]
            hidden += 0.25  # to what a layer returned
        return hidden


class Operations(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def recomputing(root: nn.Module, said: Any) -> Recompute:
    modalities = {"language": Modality(memory={"activation_checkpointing": said})}
    cut = partition(root, modalities)
    key = StageKey("language", 0)
    count = len(cut.parts["language"].paths)
    view = StageView(key, {"language": StageCut("language", 0, 0, count)}, frozenset(), frozenset(), True, False)
    names = frozenset(name for name, _ in root.named_parameters())
    runtime = Runtime(root, cut, {view: names}, Guard({}, root.parameters))
    return Recompute(runtime, modalities, torch.device("cpu"))


def trained(
    said: Any, change: Callable[[Model], Any] = lambda model: None, *, steps: int = 3, wants_input: bool = False
) -> tuple[Any, Model]:
    """Return losses, gradients and buffers of a few steps, and the model."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Model()
    change(model)
    patches = recomputing(model, said)
    losses, x = [], torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=wants_input)
    for step in range(steps):
        loss = model(x + step).square().mean()
        loss.backward()
        losses.append(loss.detach())
    drawn = [torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.rand())]
    patches.remove()
    assert not any("forward" in vars(layer) for layer in model.layers)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *gradients, *model.buffers(), *drawn], model


def assert_bitwise(said: Any, calls: list[int], change: Callable[[Model], Any] = lambda model: None) -> None:
    (expected, _), (got, model) = trained("none", change), trained(said, change)
    assert len(got) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert [layer.calls for layer in model.layers] == calls


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ("full", [6, 6, 6, 6]),
        ("selective", [6, 6, 6, 6]),
        ({"every": 2}, [3, 6, 3, 6]),
        ({"layers": [0]}, [6, 3, 3, 3]),
        ({"fraction": 0.75}, [3, 6, 6, 6]),
        ({"per_stage": [{"selective": ["aten.mm"]}]}, [6, 6, 6, 6]),
    ],
    ids=str,
)
def test_chosen_layers_run_twice_and_nothing_else_changes(said: Any, calls: list[int]) -> None:
    assert_bitwise(said, calls)


def test_selective_runs_products_again_only_where_something_wrote_to_them() -> None:
    def products(said: Any) -> int:
        with Operations() as seen:
            trained(said, steps=1)
        return seen.counts["aten.addmm"]

    # relu_ overwrites the result of `up`
    assert products("full") - products("none") == 8
    assert products("selective") - products("none") == 4

    def without_relu(said: Any) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "relu_", torch.relu)
            return products(said)

    assert without_relu("full") - without_relu("none") == 8
    assert without_relu("selective") == without_relu("none")


def test_layers_without_anything_to_differentiate_run_once() -> None:
    def freeze(model: Model) -> None:
        model.layers[:2].requires_grad_(False)
        model.layers[3].requires_grad_(False)

    assert_bitwise("full", [3, 3, 6, 6], freeze)


class Checkpointed(Layer):
    """A layer that checkpoints itself, in either way."""

    use_reentrant = False

    def forward(self, hidden: Tensor, *, scale: Tensor | None = None) -> Any:
        inner = partial(super().forward, scale=scale)
        return checkpoint(inner, hidden, use_reentrant=self.use_reentrant)


class Reentrant(Checkpointed):
    use_reentrant = True


class Caller(nn.Module):
    """Four layers that the module around them checkpoints, in either way."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layers, self.use_reentrant = Model().layers, use_reentrant

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.use_reentrant)[0]
        return hidden


@pytest.mark.parametrize(("kind", "calls"), [(Checkpointed, 6), (Reentrant, 7)])
def test_a_layer_that_checkpoints_itself_is_left_to_it(kind: type[Layer], calls: int) -> None:
    def change(model: Model) -> None:
        for layer in (model.layers[0], model.layers[1], model.layers[3]):
            layer.__class__ = kind

    _, model = trained("full", change, wants_input=True)
    # a reentrant one runs once more in the first step, in which it shows
    assert [layer.calls for layer in model.layers] == [calls, calls, 6, calls]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_that_is_called_through_checkpoint_is_left_to_that(use_reentrant: bool) -> None:
    model = Caller(use_reentrant=use_reentrant)
    patches = recomputing(model, "full")
    model(torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)).sum().backward()
    patches.remove()
    assert [layer.calls for layer in model.layers] == [2, 2, 2, 2]


def test_hooks_of_a_layer_act_once() -> None:
    fired: Counter[str] = Counter()

    def watch(model: Model) -> None:
        fired.clear()
        for layer in model.layers[1:]:
            layer.register_forward_pre_hook(lambda *_: fired.update(["before"]))
            layer.register_forward_hook(lambda *_: fired.update(["after"]))

    assert_bitwise("full", [6, 6, 6, 6], watch)
    assert fired == {"before": 9, "after": 9}


def test_memory_is_freed_before_the_backward() -> None:
    def saved(said: Any) -> int:
        held: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model = Model()
        patches = recomputing(model, said)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.randn(64, WIDTH, dtype=torch.float64)).square().mean()
        loss.backward()
        patches.remove()
        return sum(held.values())

    assert saved("full") < saved({"every": 2}) < saved("none")
    assert saved("full") < 0.4 * saved("none")


def test_a_copy_of_a_layer_computes_with_its_own_weights() -> None:
    model = Model()
    patches = recomputing(model, "full")
    other = deepcopy(model.layers[0]).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    random.seed(0)
    np.random.seed(0)
    assert other(x)[0].sum().item() in {(x * factor).sum().item() for factor in (1, 2)} | {
        (x * factor / 3).sum().item() for factor in (1, 2)
    }
    patches.remove()


class Remembering(nn.Module):
    """Adds the last of what layers have noted, and notes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, noted: list[Tensor], states: dict[str, list[Tensor]]) -> Tensor:
        hidden = self.linear(hidden * noted[-1]).tanh() + self.linear(states["all"][-1])
        noted.append(hidden)
        states["all"].append(hidden * 2)
        return hidden


class Remembered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Remembering() for _ in range(3)])
        self.double()

    def forward(self, hidden: Tensor) -> Tensor:
        noted, states = [hidden], OrderedDict(all=[hidden])
        for layer in self.layers:
            hidden = layer(hidden, noted, states)
        return hidden + sum(noted) + sum(states["all"])


def test_lists_and_dicts_in_which_layers_share_states_are_as_they_were() -> None:
    found = []
    for said in ("none", "full", "selective"):
        model = Remembered()
        patches = recomputing(model, said)
        model(torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, WIDTH)).square().sum().backward()
        patches.remove()
        found.append([p.grad for p in model.parameters()])
    for got in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(got, found[0], strict=True))


class Frozen(nn.Module):
    """Has running statistics that it reads and does not write; notes which tensor they are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH).eval(), nn.Linear(WIDTH, WIDTH)
        self.seen: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        assert self.norm.running_mean is not None
        self.seen.append(self.norm.running_mean)
        return self.linear(self.norm(hidden))


def test_a_layer_whose_norm_is_frozen_runs_again_with_the_same_buffers() -> None:
    """Microbatches side by side run layers again side by side: a buffer that one puts there, another would keep."""
    model = nn.Module()
    model.layers = nn.ModuleList([Frozen() for _ in range(2)])
    patches = recomputing(model, "full")
    for _ in range(2):
        hidden = torch.randn(6, WIDTH)
        for layer in model.layers:
            hidden = layer(hidden)
        hidden.sum().backward()
    patches.remove()
    for layer in model.layers:
        assert len(layer.seen) == 4
        assert all(buffer is layer.norm.running_mean for buffer in layer.seen)
