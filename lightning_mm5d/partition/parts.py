"""What a modality can be cut between: parts that run one after the other.

The members of a list of layers are its parts. A modality without such a list is taken apart by the code of its modules:
their submodules, in the order in which the code calls them. An ``nn.Sequential`` or ``nn.ModuleList`` among them is
taken apart into its members. Registration order proves nothing, so it never stands in for the code.

Whether a step really enters the parts in this order shows when it runs (`stage.run`).

What belongs to Lightning and torchmetrics in a user's module: below the trainer, only this file tells it apart.

Modalities that run the same modules several times: their parts are the calls, of which each stage runs some.

A stage holds all modules that it calls, so a module may live on several stages, and its gradients are summed. Found are
loops over a range (`lightning_mm5d.source.loops`), with a module of its own or a list of modules that is shorter.

Paths of modules that a user names, and what they lead to where it is no module.

Where the hidden state is among what a layer is called with: layers of all families take it first, or by one of two
names.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeGuard

import lightning.pytorch as pl
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.source.loops import looped_calls
from lightning_mm5d.source.order import accesses, is_followed
from lightning_mm5d.source.trees import mentions, method_of

_OF_LIGHTNING = frozenset(vars(pl.LightningModule()))


def is_metric(module: object) -> TypeGuard[Metric]:
    """Whether a module is a metric; a collection of metrics is none."""
    return isinstance(module, Metric)


def holds_metrics(module: object) -> bool:
    """Whether a module is a metric or a collection of metrics."""
    return isinstance(module, (Metric, MetricCollection))


def is_lightnings(module: nn.Module, name: str) -> bool:
    """Whether Lightning keeps an attribute of `module` for itself, such as its trainer."""
    return isinstance(module, pl.LightningModule) and name in _OF_LIGHTNING


def hyperparameters(module: nn.Module) -> dict[str, Any] | None:
    """Return the hyperparameters of a LightningModule; None for other modules."""
    return dict(module.hparams) if isinstance(module, pl.LightningModule) else None


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


def joined(*parts: str) -> str:
    """Return a path of those of its parts that are not empty."""
    return ".".join(filter(None, parts))


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
    line = _Line(root, (path,), ())
    line.entries = line.members(path)
    line.take_apart(wanted, fair=isinstance(root.get_submodule(path), nn.Sequential))
    return Parts(tuple(line.entries))


def of_code(
    root: nn.Module,
    start: tuple[str, str],
    wanted: int,
    within: Sequence[str] = ("",),
    without: Sequence[str] = (),
) -> Parts | None:
    """Return the parts that code calls one after the other; None where it calls fewer than two.

    Args:
        root: the LightningModule.
        start: path of the module whose code calls them, and its method.
        wanted: how many parts there should be.
        within: paths of the modules that belong to this modality.
        without: paths of modules that belong to others.
    """
    line = _Line(root, within, without)
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

    def __init__(self, root: nn.Module, within: Sequence[str], without: Sequence[str]) -> None:
        self._root, self._within, self._without = root, within, without
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
            inner = self._opened(entry, any_code=few or self._is_mixed(entry))
            if inner:
                at = self.entries.index(entry)
                self.entries[at : at + 1] = inner
            else:
                whole.add(entry)

    def members(self, path: str) -> list[str]:
        """The members of a list; one without a state that stands in several places is no part and left out."""
        members = {f"{path}.{key}": self._module_at.get(f"{path}.{key}") for key in self._module_at[path]._modules}
        seen = [id(member) for member in members.values()]
        distinct = [p for p, m in members.items() if m is not None and (seen.count(id(m)) == 1 or _has_state(m))]
        self._listed.update(distinct)
        return distinct

    def inside(self, path: str, method: str = "forward") -> list[str]:
        """What a method of the module at `path` uses, in order."""
        module, paths = self._module_at[path], list[str]()
        if method == "forward" and _is_container(module):
            return self.members(path)
        for item in accesses(module, method):
            full = f"{path}.{item}" if path else item
            owner, _, name = full.rpartition(".")
            if owner in self._module_at and owner != path and full not in self._module_at:
                if _is_container(self._module_at[owner]):
                    full = owner  # its items, for instance
                elif (function := method_of(type(self._module_at[owner]), name)) and is_followed(function):
                    paths += [full, *self.inside(owner, name)]
                    continue
            paths.append(full)
        return [item for item, _ in groupby(paths)]

    def _opened(self, path: str, any_code: bool) -> list[str]:
        module = self._module_at[path]
        if _is_container(module):
            return self.members(path)
        has_list = any(_is_container(part) and len(part._modules) > 1 for part in module.modules())
        if path in self._listed or not (any_code or has_list):
            return []
        inner = self.inside(path)
        return inner if any(self._may_be_part(item) for item in inner) else []

    def _modules(self) -> list[str]:
        return [entry for entry in self.entries if self.entries.count(entry) == 1 and self._may_be_part(entry)]

    def _may_be_part(self, path: str) -> bool:
        module = self._module_at.get(path)
        if module is None or is_metric(module) or not any(is_in(path, owned) for owned in self._within):
            return False
        return (path in self._listed or _has_state(module)) and not any(is_in(path, other) for other in self._without)

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


def repeated(
    root: nn.Module, lists: Sequence[str], wanted: int, within: Sequence[str], without: Sequence[str]
) -> tuple[str, Parts] | None:
    """Return the path of what is called again and again, and its calls as parts; None where a list does.

    Args:
        root: the LightningModule.
        lists: paths of the modality's lists of layers, the longest one first.
        wanted: how many parts there should be.
        within: paths of the modules that belong to the modality.
        without: paths of modules that belong to others.
    """
    count = len(root.get_submodule(lists[0])) if lists else 0  # type: ignore[arg-type]
    best: list[str] = []
    for path, module in root.named_modules():
        near = any(is_in(path, base) or is_in(base, path) for base in within)
        if not near or any(is_in(path, base) for base in without) or isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        if count >= wanted and path != lists[0].rpartition(".")[0]:
            continue
        if path and any(is_in(path, listed) and path != listed for listed in lists):
            continue  # inside of a layer
        for calls in looped_calls(module):
            full = [f"{path}.{call}".lstrip(".") for call in calls]
            full = [call for call in full if next(root.get_submodule(call).parameters(), None) is not None]
            allowed = all(any(is_in(call, name) for name in within) for call in full)
            if allowed and len(full) > max(len(best), count) and len(set(full)) < len(full):
                best = full
    if len(best) < wanted:
        return None
    holder = best[0].rpartition(".")[0] if best[0].rpartition(".")[2].isdigit() else best[0]
    if not all(is_in(call, holder) for call in best):
        return None
    return holder, Parts(tuple(best))


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
    if has_module(root, path) or (or_parameter and holds_tensor(root, path, "parameter")):
        return
    kind = next((kind for kind in ("parameter", "buffer") if holds_tensor(root, path, kind)), None)
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


def is_mentioned(root: nn.Module, path: str, method: str) -> bool:
    """Whether the class of any module around a callable mentions it outside of its constructor.

    Members of a list or a dict are mentioned where the container is.

    Args:
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
    read_classes = [cls for cls in classes if not cls.__module__.startswith(_UNREAD) and cls is not object]
    return any(mentions(cls, words) for cls in read_classes) or (parts[-1:] != [] and parts[-1].isdigit())


