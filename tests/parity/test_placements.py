"""A placement by the order of axes changes which rank computes what, and nothing of what is computed."""

from __future__ import annotations

import pytest

from tensor_parallel.layouts import Compared, check_all

SHARDED = {"zero_stage": 3}


@pytest.mark.usefixtures("float64")
def test_any_order_of_axes_equals_one_process() -> None:
    """language: ranks 0-3, or vision: rank 0 and language: ranks 1-3."""
    cases = [
        ("llama_tied", {"language": {"tp_size": 2, **SHARDED}}, ("tp", "dp"), 2),
        ("gpt2", {"language": {"cp_size": 2, **SHARDED}}, ("cp", "dp"), 2),
        ("llama_tied", {"language": {"cp_size": 2, "tp_size": 2, "sequence_parallel": True}}, ("tp", "cp"), 1),
        ("bert", {"language": {"pp_size": 2, "zero_stage": 2}}, ("dp", "pp"), 2),
        ("llava", {"vision": {"tp_size": 2, "colocate_with": "language"}, "language": {"pp_size": 2}}, ("dp", "tp", "pp"), 2),
    ]  # fmt: skip
    check_all(
        4,
        *(
            Compared(name=name, fields=fields, replicas=replicas, options={"placement": order})
            for name, fields, order, replicas in cases
        ),
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("order", [("dp", "pp", "tp"), ("tp", "pp", "dp")])
def test_three_axes_in_other_orders_equal_one_process(order: tuple[str, ...]) -> None:
    """language: ranks 0-7."""
    fields = {"language": {"tp_size": 2, "pp_size": 2, **SHARDED}}
    check_all(8, Compared(name="llama_tied", fields=fields, replicas=2, options={"placement": order}))
