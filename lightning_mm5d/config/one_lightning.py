"""One Lightning in a process, under both of its names, so that a run may mix projects that import either.

`lightning.pytorch` and `pytorch_lightning` hold the same code with classes of their own (beside them `lightning.fabric`
and `lightning_fabric`): a trainer of the one takes no module of the other, and passes over its callbacks in silence.
From the import of lightning_mm5d on, the name that is imported first is the one of this process, and the other name
leads to the same modules. Two remain where both were imported before lightning_mm5d, or are installed in unlike
versions; then what is not of `lightning.pytorch` is refused (`trainer.validation`).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import spec_from_loader
from types import ModuleType

_NAMES = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
_DISTRIBUTIONS = ("lightning", "pytorch-lightning")


class OtherName(MetaPathFinder):
    """Finds modules of the Lightning that a process has under the names of the one that it has not."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how a module is imported under its other name; None where it is imported as usual."""
        for names, others in (_NAMES, _NAMES[::-1]):
            for name, other in zip(names, others, strict=True):
                if fullname == name or fullname.startswith(f"{name}."):
                    if _is_imported(names) or not _is_imported(others) or not _are_one_version():
                        return None
                    return spec_from_loader(fullname, _SameModule(other + fullname.removeprefix(name)))
        return None


class _SameModule(Loader):
    """Loads nothing: the module is one that has another name.

    Args:
        name: of that module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import has replaced it


def _is_imported(names: Sequence[str]) -> bool:
    return any(name in sys.modules and sys.modules[name].__name__ == name for name in names)


@lru_cache(maxsize=1)
def _are_one_version() -> bool:
    try:
        lightning, pytorch_lightning = map(version, _DISTRIBUTIONS)
    except PackageNotFoundError:
        return False
    return lightning == pytorch_lightning
