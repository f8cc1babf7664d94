"""Finds the values that depend on weights of other ranks, and hands those that later stages use again to them.

A skip input of a later layer is either computable on every rank from the batch alone (masks, rotary tables) or not (an
encoder's states, a position bias). Only the second kind must travel. Whether a tensor carries a gradient does not tell
them apart: a frozen model has none. So the first microbatch of each structure runs under `Trace`, which marks every
result of parameters, received tensors and placeholders.

Beside the mark, a result remembers its *taps*: the calls of modules here that it was computed from. Where code puts it
together with what a later stage computes, that stage needs the results of these calls.

A custom autograd function hides what it does from the trace; its results count as marked where
they carry a gradient, and have no taps.

**Taps** are results of this stage that code of later stages uses again, beside what layers hand from one to the next.
Code between layers and after them may take up any earlier value: the skip connections of a U-Net, states that are
tapped for a feature pyramid, a loss over the routers of all layers. All of it is computed from *calls*: of layers, of
modules beside them, of boundaries, and of parameters, which count as calls of themselves. A later stage runs the same
code. So it needs nothing but the results of those calls, in whose places it has stand-ins.

1. *Find*: the trace of a structure's first microbatch remembers of each value the calls that it comes from. Where code
   puts it together with a stand-in of later stages, these calls are tapped. To see all of this, the trace follows the
   step to its end.
2. *Note*: from then on each run keeps copies of tapped results, which in-place writes after it do not touch.
3. *Send*: they travel with the hidden state. A stage in between sends on what it has received.
4. *Take*: in the later stage the call gives what was received. A module in a layer is not called there at all; its
   hooks are, because a hook was what kept its result, and before them the pre-hooks that may go with them in pairs.

What was not found stays a remote value, which raises an error where a step keeps it.

Which modules and parameters outside of layers a stage may have to send results of, because later stages lack them.

Layers and boundaries are not among these: the run knows itself which of them it computes. Modules around layers are
none either, because all stages run their code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mm5d.config.errors import RemoteParameterError, private
from lightning_mm5d.partition import Partition
from lightning_mm5d.partition.compiled import is_compiled, is_compiled_in_place
from lightning_mm5d.partition.parts import is_in
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.remote_value import LEAVING, Guard, Origin, is_remote, marked
from lightning_mm5d.sharded.tensor import Group, functions_named
from lightning_mm5d.stage.payload import Packer, copies, put, rebuild, tensors_in

Call = tuple[str, str, int, int]
"""What was called: ``layer``, ``inner...`` (in a layer), ``module``, ``boundary`` or ``parameter``; its path
or modality; the number of the layer or -1; and how many calls of it came before."""
Tap = tuple[str, str, int, int, str | int | None]
"""A call, and which entry of its result; None for all of it."""

_DEPENDS, _EARLIER, _LATER = 1, 2, 3
# These take a tensor for its shape, dtype and device only.
_SHAPE_ONLY = {
    *functions_named("zeros_like ones_like empty_like full_like rand_like randn_like", torch),
    *functions_named("new_zeros new_ones new_empty new_full new_tensor size", Tensor),
}
_NONE = frozenset[Tap]()
OF_THE_MODULE = ("lightning_mm5d.", "torch.")
"""Packages whose hooks are a part of what a module computes, such as those that normalise its weight."""


def mark_dependent(tensor: Tensor) -> None:
    """Mark `tensor` as known to this rank only, for instance because it was received."""
    tensor._mm5d_mark = _DEPENDS  # type: ignore[attr-defined]


def mark_stand_in(tensor: Tensor, *, later: bool = True) -> None:
    """Mark `tensor` as standing in for a tensor that later stages compute themselves, or that earlier ones did."""
    tensor._mm5d_mark = _LATER if later else _EARLIER  # type: ignore[attr-defined]


def mark_tap(tensor: Tensor, *taps: Tap) -> None:
    """Mark `tensor` as known to this rank only, which sends `taps` to stages that need it."""
    tensor._mm5d_mark, tensor._mm5d_taps = _DEPENDS, frozenset(taps)  # type: ignore[attr-defined]


def is_hook_of(packages: str | tuple[str, ...], hook: Any) -> bool:
    """Whether a hook's function or class stands in a module whose name begins with one of `packages`."""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith(packages)


def must_travel(tensor: Tensor) -> bool:
    """Whether a later stage cannot compute `tensor` by itself."""
    mark = getattr(tensor, "_mm5d_mark", None)
    if mark is not None:
        return mark == _DEPENDS
    return isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and not _from_stand_in(tensor))


