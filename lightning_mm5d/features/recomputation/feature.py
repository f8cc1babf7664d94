"""Lets layers, or an encoder's calls in chunks, run again in their backward, instead of keeping what it needs.

A chosen layer gets an instance attribute in front of its forward, around all that tensor and context parallelism put
there and inside of its hooks, so that hooks of the layer itself act once. It runs under torch's non-reentrant
`checkpoint`, which puts torch's random state and autocast back when the layer runs again. Beside that it

- puts back the random states of Python and numpy, and the values of the buffers that the layer writes, and then shows
  the present ones again;
- leaves caches of keys out, which would take the same keys twice;
- keeps the results of some operations, where the configuration names them.

A layer runs as it is where nothing in it or before it is differentiated, and where it is checkpointed already: by a
flag of its own, as transformers' ``gradient_checkpointing_enable`` sets it, by code that calls it, or by its own code,
which its first call shows. It also does for a cache that is not empty.

With ``{items: 16}`` a call of the encoder's boundary computes sixteen items at a time (`chunks`), and keeps what a
chunk is given and what it returns. Where stages share the encoder, or its layers are gathered for each of their calls,
each layer does so by itself. Where nothing is trained, chunks run one after the other, and none of them again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from types import MethodType
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.recomputation.chunks import Chunks, Compute, check_norms
from lightning_mm5d.features.recomputation.fields import chunk_size
from lightning_mm5d.partition.compiled import IN_PLACE, compiled_parts, is_compiled, is_compiled_in_place
from lightning_mm5d.partition.parts import has_module, is_in
from lightning_mm5d.partition.step_uses import Boundary
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.kept_results import kept_results, operations_named
from lightning_mm5d.sharded.removable import Removable, meanwhile
from lightning_mm5d.sharded.torch_internals import in_backward, in_checkpoint
from lightning_mm5d.source.order import used_fields
from lightning_mm5d.stage import Runtime
from lightning_mm5d.stage.payload import tensors_in
from lightning_mm5d.trainer.feature import Feature

_top_hooks = private(torch._C._autograd, "_top_saved_tensors_default_hooks")


class Recomputation(Feature):
    """The field `Modality.memory.activation_checkpointing`: which layers run again in their backward."""

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse a compiled module around layers that run again."""
        again = {
            part: name
            for name, layer_operations in plan.partition.kept_operations.items()
            for part, operations in zip(plan.partition.parts[name].paths, layer_operations, strict=True)
            if operations is not None
        }
        for path, _ in compiled_parts(module):
            inside = next((part for part in again if part != path and is_in(part, path)), None)
            if inside is not None:
                name, rule = again[inside], f"{path or 'the module'} is compiled around layers"
                field, config = f"modalities.{name}.memory.activation_checkpointing", plan.modalities[name]
                fix = f"Compile the layers instead, for instance {inside!r}, or use 'none'"
                raise ConfigError(field, config.memory.activation_checkpointing, rule, fix)
        for name, modality in plan.modalities.items():
            if chunk_size(modality) is not None:
                field, owns = f"modalities.{name}.memory.activation_checkpointing", plan.partition.encoders[name].owns
                parts = {path: module.get_submodule(path) for path in owns if has_module(module, path)}
                check_norms(field, modality.memory.activation_checkpointing, parts)

    def cut(self, runtime: Runtime, plan: Plan, device: torch.device) -> Callable[[], None] | None:
        """Stand before the layers and the boundaries of this rank that run again."""
        chunked = any(chunk_size(modality) is not None for modality in plan.modalities.values())
        return Recompute(runtime, plan.modalities, device).remove if plan.partition.kept_operations or chunked else None


