"""What a batch of encoder inputs is made of: items that can be encoded one by one, and their parts of a result.

An *item* is one image, video or piece of audio. Inputs tell their items by their shapes: every tensor has one row for
each item along dim 0; or they are packed, and a table of sizes (``image_grid_thw`` and its like) says how many rows
each item has. Which part of a result belongs to which item shows when one item of each size is encoded alone: it tells
the rows of a tensor that belong to such an item, and a list that is shorter. Without a table an item has one row of a
tensor, and a result with any other number is not divided. Numbers that are equal in both are shared by all items.

Where items may give unequal numbers of rows and no table tells them, inputs are not divided: a tensor that may be a
mask, lengths or sizes differs between items, an item has one number in place of a whole frame or tile, or a list of the
arguments may count the items.

Descriptions are those of `payload.Packer`. In the description of an item's part, ``rows`` marks tensors that are
concatenated along dim 0 when items are joined, and ``items`` marks lists with one entry for each item.

Shapes: N items, P rows of packed inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


class DividedError(Exception):
    """A result has no parts for single items."""


@dataclass(frozen=True)
class Items:
    """How inputs are divided.

    Attributes:
        count: N.
        table: the row of each item in the table of packed inputs, whose products sum to P; None where every tensor has
            N rows.
    """

    count: int
    table: tuple[tuple[int, ...], ...] | None = None

    @property
    def packed(self) -> tuple[int, ...] | None:
        """Rows of each item in packed inputs."""
        return None if self.table is None else tuple(map(math.prod, self.table))

    def size(self, item: int) -> tuple[int, ...]:
        """Return what items have in common that give equal numbers of rows."""
        return () if self.table is None else self.table[item]

    def bounds(self, rows: int, item_rows: Sequence[int], item: int) -> tuple[int, int]:
        """Return first row and end of an item in a tensor of a result.

        Args:
            rows: of the tensor.
            item_rows: rows of this tensor in the results for each item alone.
            item: its number.

        Raises:
            DividedError: the tensor has other rows than all items together, or more than one for each without a table.
        """
        if sum(item_rows) != rows or (self.table is None and rows != self.count):
            raise DividedError
        ends = [0, *accumulate(item_rows)]
        return ends[item], ends[item + 1]


def items_of(arguments: Sequence[Any], tensors: Sequence[Tensor]) -> Items | None:
    """Return how the tensors of a call's arguments divide into several items; None where they do not tell.

    Args:
        arguments: description of each.
        tensors: of all of them.
    """
    lengths = [len(tensor) for tensor in tensors if tensor.dim()]
    if not lengths or min(lengths) == 0:
        return None
    items = _counted(lengths, tensors)
    if items is None or any(_may_count(argument, items.count) for argument in arguments):
        return None
    return items


def _counted(lengths: Sequence[int], tensors: Sequence[Tensor]) -> Items | None:
    if len(set(lengths)) == 1:
        is_divided = lengths[0] > 1 and not any(map(_is_uneven, tensors)) and not any(map(_has_blanks, tensors))
        return Items(lengths[0]) if is_divided else None
    for table in tensors:
        if table.dim() == 2 and table.shape[1] in (2, 3) and table.dtype in (torch.int64, torch.int32):
            items = Items(len(table), tuple(map(tuple, table.tolist())))
            rows = items.packed or ()
            if len(rows) > 1 and min(rows) > 0 and {sum(rows), len(rows)} >= {*lengths}:
                return None if any(_is_uneven(tensor) for tensor in tensors if tensor is not table) else items
    return None


def _is_uneven(tensor: Tensor) -> bool:
    """Whether a tensor may be a mask, lengths or sizes, and differs between its rows."""
    if not tensor.dim() or torch.equal(tensor, tensor[:1].expand_as(tensor)):
        return False
    if tensor.dim() == 1 or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    rest = tensor[tensor != tensor.flatten()[0]]
    is_table = tensor.dim() == 2 and not tensor.is_complex() and bool((tensor == tensor.round()).all())
    return is_table or bool((rest == rest[:1]).all())


def _has_blanks(tensor: Tensor) -> bool:
    """Whether an item, a row of the tensor, has one number in place of a whole frame or tile."""
    if tensor.dim() < 3:
        return False
    frames = tensor.flatten(2)
    blank = frames[..., :1] if frames.shape[2] > 1 else 0
    return bool((frames == blank).all(dim=2).any())


def _may_count(node: Any, count: int, listed: bool = False) -> bool:
    """Whether the description of an argument has a list of tensors, or one with as many entries as there are items."""
    if not isinstance(node, dict):
        return False
    if "t" in node:
        return listed
    if "d" in node:
        return any(_may_count(value, count, listed) for _, value in node["d"])
    entries = next((node[kind] for kind in ("l", "u", "s") if kind in node), ())
    return len(entries) == count or any(_may_count(entry, count, True) for entry in entries)


def part_of_inputs(tensor: Tensor, items: Items, item: int) -> Tensor:
    """Return the rows of an item in a tensor of the arguments."""
    if not tensor.dim():
        return tensor
    if items.packed is None or len(tensor) == items.count:
        return tensor[item : item + 1]
    start = sum(items.packed[:item])
    return tensor[start : start + items.packed[item]]


def part_of_result(whole: Any, single: Any, items: Items) -> Any:
    """Return the description of the part of each item.

    Args:
        whole: description of the result for all items.
        single: description of the result for the last item.
        items: of the call.

    Raises:
        DividedError: the results differ by more than their rows.
    """
    if not (isinstance(whole, dict) and isinstance(single, dict)):
        if whole != single:
            raise DividedError
        return whole
    if whole.keys() != single.keys() or whole.get("c") != single.get("c"):
        raise DividedError
    if "t" in whole:
        return {"t": whole["t"], "rows": single["t"]}
    part = dict(whole)
    if "d" in whole:
        pairs = list(zip(whole["d"], single["d"], strict=False))
        if len(whole["d"]) != len(single["d"]) or any(field[0] != single_field[0] for field, single_field in pairs):
            raise DividedError
        part["d"] = [[field[0], part_of_result(field[1], single_field[1], items)] for field, single_field in pairs]
        return part
    for kind in ("l", "u"):
        if kind not in whole:
            continue
        entries, singles = whole[kind], single[kind]
        if len(entries) == len(singles):
            part[kind] = [part_of_result(entry, single, items) for entry, single in zip(entries, singles, strict=True)]
            return part
        if len(entries) == items.count and len(singles) == 1 and "c" not in whole:
            if not all(isinstance(entry, dict) and "t" in entry for entry in (*entries, *singles)):
                raise DividedError
            return {kind: entries, "items": True}
    if whole != single:
        raise DividedError
    return part


def take(
    part: Any, tensors: Sequence[Tensor], items: Items, item: int, item_lengths: Sequence[Sequence[int]]
) -> tuple[Any, list[Tensor]]:
    """Return an item's part of a result: its description, and its tensors.

    Args:
        part: from `part_of_result`.
        tensors: of the result.
        items: of the call.
        item: its number.
        item_lengths: the rows of all tensors in the results for each item alone.
    """
    places: dict[tuple[int, int | None], int] = {}
    part_tensors: list[Tensor] = []

    def add(index: int, rows: int | None) -> int:
        if (index, rows) not in places:
            places[index, rows] = len(part_tensors)
            tensor = tensors[index]
            if rows is not None and tensor.dim():
                start, stop = items.bounds(len(tensor), [lengths[rows] for lengths in item_lengths], item)
                tensor = tensor[start:stop]
            part_tensors.append(tensor)
        return places[index, rows]

    def rows_of(node: Any) -> Any:
        return {"t": add(node["t"], node["rows"]), "rows": True}

    def one_of(kind: str, entries: Any) -> Any:
        return {kind: [{"t": add(entries[item]["t"], None)}], "items": True}

    return _replaced(part, rows_of, one_of), part_tensors


def join(part: Any, tensors: Sequence[Sequence[Tensor]]) -> tuple[Any, list[Tensor]]:
    """Undo `take` for items with the same description; return description and tensors of their result.

    Args:
        part: description of each item's part.
        tensors: of each item.

    Raises:
        DividedError: numbers that all items share are unequal.
    """
    places: dict[tuple[int, int], int] = {}
    joined: list[Tensor] = []

    def add(index: int, item: int) -> dict[str, int]:
        """`item` is -1 for the rows of all items."""
        if (index, item) not in places:
            places[index, item] = len(joined)
            rows = [item_tensors[index] for item_tensors in tensors] if item < 0 else [tensors[item][index]]
            if item < 0 and not rows[0].dim() and not all(torch.equal(tensor, rows[0]) for tensor in rows):
                raise DividedError
            joined.append(torch.cat(rows) if item < 0 and rows[0].dim() else rows[0])
        return {"t": places[index, item]}

    def all_of(kind: str, entries: Any) -> Any:
        return {kind: [add(entries[0]["t"], item) for item in range(len(tensors))]}

    return _replaced(part, lambda node: add(node["t"], -1), all_of), joined


def _replaced(node: Any, rows: Callable[[Any], Any], entries: Callable[[str, Any], Any]) -> Any:
    """Return a description with others in place of tensors with rows of items, and of lists with an entry of each."""
    if not isinstance(node, dict):
        return node
    if "rows" in node:
        return rows(node)
    if "items" in node:
        kind = "l" if "l" in node else "u"
        return entries(kind, node[kind])
    if "d" in node:
        return {**node, "d": [[key, _replaced(value, rows, entries)] for key, value in node["d"]]}
    lists = {key: [_replaced(entry, rows, entries) for entry in node[key]] for key in ("l", "u") if key in node}
    return node | lists
