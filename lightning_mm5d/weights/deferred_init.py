"""Records what makes a module's weights instead of making them, so that a model larger than the host can be built.

Under `DeferredInit` random operations and the usual factories (`empty`, `zeros`, `ones`, `full`, `eye`) give tensors of
the meta device, without memory. Whatever makes or writes such tensors is recorded, and `DeferredWeights` replays it
later, equal to an ordinary construction bit by bit. The idea is that of `deferred_init` in torchdistx.

What is computed from Python data alone (`arange`, `tensor([...])`, drop-path schedules) is computed for real, so that
code which reads numbers works. Four parts keep a tensor without memory from being noticed:

- a dispatch mode sees every operator: it records those that touch deferred memory, and runs the others;
- a function mode answers what never reaches an operator: `device`, `is_meta`, `tolist`, `numpy`, setting `.data`;
- a number that code reads (`item`, `bool`) from deferred memory is computed from the record;
- `trunc_normal_` of torch, which redraws until all numbers are within bounds, is recorded as one operation.

It refuses code that reads a random number, because nothing was drawn yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor, UntypedStorage, nn
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.weights.deferred_weights import DeferredWeights, tensors_of
from lightning_mm5d.weights.ordinary_answers import OrdinaryAnswers
from lightning_mm5d.weights.pretrained import streaming
from lightning_mm5d.weights.random_sources import RandomSource, default_generator
from lightning_mm5d.weights.recipe import Recipe
from lightning_mm5d.weights.recorded import Memory, Operation, Signature, View, leaves, mapped
from lightning_mm5d.weights.replay import Replay, sliced

CPU, META = torch.device("cpu"), torch.device("meta")
DEFERRED_FACTORIES = frozenset(["empty", "empty_strided", "empty_permuted", "zeros", "ones", "full", "eye"])


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Let operators run without being seen."""
    with private(torch._C, "_DisableTorchDispatch")(), torch._C.DisableTorchFunction():
        yield


def truncated_normal(tensor: Tensor, *args: Any, generator: Generator | None) -> Tensor:
    """Draw as `torch.nn.init.trunc_normal_` does."""
    return private(nn.init, "_no_grad_trunc_normal_")(tensor, *args, generator=generator)


