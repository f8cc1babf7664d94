"""Records what makes a module's weights instead of making them, so that a model larger than the host can be built.

Under `DeferredInit` random operations and the usual factories (`empty`, `zeros`, `ones`, `full`, `eye`) give tensors of
the meta device, without memory. Whatever makes or writes such tensors is recorded, and `DeferredWeights` replays it
later, equal to an ordinary construction bit by bit. The idea is that of `deferred_init` in torchdistx.

What is computed from Python data alone (`arange`, `tensor([...])`, drop-path schedules) is computed for real, so that
code which reads numbers works; a parameter made of it gives its memory to the record when a module gets it. Four
parts keep code from noticing:

- a dispatch mode sees every operator: it records those that touch deferred memory, and runs the others;
- a function mode answers what never reaches an operator: `device`, `is_meta`, `tolist`, `numpy`, setting `.data`;
- a number that code reads (`item`, `bool`) from deferred memory is computed from the record, if need be by drawing;
- torch's `trunc_normal_`, which looks at its numbers until all are within bounds, is recorded as one operation.

Tensors that are made on the meta device explicitly stay what they are, see `initializers`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.features.deferred_init.deferred_weights import DeferredWeights, tensors_of
from lightning_mm5d.features.deferred_init.journal import Call, Journal
from lightning_mm5d.features.deferred_init.pretrained import Recipe, Streaming
from lightning_mm5d.features.deferred_init.recorded import (
    CPU,
    META,
    Memory,
    Operation,
    Signature,
    Undefined,
    View,
    leaves,
    mapped,
)
from lightning_mm5d.sharded.removable import put

SEQUENCES = list | tuple | range | np.ndarray
READERS = frozenset(
    {
        Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
        Tensor.__index__, Tensor.__contains__, torch.tensor, torch.as_tensor, torch.asarray,
    }
)  # fmt: skip
DEFERRED_FACTORIES = frozenset({"empty", "empty_strided", "empty_permuted", "zeros", "ones", "full", "eye"})
TRUNCATED_NORMAL = Signature("normal_", random=True, view=False, written=frozenset({"self"}), arguments=("self",))


class DeferredInit(TorchDispatchMode):
    """A context in which modules are built without memory for their weights.

    It may be entered again, to go on with modules that it built. Random generators keep the state that they had.
    It holds what was recorded, no module: `weights` returns what a module needs of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._journal = Journal()
        self._memories = self._journal.memories
        self._signatures: dict[OpOverload, Signature] = {}
        self._answers = OrdinaryAnswers(self)

    def __enter__(self) -> DeferredInit:
        super().__enter__()
        self._beside = ExitStack()
        self._beside.enter_context(self._answers)
        self._beside.callback(register_module_parameter_registration_hook(self._take_memory).remove)
        private(nn.init, "_no_grad_trunc_normal_")  # raises where it has moved
        self._beside.callback(put(nn.init, "_no_grad_trunc_normal_", self._record_trunc_normal))
        self._streaming = Streaming(self.read_from)
        self._beside.enter_context(self._streaming)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._beside.__exit__(*exception)
        super().__exit__(*exception)
        self._journal.close()

    def weights(self, module: nn.Module) -> DeferredWeights:
        """What is deferred in `module`, by name, and how to make it."""
        with unrecorded():
            tensors = list(tensors_of(module))
            memories = self._memories.table()
            used = [self._memories.view(t) for _, _, t in tensors if self._memories.holds(t)]
            undefined = undefined_memories(self._journal.operations, memories, used)
            why = {
                id(t): undefined.get(number) for _, _, t in tensors if (number := self._memories.number(t)) is not None
            }
            for names, _, tensor in tensors:
                if why.get(id(tensor)) is Undefined.FROM_META:
                    rule = "Such tensors have no contents"
                    fix = "Build the module outside of torch.device('meta'): configure_model makes no weights by itself"
                    raise ConfigError(names[0], "a value computed from a tensor of the meta device", rule, fix)
            deferred = {key for key, reason in why.items() if reason is not Undefined.META}
            known = [(names, kind, t) for names, kind, t in tensors if id(t) in deferred]
            return DeferredWeights(
                operations=tuple(self._journal.operations),
                memories=memories,
                starts=tuple(source.start for source in self._journal.sources),
                draws_from=tuple(source.stands_for for source in self._journal.sources),
                ends=dict(self._journal.ends),
                read_by=self._journal.read_by,
                tensors=tuple((n, self._memories.view(t)) for n, k, t in known if k != "attribute"),
                attributes=tuple((t, self._memories.view(t)) for _, k, t in known if k == "attribute"),
                unwritten=tuple(n[0] for n, _, t in tensors if why.get(id(t)) is Undefined.EMPTY),
                unknown=tuple(n[0] for n, _, t in tensors if t.is_meta and id(t) not in deferred),
            )

    def adopt(self, tensor: Tensor) -> None:
        """Record what happens to a tensor of the meta device, too."""
        if not self._memories.holds(tensor):
            self._memories.adopt(tensor)

    def read_from(self, tensor: Tensor, recipe: Recipe) -> None:
        """Note that a tensor of the meta device is what `recipe` reads."""
        self._memories.add(tensor, CPU)
        view = self._memories.view(tensor)
        memories = frozenset([view.memory])
        self._journal.operations.append(
            Operation(recipe.read, (), {}, (view,), frozenset(), memories, memories, None, torch.get_default_dtype())
        )

    def is_deferred(self, item: Any) -> bool:
        """Whether something is a tensor whose contents are recorded here."""
        return isinstance(item, Tensor) and self._memories.holds(item)

    def device_of(self, tensor: Tensor) -> torch.device:
        """The device that a deferred tensor stands for."""
        return self._memories.device(tensor)

    def value(self, tensor: Tensor, asked_by: str) -> Tensor:
        """The contents of a deferred tensor now, for code that reads them.

        Raises:
            ConfigError: they depend on random numbers that cannot be drawn yet.
        """
        with unrecorded():
            return self._journal.value(tensor, asked_by)

    def constant(self, tensor: Tensor) -> Tensor:
        """A deferred tensor with the contents that a real one has now."""
        clone = torch.ops.aten.clone.default
        with unrecorded():
            return self._record(Call(clone, Signature.of(clone), (tensor.detach(),), {}))

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._streaming.look()
        if any(kind is not Tensor and not issubclass(kind, nn.Parameter | nn.Buffer) for kind in types):
            return NotImplemented  # the subclass takes itself apart; its parts come here again
        if function not in self._signatures:
            self._signatures[function] = Signature.of(function)
        call = Call(function, self._signatures[function], tuple(args), kwargs)
        if call.signature.name == "scalar_tensor":  # setting an item makes its number a tensor of the same device
            return function(*args, **(kwargs | {"device": CPU}))
        if call.signature.view or not self._defers(call):
            return function(*args, **kwargs)
        if not call.signature.returns_tensors or torch.Tag.data_dependent_output in function.tags:
            return self._run_for_real(call)
        return self._record(call)

    def _defers(self, call: Call) -> bool:
        """Whether a call is recorded rather than run."""
        tensors, name, device = call.tensors, call.signature.name, call.kwargs.get("device")
        if any(self.is_deferred(t) for t in tensors) and not (call.signature.shape_only and device == META):
            return True
        if name == "_to_copy" and device == META:
            return not tensors[0].is_meta  # indexing moves its operands to the device of the indexed tensor
        if not tensors or call.signature.shape_only:
            like_meta = any(t.is_meta for t in tensors)
            on_meta = device == META or (device is None and like_meta)
            holds_nothing = name in DEFERRED_FACTORIES and 0 in leaves(call.args[:1])
            makes = call.signature.random or like_meta or name in DEFERRED_FACTORIES
            return makes and not on_meta and not holds_nothing
        return call.signature.random and not any(t.is_meta for t in tensors)

    def _record(self, call: Call) -> Any:
        """Run a call on the meta device, and note it."""
        for tensor in [*call.written, *(t for t in call.tensors if t.is_meta)]:
            self.adopt(tensor)
        twins = {id(t): self._memories.twin(t) for t in call.tensors}
        originals = {id(twins[id(t)]): t for t in call.tensors}
        args, kwargs = call.mapped(lambda t: twins.get(id(t), t), device=META, generator=None)
        if call.signature.shape_only:
            kwargs["device"] = META
        try:
            results = call.function(*args, **kwargs)
        except NotImplementedError:
            return self._run_for_real(call)
        self._journal.note(call, list(leaves(results)))
        return mapped(lambda t: originals.get(id(t), t), results)

    def _run_for_real(self, call: Call) -> Any:
        """Run a call with the contents that deferred tensors have now; its results are real."""
        name = str(call.function)
        args, kwargs = call.mapped(lambda t: self._journal.value(t, name) if self.is_deferred(t) else t)
        return call.function(*args, **(kwargs | ({"device": CPU} if kwargs.get("device") == META else {})))

    def _record_trunc_normal(self, tensor: Tensor, *args: Any, generator: Generator | None = None) -> Tensor:
        """Stand for the function behind `trunc_normal_`, which looks at what it drew."""
        with unrecorded():
            if self.is_deferred(tensor) or not tensor.is_meta:
                self.adopt(tensor)
                call = Call(truncated_normal, TRUNCATED_NORMAL, (tensor, *args), {"generator": generator})
                self._journal.note(call, [tensor])
        return tensor

    def _take_memory(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Take the memory of a parameter that was computed for real, when a module gets it."""
        with unrecorded():
            if type(parameter) is not nn.Parameter or parameter.is_meta or weakref.getweakrefs(parameter):
                return
            self.adopt(parameter)
            twin = nn.Parameter(self._memories.twin(parameter.data), parameter.requires_grad)
            vars(twin).update(vars(parameter))
            torch.utils.swap_tensors(parameter, twin)


def truncated_normal(tensor: Tensor, *args: Any, generator: Generator | None) -> Tensor:
    """Draw as `torch.nn.init.trunc_normal_` does."""
    return private(nn.init, "_no_grad_trunc_normal_")(tensor, *args, generator=generator)


def undefined_memories(
    operations: Sequence[Operation], memories: Mapping[int, Memory], used: Iterable[View]
) -> dict[int, Undefined]:
    """The memories of which a view in `used` has final contents that are not defined in full."""
    why = {number: memory.undefined for number, memory in memories.items() if memory.undefined is not None}
    views: dict[int, list[View]] = {}  # what was overwritten of memories that are not defined in full

    def reason(memory: int, wanted: Sequence[View] = ()) -> Undefined | None:
        if memory in views and _reached(views[memory], memories[memory], wanted):
            del views[memory], why[memory]
        return why.get(memory)

    for operation in operations:
        reasons = {reason(memory) for memory in operation.reads - operation.writes} - {None}
        for memory in operation.writes:
            if reasons:
                why[memory] = Undefined.EMPTY if reasons == {Undefined.EMPTY} else Undefined.FROM_META
            elif memory in operation.overwrites:
                why.pop(memory, None)
                views.pop(memory, None)
            elif memory in why:
                views.setdefault(memory, []).extend(v for v in operation.overwritten_views() if v.memory == memory)
    wanted: dict[int, list[View]] = {}
    for view in used:
        wanted.setdefault(view.memory, []).append(view)
    return {memory: undefined for memory, of in wanted.items() if (undefined := reason(memory, of)) is not None}


def _reached(views: Sequence[View], memory: Memory, wanted: Sequence[View]) -> bool:
    """Whether the views reach each element of the wanted views; of the memory, if none are given."""
    if len({view.dtype for view in [*views, *wanted]}) != 1:
        return False
    reached = torch.zeros(memory.n_bytes // views[0].dtype.itemsize, dtype=torch.bool)
    for view in views:
        reached.as_strided(view.size, view.stride, view.offset).fill_(True)
    return all(bool(reached.as_strided(v.size, v.stride, v.offset).all()) for v in wanted) and bool(
        wanted or reached.all()
    )


@contextmanager
def unrecorded() -> Iterator[None]:
    """Let operators and functions run without being seen."""
    with private(torch._C, "_DisableTorchDispatch")(), torch._C.DisableTorchFunction():
        yield


class OrdinaryAnswers(TorchFunctionMode):
    """The part of `DeferredInit` that sees functions rather than operators.

    Deferred tensors answer as ordinary ones would to what never reaches an operator.
    """

    def __init__(self, recorder: DeferredInit) -> None:
        super().__init__()
        self._recorder, self._is_deferred = recorder, recorder.is_deferred
        self._handlers: dict[Any, Callable[..., Any]] = {
            private(Tensor.device, "__get__"): lambda t, *_: recorder.device_of(t),
            private(Tensor.is_meta, "__get__"): lambda *_: False,
            private(Tensor.is_cpu, "__get__"): lambda t, *_: recorder.device_of(t).type == "cpu",
            private(Tensor.is_cuda, "__get__"): lambda t, *_: recorder.device_of(t).type == "cuda",
            Tensor.cpu: lambda t, *_, **__: self._to(t, CPU),
            Tensor.to: self._to,
            Tensor.new_tensor: self._new_tensor,
            Tensor.set_: self._set,
            Tensor.__getitem__: lambda t, index: t[_with_tensors(index)],
            Tensor.__setitem__: lambda t, index, value: t.__setitem__(_with_tensors(index), value),
        }
        self._set_data = private(Tensor.data, "__set__")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function == self._set_data:
            return self._put_data(*args)
        if function is Tensor.__deepcopy__ and not self._is_deferred(args[0]):
            with unrecorded():  # it sets the storage of an empty tensor
                return function(*args, **kwargs)
        if function in self._handlers and self._is_deferred(args[0]):
            return self._handlers[function](*args, **kwargs)
        if function in READERS and any(self._is_deferred(item) for item in leaves(list(args))):
            name = function.__name__
            args = mapped(lambda t: self._recorder.value(t, name) if self._is_deferred(t) else t, tuple(args))
        return function(*args, **kwargs)

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`Tensor.to`, where the device that a tensor pretends to be on is no other device."""
        device = self._recorder.device_of(tensor)

        def same(item: Any) -> Any:
            if isinstance(item, str | torch.device) and torch.device(item) == device:
                return tensor.device
            return item

        return tensor.to(*[same(item) for item in args], **{name: same(item) for name, item in kwargs.items()})

    def _new_tensor(self, tensor: Tensor, data: Any, **kwargs: Any) -> Tensor:
        options: dict[str, Any] = {"dtype": tensor.dtype, "device": self._recorder.device_of(tensor)} | kwargs
        return torch.tensor(data, **options)

    def _set(self, tensor: Tensor, *source: Any) -> Tensor:
        """`Tensor.set_`, which makes a deferred tensor real where the source is."""
        if source and source[0].device.type != "meta":
            with unrecorded():
                real = torch.empty(0, dtype=tensor.dtype, device=source[0].device).set_(*source)
                torch.utils.swap_tensors(tensor, real)
            return tensor
        return tensor.set_(*source)

    def _put_data(self, tensor: Tensor, data: Tensor) -> None:
        """`tensor.data = data`, also between deferred and real tensors."""
        if self._is_deferred(tensor) and not data.is_meta:
            data = self._recorder.constant(data)
        if self._is_deferred(data) and not tensor.is_meta:
            other = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
            torch.utils.swap_tensors(tensor, other)
            return
        tensor.data = data


def _with_tensors(index: Any) -> Any:
    """An index with tensors in place of sequences, whose numbers torch would move to the meta device."""
    if isinstance(index, tuple):
        return tuple(torch.tensor(item) if isinstance(item, SEQUENCES) else item for item in index)
    return torch.tensor(index) if isinstance(index, SEQUENCES) else index
