"""The sum of input gradients of column layers is under way while their weight gradients are computed.

A spy notes each start of a collective, each wait for one and each matrix product of a backward, in turn. Ranks 0 and 1
share an attention of three projections with one input; its results are those of one process. Where sequence shards
travel around a ring, each hop is beside a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_mm5d.features.compressed_communication.encoding import Compression
from lightning_mm5d.layout.layout import even_lengths
from lightning_mm5d.sharded.collectives import TensorGroup, reduce
from lightning_mm5d.sharded.tensor import from_local
from lightning_mm5d.stage.deferred import Deferred
from lightning_mm5d.tensor_parallel.apply import TensorParallel
from lightning_mm5d.tensor_parallel.family_plans import TensorParallelPlan
from lightning_mm5d.tensor_parallel.resolve import resolve
from ranks import run_ranks

WIDTH, HIDDEN, ROWS, TOKENS = 6, 10, 3, 4
PLAN = TensorParallelPlan(column={"q": ("width",), "k": ("width",), "v": ("width",)}, row={"out": ("width",)})


class Block(nn.Module):
    """Three projections of one input, mixed, and a projection back."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k, self.v = (nn.Linear(WIDTH, HIDDEN, bias=bias) for _ in range(3))
        self.out = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.q(x).tanh() * self.k(x) + self.v(x).sigmoid())