class DeferredInit(TorchDispatchMode):
    """A context in which modules are built without memory for their weights.

    It may be entered again, to go on with modules that it built. Random generators keep the state that they had.
    It holds what was recorded, no module: `weights` returns what a module needs of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.sources: list[RandomSource] = []
        self._signatures: dict[OpOverload, Signature] = {}
        self._storages: list[UntypedStorage] = []  # of the meta device; the index is the memory's number
        self._memories: list[Memory] = []
        self._numbers: dict[int, int] = {}
        self._adopted: list[UntypedStorage] = []
        self._ends: dict[int, Tensor | int] = {}
        self._answers = OrdinaryAnswers(self)

    def __enter__(self) -> DeferredInit:
        super().__enter__()
        self._answers.__enter__()
        self._hook = register_module_parameter_registration_hook(self._without_memory)
        self._trunc_normal = private(nn.init, "_no_grad_trunc_normal_")
        setattr(nn.init, "_no_grad_trunc_normal_", self._record_trunc_normal)  # noqa: B010
        self._streaming = streaming(self.read_from)
        self._streaming.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hook.remove()
        self._streaming.__exit__(*exception)
        setattr(nn.init, "_no_grad_trunc_normal_", self._trunc_normal)  # noqa: B010
        self._answers.__exit__(*exception)
        super().__exit__(*exception)
        self._ends = {source.index: end for source in self.sources if (end := source.changed()) is not None}
        for source in self.sources:
            source.rewind()

    def weights(self, module: nn.Module) -> DeferredWeights:
        """What is deferred in `module`, by name, and how to make it."""
        found = [(names, kind, tensor) for names, kind, tensor in tensors_of(module)]
        memories = {
            number: Memory(self._storages[number].nbytes(), m.device, m.initial, m.undefined)
            for number, m in enumerate(self._memories)
        }
        return DeferredWeights(
            operations=tuple(self.operations),
            memories=memories,
            starts=tuple(source.start for source in self.sources),
            generators=tuple(source.generator for source in self.sources),
            ends=dict(self._ends),
            tensors=tuple((n, k, self.view(t)) for n, k, t in found if self.is_deferred(t)),
            unknown=tuple(n[0] for n, _, t in found if t.is_meta and not self.is_deferred(t)),
        )

    def read_from(self, tensor: Tensor, recipe: Recipe) -> None:
        """Note that a tensor of the meta device is what `recipe` reads."""
        self._number_storage(tensor.untyped_storage(), Memory(0, CPU))
        view = self.view(tensor)
        made = frozenset([view.memory])
        self.operations.append(
            Operation(recipe.read, (), {}, (view,), frozenset(), made, made, None, torch.get_default_dtype())
        )

    def is_deferred(self, tensor: Tensor) -> bool:
        """Whether the contents of this tensor are recorded here."""
        return self._number(tensor) is not None

    def device_of(self, tensor: Tensor) -> torch.device:
        """The device that a deferred tensor would be on."""
        number = self._number(tensor)
        assert number is not None
        return self._memories[number].device

    def view(self, tensor: Tensor) -> View:
        """Where a deferred tensor is."""
        number = self._number(tensor)
        assert number is not None
        if tensor.is_neg():
            raise ConfigError(
                "configure_model", "a negated view of a weight", "Weights are made without such views", "Clone it"
            )
        return View(
            number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.is_conj()
        )

    def value(self, tensor: Tensor, asked_by: str) -> Tensor:
        """The contents of a deferred tensor now, computed from the record.

        Raises:
            ConfigError: they depend on random numbers, which are not drawn yet.
        """
        view = self.view(tensor)
        steps = sliced(self.operations, [view.memory], draws=False)
        for step in steps:
            if step.operation.draw is not None:
                raise ConfigError(
                    "configure_model",
                    f"{asked_by} of a value made by {step.operation.name}",
                    "Random numbers are drawn after the module is built, so code that builds it cannot read them",
                    "Build this part in __init__, or compute the number from the module's configuration",
                )
        found: list[UntypedStorage] = []
        memories = dict(enumerate(self._memories))
        for number, storage in enumerate(self._storages):
            memories[number].n_bytes = storage.nbytes()
        with _unrecorded():
            Replay(memories, steps, [], frozenset([view.memory]), lambda _, storage: found.append(storage)).run()
            return view.tensor(found[0])

    def __torch_dispatch__(self, function: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(not issubclass(kind, nn.Parameter | nn.Buffer) and kind is not Tensor for kind in types):
            return NotImplemented  # the subclass takes itself apart; its parts come here again
        if function not in self._signatures:
            self._signatures[function] = Signature.of(function)
        signature = self._signatures[function]
        tensors = [t for t in leaves([list(args), list(kwargs.values())]) if isinstance(t, Tensor)]
        if signature.view or not self._defers(signature, tensors, args, kwargs):
            return function(*args, **kwargs)
        return self._record(function, signature, args, kwargs, tensors)

    def _defers(self, signature: Signature, tensors: list[Tensor], args: Any, kwargs: Any) -> bool:
        """Whether an operator is recorded rather than run."""
        if any(self.is_deferred(tensor) for tensor in tensors):
            return True
        if signature.name == "_to_copy" and kwargs.get("device") == META:
            return not tensors[0].is_meta  # indexing moves its operands to the device of the indexed tensor
        if any(tensor.is_meta for tensor in tensors) or kwargs.get("device", CPU) == META:
            return False
        return signature.random or (not tensors and signature.name in DEFERRED_FACTORIES)

    def _record(self, function: OpOverload, signature: Signature, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run the operator on the meta device, and note the call with views in place of tensors."""
        named = dict(signature.named(args, kwargs))
        written = [t for name in signature.written for t in leaves(named.get(name)) if isinstance(t, Tensor)]
        for tensor in [*written, *(t for t in tensors if t.is_meta)]:
            if not self.is_deferred(tensor):
                self._adopt(tensor)
        if not signature.returns_tensors or torch.Tag.data_dependent_output in function.tags:
            return self._run_for_real(function, args, kwargs)
        device = self._device(kwargs, tensors)
        twins = {id(t): self._twin(t) for t in tensors}
        origins = {id(twin): t for t in tensors if (twin := twins[id(t)]) is not None}
        meta_kwargs = dict(kwargs) | ({"device": META} if "device" in kwargs else {})
        meta_kwargs |= {"generator": None} if "generator" in kwargs else {}
        swap = lambda item: twins[id(item)] if isinstance(item, Tensor) else item  # noqa: E731
        try:
            made = function(*mapped(swap, args), **{k: mapped(swap, v) for k, v in meta_kwargs.items()})
        except NotImplementedError:
            return self._run_for_real(function, args, kwargs)
        results = [self._result(t, device) for t in leaves(made)]
        writes = {self.view(t).memory for t in written}
        new = {view.memory for view in results if view is not None}
        if writes or new:
            self.operations.append(
                self._operation(function, signature, args, kwargs, named, written, results, writes | new, device)
            )
        return mapped(lambda t: origins.get(id(t), t), made)

    def _operation(
        self,
        function: Callable[..., Any],
        signature: Signature,
        args: Any,
        kwargs: Any,
        named: dict[str, Any],
        written: list[Tensor],
        results: list[View | None],
        writes: set[int],
        device: torch.device,
    ) -> Operation:
        views = [self.view(t) for t in written]
        unread = set(signature.out) | ({"self"} if signature.overwrites else set())
        covered = {v.memory for v in views if v.covers(self._storages[v.memory].nbytes())} if unread else set()
        reads: set[int] = set()
        for name, argument in named.items():
            for t in leaves(argument):
                if isinstance(t, Tensor) and self.is_deferred(t) and not signature.shape_only:
                    memory = self.view(t).memory
                    if name not in unread or memory not in covered:
                        reads.add(memory)
        overwrites = {view.memory for view in results if view is not None} | (covered - reads)
        draw = None
        if signature.random:
            draw = self._source(kwargs.get("generator"), device).draw(len(self.operations))
        kwargs = dict(kwargs) | ({"device": device} if "device" in kwargs else {})
        kwargs |= {"generator": None} if "generator" in kwargs else {}
        return Operation(
            function=function,
            args=mapped(self._frozen, tuple(args)),
            kwargs={name: mapped(self._frozen, item) for name, item in kwargs.items()},
            results=tuple(results),
            reads=frozenset(reads),
            writes=frozenset(writes),
            overwrites=frozenset(overwrites),
            draw=draw,
            default_dtype=torch.get_default_dtype(),
        )

    def _record_trunc_normal(self, tensor: Tensor, *args: Any, generator: Generator | None = None) -> Tensor:
        """Stand for the function behind `trunc_normal_`, which looks at what it drew."""
        if not self.is_deferred(tensor):
            if tensor.is_meta:
                return tensor
            self._adopt(tensor)
        signature = Signature("normal_", True, False, frozenset(["self"]), frozenset(), (), True)
        kwargs = {"generator": generator}
        named = {"self": tensor}
        writes = {self.view(tensor).memory}
        device = self.device_of(tensor)
        with _unrecorded():
            operation = self._operation(
                truncated_normal, signature, (tensor, *args), kwargs, named, [tensor], [], writes, device
            )
        self.operations.append(operation)
        return tensor

    def _without_memory(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Take the memory of a parameter that was computed for real, when a module gets it."""
        with _unrecorded():
            if type(parameter) is not nn.Parameter or parameter.is_meta or weakref.getweakrefs(parameter):
                return
            if not self.is_deferred(parameter):
                self._adopt(parameter)
            twin = nn.Parameter(self._twin(parameter.data), parameter.requires_grad)
            vars(twin).update(vars(parameter))
            torch.utils.swap_tensors(parameter, twin)

    def constant(self, tensor: Tensor) -> Tensor:
        """A deferred tensor with the contents of a real one."""
        clone = torch.ops.aten.clone.default
        signature = self._signatures.setdefault(clone, Signature.of(clone))
        with _unrecorded():
            tensor = tensor.detach()
            return self._record(clone, signature, (tensor,), {}, [tensor])

    def _frozen(self, item: Any) -> Any:
        """An argument as it is kept: a view, a copy of a real tensor, or the thing itself."""
        if not isinstance(item, Tensor):
            return item
        return self.view(item) if self.is_deferred(item) else item.detach().clone()

    def _run_for_real(self, function: OpOverload, args: Any, kwargs: Any) -> Any:
        real = lambda t: self.value(t, str(function)) if isinstance(t, Tensor) and self.is_deferred(t) else t  # noqa: E731
        kwargs = {name: mapped(real, item) for name, item in kwargs.items()}
        if kwargs.get("device") == META:
            kwargs["device"] = CPU
        return function(*mapped(real, args), **kwargs)

    def _device(self, kwargs: Any, tensors: list[Tensor]) -> torch.device:
        """The device on which the results of a call would be."""
        device = kwargs.get("device")
        if device is not None and device != META:
            return torch.device(device)
        own = [self.device_of(t) if self.is_deferred(t) else t.device for t in tensors]
        return next((d for t, d in zip(tensors, own, strict=True) if t.dim()), own[0] if own else CPU)

    def _source(self, generator: Generator | None, device: torch.device) -> RandomSource:
        generator = default_generator(device) if generator is None else generator
        for source in self.sources:
            if source.generator is generator:
                return source
        self.sources.append(RandomSource(generator, len(self.sources)))
        return self.sources[-1]

    def _result(self, tensor: Any, device: torch.device) -> View | None:
        """The view of a tensor that a call made, none where it shares memory that was there."""
        if not isinstance(tensor, Tensor) or self.is_deferred(tensor):
            return None
        self._number_storage(tensor.untyped_storage(), Memory(0, device))
        return self.view(tensor)

    def _adopt(self, tensor: Tensor) -> None:
        """Take memory that was there before into the record, with what it holds now."""
        storage = tensor.untyped_storage()
        if tensor.is_meta:
            self._number_storage(storage, Memory(0, CPU, undefined=True))
            return
        self._adopted.append(storage)
        self._numbers[id(storage)] = len(self._storages)
        self._number_storage(UntypedStorage(storage.nbytes(), device="meta"), Memory(0, tensor.device, storage))

    def _number_storage(self, storage: UntypedStorage, memory: Memory) -> None:
        self._numbers[id(storage)] = len(self._storages)
        self._storages.append(storage)
        self._memories.append(memory)

    def _number(self, tensor: Tensor) -> int | None:
        if tensor.layout != torch.strided:
            return None
        return self._numbers.get(id(tensor.untyped_storage()))

    def _twin(self, tensor: Tensor) -> Tensor:
        """A meta tensor of the same geometry, on the same numbered memory where it has one."""
        if tensor.is_meta:
            return tensor
        if self.is_deferred(tensor):
            view = self.view(tensor)
            return view.tensor(self._storages[view.memory])
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
