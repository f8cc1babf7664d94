"""Values cross to other ranks as they are; what stands for one that cannot raises our error, also inside of torch."""

from __future__ import annotations

import enum
import json
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from lightning_mm5d.stage.payload import NotSent, Packer, detached, map_tensors, rebuild, sendable, with_sendable_fields
from lightning_mm5d.stage.view import StageError


@pytest.mark.parametrize(
    "use",
    [
        lambda value: torch.cat([torch.zeros(1), value]),
        lambda value: torch.stack((value,)),
        lambda value: torch.zeros(1) + value,
        lambda value: torch.nn.functional.softmax(input=value, dim=0),
        float,
    ],
)
def test_any_use_names_the_value(use: Callable[[Any], Any]) -> None:
    with pytest.raises(StageError, match=r"self\.features cannot be sent to other ranks"):
        use(NotSent("self.features"))


class DynamicCache:
    """Stands for one of transformers."""


def test_the_error_names_the_field_and_what_to_do() -> None:
    tree = [None, {"outputs": [{"logits": torch.zeros(1), "past_key_values": DynamicCache()}]}]
    with pytest.raises(ValueError, match=r"DynamicCache in 'outputs\.past_key_values' cannot.*with use_cache=False"):
        Packer().describe(tree)
    with pytest.raises(ValueError, match="a value of type object cannot be sent to other ranks; tensors") as caught:
        Packer().describe(object())
    assert "use_cache" not in str(caught.value)


def test_of_a_result_only_fields_that_cannot_cross_are_replaced() -> None:
    whole = {"logits": torch.zeros(1)}
    assert with_sendable_fields("model", whole) is whole
    sent = with_sendable_fields("model", {**whole, "past_key_values": DynamicCache()})
    assert sent["logits"] is whole["logits"]
    with pytest.raises(StageError, match=r"model\(\)\.past_key_values, of type DynamicCache, cannot be sent"):
        sent["past_key_values"].get_seq_length()


@dataclass
class Scaled:
    """A result whose constructor changes what it is given."""

    values: torch.Tensor
    total: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.values = self.values * 2
        self.total = self.values.sum()
        self.name = "scaled"


def test_a_dataclass_crosses_without_its_constructor() -> None:
    packer = Packer()
    description = json.loads(json.dumps(packer.describe(result := Scaled(torch.ones(3)))))
    there = rebuild(description, packer.tensors)
    assert vars(there) == vars(result)
    assert there.values is result.values


class Kind(str, enum.Enum):
    IMAGE = "image"


class Named(dict):
    """A dict with its entries as attributes."""

    __getattr__ = dict.__getitem__


class Boxes(list):
    """A list with a format of its own."""

    def __init__(self, values: Any, form: str) -> None:
        super().__init__(values)
        self.form = form


def test_members_of_enumerations_and_containers_of_a_users_own_stay_what_they_are() -> None:
    packer = Packer()
    top = torch.arange(3.0).topk(2)
    result = {"kind": Kind.IMAGE, "named": Named(features=torch.ones(2)), "boxes": Boxes([1, 2], "xyxy"), "top": top}
    there = rebuild(json.loads(json.dumps(packer.describe(result))), packer.tensors)
    assert there["kind"] is Kind.IMAGE
    assert type(there["named"]) is Named
    assert there["named"].features is result["named"]["features"]
    assert (type(there["boxes"]), there["boxes"], there["boxes"].form) == (Boxes, [1, 2], "xyxy")
    assert there["top"].indices is top.indices


def test_a_class_within_a_function_stays_in_its_process_and_is_named_where_it_would_cross() -> None:
    class Pair(NamedTuple):
        left: torch.Tensor
        right: int

    doubled = map_tensors(Pair(torch.ones(2), 3), lambda tensor: tensor * 2)
    assert type(doubled) is Pair
    assert doubled.left.tolist() == [2.0, 2.0]
    with pytest.raises(StageError, match=r"result, of type Pair within a function, cannot be sent"):
        float(sendable("result", Pair(torch.ones(2), 3)))
    with pytest.raises(ValueError, match=r"Pair is a class within a function.*: define it outside"):
        Packer().describe(Pair(torch.ones(2), 3))


class Own(dict):
    """A dict that is its own attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.__dict__ = self


class Ordered(OrderedDict):
    """A dict whose order is its own."""


class Grouped(defaultdict):
    """A dict that makes entries by itself."""


class Row(list):
    """A list whose making wants arguments."""

    def __new__(cls, values: Any) -> Any:
        return super().__new__(cls)


class Sides(enum.Flag):
    LEFT = 1
    RIGHT = 2


def _there(value: Any) -> Any:
    packer = Packer()
    return rebuild(json.loads(json.dumps(packer.describe(value))), packer.tensors)


@pytest.mark.parametrize("crossed", [_there, detached])
def test_containers_cross_by_what_they_are_built_on(crossed: Callable[[Any], Any]) -> None:
    ordered = crossed(Ordered(a=torch.ones(1), b=2))
    assert (type(ordered), [*ordered.items()]) == (Ordered, [("a", torch.ones(1)), ("b", 2)])
    own = crossed(Own(a=1))
    own.b = 2
    assert (type(own), dict(own)) == (Own, {"a": 1, "b": 2})
    row = crossed(Row([1, 2]))
    assert (type(row), row) == (Row, [1, 2])
    grouped = Grouped(list)
    grouped["a"].append(1)
    assert type(crossed(grouped)) is dict


@pytest.mark.parametrize("sides", [Sides.LEFT, Sides.LEFT | Sides.RIGHT, Sides(0)])
def test_flags_cross_by_their_value(sides: Sides) -> None:
    assert _there(sides) is sides
    packer = Packer()
    packer.describe(sides)
    assert packer.has_values


@pytest.mark.parametrize("make", [lambda: Scaled(torch.ones(3)), lambda: Boxes([torch.ones(3)], "xyxy")])
def test_what_stands_beside_fields_and_refers_back_stays_here_and_is_named_elsewhere(make: Callable[[], Any]) -> None:
    out = make()
    out.parent, out.cache, out.others = out, DynamicCache(), [make() for _ in range(12)]
    for other in out.others:
        other.others = out.others
    packer = Packer()
    there = rebuild(json.loads(json.dumps(packer.describe(out))), packer.tensors)
    with pytest.raises(StageError, match=r"parent, of type \w+, cannot be sent"):
        float(there.parent)
    with pytest.raises(StageError, match=r"others, of type list, cannot be sent"):
        len(there.others[0].others)
    here = detached(out)
    assert (here.parent, here.cache) == (out, out.cache)
    assert len(here.others) == 12
    around: dict[str, Any] = {}
    around["around"] = around
    assert detached(around) is around
