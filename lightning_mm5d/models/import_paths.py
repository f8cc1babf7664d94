"""Names a function or class by the path it is imported from, so that a saved configuration can name it.

Only what an import finds again has such a path. Paths in a configuration name code that will run, so they are
resolved to functions and classes of installed packages alone, never to those of the standard library.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import Any

from lightning_mm5d.config.errors import CheckpointUntrustedError, ConfigError


def import_path(item: Any) -> str | None:
    """Return ``"package.module:name"`` of a function or class; None where an import would not find it again."""
    module, name = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or "<" in name:
        return None
    found: Any = sys.modules.get(module)
    for step in name.split("."):
        found = getattr(found, step, None)
    return f"{module}:{name}" if found is item else None


def written_path(item: Any) -> str | None:
    """Return the path of a function or class also where an import finds nothing there; None for None."""
    if item is None:
        return None
    name = getattr(item, "__qualname__", f"{type(item).__qualname__}()")
    return f"{getattr(item, '__module__', type(item).__module__)}:{name}"


def from_import_path(path: str, field: str, base: type | None = None) -> Any:
    """Return the function at `path`, or the class.

    Args:
        path: what `import_path` returned.
        field: that holds it, for the error.
        base: what the class derives from; None for a function.

    Raises:
        ConfigError: there is no such function or class.
        CheckpointUntrustedError: it belongs to the standard library, or it is something else than the field holds, so
            it cannot have been written for a module of a model.
    """
    module, _, name = str(path).partition(":")
    if not isinstance(path, str) or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise CheckpointUntrustedError(f"{field} names {path!r}, which is no import path; it is not run")
    if module.partition(".")[0] in {*sys.stdlib_module_names, "builtins"}:
        raise CheckpointUntrustedError(f"{field} names {path!r}, which belongs to the standard library; it is not run")
    try:
        found: Any = import_module(module)
        for step in name.split("."):
            found = getattr(found, step)
    except (ImportError, AttributeError) as error:
        fix = "Make it importable under that path, or compose the model again and load its weights"
        raise ConfigError(field, path, f"There is no such function or class ({error})", fix) from None
    if not (inspect.isfunction(found) or inspect.isclass(found)) or import_path(found) != path:
        raise ConfigError(field, path, "It is neither a function nor a class defined there", "Name the definition")
    if base is None and not inspect.isfunction(found):
        raise CheckpointUntrustedError(f"{field} names {path!r}, which is no function; it is not run")
    if base is not None and not (inspect.isclass(found) and issubclass(found, base)):
        raise CheckpointUntrustedError(f"{field} names {path!r}, which is no {base.__name__}; it is not run")
    return found
