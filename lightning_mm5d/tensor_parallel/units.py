"""What the parts of a tensor parallel plan count, who gets which of them, and which indices of a tensor these are.

It refuses parts that the plan does not count, and sizes that are not made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.layout.even_split import even_ranges
from lightning_mm5d.sharded.shards import HeadRanges, Range, Shard, heads_of, joined, scaled
from lightning_mm5d.tensor_parallel.family_plans import TensorParallelPlan


class OwnHeads(int):
    """This rank's number of heads, for a module that divides the full width of its input by the number of all heads."""

    whole: int

    @classmethod
    def of(cls, count: int, whole: int) -> OwnHeads:
        """`count` of `whole` heads."""
        own = cls(count)
        own.whole = whole
        return own

    def __rfloordiv__(self, width: int) -> int:
        return width // self.whole


class Units:
    """What the parts of one plan count, and who gets which of them.

    Args:
        path: of the module.
        module: what the plan is relative to.
        plan: says what is made of which parts.
        degree: number of ranks.

    Attributes:
        why_whole: why the module cannot be sharded; empty where it can.
    """

    def __init__(self, path: str, module: nn.Module, plan: TensorParallelPlan, degree: int) -> None:
        self._path, self._module, self._plan, self._degree = path, module, plan, degree
        self.why_whole = ""
        self._held: tuple[HeadRanges, ...] = ()
        self._query = self._key_value = 0
        if plan.heads is None:
            return
        self._query = _number(module, plan.heads)
        self._key_value = self._query if plan.key_value_heads is None else _number(module, plan.key_value_heads)
        held = heads_of(self._query, self._key_value, degree)
        if held is None:
            kinds = f"{self._query} query and {self._key_value} key and value" * (self._query != self._key_value)
            self.why_whole = f"its {kinds or self._query} heads cannot be shared by {degree} ranks"
        else:
            self._held = held

    def _ranges(self, part: str) -> tuple[Range, ...]:
        if part not in ("heads", "key_value_heads", "groups"):
            raise ConfigError(self._path, part, "A part is heads, key_value_heads, groups or width", "Use one of these")
        if not self._held:
            raise ConfigError(self._path, part, "A plan that counts heads names the attribute `heads`", "Add it")
        return tuple(held.query if part == "heads" else held.key_value for held in self._held)

    def lengths(self, part: str) -> tuple[int, ...]:
        """Units on each rank."""
        return tuple(stop - start for start, stop in self._ranges(part))

    def attributes(self) -> dict[str, tuple[int, ...]]:
        """Values of attributes on each rank."""
        found: dict[str, tuple[int, ...]] = {}
        plan = self._plan
        counts = {}
        if isinstance(plan.key_value_heads, str):
            counts[plan.key_value_heads] = "key_value_heads"
        if isinstance(plan.heads, str):
            counts[plan.heads] = "heads"
        for attribute, part in (counts | dict(plan.local)).items():
            value = _number(self._module, attribute)
            if part == "width":
                found[attribute] = tuple(stop - start for start, stop in even_ranges(value, self._degree))
            elif part == "group_size":
                both = zip(self.lengths("heads"), self.lengths("key_value_heads"), strict=True)
                found[attribute] = tuple(query // key_value for query, key_value in both)
            else:
                units = self._query if part == "heads" else self._key_value
                found[attribute] = tuple(value * length // units for length in self.lengths(part))
            if plan.whole_width and attribute == plan.heads:
                found[attribute] = tuple(OwnHeads.of(count, value) for count in found[attribute])
        return found

    def shard(self, path: str, dim: int, size: int, parts: Sequence[str]) -> Shard:
        """The shard of a dim that is made of `parts`, one after the other."""
        if parts == ("groups",):
            return self._groups(path, dim, size)
        units = [self._query if part == "heads" else self._key_value if part != "width" else 1 for part in parts]
        width, rest = divmod(size, max(sum(units), 1))
        if rest or not parts:
            rule = (
                f"Its size along dim {dim} is not made of {' + '.join(parts) or 'parts'}, {sum(units)} units of one "
                "width"
            )
            raise ConfigError(path, size, rule, "Correct the tensor parallel plan of its module")
        offset, ranges = 0, []
        for part, count in zip(parts, units, strict=True):
            if part == "width":
                ranges.append([scaled(held, 1, offset) for held in even_ranges(width, self._degree)])
            else:
                ranges.append([scaled(held, width, offset) for held in self._ranges(part)])
            offset += count * width
        return joined(ranges, dim, size)

    def _groups(self, path: str, dim: int, size: int) -> Shard:
        """Rows that have, for each key and value head, its query heads and then its key and its value."""
        each = self._query // max(self._key_value, 1)
        width, rest = divmod(size, max(self._key_value * (each + 2), 1))
        if rest or not self._held:
            raise ConfigError(path, size, f"Its size is not that of {self._key_value} groups of heads", "Correct it")
        ranges: list[tuple[Range, ...]] = []
        for (first, last), (low, high) in self._held:
            held: list[Range] = []
            for head in range(low, high):
                start = head * (each + 2)
                a, b = max(first - head * each, 0), min(last - head * each, each)
                held += [scaled((start + a, start + b), width), scaled((start + each, start + each + 2), width)]
            ranges.append(tuple(held))
        return Shard(dim, size, tuple(ranges))


def _number(module: nn.Module, path: str | int) -> int:
    value: Any = path
    if isinstance(path, str):
        value = module
        for part in path.split("."):
            value = getattr(value, part)
    return int(value)