def holds_tensor(root: nn.Module, path: str, kind: str) -> bool:
    """Whether a path leads to a module's ``"parameter"`` or ``"buffer"``, which of these `kind` says."""
    holder, _, name = path.rpartition(".")
    return has_module(root, holder) and name in vars(root.get_submodule(holder))[f"_{kind}s"]


def tensors_of(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, tied ones under each of their names."""
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)


def has_no_forward(module: nn.Module) -> bool:
    """Whether a module is a container that cannot be called."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


Place = tuple[int, int | str]  # 0 and a position among args, or 1 and a name among kwargs
_NAMES = ("hidden_states", "hidden_state")


def hidden_place(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Place | None:
    """Return where in ``(args, kwargs)`` the hidden state is: what is called so, else the first tensor.

    None where there is no tensor.
    """
    for name in _NAMES:
        if isinstance(kwargs.get(name), Tensor):
            return (1, name)
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return (0, index)
    return next(((1, name) for name, value in kwargs.items() if isinstance(value, Tensor)), None)


def at(place: Place, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what is at `place`."""
    where, key = place
    return kwargs[key] if where else args[key]  # type: ignore[index]


def with_state(place: Place, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments with `state` at `place`."""
    where, key = place
    if where:
        return args, {**kwargs, str(key): state}
    assert isinstance(key, int)
    return (*args[:key], state, *args[key + 1 :]), kwargs
