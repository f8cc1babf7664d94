"""Looks up classes of libraries that a run may not use, without importing them, which takes seconds."""

from __future__ import annotations

import sys
from typing import Any


def imported(module: str, name: str) -> Any:
    """Return an attribute of a module; None where nobody has imported the module yet, so that no instances exist.

    Args:
        module: the one that defines the attribute, for instance ``"transformers.modeling_utils"``.
        name: of the attribute.
    """
    return getattr(sys.modules.get(module), name, None)
