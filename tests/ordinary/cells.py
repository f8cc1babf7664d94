"""A cell is a use in a column, and its outcome by comparison with the use on one plain process of Lightning.

An outcome is "equal", "refused" with the error, "differs" with the reason that the use gives, or a *fault*: a wrong
result that nobody announced, or an error that is not one of ours. Faults have no place in the table.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from features.toys import LANGUAGE, PAIR, VISION, Layout
from lightning_mm5d import Modality, TensorParallelPlan, register_tensor_parallel_plan
from lightning_mm5d.config import errors
from lightning_mm5d.stage.view import StageError
from ordinary.rows import USES
from ordinary.uses import Run, Use
from ranks import call_ranks

ALL = {"colocate_with": "language", **VISION}
COLUMNS: dict[str, Layout] = {
    "one": Layout(None, 1),  # type: ignore[arg-type]
    "replicas": Layout(None, 2, 2),  # type: ignore[arg-type]
    "split": PAIR,
    "pp": Layout({"vision": Modality(**ALL), "language": Modality(pp_size=2, **LANGUAGE)}, 2),
    "tp": Layout({"vision": Modality(tp_size=2, **ALL), "language": Modality(tp_size=2, **LANGUAGE)}, 2),
    "zero": Layout({"model": Modality(sharding={"zero_stage": 3})}, 2, 2),
}
"""one process | replicas: ranks 0-1 | vision: rank 0, language: rank 1 | vision and two stages of language: ranks 0-1 |
both sharded over ranks 0-1 | two replicas with rows of parameters: ranks 0-1"""
HEADINGS = {
    "one": "one process",
    "replicas": "replicas",
    "split": "vision \\| language",
    "pp": "pp 2",
    "tp": "tp 2",
    "zero": "zero 3",
}
OPTIONS: dict[str, dict[str, Any]] = {"split": {"num_microbatches": 2}, "pp": {"num_microbatches": 2}}
REPLICATED = ("replicas", "zero")
WARNED = "warned of a loss that is no mean"
LIMIT_S = 180
NAMED = (
    errors.ConfigError,
    errors.RankMismatchError,
    errors.RemoteParameterError,
    errors.NonFiniteError,
    errors.CheckpointCorruptError,
    errors.CheckpointUntrustedError,
    StageError,
    MisconfigurationException,
)
ON_RANK_0 = ("weights", "logged", "files")
OVER = ("mean", "sum", "joined", "first")


@dataclass(frozen=True)
class Failure:
    """An error in place of a result."""

    kind: str
    message: str
    named: bool
    lost: bool = False
    """it only repeats that another rank failed"""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        lost = isinstance(error, errors.RankLostError)
        return cls(type(error).__name__, str(error), isinstance(error, NAMED), lost)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True)
class Outcome:
    """What a cell shows."""

    kind: str
    text: str = ""


@lru_cache(maxsize=64)
def on_one_process(use: Any, replicas: int = 1) -> dict[str, Any] | Failure:
    """The use on a plain trainer; with `replicas` in the order of the sampler of DDP."""
    with TemporaryDirectory() as folder, warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        try:
            return use(Run(None, replicas, {}, Path(folder)))
        except Exception as error:
            return Failure.of(error)


def on_ranks(column: str, uses: Sequence[Any]) -> list[list[dict[str, Any] | Failure]]:
    """The results of each use on each rank of `column`. Ranks that a failure ended are asked again for the rest."""
    results: list[list[Any]] = []
    while len(results) < len(uses):
        left = uses[len(results) :]
        with TemporaryDirectory() as folder:
            try:
                got = call_ranks(COLUMNS[column].world, _results, column, left, folder, limit=LIMIT_S + 2 * len(left))
                done = min(len(rank) for rank in got)
                results += [[rank[index] for rank in got] for index in range(done)]
            except AssertionError as error:
                if len(left) > 1:  # which of them it was shows when each runs by itself
                    for use in left:
                        results += on_ranks(column, [use])
                else:
                    results.append([Failure("ended", str(error)[-3000:], False)])
    return results


def _results(rank: int, column: str, uses: Sequence[Any], folder: str) -> list[dict[str, Any] | Failure]:
    warnings.simplefilter("ignore")
    register_tensor_parallel_plan("Layer", TensorParallelPlan(column={"up": ("width",)}, row={"down": ("width",)}))
    layout, results = COLUMNS[column], []
    for index, use in enumerate(uses):
        path = Path(folder, str(index))
        path.mkdir(exist_ok=True)
        try:
            with redirect_stdout(StringIO()), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                result = use(Run(layout, layout.replicas, OPTIONS.get(column, {}), path))
            said = [str(one.message) for one in caught]
            results.append({**result, WARNED: [text for text in said if "loss of the first two microbatches" in text]})
        except Exception as error:
            results.append(Failure.of(error))
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            break  # ranks that have met and lost each other are not asked again
    return results


def outcome(use: Use, column: str, plain: dict[str, Any] | Failure, ranks: Sequence[Any]) -> Outcome:
    """Judge what the ranks of `column` gave beside what one process gave."""
    failures = [result for result in ranks if isinstance(result, Failure)]
    if failures:
        first = next((failure for failure in failures if not failure.lost), failures[0])
        if isinstance(plain, Failure) and plain.kind == first.kind:
            return Outcome("equal")
        if first.named or (first.lost and any(f"{kind.__name__}: " in first.message for kind in NAMED)):
            return Outcome("refused", shortened(first))
        return Outcome("fault", f"{first}")
    if isinstance(plain, Failure):
        return Outcome("fault", f"one process fails, and ranks do not: {plain}")
    if column not in REPLICATED and (found := disagreement(ranks)):
        return Outcome("fault", found)
    if (warned := sum(len(rank[WARNED]) for rank in ranks)) != (use.warns and column in OPTIONS):
        return Outcome("fault", f"{warned} warnings: {[rank[WARNED] for rank in ranks]}")
    over = use.over if column in REPLICATED or use.over == "first" else ""
    if found := difference(ranks, plain, over, use.tolerance, replicated=column in REPLICATED):
        reason = use.differs.get(column) or (use.differs.get("replicas") if column == "zero" else None)
        return Outcome("differs", reason) if reason else Outcome("fault", found)
    return Outcome("equal")


def shortened(failure: Failure) -> str:
    """The error without what changes from run to run, in one line."""
    text = re.sub(r"/tmp/\S+", "<path>", " ".join(str(failure).split()))
    text = re.sub(r"rank \d+ \(.*?\) failed first: ", "", text)
    text = re.sub(r"0x[0-9a-f]+", "0x", text)
    return text if len(text) <= 240 else text[:240].rsplit(" ", 1)[0] + " …"


def difference(ranks: Sequence[Any], plain: dict[str, Any], over: str, tolerance: float, *, replicated: bool) -> str:
    """Where what ranks observed is not what one process did; "" where it is."""
    for key, expected in plain.items():
        values = [rank.get(key) for rank in ranks]
        if key in ON_RANK_0:
            values = values[:1]
        elif key == "batches":
            values = [] if replicated else values
        elif replicated and key == "losses":
            values = [_merged(values, "mean")]
        elif over and key == "seen":
            values = [_merged(values, over)]
        for index, value in enumerate(values):
            if found := unequal(value, expected, key, tolerance):
                return f"rank {index}: {found}"
    return ""


def disagreement(ranks: Sequence[Any]) -> str:
    """What ranks of one replica observed differently, whatever one process observed."""
    for key in ("losses", "batches"):
        for index, other in enumerate(ranks):
            if found := unequal(other.get(key), ranks[0].get(key), key):
                return f"ranks 0 and {index} of one replica disagree: {found}"
    return ""


def _merged(values: Sequence[Any], over: str) -> Any:
    """One value of those that replicas observed."""
    first = values[0]
    if over == "first" or any(value is None for value in values):
        return first
    if isinstance(first, Mapping):
        return {key: _merged([value.get(key) for value in values], over) for key in first}
    if over == "joined" and isinstance(first, list):
        return [item for value in values for item in value]
    if isinstance(first, list | tuple):
        if len({len(value) for value in values}) > 1:
            return values
        return [_merged(items, over) for items in zip(*values, strict=True)]
    if isinstance(first, bool | str):
        return first
    total = sum(values)
    return total / len(values) if over == "mean" else total


def unequal(got: Any, expected: Any, where: str, tolerance: float = 1e-9) -> str:
    """The first difference of two nested values in words; "" where there is none."""
    if isinstance(expected, Mapping):
        if not isinstance(got, Mapping) or sorted(map(str, got)) != sorted(map(str, expected)):
            return f"{where} has {_said(got)}, one process {_said(expected)}"
        pairs = [(got[key], expected[key], f"{where}.{key}") for key in expected]
    elif isinstance(expected, list | tuple):
        if not isinstance(got, list | tuple) or len(got) != len(expected):
            return f"{where} is {_said(got)}, on one process {_said(expected)}"
        pairs = [(*pair, f"{where}[{index}]") for index, pair in enumerate(zip(got, expected, strict=True))]
    elif isinstance(expected, Tensor):
        if not isinstance(got, Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
            return f"{where} is {_said(got)}, on one process {_said(expected)}"
        same = torch.allclose(got.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
        largest = f"off by up to {float((got.double() - expected.double()).abs().max()):.2e}" if not same else ""
        return f"{where}: {largest}" if largest else ""
    elif isinstance(expected, float) and isinstance(got, int | float):
        same = abs(got - expected) <= tolerance * (1 + abs(expected)) or (got != got and expected != expected)
        same = same or got == expected
        return "" if same else f"{where} is {got}, on one process {expected}"
    else:
        return "" if got == expected else f"{where} is {_said(got)}, on one process {_said(expected)}"
    return next((found for pair in pairs if (found := unequal(*pair, tolerance))), "")


def _said(value: Any) -> str:
    text = repr(sorted(map(str, value)) if isinstance(value, Mapping) else value)
    return " ".join(text.split())[:300]


def outcomes(column: str, names: Sequence[str]) -> dict[str, Outcome]:
    """The outcomes of the cells of `column` in the rows `names`."""
    uses = [Named(name) for name in names]
    plain = [on_one_process(use, COLUMNS[column].replicas) for use in uses]
    judged = zip(names, plain, on_ranks(column, uses), strict=True)
    return {name: outcome(USES[name], column, one, ranks) for name, one, ranks in judged}


@dataclass(frozen=True)
class Named:
    """A use by its name, which is all that travels to ranks."""

    name: str

    def __call__(self, run: Run) -> dict[str, Any]:
        return USES[self.name](run)
