"""A placement by the order of axes changes which rank computes what, and nothing of what is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compare import tolerance
from lightning_mm5d import Modality
from parity.harness import fit, strategy
from ranks import call_ranks
from sweeps import swept
from tensor_parallel.layouts import Compared, alone, batches_of, build, check_all
from zoo import CASES

REPLICAS = 2
SHARED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("llama_tied", {"tp_size": 2, "zero_stage": 3}, ["tp", "dp"]),
    ("llama", {"tp_size": 2, "zero_stage": 3, "shard_embedding": False}, ["dp", "tp"]),
    ("gpt2", {"cp_size": 2, "zero_stage": 3}, ["cp", "dp"]),
    ("gpt2", {"cp_size": 2, "zero_stage": 2, "dp_shard_size": 2}, ["cp", "dp"]),
    ("gpt2", {"pp_size": 2, "zero_stage": 3, "reshard_after_forward": True}, ["dp", "pp"]),
]


SEQUENCE_SHARDS = {"tp_size": 2, "sequence_parallel": True}
WITH_LANGUAGE = {"tp_size": 2, "colocate_with": "language"}
ORDERS: dict[str, tuple[str, dict[str, Any], list[str], int]] = {
    "tp, dp": ("llama_tied", {"language": {"tp_size": 2}}, ["tp", "dp"], 2),
    "cp, dp": ("gpt2", {"language": {"cp_size": 2}}, ["cp", "dp"], 2),
    "cp, tp": ("llama_tied", {"language": {"cp_size": 2, **SEQUENCE_SHARDS}}, ["cp", "tp"], 1),
    "tp, pp": ("bert", {"language": {"tp_size": 2, "pp_size": 2}}, ["tp", "pp"], 1),
    "dp, tp, pp": ("llava", {"vision": WITH_LANGUAGE, "language": {"pp_size": 2}}, ["dp", "tp", "pp"], 2),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("which", swept(ORDERS, "tp, dp", "cp, tp", "tp, pp"))
def test_any_order_of_axes_equals_one_process(which: str) -> None:
    """language: ranks 0-3, also with vision on the same ranks."""
    name, fields, order, replicas = ORDERS[which]
    check_all(4, Compared(name=name, fields=fields, replicas=replicas, options={"placement": order}))


def trained(rank: int, name: str, fields: dict[str, Any], order: list[str]) -> dict[str, torch.Tensor]:
    """The parameters that rank 0 has after two steps."""
    module = build(name)
    chosen = strategy({"language": Modality(**fields)}, num_microbatches=2, placement=order)
    parts = [part for batch in batches_of(name) for part in CASES[name].split(batch, REPLICAS)]
    fit(module, parts, chosen, 4, use_distributed_sampler=True)
    return module.state_dict()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("index", swept(range(len(SHARED)), 1, 3))
def test_parameters_shared_over_ranks_in_any_order_equal_one_process(index: int) -> None:
    """language: ranks 0-3."""
    name, fields, order = SHARED[index]
    parameters = call_ranks(4, trained, *SHARED[index])[0]
    _, expected = alone(Compared(name=name, fields={}))
    for key, value in expected.items():
        where = f"{name}, {fields}, {order}: {key}"
        torch.testing.assert_close(
            parameters[key], value, **tolerance(exact=False), msg=lambda m, where=where: f"{where}: {m}"
        )