@contextmanager
def untapped(tree: Any) -> Iterator[None]:
    """Let tensors come from no calls meanwhile, where what is computed of them only tells shapes."""
    tapped = [(tensor, getattr(tensor, "_mm5d_taps", _NONE)) for _, tensor in tensors_in(tree)]
    for tensor, _ in tapped:
        tensor._mm5d_taps = _NONE  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for tensor, taps in tapped:
            tensor._mm5d_taps = taps  # type: ignore[attr-defined]


def _from_stand_in(tensor: Tensor) -> bool:
    """Whether the graph of an unmarked tensor, the result of a custom autograd function, begins at a stand-in."""
    waiting, seen = [tensor.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and getattr(leaf, "_mm5d_mark", 0) > _DEPENDS:
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


@contextmanager
def traced(trace: Trace) -> Iterator[None]:
    """Mark results inside of the block; compiled layers run uncompiled there, because they would hide what they do."""
    with torch.compiler.set_stance("force_eager"), trace:
        yield


class Trace(TorchFunctionMode):
    """Marks the result of every torch function that takes a marked tensor or a parameter.

    Args:
        own_taps: of the parameters that only this stage and earlier ones hold, their taps, by id.
        later: ids of the parameters that only later stages hold.

    Attributes:
        needed_taps: the taps that later stages need.
    """

    def __init__(self, own_taps: Mapping[int, Tap] | None = None, later: Collection[int] = ()) -> None:
        super().__init__()
        self.needed_taps: set[Tap] = set()
        self._own_taps, self._later = own_taps or {}, later

    def needs(self, tree: Any) -> None:
        """Note that later stages need the tensors in `tree`."""
        for _, tensor in tensors_in(tree):
            if self._mark(tensor) == _DEPENDS:
                self.needed_taps |= self._taps(tensor)

    def _mark(self, tensor: Tensor) -> int:
        mark: int = getattr(tensor, "_mm5d_mark", 0)
        if not mark and isinstance(tensor, torch.nn.Parameter):
            return _LATER if id(tensor) in self._later else _DEPENDS
        return mark

    def _taps(self, tensor: Tensor) -> frozenset[Tap]:
        taps: frozenset[Tap] | None = getattr(tensor, "_mm5d_taps", None)
        if taps is None and id(tensor) in self._own_taps and isinstance(tensor, torch.nn.Parameter):
            return frozenset({self._own_taps[id(tensor)]})
        return taps or _NONE

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        taken = [tensor for _, tensor in tensors_in((args, kwargs))]
        marks = [self._mark(tensor) for tensor in taken]
        mark = max(marks, default=0)
        taps = _NONE
        if mark and func not in _SHAPE_ONLY:
            taps = taps.union(*(self._taps(arg) for arg, kind in zip(taken, marks, strict=True) if kind == _DEPENDS))
            if mark == _LATER or getattr(func, "__name__", "") in LEAVING:
                self.needed_taps |= taps
        result = func(*args, **kwargs)
        if func in _SHAPE_ONLY or not mark:
            return result
        written = args[0] if result is None and args else result
        for _, tensor in tensors_in(written):
            if isinstance(tensor, torch.nn.Parameter):  # it lives on, and means something else in the next stage
                continue
            tensor._mm5d_mark = mark  # type: ignore[attr-defined]
            tensor._mm5d_taps = taps if mark == _DEPENDS else _NONE  # type: ignore[attr-defined]
        return result


@dataclass(frozen=True)
class TapPoints:
    """What one stage of this rank has, and what later ones have.

    Attributes:
        modules: paths of modules that this stage computes and a later stage of the modality cannot.
        parameters: names of parameters outside of layers that this stage has and the last one of the modality has not.
        later: names of parameters that this stage lacks and later ones have.
    """

    modules: frozenset[str]
    parameters: frozenset[str]
    later: frozenset[str]


def watched_modules(root: nn.Module, partition: Partition) -> dict[str, nn.Module]:
    """Return the modules with parameters beside layers that are split over stages, by path."""
    split = [name for name, stages in partition.stages.items() if len(stages) > 1]
    if not split:
        return {}
    layers = [path for name in split for path in partition.parts[name].paths]
    single = [path for name, encoder in partition.encoders.items() if name not in split for path in encoder.owns]
    watched = {}
    compiled: list[str] = []
    for path, module in root.named_modules():
        if is_compiled(module) or is_compiled_in_place(module):
            compiled.append(path)
        around = not path or any(is_in(layer, path) for layer in layers)
        inside = any(is_in(path, outer) for outer in (*layers, *single, *compiled))
        if not around and not inside and next(module.parameters(), None) is not None:
            watched[path] = module
    return watched


def tap_points(
    root: nn.Module, partition: Partition, members: Iterable[StageKey], modules: Mapping[str, nn.Module]
) -> TapPoints:
    """Return those of the stage that `members` of the partition run as; `modules` are the watched ones."""
    members = tuple(members)
    names = [name for name, _ in root.named_parameters(remove_duplicate=False)]
    owners = {name: frozenset(partition.owners[name]) for name in names}
    own_modules, own_parameters, later = set[str](), set[str](), set[str]()
    for member in members:
        after = [cut.name for cut in partition.stages[member.modality] if cut.index > member.number]
        if after:
            paths = partition.parts[member.modality].paths
            held = {name for name in names if member in owners[name]}
            outside = {name for name in held if not any(is_in(name, path) for path in paths)}
            own_parameters |= {name for name in outside if after[-1] not in owners[name]}
            for path, module in modules.items():
                inner = [f"{path}.{name}" for name, _ in module.named_parameters()]
                if held.issuperset(inner) and any(stage not in owners[name] for stage in after for name in inner):
                    own_modules.add(path)
        if member.modality in partition.encoders:
            after += [cut.name for cut in partition.stages[partition.loss_modality]]
        later |= {name for name in names if owners[name].isdisjoint(members) and not owners[name].isdisjoint(after)}
    return TapPoints(frozenset(own_modules), frozenset(own_parameters), frozenset(later))


Entry = str | int | None
_NAMED = ""  # in place of an entry: the call alone


class Taps:
    """The tapped results of one run of a stage.

    Args:
        known: the taps of the batch's structure.
        trace: finds them, where they are not known.
    """

    def __init__(self, known: frozenset[Tap], trace: Trace | None) -> None:
        self._known, self._trace = known, trace
        self._wanted = frozenset(tap[:4] for tap in known)
        self._wanted_inside = {layer for kind, _, layer, _ in self._wanted if kind.startswith("inner")}
        self._received: dict[Call, dict[Entry, Any]] = {}
        self._noted: dict[Tap, Any] = {}
        self._inner: dict[int, tuple[Tensor, Tap]] = {}  # results that hooks in layers have seen
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._seen: dict[Call, None] = {}  # calls in layers that hooks have seen

    @property
    def is_complete(self) -> bool:
        """Whether all known taps have been noted; parameters are known from the start."""
        return all(tap in self._noted or tap[0] == "parameter" or tap[4] == _NAMED for tap in self._known)

    @property
    def needed(self) -> frozenset[Tap]:
        """The taps that later stages need, as far as is known.

        Of what hooks have seen in layers they need all or nothing, and then the names: the count of states is a value
        too, though no tensor tells.
        """
        if self._trace is None:
            return self._known
        taps = set(self._trace.needed_taps)
        if any(tap[0].startswith("inner") for tap in taps):
            taps |= {tap for tap in self._noted if tap[0].startswith("inner")}
        sent = {tap[:4] for tap in taps}
        return frozenset(taps | {(*call, _NAMED) for call in self._seen if call not in sent})

    def accept(self, rows: list[Any], tensors: list[Tensor], group: Callable[[Any], Group]) -> None:
        """Take what an earlier stage has sent, as `described` gives it."""
        for (*call, entry), description in rows:
            value = rebuild(description, tensors, group)
            for _, tensor in tensors_in(value):
                mark_dependent(tensor)
            self._received.setdefault(tuple(call), {})[entry] = value

    def received_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that were received, by name."""
        return {call[1]: values[None] for call, values in self._received.items() if call[0] == "parameter"}

    def has_arrived(self, call: Call) -> bool:
        """Whether anything was received of the result of `call`."""
        return call in self._received

    def next_call(self, kind: str, path: str, layer: int = -1) -> Call:
        """Return the next call of something in this run."""
        number = self._counts[kind, path, layer]
        self._counts[kind, path, layer] += 1
        return kind, path, layer, number

    def result(self, call: Call, value: Any, *, computed: bool | tuple[Entry, ...]) -> Any:
        """Return the result of a call, with what was received of it in its place.

        Args:
            call: that gave it.
            value: what it gave here.
            computed: whether this stage computes it, or knows certain entries of it.
        """
        if self._received:
            value = self.again(call, value)
        if self._trace is None and call not in self._wanted:
            return value
        arrived = self._received.get(call, {})
        for entry, entry_value in _entries(value):
            if computed is True or entry in arrived or (computed and entry in computed):
                self._note((*call, entry), entry_value)
        return value

    def again(self, call: Call, value: Any) -> Any:
        """Return the result of a call that runs again in the backward."""
        for entry, entry_value in self._received.get(call, {}).items():
            value = put(value, () if entry is None else (entry,), copies(entry_value))
        return value

    def _note(self, tap: Tap, value: Any) -> None:
        tensors = [tensor for _, tensor in tensors_in(value)]
        if not tensors or any(map(is_remote, tensors)):
            return
        if self._trace is None:
            if tap in self._known:
                self._noted[tap] = copies(value)
            return
        if not any(map(must_travel, tensors)):
            return
        try:
            Packer().describe(value)
        except ValueError:  # objects of the user's own
            return
        self._noted[tap] = copies(value)
        for tensor in tensors:
            if tap[0].startswith("inner"):
                self._inner[id(tensor)] = tensor, tap
            seen = self._inner.get(id(tensor))
            mark_tap(tensor, tap, *() if seen is None else (seen[1],))

    def watching(
        self, layer: nn.Module, path: str, index: int, hidden: Callable[[], Any]
    ) -> AbstractContextManager[Any]:
        """Enter around a call of a local layer: what hooks of modules in it see may be tapped.

        Args:
            layer: that is called.
            path: of the layer.
            index: of the layer.
            hidden: returns the hidden state that it is called with.
        """
        if self._trace is None and index not in self._wanted_inside:
            return nullcontext()
        wanted = {call[1] for call in self._wanted if call[0].startswith("inner") and call[2] == index}
        stack, state = ExitStack(), hidden()
        for name, module in layer.named_modules():
            full = f"{path}.{name}"
            if name and (full in wanted or (self._trace is not None and private(module, "_forward_hooks"))):
                hook = self._noting(full, index, state)
                stack.callback(module.register_forward_hook(hook, prepend=True).remove)
        return stack

    def _noting(self, path: str, index: int, hidden: Any) -> Callable[[nn.Module, Any, Any], None]:
        thread = get_ident()

        def note(_: nn.Module, args: Any, result: Any) -> None:
            if get_ident() != thread:  # another microbatch passes the layer side by side with this one
                return
            kind = "inner, of the layer's state" if args and args[0] is hidden else "inner"
            call = self.next_call(kind, path, index)
            self._seen[call] = None
            self.result(call, result, computed=True)

        return note

    @property
    def has_received(self) -> bool:
        """Whether an earlier stage has sent any."""
        return bool(self._received)

    def call_hooks(self, root: nn.Module, path: str, index: int, hidden: Any, guard: Guard) -> None:
        """Call the hooks of modules in a remote layer whose results were received.

        Args:
            root: the LightningModule.
            path: of the layer.
            index: of the layer.
            hidden: what the layer is called with.
            guard: of the values that other ranks have: these are all other arguments.
        """
        for call, values in [*self._received.items()]:
            if not call[0].startswith("inner") or call[2] != index or not call[1].startswith(f"{path}."):
                continue
            missing = marked(torch.full((1,), torch.nan), Origin(call[1], guard))
            self._seen[call] = None
            value: Any = missing if _NAMED in values else values.get(None)
            if value is None:
                value = tuple(values.get(entry) for entry in range(1 + max(map(int, values))))  # type: ignore[arg-type]
            if _NAMED not in values:
                value = self.result(call, value, computed=False)
            module = root.get_submodule(call[1])
            args = (missing if call[0] == "inner" else hidden,)
            for kind, result in (("pre_", ()), ("", (value,))):
                named = private(module, f"_forward_{kind}hooks_with_kwargs")
                for key, hook in list(private(module, f"_forward_{kind}hooks").items()):
                    if kind and is_hook_of(OF_THE_MODULE, hook):
                        continue
                    with suppress(RemoteParameterError):  # of a hook that reads a number for itself
                        hook(module, args, *([{}] if key in named else []), *result)

    def described(self, packer: Packer, root: nn.Module) -> list[Any]:
        """Return what later stages need of this run, and of earlier ones.

        Args:
            packer: takes the tensors.
            root: the LightningModule, whose parameters are taps, too.
        """
        received = self.received_parameters()
        rows = []
        for tap in sorted(self.needed, key=repr):
            kind, path, *_, entry = tap
            if entry == _NAMED:
                rows.append([[*tap], None])
                continue
            value: Any = self._noted.get(tap)
            if kind == "parameter":
                value = received[path] if path in received else root.get_parameter(path)
            if value is None:
                continue
            description = packer.describe(value)
            if kind not in ("layer", "boundary"):  # tensor parallel ranks may have shards of it
                packer.local.update(packer.add(tensor) for _, tensor in tensors_in(value))
            rows.append([[*tap], description])
        return rows


def _entries(value: Any) -> Iterator[tuple[Entry, Any]]:
    if isinstance(value, Tensor):
        yield None, value
    elif isinstance(value, Mapping):
        yield from ((key, inner) for key, inner in value.items() if isinstance(key, str | int))
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
