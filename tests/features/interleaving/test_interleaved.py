"""Microbatches that are computed side by side give what one process gives, and really run side by side.

Ranks are in the order of the modalities: "vision | language tp 2" is "vision: rank 0; language: ranks 1-2". The default
run holds interleaving with each other parallelism and with recomputation; `exhaustive` holds more of the pairs.
"""

from __future__ import annotations

import threading
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.backends import cuda, cudnn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_mm5d import Modality, TensorParallelPlan, register_tensor_parallel_plan
from nccl_order import NAMES
from parity.harness import fit, strategy
from ranks import call_ranks, run_ranks
from tensor_parallel.layouts import Compared, batches_of, check_all
from zoo import CASES

TWO = {"interleaved_microbatches": 2}
OPEN: list[int] = []  # threads that are inside of a layer of this process
MOST: list[int] = []  # how many at once


def layers_of(module: L.LightningModule) -> nn.ModuleList:
    """The longest list of modules: the layers of the language model."""
    return max((one for one in module.modules() if isinstance(one, nn.ModuleList)), key=len)


def side_by_side(module: L.LightningModule, path: str = "") -> None:
    """Assert at the end of a run on ranks that two microbatches have been inside of layers at once.

    Args:
        module: that is trained.
        path: of the layers; empty for the longest list.
    """
    OPEN.clear()
    MOST.clear()

    def enters(*_: Any) -> None:
        OPEN.append(threading.get_ident())
        MOST.append(len(set(OPEN)))

    for layer in module.get_submodule(path).children() if path else layers_of(module):
        layer.register_forward_pre_hook(enters)
        layer.register_forward_hook(lambda *_: OPEN.remove(threading.get_ident()), always_call=True)

    def on_train_end() -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            most = torch.tensor(
                max(MOST, default=0), device=module.device
            )  # ranks of other modalities run no layers at once
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
            assert most > 1, "one microbatch after another"

    module.on_train_end = on_train_end  # type: ignore[method-assign]


def run(name: str, fields: dict[str, dict[str, Any]], **options: Any) -> Compared:
    known = {key: options.pop(key) for key in ("replicas", "variant", "exact", "steps") if key in options}
    return Compared(name=name, fields=fields, prepare=side_by_side, options=options, **known)


PAIRS = [
    run("gpt2", {"language": {"tp_size": 2, "activation_checkpointing": "full", **TWO}}, accumulate_grad_batches=2),
    run("llama", {"language": {"cp_size": 2, "cp_mode": "ring", **TWO}}),
    run(
        "llava",
        {"vision": {"tp_size": 2, "colocate_with": "language"}, "language": {"tp_size": 2, **TWO}},
        variant="encoder",
    ),
]
MORE_PAIRS = [
    run("bert", {"language": {"tp_size": 2, "interleaved_microbatches": 4}}, exact=True),
    run("llama", {"language": {"tp_size": 2, "sequence_parallel": True, **TWO}}, gradient_clip_val=0.05),
    run("llama_tied", {"language": {"tp_size": 2, **TWO}}),
    run("llama", {"language": {"cp_size": 2, "cp_mode": "ulysses", "activation_checkpointing": "full", **TWO}}),
]
TRIPLES = [
    run("llava", {"vision": {}, "language": {"tp_size": 2, **TWO}}),
    run("llava", {"vision": {"tp_size": 2, **TWO}, "language": {}}),
]
PIPES = [
    run("llama_tied", {"language": {"tp_size": 2, "pp_size": 2, **TWO}}, schedule="zero_bubble"),
    run("llama", {"language": {"cp_size": 2, "pp_size": 2, "pp_chunks": 2, **TWO}}, schedule="interleaved"),
]
MORE_PIPES = [
    run("llama", {"language": {"tp_size": 2, **TWO}}, replicas=2),
    run("llama", {"language": {"tp_size": 2, "pp_size": 2, **TWO}}),
    run("llama", {"language": {"tp_size": 2, "cp_size": 2, **TWO}}),
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("world", "runs"),
    [
        (2, PAIRS),
        (3, TRIPLES),
        (4, PIPES),
        pytest.param(2, MORE_PAIRS, marks=pytest.mark.exhaustive),
        pytest.param(4, MORE_PIPES, marks=pytest.mark.exhaustive),
    ],
    ids=["2", "3", "4", "more of 2", "more of 4"],
)
def test_microbatches_side_by_side_equal_one_process(world: int, runs: list[Compared]) -> None:
    check_all(world, *runs)


@pytest.mark.usefixtures("float64")
def test_microbatches_side_by_side_equal_one_process_where_all_operations_of_a_device_have_one_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """language: ranks 0-1, tensor or context parallel; vision: both of them, or none."""
    monkeypatch.setenv("TEST_BACKEND", NAMES[1])
    check_all(2, *PAIRS[2:])


def drops(module: L.LightningModule) -> None:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.2


def logs(module: L.LightningModule) -> None:
    """Log a number of each microbatch after its layers."""
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        loss = step(batch, batch_idx)
        module.log("sum", batch["input_ids"].sum().double(), reduce_fx="sum")
        module.log("most", loss.detach(), reduce_fx="max")
        return loss

    module.training_step = training_step  # type: ignore[method-assign]


