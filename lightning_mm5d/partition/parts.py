"""What a modality can be cut between: parts that run one after the other.

The members of a list of layers are its parts. A modality without such a list is taken apart by the code of its modules:
their submodules, in the order in which the code calls them. An ``nn.Sequential`` or ``nn.ModuleList`` among them is
taken apart into its members. Registration order proves nothing, so it never stands in for the code.

Whether a step really enters the parts in this order shows when it runs (`stage.passes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from lightning_mm5d.partition.frameworks import is_metric
from lightning_mm5d.source.order import accesses, is_followed
from lightning_mm5d.source.trees import Source, method_of


@dataclass(frozen=True)
class Parts:
    """The parts of one modality, in the order in which they run.

    Attributes:
        paths: of the parts.
        uses: what else the code uses, and after how many parts; None for a list of layers, where `find.position` tells.
    """

    paths: tuple[str, ...] = ()
    uses: tuple[tuple[str, int], ...] | None = None

    def index(self, full: str) -> int | None:
        """Return which part `full` is in, None where it is in none."""
        return next((index for index, path in enumerate(self.paths) if is_in(full, path)), None)

    def indices(self, full: str) -> list[int]:
        """Return which parts `full` is in: several where one module runs several times."""
        return [index for index, path in enumerate(self.paths) if is_in(full, path)]

    def gaps(self, full: str) -> list[int]:
        """Return after how many parts the code uses `full`; empty where the code does not say."""
        return sorted({gap for path, gap in self.uses or () if is_in(full, path)})

    def holds(self, path: str) -> bool:
        """Whether a part is inside of the module at `path`."""
        return any(part.startswith(f"{path}.") for part in self.paths)


def is_in(full: str, path: str) -> bool:
    """Whether `full` is `path`, or a name inside of it."""
    return not path or full == path or full.startswith(f"{path}.")


def of_list(root: nn.Module, path: str, wanted: int) -> Parts:
    """Return the members of the list at `path`; an ``nn.Sequential`` among too few of them is taken apart.

    Args:
        root: the LightningModule.
        path: of the list.
        wanted: how many parts there should be.
    """
    line = _Line(Source(), root, (path,), ())
    line.entries = line.members(path)
    line.take_apart(wanted, fair=isinstance(root.get_submodule(path), nn.Sequential))
    return Parts(tuple(line.entries))


def of_code(
    source: Source,
    root: nn.Module,
    start: tuple[str, str],
    wanted: int,
    within: Sequence[str] = ("",),
    without: Sequence[str] = (),
) -> Parts | None:
    """Return the parts that code calls one after the other; None where it calls fewer than two.

    Args:
        source: reads the code.
        root: the LightningModule.
        start: path of the module whose code calls them, and its method.
        wanted: how many parts there should be.
        within: paths of the modules that belong to this modality.
        without: paths of modules that belong to others.
    """
    line = _Line(source, root, within, without)
    line.entries = line.inside(*start)
    line.take_apart(wanted, fair=True)
    parts = line.parts()
    if len(parts) < 2:
        return None
    uses, count = [], 0
    for entry in line.entries:
        if entry in parts:
            count += 1
        else:
            uses.append((entry, count))
    return Parts(tuple(parts), tuple(uses))


class _Line:
    """What code uses, in order: parts, and all else."""

    def __init__(self, source: Source, root: nn.Module, within: Sequence[str], without: Sequence[str]) -> None:
        self._source, self._root, self._within, self._without = source, root, within, without
        self._module_at = dict(root.named_modules(remove_duplicate=False))
        self._listed: set[str] = set()  # members of lists; the code of plain ones is not read
        self.entries: list[str] = []

    def parts(self) -> list[str]:
        """The entries that are modules with a state of their own, called in one place, of this modality alone."""
        return [entry for entry in self._modules() if not self._is_mixed(entry)]

    def take_apart(self, wanted: int, *, fair: bool) -> None:
        """Replace modules by what is inside of them: lists, and others while there are too few parts.

        Args:
            wanted: how many parts there should be.
            fair: whether what costs more than its share is taken apart too, where it is or holds a list.
        """
        whole: set[str] = set()
        while wanted > 1:
            parts = self.parts()
            few, share = len(parts) < wanted, sum(map(self._size, parts)) / wanted
            worth = [
                entry
                for entry in self._modules()
                if entry not in whole and (few or self._must_open(entry) or (fair and self._size(entry) > share))
            ]
            if not worth:
                break
            entry = max(worth, key=lambda path: (self._must_open(path), self._size(path)))
            found = self._opened(entry, any_code=few or self._is_mixed(entry))
            if found:
                at = self.entries.index(entry)
                self.entries[at : at + 1] = found
            else:
                whole.add(entry)

    def members(self, path: str) -> list[str]:
        """The members of a list; one without a state that stands in several places is no part and left out."""
        members = {f"{path}.{key}": self._module_at.get(f"{path}.{key}") for key in self._module_at[path]._modules}
        seen = [id(member) for member in members.values()]
        found = [p for p, m in members.items() if m is not None and (seen.count(id(m)) == 1 or _has_state(m))]
        self._listed.update(found)
        return found

    def inside(self, path: str, method: str = "forward") -> list[str]:
        """What a method of the module at `path` uses, in order."""
        module, found = self._module_at[path], list[str]()
        if method == "forward" and _is_container(module):
            return self.members(path)
        for item in accesses(self._source, module, method):
            full = f"{path}.{item}" if path else item
            owner, _, name = full.rpartition(".")
            if owner in self._module_at and owner != path and full not in self._module_at:
                if _is_container(self._module_at[owner]):
                    full = owner  # its items, for instance
                elif (function := method_of(type(self._module_at[owner]), name)) and is_followed(function):
                    found += [full, *self.inside(owner, name)]
                    continue
            found.append(full)
        return [item for item, _ in groupby(found)]

    def _opened(self, path: str, any_code: bool) -> list[str]:
        module = self._module_at[path]
        if _is_container(module):
            return self.members(path)
        has_list = any(_is_container(part) and len(part._modules) > 1 for part in module.modules())
        if path in self._listed or not (any_code or has_list):
            return []
        found = self.inside(path)
        return found if any(self._may_be_part(item) for item in found) else []

    def _modules(self) -> list[str]:
        return [entry for entry in self.entries if self.entries.count(entry) == 1 and self._may_be_part(entry)]

    def _may_be_part(self, path: str) -> bool:
        module = self._module_at.get(path)
        if module is None or is_metric(module) or not any(is_in(path, one) for one in self._within):
            return False
        return (path in self._listed or _has_state(module)) and not any(is_in(path, one) for one in self._without)

    def _is_mixed(self, path: str) -> bool:
        """Whether another modality is inside of the module."""
        return any(is_in(other, path) for other in self._without)

    def _must_open(self, path: str) -> bool:
        """Whether the module is a list that cannot be called itself, or holds another modality."""
        module = self._module_at[path]
        return self._is_mixed(path) or (_is_container(module) and not isinstance(module, nn.Sequential))

    def _size(self, path: str) -> int:
        return sum(parameter.numel() for parameter in self._module_at[path].parameters())


def _is_container(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential):
        return type(module).forward is nn.Sequential.forward
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def has_module(root: nn.Module, path: str) -> bool:
    """Whether `root` has a module at `path`."""
    try:
        root.get_submodule(path)
    except AttributeError:
        return False
    return True
