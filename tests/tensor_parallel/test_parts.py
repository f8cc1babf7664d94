"""Modules and optimizers of parts are collected, loaded and made whole: on hand-made plans, without training."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from features.toys import assert_same
from lightning_mm5d.checkpoint.module_state import collect_module, load_module, restore_full
from lightning_mm5d.checkpoint.optimizer_state import collect_optimizer, drop_remote_state, load_optimizer
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.stage import is_placeholder
from ranks import run_ranks
from sweeps import every
from tensor_parallel.handmade import Model, connect, cut, model_plan

CPU = torch.device("cpu")
LAYOUTS: dict[str, tuple[int, int, int, dict[str, int]]] = {
    "two replicas": (4, 4, 1, {"tp_size": 2, "dp_size": 2}),
    "two stages": (4, 4, 2, {"tp_size": 2, "pp_size": 2}),
    "uneven heads": (3, 6, 2, {"tp_size": 3}),
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda groups: AdamW(groups, lr=0.1, amsgrad=True),
    "momentum": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
    "adagrad": lambda groups: Adagrad(groups, lr=0.1),
    "without state": lambda groups: SGD(groups, lr=0.1),
}
FROZEN = "layers.1.norm.bias"


def optimizer_of(module: Model, kind: str) -> Optimizer:
    parameters = list(module.parameters())
    return OPTIMIZERS[kind]([{"params": parameters[:5]}, {"params": parameters[5:], "lr": 0.2}])


def step(module: Model, optimizer: Optimizer, seed: int, plan: Plan | None = None, rank: int = 0) -> None:
    """One step with made up gradients, of what is here."""
    for name, parameter in module.named_parameters():
        if is_placeholder(parameter) or name == FROZEN:
            continue
        whole = Model(*sizes_of(module)).get_parameter(name)
        grad = torch.randn(whole.shape, dtype=whole.dtype, generator=torch.Generator().manual_seed(seed))
        if plan is not None and name in plan.division.shards:
            grad = plan.division.shards[name].cut(grad, plan.ownership.shard_index(name, rank))
        parameter.grad = grad
    optimizer.step()


def sizes_of(module: Model) -> tuple[int, int]:
    return module.query, module.key_value


def copied(state: Any) -> Any:
    return {name: value.detach().clone() for name, value in state.items()}


def storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


# --- modules ---


def collected(rank: int, plan: Plan, module: Model, targets: tuple[int, ...]) -> Any:
    connect(rank, plan)
    cut(plan, module, rank)
    held = copied(module.state_dict())
    state = collect_module(module, plan, rank, targets, wire=CPU)
    is_tied = storage(state["table.weight"]) == storage(state["head.weight"])
    for name, value in module.state_dict().items():
        if not is_remote(value):
            assert torch.equal(value, held[name])
    return copied(state), held, list(state), is_tied


@pytest.mark.parametrize("layout", LAYOUTS)
def test_targets_get_the_state_of_one_process_and_others_keep_theirs(layout: str) -> None:
    world, query, key_value, fields = LAYOUTS[layout]
    module, plan = model_plan(world, query, key_value, **fields)
    targets = (0, 2)
    for rank, (state, held, names, is_tied) in enumerate(run_ranks(world, collected, plan, module, targets)):
        assert names == list(module.state_dict())
        if rank in targets:
            assert_same(state, copied(module.state_dict()))
            assert is_tied, "what has two names is one tensor in the file"
        else:
            assert {name: value.shape for name, value in state.items()} == {
                name: value.shape for name, value in held.items()
            }


def loaded(rank: int, plan: Plan, module: Model, state: dict[str, Tensor]) -> Any:
    connect(rank, plan)
    cut(plan, module, rank)
    load_module(module, state, True, plan, rank)
    return {
        name: value.clone() for name, value in module.state_dict().items() if rank in plan.ownership.ranks_holding(name)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_takes_its_part_of_a_file(layout: str) -> None:
    world, query, key_value, fields = LAYOUTS[layout]
    module, plan = model_plan(world, query, key_value, **fields)
    state = copied(Model(query, key_value, seed=1).state_dict())
    for rank, found in enumerate(run_ranks(world, loaded, plan, module, state)):
        assert found
        for name, value in found.items():
            shard = plan.division.shards.get(name)
            expected = state[name] if shard is None else shard.cut(state[name], plan.ownership.shard_index(name, rank))
            assert torch.equal(value, expected), name


def refused(rank: int, plan: Plan, module: Model, state: dict[str, Tensor]) -> str:
    connect(rank, plan)
    cut(plan, module, rank)
    try:
        load_module(module, state, True, plan, rank)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", ["layers.0.qkv.weight", "layers.1.slopes", "layers.1.norm.weight"])
def test_all_ranks_refuse_another_shape(name: str) -> None:
    """language: ranks 0-1 and 2-3 as stages; also those that do not hold it, and where it is that of a part."""
    module, plan = model_plan(4, 4, 2, tp_size=2, pp_size=2)
    state = copied(module.state_dict())
    state[name] = state[name][: len(state[name]) // 2]
    holders = (
        plan.ownership.ranks_holding(name) if name.endswith("slopes") else range(4)
    )  # a buffer is whole where it is not used
    errors = run_ranks(4, refused, plan, module, state)
    for rank in holders:
        assert "size mismatch" in errors[rank]
        assert name in errors[rank]


def restored(rank: int, plan: Plan, module: Model, targets: tuple[int, ...]) -> Any:
    connect(rank, plan)
    cut(plan, module, rank)
    before = dict(module.named_parameters())
    for parameter in before.values():
        if not is_placeholder(parameter):
            parameter.grad = torch.ones_like(parameter)
    was_placeholder = {name for name, parameter in before.items() if is_placeholder(parameter)}
    restore_full(module, plan, rank, targets, wire=CPU)
    after = dict(module.named_parameters())
    return {
        "same": all(after[name] is parameter for name, parameter in before.items()),
        "tied": module.head.weight is module.table.weight,
        "values": copied(dict(module.named_parameters())) | copied(dict(module.named_buffers())),
        "gradients": {name for name, parameter in after.items() if parameter.grad is not None},
        "placeholders": {name for name, parameter in after.items() if is_placeholder(parameter)},
        "remote": was_placeholder,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_is_whole_on_the_targets_and_has_its_whole_shape_on_others(layout: str) -> None:
    """With buffers that no file holds; parameters stay the same objects, and gradients of parts are dropped."""
    world, query, key_value, fields = LAYOUTS[layout]
    module, plan = model_plan(world, query, key_value, **fields)
    targets = (0, 2)
    expected = copied(dict(module.named_parameters())) | copied(dict(module.named_buffers()))
    divided = set(plan.division.shards) & set(dict(module.named_parameters()))
    for rank, found in enumerate(run_ranks(world, restored, plan, module, targets)):
        assert found["same"]
        assert found["tied"]
        kept = set(dict(module.named_parameters())) - divided - found["remote"]
        assert found["gradients"] == kept
        if rank in targets:
            assert_same(found["values"], expected)
            assert not found["placeholders"]
        else:
            assert found["placeholders"] == found["remote"] | divided
            for name, value in found["values"].items():
                assert value.shape == expected[name].shape
                if name in divided:
                    assert value.isnan().all()
                elif name not in plan.division.shards and name not in found["remote"]:
                    assert torch.equal(value, expected[name])


# --- optimizers ---


def optimized(rank: int, plan: Plan, module: Model, kind: str, saved: dict[str, Any]) -> Any:
    connect(rank, plan)
    cut(plan, module, rank)
    optimizer = optimizer_of(module, kind)
    drop_remote_state(optimizer)
    for seed in range(2):
        step(module, optimizer, seed, plan, rank)
    state = collect_optimizer(optimizer, module, plan, rank, CPU)

    fresh = optimizer_of(module, kind)
    load_optimizer(fresh, saved, module, plan, rank)
    again = deepcopy(collect_optimizer(fresh, module, plan, rank, CPU))
    step(module, fresh, 2, plan, rank)
    restore_full(module, plan, rank, wire=CPU)
    return state, again, copied(module.state_dict()), collect_optimizer(fresh, module, plan, rank, CPU)


@pytest.mark.parametrize(("layout", "kind"), every(2, LAYOUTS, OPTIMIZERS))
def test_optimizer_state_is_that_of_one_process_and_goes_on_from_it(layout: str, kind: str) -> None:
    """Saved, loaded, saved again, and saved when the module is whole but the state is still that of parts."""
    world, query, key_value, fields = LAYOUTS[layout]
    module, plan = model_plan(world, query, key_value, **fields)
    one = Model(query, key_value)
    optimizer = optimizer_of(one, kind)
    for seed in range(2):
        step(one, optimizer, seed)
    saved = deepcopy(optimizer.state_dict())
    step(one, optimizer, 2)
    state, again, weights, last = run_ranks(world, optimized, plan, module, kind, saved)[0]
    assert_same(state, saved)
    assert_same(again, saved)
    assert_same(weights, copied(one.state_dict()))
    assert_same(last, optimizer.state_dict())


def with_missing_parts(rank: int, plan: Plan, module: Model) -> Any:
    connect(rank, plan)
    cut(plan, module, rank)
    optimizer = AdamW(module.parameters(), lr=0.1)
    if rank == 1:
        module.table.weight.grad = torch.ones_like(module.table.weight)
    optimizer.step()
    return collect_optimizer(optimizer, module, plan, rank, CPU)["state"]


def test_a_part_without_state_counts_as_zeros() -> None:
    """language: ranks 0-1, tensor parallel; only rank 1 had a gradient of the table."""
    module, plan = model_plan(2, 4, 1, tp_size=2)
    state = run_ranks(2, with_missing_parts, plan, module)[0]
    assert list(state) == [0]
    first = plan.division.shards["table.weight"].lengths[0]
    assert state[0]["step"] == 1
    assert not state[0]["exp_avg"][:first].any()
    assert state[0]["exp_avg"][first:].all()
    assert state[0]["exp_avg"].shape == module.table.weight.shape
