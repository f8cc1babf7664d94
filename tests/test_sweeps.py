"""The part of a product that the default run holds covers what it says, and is the same in every process."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sweeps import covering, dealt

ROWS, COLUMNS, LAST = ("a", "b", "c", "d"), (1, 2, 3), ("x", "y")


def default(params: Iterable[Any]) -> list[Any]:
    return [param.values for param in params if pytest.mark.exhaustive not in param.marks]


def test_each_value_of_an_aspect_is_in_the_default_run_and_no_case_is_lost() -> None:
    params = covering(product(ROWS, COLUMNS), (0,), (1,))
    assert [param.values for param in params] == list(product(ROWS, COLUMNS))
    rows, columns = zip(*default(params), strict=True)
    assert len(rows) == len(ROWS)
    assert set(rows) == set(ROWS)
    assert set(columns) == set(COLUMNS)


def test_each_pair_of_an_aspect_is_in_the_default_run() -> None:
    chosen = default(covering(product(ROWS, COLUMNS, LAST), (0, 2), (1,)))
    assert {(row, last) for row, _, last in chosen} == set(product(ROWS, LAST))
    assert {column for _, column, _ in chosen} == set(COLUMNS)


def test_cases_that_are_kept_are_in_the_default_run_and_count() -> None:
    chosen = default(covering(product(ROWS, COLUMNS), (0,), (1,), kept=[("b", 3), ("c", 3)]))
    assert {("b", 3), ("c", 3)} <= set(chosen)
    assert len(chosen) == 4
    with pytest.raises(AssertionError, match="one of the cases"):
        covering(product(ROWS, COLUMNS), (0,), kept=[("e", 1)])


def test_a_file_is_dealt_the_same_cases_wherever_the_tests_lie() -> None:
    for count in (1, 2):
        one, other = (default(dealt(f"{root}/tests/room/test_x.py", COLUMNS, count)) for root in ("/here", "/there"))
        assert one == other
        assert len(one) == count


def test_what_is_left_out_for_its_lines_is_a_test() -> None:
    tests = Path(__file__).parent
    left_out = {name.partition("[")[0] for name in (tests / "exhaustive.txt").read_text().splitlines()}
    files = {name.partition("::")[0] for name in left_out}
    functions = {
        f"{file}::{node.name}"
        for file in files
        for node in ast.walk(ast.parse((tests.parent / file).read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert left_out <= functions