class Spy(TorchDispatchMode):
    """Notes what a backward starts, waits for and multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left = args[-2]
            self.events.append("weight product" if left.shape[1] == ROWS * TOKENS else "input product")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def listening(self) -> Iterator[None]:
        names = ("all_reduce", "reduce_scatter_single", "all_gather_single", "all_to_all_single")
        with self:
            for name in names:
                patcher = patch.object(dist, name, self._noted(name, getattr(dist, name)))
                patcher.start()
            patch.object(dist, "batch_isend_irecv", self._noted("hop", dist.batch_isend_irecv)).start()
            try:
                yield
            finally:
                patch.stopall()

    def _noted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.events.append(f"start {name}")
            work = original(*args, **kwargs)
            if isinstance(work, list):
                return [_Work(self.events, name, *work)]
            return work if work is None else _Work(self.events, name, work)

        return call


class _Work:
    def __init__(self, events: list[str], name: str, *works: Any) -> None:
        self._events, self._name, self._works = events, name, works

    def wait(self) -> None:
        self._events.append(f"wait {self._name}")
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How the block is trained."""

    bias: bool = True
    frozen: tuple[str, ...] = ()
    shards: bool = False
    rings: bool = False
    bf16: bool = False
    recomputes: bool = False
    defers: bool = False
    compression: Compression | None = None

    def around(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext()


CASES = {
    "plain": Case(),
    "without bias": Case(bias=False),
    "a frozen weight": Case(frozen=("k.weight",)),
    "biases alone": Case(frozen=("q.weight", "k.weight", "v.weight", "out.weight")),
    "autocast": Case(bf16=True),
    "recomputed": Case(recomputes=True),
    "compressed": Case(compression=Compression(torch.bfloat16)),
    "put off": Case(defers=True),
    "sequence shards": Case(shards=True),
    "sequence shards, recomputed": Case(shards=True, recomputes=True),
    "sequence shards, put off": Case(shards=True, defers=True),
    "sequence shards, a frozen weight": Case(shards=True, frozen=("q.weight",)),
}
ring = partial(Case, shards=True, rings=True)
RINGS = {
    "a ring": ring(),
    "a ring, without bias": ring(bias=False),
    "a ring, a frozen weight": ring(frozen=("q.weight",)),
    "a ring, biases alone": ring(frozen=("q.weight", "k.weight", "v.weight", "out.weight")),
    "a ring, nothing trained": ring(bias=False, frozen=("q.weight", "k.weight", "v.weight", "out.weight")),
    "a ring, autocast": ring(bf16=True),
    "a ring, recomputed": ring(recomputes=True),
    "a ring, put off": ring(defers=True),
}
NEAR = {"compressed": 3e-2, "autocast": 3e-2, "a ring, autocast": 4e-2}


def built(case: Case) -> Block:
    block = Block(case.bias).to(torch.float32 if case.bf16 else torch.float64)
    for name in case.frozen:
        block.get_parameter(name).requires_grad_(False)
    return block


def given(case: Case) -> tuple[Tensor, Tensor]:
    x, gradient = torch.randn(2, ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return (x.float(), gradient.float()) if case.bf16 else (x, gradient)


def trained(rank: int, case: Case) -> tuple[list[str], dict[str, float], list[str]]:
    """The events of a backward, how far each gradient is from that of one process, and the events of a forward."""
    x, gradient = given(case)
    whole, block = built(case), built(case)
    own = x.clone().requires_grad_()
    with case.around():
        whole(own).backward(gradient.to(whole(x).dtype))
    world: Any = dist.group.WORLD
    group = TensorGroup(world) if case.compression is None else case.compression.group(world)
    division = resolve(nn.ModuleDict({"block": block}), {"block": (PLAN,)}, lambda name: ("all", group.size))
    tensor = TensorParallel(
        nn.ModuleDict({"block": block}), division, {"all": group}, rings=["all"] if case.rings else []
    )
    due = Deferred()
    if case.defers:
        tensor.puts_off = lambda module, x: due if module.weight.requires_grad else None
    given_x = x.clone().requires_grad_()
    entering: Tensor = given_x
    lengths = even_lengths(TOKENS, group.size)
    if case.shards:
        local = group.local_of(x, -2, lengths).clone().requires_grad_()
        given_x, entering = local, from_local(local, -2, lengths, group)
    forward = Spy()
    with case.around(), forward.listening() if case.rings and not case.recomputes else nullcontext():
        out = checkpoint(block, entering, use_reentrant=False) if case.recomputes else block(entering)
    local_gradient = group.local_of(gradient, -2, lengths) if case.shards else gradient
    local_out = out.local if case.shards else out  # type: ignore[attr-defined]
    spy = Spy()
    with spy.listening(), due:
        local_out.backward(local_gradient.to(local_out.dtype))
    due.compute()
    off = {"x": _off(given_x.grad, group.local_of(own.grad, -2, lengths) if case.shards else own.grad)}
    for name, parameter in whole.named_parameters():
        expected, mine = parameter.grad, block.get_parameter(name).grad
        shard = division.shards.get(f"block.{name}")
        if expected is not None and shard is not None:
            expected = shard.cut(expected, group.index)
        off[name] = _off(mine, expected)
    return spy.events, off, forward.events


def _off(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    return float((found - expected).abs().max())


def all_cases(rank: int) -> Any:
    dist.init_process_group("gloo")
    return {name: trained(rank, case) for name, case in {**CASES, **RINGS}.items()}


@pytest.fixture(scope="module")
def results() -> list[Any]:
    return run_ranks(2, all_cases)


@pytest.mark.parametrize("name", {**CASES, **RINGS})
def test_gradients_are_those_of_one_process(name: str, results: list[Any]) -> None:
    for found in results:
        off = found[name][1]
        assert max(off.values()) <= NEAR.get(name, 1e-12), off


@pytest.mark.parametrize("name", CASES)
def test_weight_products_run_while_the_sum_is_under_way(name: str, results: list[Any]) -> None:
    case, products = CASES[name], 3 - sum(one[0] in "qkv" for one in CASES[name].frozen)
    start = "start reduce_scatter_single" if case.shards else "start all_reduce"
    if case.compression is not None:
        start = "start all_to_all_single"
    for found in results:
        events = found[name][0]
        last_start = len(events) - 1 - events[::-1].index(start)
        wait = events.index(start.replace("start", "wait"), last_start)
        during = events[last_start:wait]
        assert during.count("weight product") == (0 if case.defers else products), events
        assert during.count("input product") == 0, events
        assert "input product" in events[:last_start]


def test_gathered_inputs_are_gathered_again_beside_the_input_products(results: list[Any]) -> None:
    for found in results:
        for name in ("sequence shards", "sequence shards, recomputed", "sequence shards, put off"):
            events = found[name][0]
            start = len(events) - 1 - events[::-1].index("start all_gather_single")
            wait = events.index("wait all_gather_single", start)
            assert events[start:wait].count("input product") == 3, events
            assert events[start:].count("start all_gather_single") == 1, "one for three layers"


PRODUCT = "input product"
BESIDE = ["start hop", PRODUCT, "wait hop"]  # of two ranks


def test_in_a_ring_rows_travel_while_the_first_layer_and_the_last_one_multiply(results: list[Any]) -> None:
    for name in ("a ring", "a ring, put off", "a ring, nothing trained"):
        for found in results:
            column, row = [*BESIDE, PRODUCT, PRODUCT, PRODUCT], [PRODUCT, *BESIDE]
            assert found[name][2] == column + row, "one gather for three layers, one hop for their sum"


def test_in_a_ring_the_backward_hides_each_hop(results: list[Any]) -> None:
    row, three = [*BESIDE, PRODUCT], [PRODUCT] * 3
    hidden = [*three, "start hop", *three, "wait hop"]
    gathers = ["start all_gather_single", *hidden, "wait all_gather_single"]
    weights = ["weight product"] * 3
    bulk = ["start all_gather_single", *three, "start reduce_scatter_single", "wait all_gather_single", *weights]
    expected = {
        "a ring, nothing trained": row + hidden,
        "a ring, put off": row + gathers,
        "a ring": [*row, "weight product", *bulk, "wait reduce_scatter_single"],
    }
    for found in results:
        for name, wanted in expected.items():
            of_biases = ("start all_reduce", "wait all_reduce")  # the last one is equal on all ranks
            assert [event for event in found[name][0] if event not in of_biases] == wanted


# --- outputs that nobody else holds ---


def reduced(rank: int) -> Any:
    dist.init_process_group("gloo")
    group = TensorGroup(dist.group.WORLD)  # type: ignore[arg-type]
    x, weight = torch.ones(4, 3, requires_grad=True), torch.full((5, 3), rank + 1.0, requires_grad=True)

    def places(is_fresh: bool, around: AbstractContextManager[Any]) -> tuple[bool, float]:
        with around:
            y = torch.nn.functional.linear(x, weight)
            total = reduce(y, group, is_fresh=is_fresh)
        total.add_(0)  # models write to what they are given
        return total.data_ptr() == y.data_ptr(), float(total.detach().sum())

    return places(True, nullcontext()), places(False, nullcontext()), places(True, Spy())


def test_a_fresh_output_is_summed_in_its_own_memory() -> None:
    for fresh, held, observed in run_ranks(2, reduced):
        assert fresh == (True, 4 * 5 * 3 * 3.0)
        assert held == (False, 4 * 5 * 3 * 3.0)
        assert observed == (False, 4 * 5 * 3 * 3.0), "a mode may keep what it has seen"
