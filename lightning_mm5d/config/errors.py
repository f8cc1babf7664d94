"""The errors that a user meets by name, and the words for what would work.

`ConfigError` is one class, so that every refusal says the same four things: where it is, what it got, which rule it
breaks and what would work. The others tell what ended a run. Bugs of this library are `AssertionError`s instead.

`imported` and `private` look up names of other packages.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)
FAILED_FIRST = "failed first:"
"""part of every line that blames a rank"""


class ConfigError(ValueError):
    """A configuration that cannot work, found before any process group exists.

    Args:
        field: path of the field as the user wrote it, for instance ``"modalities.vision.pp_size"``.
        got: the value found there.
        rule: the rule that it breaks, as a sentence without a final full stop.
        fix: the nearest thing that would work, as a sentence without a final full stop.
    """

    def __init__(self, field: str, got: Any, rule: str, fix: str) -> None:
        self.field, self.got, self.rule, self.fix = field, got, rule, fix
        super().__init__(f"{field}: got {got!r}. {rule}. {fix}.")

    def __reduce__(self) -> tuple[type, tuple[str, Any, str, str]]:
        return type(self), (self.field, self.got, self.rule, self.fix)


class RankLostError(RuntimeError):
    """Another rank failed, died or no longer answers; the message names it, and its error where that is known."""


class RefusedElsewhereError(ConfigError, RankLostError):
    """The `ConfigError` of another rank, which the message names; without a ``field`` of its own."""

    def __init__(self, *line: str) -> None:
        self.field, self.got, self.rule, self.fix = "", None, "".join(line), ""
        RuntimeError.__init__(self, *line)

    __reduce__ = RuntimeError.__reduce__  # type: ignore[assignment]


class RankMismatchError(RuntimeError):
    """Ranks disagree: on what they run, or on what comes next, so that they would wait for each other."""


class WatchdogTimeoutError(RuntimeError):
    """No rank made progress for longer than the watchdog allows; the message names the rank that others wait for."""


class NonFiniteError(RuntimeError):
    """A loss or a gradient is NaN or infinite; no parameter was changed by it."""


class CheckpointCorruptError(RuntimeError):
    """A checkpoint is not as it was written; the message names the file and what is wrong with it."""


class CheckpointUntrustedError(RuntimeError):
    """A checkpoint holds something that would run code, or that points out of its folder; nothing of it was run."""


class RemoteParameterError(RuntimeError):
    """A value was asked of a parameter that other ranks hold."""


def repeated(error: E, rank: int, failure: str) -> E:
    """Return `error`, which repeats that of another rank, with a note by which that rank is blamed.

    Args:
        error: of this rank.
        rank: that failed.
        failure: type and text of its error; the first line is taken.
    """
    error.add_note(f"rank {rank} {FAILED_FIRST} {failure.strip().partition(chr(10))[0]}")
    return error


def other_package(field: str, got: str) -> ConfigError:
    """Return the error for something of the Lightning that the strategy was not imported with."""
    return ConfigError(
        field,
        got,
        "lightning and pytorch_lightning are two packages in this process, because both were imported before "
        "lightning_mm5d or their versions differ, and MultimodalStrategy works with the classes of one",
        "Write `import lightning_mm5d` above both of them, with equal versions of both, or write "
        "`import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`, wherever it is imported",
    )


def private(holder: Any, name: str) -> Any:
    """Return ``holder.name``, a private name of another package.

    Raises:
        ImportError: the installed version of that package has no such name.
    """
    try:
        return getattr(holder, name)
    except AttributeError:
        owner = holder if isinstance(holder, ModuleType | type) else type(holder)
        where = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
        package = where.partition(".")[0]
        version = getattr(sys.modules.get(package), "__version__", "as installed")
        raise ImportError(
            f"{package} {version} has no {where}.{name}, a private name on which lightning_mm5d builds. Install a "
            f"version of {package} that lightning_mm5d requires"
        ) from None


def nearest(value: int, fits: Callable[[int], bool], reach: int = 4096) -> list[int]:
    """The largest number in 1 to `value` and the smallest above it that fit, within `reach` of it."""
    below = next((n for n in range(value, max(0, value - reach), -1) if fits(n)), None)
    above = next((n for n in range(max(value, 0) + 1, max(value, 0) + 1 + reach) if fits(n)), None)
    return [n for n in (below, above) if n is not None]


def one_of(choices: Iterable[object]) -> str:
    """The choices as English: ``"6 or 8"``."""
    return " or ".join(str(choice) for choice in choices)


def did_you_mean(got: object, known: Iterable[str]) -> str:
    """A sentence with the name in `known` that is nearest to `got`, and all of them."""
    names = list(known)
    if len(names) == 1:
        return f"Use {names[0]!r}"
    if not isinstance(got, str):
        return f"Use one of {', '.join(names)}"
    close = difflib.get_close_matches(got, names, n=1, cutoff=0.0)
    return f"Did you mean {close[0]!r}? There are {', '.join(names)}"


def imported(module: str, name: str) -> Any:
    """Return an attribute of a module; None where nobody has imported the module yet, so that no instances exist.

    Args:
        module: the one that defines the attribute, for instance ``"transformers.modeling_utils"``.
        name: of the attribute.
    """
    return getattr(sys.modules.get(module), name, None)
