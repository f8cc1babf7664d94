"""What the code of a class mentions, and what follows where the code has no source."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mm5d.context_parallel.hooks.whole_modules import Reader
from lightning_mm5d.source.reads import reads, weights_read
from lightning_mm5d.source.trees import (
    class_names,
    decorated,
    forward_names,
    function_of,
    mentions,
    method_of,
    names,
    own_functions,
    tree_of,
)
from lightning_mm5d.tensor_parallel.region import drops


def outer(value: Any) -> Any:
    return value


def logged(function: Callable) -> Callable:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return outer(function(*args, **kwargs))

    return around


def helper(query: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, query, query)


class Attention(nn.Module):
    """Attends through a function beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.only_made = nn.Linear(2, 2)

    @logged
    def forward(self, hidden: Tensor, rate: float = 0.5) -> Tensor:
        inner: Tensor = helper(hidden)
        return inner.reshape(-1) + getattr(self, "by_string")  # noqa: B009

    @staticmethod
    def scaled(value: Tensor) -> Tensor:
        return value * 2


def without_source(body: str) -> type[nn.Module]:
    """A class of modules whose forward returns `body` of ``x`` and is compiled from a string."""
    scope: dict[str, Any] = {"nn": nn, "F": F}
    exec(f"class Hidden(nn.Module):\n    def forward(self, x):\n        return {body}\n", scope)
    return scope["Hidden"]


def test_a_function_is_found_under_decorators_and_descriptors() -> None:
    assert [name for name, _ in own_functions(Attention)] == ["__init__", "forward", "scaled"]
    forward = method_of(Attention, "forward")
    assert forward is not None
    assert forward.__code__.co_firstlineno != Attention.forward.__code__.co_firstlineno
    assert list(decorated(Attention.forward)) == [Attention.forward, forward]
    assert function_of(len) is None
    assert function_of(functools.partial(outer, 1)) is None
    assert method_of(Attention, "no_such_method") is None


def test_docstrings_may_have_lines_without_indent() -> None:
    class Documented:
        def method(self) -> None:
            """Does
            nothing."""

    function = method_of(Documented, "method")
    assert function is not None
    assert tree_of(function) is not None


def test_names_are_those_of_attributes_globals_and_variables() -> None:
    forward = method_of(Attention, "forward")
    assert forward is not None
    outside = {"logged", "Tensor", "float", "helper", "reshape", "getattr"}
    assert names(forward, variables=False) == outside
    assert names(forward) == outside | {"self", "hidden", "rate", "inner"}


def test_functions_beside_a_class_count_where_its_forward_names_them() -> None:
    assert "scaled_dot_product_attention" in (class_names(Attention) or ())
    assert "scaled_dot_product_attention" not in (forward_names(Attention) or ())


def test_torchs_own_layers_name_nothing() -> None:
    assert class_names(nn.Linear) == forward_names(nn.Linear) == frozenset()


@pytest.mark.parametrize(("word", "expected"), [("helper", True), ("by_string", True), ("only_made", False)])
def test_words_are_looked_for_outside_of_the_constructor(word: str, expected: bool) -> None:
    assert mentions(Attention, [word]) is expected


def test_code_without_source_is_not_known() -> None:
    hidden = without_source("x")
    assert reads(hidden) is forward_names(hidden) is class_names(hidden) is None
    assert weights_read(hidden) == frozenset()
    assert mentions(hidden, ["anything"])


def test_code_without_source_may_drop_values_out() -> None:
    assert drops(without_source("F.dropout(x, 0.1)")())
    assert not drops(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def test_a_module_without_source_may_mix_tokens_and_runs_on_whole_sequences() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mixer = Attention(), without_source("x.cumsum(1)")()

    assert list(Reader().mixers(Layer()).whole) == ["mixer"]
    assert not Reader().mixers(Attention()).whole


def test_each_function_is_parsed_once() -> None:
    function = method_of(Attention, "forward")
    assert function is not None
    assert tree_of(function) is tree_of(function)
