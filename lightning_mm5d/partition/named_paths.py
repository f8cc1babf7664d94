"""Paths of modules that a user names, and what they lead to where it is no module."""

from __future__ import annotations

import difflib

from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.partition.parts import has_module
from lightning_mm5d.source.names import mentions
from lightning_mm5d.source.trees import Source

# what holds any submodules, and so mentions them all; torch.nn.Transformer and its like do use theirs by name
_UNREAD = (
    "torch.nn.modules.module",
    "torch.nn.modules.container",
    "lightning.",
    "pytorch_lightning.",
    "lightning_fabric.",
)


def resolve(root: nn.Module, path: str, field: str, *, or_parameter: bool = False) -> None:
    """Refuse a path that leads to no module.

    Args:
        root: the LightningModule.
        path: dotted path that a user named.
        field: where.
        or_parameter: whether it may lead to a parameter.

    Raises:
        ConfigError: it leads to something else, or nowhere.
    """
    if has_module(root, path) or (or_parameter and _holds(root, path, "_parameters")):
        return
    kind = "parameter" if _holds(root, path, "_parameters") else "buffer" if _holds(root, path, "_buffers") else None
    if kind is not None:
        rule = f"It is a {kind}, and a modality is a module, whose call gives the result that others consume"
        holder = path.rpartition(".")[0]
        fix = (
            f"Name the module that holds it, {holder!r}" if holder else "Move it into a module whose forward returns it"
        )
        fix += f", or a list of the modality's module and this {kind}" if kind == "parameter" else ""
        raise ConfigError(field, path, rule, fix)
    names = [name for name, _ in root.named_modules() if name]
    near = difflib.get_close_matches(path, names, n=1, cutoff=0.3) or names[:1]
    fix = f"The nearest is {near[0]!r}" if near else "Build the model in configure_model or __init__"
    raise ConfigError(field, path, "There is no such module in the model", fix)


def is_mentioned(source: Source, root: nn.Module, path: str, method: str) -> bool:
    """Whether the class of any module around a callable mentions it outside of its constructor.

    Members of a list or a dict are mentioned where the container is.

    Args:
        source: reads the code.
        root: the LightningModule.
        path: of the module that has the callable.
        method: its name.
    """
    parts = path.split(".") if path else []
    word = parts[-1] if method == "forward" and parts else method
    words = [word, "getattr", "named_children", "children", "_modules"]
    if len(parts) > 1 and isinstance(root.get_submodule(".".join(parts[:-1])), nn.ModuleDict):
        words.append(parts[-2])
    classes = [cls for at in range(len(parts) + 1) for cls in type(root.get_submodule(".".join(parts[:at]))).__mro__]
    own = [cls for cls in classes if not cls.__module__.startswith(_UNREAD) and cls is not object]
    return any(mentions(source, cls, words) for cls in own) or (parts[-1:] != [] and parts[-1].isdigit())


def _holds(root: nn.Module, path: str, kind: str) -> bool:
    """Whether a path leads to a tensor among a module's `kind`, which is ``_parameters`` or ``_buffers``."""
    holder, _, name = path.rpartition(".")
    return has_module(root, holder) and name in vars(root.get_submodule(holder))[kind]


def has_no_forward(module: nn.Module) -> bool:
    """Whether a module is a container that cannot be called."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)