class Recompute(Removable):
    """The layers of one rank that run again in the backward, from the making of this object to `remove`.

    Args:
        runtime: the module and its stages.
        modalities: the configuration.
        device: where this rank computes.
    """

    def __init__(self, runtime: Runtime, modalities: Mapping[str, Modality], device: torch.device) -> None:
        self._runtime, self._device = runtime, device
        self._modalities = modalities
        whole = {name for name, modality in modalities.items() if _runs_whole(modality)}
        for modality in sorted(whole & {name for stage in runtime.stages for name in stage.cuts}):
            for boundary in runtime.partition.encoders[modality].boundaries:
                self._patch_boundary(boundary, modality)
        done = set[int]()
        for modality, layer_operations in runtime.partition.kept_operations.items():
            if modality in whole:
                continue
            cuts = [stage.cuts[modality] for stage in runtime.stages if modality in stage.cuts]
            for layer, operations in zip(runtime.lists[modality], layer_operations, strict=True):
                calls = [call for call, other in enumerate(runtime.lists[modality]) if other is layer]
                here = any(cut.first <= call < cut.last for cut in cuts for call in calls)
                if here and operations is not None and id(layer) not in done:
                    done.add(id(layer))
                    self._patch(layer, modality, calls, operations_named(operations))

    def _chunks(self, modality: str, path: str, parts: Sequence[str], fix: str) -> Chunks | None:
        """What computes the callable of the module at `path` a few items at a time, with the modules at `parts`."""
        size = chunk_size(self._modalities[modality])
        if size is None:
            return None
        field, root = f"modalities.{modality}.memory.activation_checkpointing", self._runtime.root
        modules = {part: root.get_submodule(part) for part in parts}
        return Chunks(self._runtime, field, size, path, modules, self._device, fix)

    def _patch_boundary(self, boundary: Boundary, modality: str) -> None:
        runtime, module = self._runtime, self._runtime.root.get_submodule(boundary.path)
        method = IN_PLACE if boundary.method == "forward" and is_compiled_in_place(module) else boundary.method
        runtime.wanted.setdefault(boundary.name, used_fields(runtime.root, boundary.path, boundary.method))
        owns = runtime.partition.encoders[modality].owns
        parts = [path for path in owns if has_module(runtime.root, path)]
        fix = f"Use 'full', or let modalities.{modality}.boundary name a part that computes each item by itself"
        chunks = self._chunks(modality, boundary.path, parts, fix)
        assert chunks is not None
        trained = [runtime.root.get_submodule(path) for path in parts]
        original = getattr(module, method)

        def compute(*args: Any, **kwargs: Any) -> Any:
            return runtime.read_fields(boundary.name, original(*args, **kwargs))

        def chunk(*args: Any, **kwargs: Any) -> Any:
            if not self._is_differentiated(trained, args, kwargs):
                return compute(*args, **kwargs)
            return self._again(compute, args, kwargs)

        @torch.compiler.disable
        @wraps(original, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            run = runtime.active
            # in lock step other ranks answer the modules of one call
            if runtime.guard.is_dry or runtime.in_lock_step or (run is not None and modality not in run.stage.cuts):
                return original(*args, **kwargs)
            with self._one_stream():
                return chunks(compute, chunk, args, kwargs)

        self.put_attribute(module, method, call)

    @contextmanager
    def _one_stream(self) -> Iterator[None]:
        """Draw from the stream that the layers begin: a chunk that runs again begins none."""
        run = self._runtime.active
        if run is None or run.draws is None:
            yield
            return
        run.draws.layers()
        with meanwhile(run, draws=None):
            yield

    def _again(self, compute: Compute, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Compute a chunk, and once more in its backward."""
        leaves, spec = tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def call(*tensors: Tensor) -> Any:
            by_place = dict(zip(places, tensors, strict=True))
            positional, named = tree_unflatten([by_place.get(place, leaf) for place, leaf in enumerate(others)], spec)
            return compute(*positional, **named)

        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        run = self._runtime.active
        replay = _Replay(nullcontext(), is_eager=run is not None and run.is_traced)
        return checkpoint(
            call,
            *(leaves[place] for place in places),
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), replay),
            debug=False,
        )

    def _patch(self, layer: nn.Module, modality: str, calls: list[int], operations: frozenset[str]) -> None:
        method = IN_PLACE if is_compiled_in_place(layer) else "forward"
        override = vars(layer).get(method)
        buffers, watch = _Buffers(layer), _Watch(layer)
        path = self._runtime.partition.parts[modality].paths[calls[0]]
        fix = "Use 'full', or pp_size=1 without reshard_after_forward, where calls of the whole encoder are divided"
        chunks = self._chunks(modality, path, [path], fix)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inner = partial(type(module).forward, module) if override is None else override

            def chunk(*args: Any, **kwargs: Any) -> Any:
                if watch.checkpoints_itself or not self._applies(module, modality, calls, args, kwargs):
                    return inner(*args, **kwargs)
                is_watched = watch.checkpoints_itself is None
                compute = watch.watched(inner) if is_watched else inner
                return self._run(module, compute, args, kwargs, operations, buffers, is_eager=is_watched)

            if chunks is None or not self._is_local(modality, calls) or in_backward():
                return chunk(*args, **kwargs)
            return chunks(inner, chunk, args, kwargs)

        # bound, so that a copy of the module computes with its own weights
        self.put_attribute(layer, method, MethodType(forward, layer))

    def _applies(self, layer: nn.Module, modality: str, calls: list[int], args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a call of a layer runs again in its backward."""
        checkpoints_itself = layer.training and getattr(layer, "gradient_checkpointing", False)
        return (
            not checkpoints_itself
            and self._is_local(modality, calls)
            and not any(_tokens_in(value, calls[0]) for value in (*args, *kwargs.values()))
            and self._is_differentiated([layer], args, kwargs)
        )

    def _is_local(self, modality: str, calls: list[int]) -> bool:
        """Whether the stage that runs, if any, computes the layer of these calls."""
        run = self._runtime.active
        cut = None if run is None else run.stage.cuts.get(modality)
        return run is None or (cut is not None and any(cut.first <= call < cut.last for call in calls))

    @staticmethod
    def _is_differentiated(modules: Sequence[nn.Module], args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a call is differentiated with what autograd would keep of it, and no code around runs it again."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or in_backward() or in_checkpoint():
            return False
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        if any(tensor.requires_grad for tensor in tensors):
            return any(map(Tensor.numel, tensors))  # without rows there is nothing to save
        return any(parameter.requires_grad for module in modules for parameter in module.parameters())

    def _run(
        self,
        layer: nn.Module,
        inner: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        operations: frozenset[str],
        buffers: _Buffers,
        *,
        is_eager: bool,
    ) -> Any:
        call = _Call(inner, *_without_caches(layer, args, kwargs))
        before = buffers.before(layer)
        keeps, takes = kept_results(operations) if operations else (nullcontext(), nullcontext())
        run = self._runtime.active
        replay = _Replay(takes, is_eager=is_eager or (run is not None and run.is_traced))
        result = checkpoint(
            call, *call.tensors(args, kwargs), use_reentrant=False, context_fn=lambda: (keeps, replay), debug=False
        )
        replay.buffers = buffers.written(before)
        call.is_again = True
        return result


def _runs_whole(modality: Modality) -> bool:
    """Whether calls of an encoder's boundary run in chunks; else calls of its layers do, if any."""
    is_whole = modality.num_cuts == 1 and not modality.sharding.reshard_after_forward
    return is_whole and chunk_size(modality) is not None


class _Call:
    """A call of a layer, which may run again with its tensors given anew.

    Dicts and lists that layers share states in are passed as they are, and to a call that runs again as they were.
    """

    is_again = False

    def __init__(self, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        self._inner, self._count = inner, len(args)
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        self._places = [place for place, value in arguments.items() if isinstance(value, Tensor)]
        self._others = {place: value for place, value in arguments.items() if not isinstance(value, Tensor)}
        self._shared = _copy_of_containers(self._others)

    def tensors(self, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors among arguments, in the order in which a call takes them."""
        return [args[place] if isinstance(place, int) else kwargs[place] for place in self._places]

    def __call__(self, *tensors: Tensor) -> Any:
        arguments: dict[Any, Any] = {**self._others, **dict(zip(self._places, tensors, strict=True))}
        if self.is_again:
            arguments |= _copy_of_containers(self._shared)
        args = [arguments.pop(place) for place in range(self._count)]
        return self._inner(*args, **arguments)


class _Watch:
    """Whether a layer's own code checkpoints all that has parameters in it, as its first call shows.

    Attributes:
        checkpoints_itself: whether it does; None before that call.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._modules = [
            module for module in layer.modules() if next(module.parameters(recurse=False), None) is not None
        ]
        self.checkpoints_itself: bool | None = False if any(map(is_compiled, layer.modules())) else None

    def watched(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return `inner`, a layer's forward; its first call inside of a checkpoint is watched."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.checkpoints_itself is not None:
                return inner(*args, **kwargs)
            around, seen = _top_hooks(True)[0], list[bool]()

            def note(*_: Any) -> None:
                seen.append(not torch.is_grad_enabled() or _top_hooks(True)[0] is not around)

            with ExitStack() as stack:
                for module in self._modules:
                    stack.callback(module.register_forward_pre_hook(note).remove)
                stack.callback(lambda: setattr(self, "checkpoints_itself", bool(seen) and all(seen)))
                stack.enter_context(torch.compiler.set_stance("force_eager"))  # hooks are not to be compiled
                return inner(*args, **kwargs)

        return call


def _copy_of_containers(tree: Any) -> Any:
    """Return dicts and lists anew, at any depth, with what is in them as it is."""
    return tree_map(lambda leaf: leaf, tree)


_Place = tuple[str, str]  # path of a module in a layer, name of a buffer


class _Written(NamedTuple):
    """A buffer that calls write, as a call found it.

    Attributes:
        module: that has it.
        name: of it in the module.
        value: when the call began.
        unwritten: the buffer and its version where this call did not write it; None where it did.
    """

    module: nn.Module
    name: str
    value: Tensor
    unwritten: tuple[Tensor, int] | None

    @property
    def is_shown(self) -> bool:
        """Whether the module has the value now, and the call run again does not write it."""
        if self.unwritten is None:
            return False
        buffer, version = self.unwritten
        return self.module._buffers.get(self.name) is buffer and buffer._version == version


_Buffer = tuple[nn.Module, Tensor, int, Tensor | None]
"""A buffer before a call: its module, itself, its version, and a copy where a call may write it."""


class _Buffers:
    """The buffers of a layer that its forward writes, such as running statistics.

    Those of norms are known. Others are found out: in the first call by their values, later by their versions.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._is_first = True
        self._written = {
            (path, name)
            for path, module in layer.named_modules()
            if isinstance(module, _NormBase)
            for name in module._buffers
        }

    def before(self, layer: nn.Module) -> dict[_Place, _Buffer]:
        """Return the buffers as they are now."""
        return {
            (path, name): (
                module,
                buffer,
                buffer._version,
                buffer.clone() if self._is_first or (path, name) in self._written else None,
            )
            for path, module in layer.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def written(self, before: dict[_Place, _Buffer]) -> list[_Written]:
        """Return the buffers that calls write, as they were `before` this one.

        Norms that train write theirs in ways that versions do not show.
        """
        written_buffers = []
        for place, (module, buffer, version, copy) in before.items():
            now = module._buffers.get(place[1])
            is_same = now is buffer and buffer._version == version
            if self._is_first and is_same and copy is not None:
                is_same = bool(torch.equal(copy, buffer))
            if not is_same:
                self._written.add(place)
            if place in self._written:
                keeps = is_same and not (isinstance(module, _NormBase) and module.training)
                value = buffer.clone() if copy is None else copy
                written_buffers.append(_Written(module, place[1], value, (buffer, version) if keeps else None))
        self._is_first = False
        return written_buffers


class _Replay:
    """Entered around a layer that runs again; may be entered several times.

    Args:
        takes: gives it results of operations.
        is_eager: whether compiled code ran uncompiled in the forward.
    """

    def __init__(self, takes: AbstractContextManager[Any], *, is_eager: bool) -> None:
        self.buffers: list[_Written] = []
        self._takes, self._is_eager = takes, is_eager
        self._states = random.getstate(), np.random.get_state()
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.callback(random.setstate, random.getstate())
            stack.callback(np.random.set_state, np.random.get_state())
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
            for buffer in self.buffers:
                # microbatches side by side run layers again side by side: nothing may be swapped
                if not buffer.is_shown:
                    stack.callback(buffer.module._buffers.__setitem__, buffer.name, buffer.module._buffers[buffer.name])
                    buffer.module._buffers[buffer.name] = buffer.value.clone()
            if self._is_eager:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._takes)
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _tokens_in(cache: Any, index: int) -> bool:
    """Whether a cache has keys of earlier calls of the layer at `index`."""
    length = getattr(cache, "get_seq_length", None)
    return length is not None and int(length(index)) > 0


def _without_caches(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Leave out empty caches, as transformers does for its own checkpointing."""
    args = tuple(None if hasattr(value, "get_seq_length") else value for value in args)
    kwargs = {key: None if hasattr(value, "get_seq_length") else value for key, value in kwargs.items()}
    if hasattr(layer, "gradient_checkpointing") and kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return args, kwargs


FEATURE = Recomputation
