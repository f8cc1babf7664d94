"""The list of checks, in the order in which they run: short proofs first, kernels last, which take the time left."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Row


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    Args:
        name: ``"group.check"``; a user names a group or one check of it.
        title: what it proves, for the report.
        function: ``"module:function"`` in this package; only the check's own process imports it.
        limit_s: wall-clock limit.
    """

    name: str
    title: str
    function: str
    limit_s: int


CHECKS = (
    Check(
        name="flex.tests",
        title="Tests that need a GPU: FlexAttention and flash attention of tiles",
        function="gpu_tests:run",
        limit_s=300,
    ),
)


def load(function: str) -> Callable[[Machine], Iterator[Row]]:
    """Return the function of a check by its ``"module:function"``."""
    module, _, name = function.partition(":")
    return getattr(import_module(f"benchmarks.gpu.{module}"), name)


def chosen(names: list[str]) -> list[Check]:
    """Return the checks that `names` name, groups or single ones; all for none.

    Raises:
        SystemExit: a name is neither.
    """
    known = {check.name for check in CHECKS} | {check.name.partition(".")[0] for check in CHECKS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no check is named {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
    return [check for check in CHECKS if not names or {check.name, check.name.partition(".")[0]} & set(names)]
