"""What a user is told where the command refuses: one line, with the option that was probably meant."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterable

from lightning_mm5d.config.errors import did_you_mean
from lightning_mm5d.tools.cli.configuration import FIELDS

_UNION = "Does not validate against any of the Union subtypes"
_NOISE = ("Subtypes:", "Errors:", "Given value", "Expected a <class 'NoneType'>", "Expected a <class 'str'>")
_UNKNOWN = re.compile(
    r"(?:given class_path '(?P<owner>[\w.]+)':\s+)?(?:Option|not accept option|Key) '(?P<key>[\w.]+)'"
    r"|unrecognized arguments: --(?P<option>[\w.]+)"
)
_LONG = 20  # names; longer lists are not printed


def one_line(message: str) -> str:
    """The message in one line, without the list of types that jsonargparse tried, and with the nearest key."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    kept = " ".join(line for line in lines if not line.startswith(_NOISE)).replace(_UNION, "")
    text = " ".join((" ".join(lines) if kept.rstrip().endswith(":") else kept).split())
    advice = _suggestion(message)
    return f"{text.rstrip('.')}. {advice}" if advice else text


def _suggestion(message: str) -> str:
    """``Did you mean 'pp_size'?`` for a key that some class does not accept; nothing for other messages."""
    *_, found = [None, *_UNKNOWN.finditer(message)]
    if found is None:
        return ""
    path, _, key = (found["key"] or found["option"]).rpartition(".")
    owner = found["owner"] or {"trainer": "lightning.pytorch.Trainer"}.get(path)
    known = (
        _parameters(owner) if owner else ["trainer", "model", "data", "seed_everything", *FIELDS] if not path else []
    )
    if not known:
        return ""
    advice = did_you_mean(key, known)
    return advice if len(known) <= _LONG else f"{advice.split('? ')[0]}?"


def _parameters(path: str) -> list[str]:
    module, _, name = path.rpartition(".")
    if module.startswith("lightning.") and module not in sys.modules:
        return []
    try:
        return [each for each in _signature(getattr(importlib.import_module(module), name)) if each != "self"]
    except (ImportError, AttributeError, TypeError, ValueError):
        return []


def _signature(cls: type) -> Iterable[str]:
    return inspect.signature(cls.__init__).parameters  # type: ignore[misc]
