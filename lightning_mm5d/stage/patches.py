"""Patches a module so that a rank can run it as any of its stages.

The modules stay the same objects of the same classes under the same names. Each of these callables gets an instance
attribute in front of it, which asks the active run what to do and, without one, does what it always did:

- linear layers and experts, where a split backward puts their weight gradients off;
- boundaries of encoders;
- layers of lists that are split over stages;
- remote leaf modules, which answer with placeholders.

**Encoders of torch** (``nn.TransformerEncoder``) that ranks share, in evaluation: There torch packs padded samples into
nested tensors and runs fused layers, which read weights and numbers of heads past the modules that hold them. Here
samples stay padded, and layers with sharded parts compute in steps. The result is equal: padding is zero after the last
layer.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.expert_parallel import LISTS, holds_experts
from lightning_mm5d.partition.compiled import IN_PLACE, compiled_parts, is_compiled, is_compiled_in_place
from lightning_mm5d.partition.parts import has_module, is_in
from lightning_mm5d.sharded.collectives import dry_run
from lightning_mm5d.sharded.remote_value import Origin, is_remote
from lightning_mm5d.sharded.removable import Removable, meanwhile
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.source.order import used_fields
from lightning_mm5d.stage.deferred import Deferred, DeferredProducts, deferred_linear, defers, is_linear
from lightning_mm5d.stage.payload import tensors_in
from lightning_mm5d.stage.remote import LayerResults, ShapeMemory, UserHooks, hidden_of, shown_stand_ins
from lightning_mm5d.stage.runtime import Runtime
from lightning_mm5d.tensor_parallel.region import linear


class TorchEncoders(Removable):
    """The encoders of torch in a module, until `remove`.

    Args:
        root: the LightningModule.
        sharded: paths of modules of which tensor parallel ranks hold parts.
    """

    def __init__(self, root: nn.Module, sharded: Collection[str] = ()) -> None:
        for path, module in root.named_modules():
            if isinstance(module, nn.TransformerEncoder) and type(module).forward is nn.TransformerEncoder.forward:
                if module.use_nested_tensor:
                    self.put_forward(module, _padded)
            elif isinstance(module, nn.TransformerEncoderLayer) and any(
                name.startswith(f"{path}.") for name in sharded
            ):
                self.put_attribute(module, "activation_relu_or_gelu", 0)  # the fused kernel knows no other activations


def _padded(module: Any, src: Tensor, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
    """The forward of ``nn.TransformerEncoder`` without nested tensors."""
    call = partial(type(module).forward, module, src, mask, src_key_padding_mask, is_causal)
    if not _would_nest(module, src, mask, src_key_padding_mask):
        return call()

    def clear(_: nn.Module, __: Any, hidden: Tensor) -> Tensor:
        return hidden.masked_fill(padding.unsqueeze(-1), 0.0)

    padding = src_key_padding_mask if src_key_padding_mask.dtype is torch.bool else src_key_padding_mask != 0
    with module.layers[-1].register_forward_hook(clear), meanwhile(module, use_nested_tensor=False):
        return call()


def _would_nest(module: Any, src: Tensor, mask: Tensor | None, padding: Tensor | None) -> bool:
    """Whether torch would pack the samples, as its forward decides it."""
    first = module.layers[0]
    if not torch.backends.mha.get_fastpath_enabled() or not module.use_nested_tensor or first.training:
        return False
    if src.dim() != 3 or padding is None or mask is not None or src.is_nested or torch.is_autocast_enabled():
        return False
    if torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in first.parameters())):
        return False
    valid = padding.logical_not() if padding.dtype is torch.bool else padding == 0
    is_aligned = not bool((valid[:, 1:] & ~valid[:, :-1]).any())
    return is_aligned or not getattr(module, "mask_check", True)


class Patches(Removable):
    """The patches of one rank's module, from the making of this object to `remove`.

    Args:
        runtime: the module and its stages.
        defers: whether backwards may put weight gradients off.
    """

    def __init__(self, runtime: Runtime, *, defers: bool) -> None:
        self._runtime = runtime
        self._shapes = ShapeMemory()
        self._results = {name: self._results_of(path) for name, path in runtime.partition.layers.items()}
        if defers:
            self._patch_linears()
            self._patch_experts()
        self._patch_boundaries()
        self._patch_lists()
        self._patch_leaves()
        for path, module in runtime.watched.items():
            self.changes.callback(module.register_forward_hook(functools.partial(self._computed, path)).remove)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Enter around a run of remote modules that only tells shapes; ranks that share them may be elsewhere."""
        groups = self._runtime.groups
        with dry_run(groups) if groups else nullcontext(), self._runtime.guard.dry_run():
            yield

    def _results_of(self, path: str | None) -> LayerResults:
        """The results of the layers at `path`; of parts that are no list where it is None."""
        listed = path is not None and isinstance(self._runtime.root.get_submodule(path), nn.ModuleList)
        return LayerResults(self._shapes, self._runtime.guard, self._quiet, pads=listed)

    def _patch_linears(self) -> None:
        runtime = self._runtime
        if runtime.tensor is not None:
            runtime.tensor.linear, runtime.tensor.puts_off = self._linear, self._due
        held, compiled = frozenset().union(*runtime.stages.values()), list[str]()

        # one function for all, outside of compiled layers, which are bound to the functions that they call
        @torch.compiler.disable
        def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            # what is sharded would be gathered
            if kwargs or not args or isinstance(args[0], Sharded) or (due := self._due(layer, *args)) is None:
                return type(layer).forward(layer, *args, **kwargs)
            return deferred_linear(layer, args[0], layer.bias, due)  # type: ignore[arg-type]

        for path, module in runtime.root.named_modules():
            if is_compiled(module):
                compiled.append(path)
            if is_linear(module) and f"{path}.weight" in held and not any(is_in(path, outer) for outer in compiled):
                self.put_forward(module, forward)

    def _patch_experts(self) -> None:
        held = frozenset().union(*self._runtime.stages.values())
        for path, module in self._runtime.root.named_modules():
            if holds_experts(module) and all(f"{path}.{name}" in held for name, _ in module.named_parameters()):
                self._patch_experts_of(module)

    def _patch_boundaries(self) -> None:
        runtime = self._runtime
        for name, encoder in runtime.partition.encoders.items():
            owned = [runtime.root.get_submodule(path) for path in encoder.owns if has_module(runtime.root, path)]
            runtime.user_hooks[name] = UserHooks(owned)
            for cut in encoder.boundaries:
                runtime.wanted[cut.name] = used_fields(runtime.root, cut.path, cut.method)
                remote = any(name not in stage.cuts or not stage.is_last for stage in runtime.stages)
                if remote or encoder.runs_after:
                    self._patch_boundary(runtime.root.get_submodule(cut.path), cut.method, cut.name, name)
                if encoder.runs_after:
                    self._draw_apart(runtime.root.get_submodule(cut.path), cut.method, cut.name)
        for cut in runtime.partition.ends:
            self._draw_apart(runtime.root.get_submodule(cut.path), cut.method, cut.name)

    def _patch_lists(self) -> None:
        compiled = [path for path, _ in compiled_parts(self._runtime.root)]
        for name, layers in self._runtime.lists.items():
            # an encoder that is compiled as a whole is one stage, and its boundary answers for it in others
            if any(is_in(self._runtime.partition.layers[name] or "", path) for path in compiled if path):
                continue
            cuts = [stage.cuts.get(name) for stage in self._runtime.stages]
            if not all(cut is not None and cut.last - cut.first == len(layers) for cut in cuts):
                for layer in dict.fromkeys(layers):
                    self._patch_layer(layer, name, [index for index, listed in enumerate(layers) if listed is layer])
                self._watch_parents(self._runtime.partition.layers[name] or "", name)

    def _watch_parents(self, layers: str, modality: str) -> None:
        """Refuse full backward hooks on modules around split layers, whose input and output are on different ranks."""

        def check(path: str, module: nn.Module, args: tuple) -> None:
            hooked = module._backward_hooks and private(module, "_is_full_backward_hook")
            if hooked and self._runtime.active is not None and any(x.requires_grad for _, x in tensors_in(args)):
                rule = (
                    "It is given the gradients of the input and the output, which are on different ranks with "
                    f"modalities.{modality}.pp_size > 1"
                )
                fix = "Register hooks on layers, or Tensor.register_hook on the input or the output, or use pp_size=1"
                raise ConfigError(f"{path}.register_full_backward_hook", type(module).__name__, rule, fix)

        parts = layers.split(".")
        for length in range(1, len(parts)):
            path = ".".join(parts[:length])
            watched = self._runtime.root.get_submodule(path)
            self.changes.callback(watched.register_forward_pre_hook(functools.partial(check, path)).remove)

    def _patch_leaves(self) -> None:
        runtime, root = self._runtime, self._runtime.root
        patched = {module for layers in runtime.lists.values() for layer in layers for module in layer.modules()}
        patched |= {root.get_submodule(cut.path) for e in runtime.partition.encoders.values() for cut in e.boundaries}
        for path, module in root.named_modules():
            names = [name for name, _ in module.named_parameters(path)]
            # a list with code of its own, of experts say, calls its members by what it computes
            picks = isinstance(module, LISTS) and type(module).forward is not nn.Module.forward
            picks = picks and patched.isdisjoint(module.children())
            leaf = picks or len(names) == sum(1 for _ in module.parameters(recurse=False))
            remote = frozenset(stage.name for stage, held in runtime.stages.items() if not held.intersection(names))
            if names and leaf and remote and module not in patched and module is not root:
                patched.update(module.modules() if picks else ())
                self._patch_leaf(module, path, remote, names)

    def _patch_boundary(self, module: nn.Module, method: str, name: str, modality: str) -> None:
        if method == "forward" and is_compiled_in_place(module):
            method = IN_PLACE
        original = getattr(module, method)

        # generation reads the signature; attributes of a compiled function are none of this one's
        @functools.wraps(original, updated=())
        def boundary(*args: Any, **kwargs: Any) -> Any:
            run = self._runtime.active
            return original(*args, **kwargs) if run is None else run.boundary(name, modality, original, args, kwargs)

        self.put_attribute(module, method, boundary)

    def _draw_apart(self, module: nn.Module, method: str, name: str) -> None:
        """Let a call draw from a stream of its own, so that the step draws the same after it wherever it ran."""
        original = getattr(module, method)

        @functools.wraps(original, updated=())
        def apart(*args: Any, **kwargs: Any) -> Any:
            run = self._runtime.active
            with nullcontext() if run is None or run.draws is None else run.draws.apart(name):
                return original(*args, **kwargs)

        self.put_attribute(module, method, apart)

    def _patch_leaf(self, module: nn.Module, path: str, remote: frozenset[str], names: list[str]) -> None:
        original, origin = module.forward, Origin(path, self._runtime.guard)

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = self._runtime.active
            if run is None or run.stage.name not in remote:
                return original(*args, **kwargs)
            with self._quiet():
                result = self._shapes.placeholder(module, origin, original, args, kwargs)
            run.answered(names, args, kwargs, result)
            return result

        self.put_attribute(module, "forward", forward)

    def _computed(self, path: str, module: nn.Module, args: tuple, result: Any) -> Any:
        run = self._runtime.active
        return result if run is None or self._runtime.guard.is_dry else run.computed(path, result)

    def _patch_experts_of(self, module: nn.Module) -> None:
        instance_forward = vars(module).get("forward")

        @torch.compiler.disable
        def forward(experts: nn.Module, *args: Any, **kwargs: Any) -> Any:
            original = MethodType(type(experts).forward, experts) if instance_forward is None else instance_forward
            run = self._runtime.active
            with nullcontext() if run is None or run.deferred is None else DeferredProducts(run.deferred):
                return original(*args, **kwargs)

        self.put_forward(module, forward)

    def _linear(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute a linear layer; the active run may put its weight gradient off."""
        due = self._due(layer, x)
        return linear(layer, x, bias) if due is None else deferred_linear(layer, x, bias, due)

    def _due(self, layer: nn.Module, x: Tensor) -> Deferred | None:
        """What takes the weight gradient of a linear layer with input `x`, if the active run may put it off."""
        run = self._runtime.active
        return run.deferred if run is not None and run.deferred is not None and defers(layer, x) else None

    def _patch_layer(self, layer: nn.Module, modality: str, indices: list[int]) -> None:
        method = IN_PLACE if is_compiled_in_place(layer) else "forward"
        original = getattr(layer, method)
        results, hooks = self._results[modality], UserHooks([layer])
        arrived: tuple[tuple, dict[str, Any]] = (), {}
        index = indices[0]

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = self._runtime.active
            if run is None:
                return original(*args, **kwargs)
            cut = run.stage.cuts.get(modality)
            if method == IN_PLACE:  # called in place of the hooks
                args, kwargs = enter(layer, args, kwargs) or (args, kwargs)
            at = index  # another microbatch may pass another call of the same layer meanwhile
            if cut is not None and cut.first <= at < cut.last:
                with run.inside(layer, modality, at, partial(hidden_of, args, kwargs)):
                    result = original(*args, **kwargs)
                return run.leaves(modality, at, result)
            args, kwargs = arrived
            if cut is None and hooks:
                with dry_run(self._runtime.groups), shown_stand_ins(layer):
                    original(*args, **kwargs)
            known = run.skip(modality, index, args, kwargs)
            result = results.of(layer, original, args, kwargs, known)
            return run.passed(modality, index, result, known, args, kwargs)

        def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
            nonlocal arrived, index
            run = self._runtime.active
            if run is not None and len(indices) > 1:
                index = run.turn(modality, indices, args, kwargs)
            cut = run.stage.cuts.get(modality) if run is not None else None
            if run is None:
                return None
            if cut is not None and cut.first <= index < cut.last:
                return run.enters(modality, index, args, kwargs)
            arrived = args, kwargs
            sent = hidden_of(args, kwargs) if cut is not None and index == cut.last else None
            return _shown(args, sent), {
                key: _shown(value, sent) if isinstance(value, (Tensor, tuple)) else value
                for key, value in kwargs.items()
            }

        self.put_attribute(layer, method, forward)
        if method == IN_PLACE:
            return
        # a hook, not the forward: it stays outside of activation checkpointing. The first, so that hooks of the user's
        # own act where the layer is local, and nowhere else
        self.changes.callback(layer.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)


def _shown(value: Any, sent: Any) -> Any:
    """Return an argument of a remote layer for the user's hooks on it: what they do to it must not act on `sent`."""
    if type(value) is tuple:
        return tuple([_shown(element, sent) for element in value])
    if not isinstance(value, Tensor):
        return value
    if value is sent and not isinstance(value, Sharded):
        return value.clone()
    return value.view_as(value) if value.requires_grad and not is_remote(value) else value