def remembers(module: L.LightningModule) -> None:
    """Let a layer write an attribute that the step reads after all layers."""
    step, layer = module.training_step, layers_of(module)[0]

    def hook(_: nn.Module, args: Any, result: Any) -> None:
        module.kept = (result[0] if isinstance(result, tuple) else result).square().mean()

    def training_step(batch: Any, batch_idx: int) -> Any:
        return step(batch, batch_idx) + module.kept

    layer.register_forward_hook(hook)
    module.training_step = training_step  # type: ignore[method-assign]


def prepares(module: L.LightningModule) -> None:
    """Let the step put a value on the module before all layers, and read it after them."""
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        module.factor = batch["input_ids"].double().mean()
        return step(batch, batch_idx) * module.factor

    module.training_step = training_step  # type: ignore[method-assign]


def noises(module: L.LightningModule) -> None:
    """Add random numbers to gradients within the layers."""

    def hook(_: nn.Module, args: Any, result: Any) -> None:
        hidden = result[0] if isinstance(result, tuple) else result
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * (1 + torch.rand_like(gradient)))

    for layer in layers_of(module):
        layer.register_forward_hook(hook)


def sets(module: L.LightningModule) -> None:
    """Let the step run the model under other settings of torch, and assert that these are its own."""
    step, found = module.training_step, _settings()

    def training_step(batch: Any, batch_idx: int) -> Any:
        assert _settings() == found
        with sdpa_kernel(SDPBackend.MATH), cudnn.flags(enabled=False):
            inside = _settings()
            loss = step(batch, batch_idx)
            assert _settings() == inside != found
        assert _settings() == found
        return loss

    module.training_step = training_step  # type: ignore[method-assign]
    module.on_train_batch_end = lambda *_: _same(_settings(), found)  # type: ignore[method-assign]


def _settings() -> list[Any]:
    return [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cudnn.set_flags(_fp32_precision=None)]


def _same(found: Any, expected: Any) -> None:
    assert found == expected


WAYS = {"drops": drops, "logs": logs, "remembers": remembers, "prepares": prepares, "noises": noises, "sets": sets}


def trained(rank: int, which: str) -> list[Any]:
    """What a rank finds with microbatches one after another, and side by side."""
    found = []
    for size in (1, 2):
        torch.manual_seed(3)
        module = CASES["gpt2"].build()
        WAYS[which](module)
        if size > 1 and which in ("drops", "logs", "noises", "sets"):
            side_by_side(module)
        chosen = strategy(
            {"language": Modality(tp_size=2, pipeline={"interleaved_microbatches": size})}, num_microbatches=4
        )
        recorder = fit(module, batches_of("gpt2"), chosen, 2)
        found.append((recorder.losses, recorder.gradients, dict(module.trainer.callback_metrics)))
    return found


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("which", WAYS)
def test_dropout_logs_and_attributes_are_those_of_one_after_another(which: str) -> None:
    for apart, beside in call_ranks(2, trained, which):
        torch.testing.assert_close(beside, apart, rtol=1e-9, atol=1e-12)


class Unit(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


class Units(nn.Module):
    """Calls only those units that any token takes: other ones, and another number, on ranks with other tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.units = nn.ModuleList([Unit(width) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, taken = torch.zeros_like(x), (x[..., 0].abs() * 1000).long() % len(self.units)
        for number, unit in enumerate(self.units):
            rows = taken == number
            if bool(rows.any()):
                out = out.masked_scatter(rows.unsqueeze(-1), unit(x[rows]))
        return out


def routed(rank: int) -> list[Any]:
    """What a rank finds with microbatches one after another, and side by side, where ranks call unlike units."""
    register_tensor_parallel_plan("Unit", TensorParallelPlan(column={"up": ("width",)}, row={"down": ("width",)}))
    found = []
    for size in (1, 2):
        module = CASES["llama"].build()
        torch.manual_seed(3)
        for layer in layers_of(module):
            layer.mlp = Units(layer.mlp.gate_proj.in_features)  # type: ignore[union-attr, arg-type]
        language = Modality(tp_size=2, cp_size=2, pipeline={"interleaved_microbatches": size})
        recorder = fit(module, batches_of("llama", 1), strategy({"language": language}, num_microbatches=4), 4)
        found.append((recorder.losses, recorder.gradients))
    return found


@pytest.mark.usefixtures("float64")
def test_ranks_of_a_sequence_may_communicate_unlike_numbers_of_times_with_their_tensor_parallel_ranks() -> None:
    """language: ranks 0-3, tp 2 and cp 2."""
    for apart, beside in call_ranks(4, routed):
        torch.testing.assert_close(beside, apart, rtol=1e-6, atol=1e-7)


def failing(rank: int) -> None:
    """Fail in the layers of one rank, in a microbatch that is not the first of its group."""
    module, calls = CASES["llama"].build(), [0]

    def fails(*_: Any) -> None:
        calls[0] += 1
        if rank == 1 and calls[0] > 4 and threading.current_thread() is not threading.main_thread():
            raise ValueError("the layer is broken")

    layers_of(module)[0].register_forward_pre_hook(fails)
    chosen = strategy({"language": Modality(tp_size=2, **TWO)}, num_microbatches=4)
    fit(module, batches_of("llama"), chosen, 2)


def test_an_error_beside_another_microbatch_ends_all_ranks_with_its_cause() -> None:
    with pytest.raises(AssertionError, match="ValueError: the layer is broken"):
        run_ranks(2, failing)
