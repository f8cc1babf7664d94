"""Patches a module so that a rank can run it as any of its stages.

The modules stay the same objects of the same classes under the same names. Three kinds of callables get an instance
attribute in front of them: boundaries of encoders, layers of lists that are split, and remote leaf modules. Each asks
the active `Run` what to do and, where none is active, does what it always did.

It refuses nothing; `remove` undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.context_parallel.hooks.apply import ContextParallel
from lightning_mm5d.partition import Partition
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.sharded.collectives import TensorGroup, dry_run
from lightning_mm5d.sharded.tensor import Group, Sharded
from lightning_mm5d.source.order import used_fields
from lightning_mm5d.stage.deferred import deferred_linear, defers, is_linear
from lightning_mm5d.stage.remote import ShapeMemory
from lightning_mm5d.stage.run import Run, StageError, StageView, hidden_of
from lightning_mm5d.tensor_parallel.apply import TensorParallel
from lightning_mm5d.tensor_parallel.region import linear


class Runtime:
    """The patched module of one rank.

    Args:
        root: the LightningModule.
        partition: what is cut where.
        stages: the stages of this rank, with the parameters that each of them holds.
        defers: whether backwards may put weight gradients off.
        tensor: the layers that this rank shares with others.
        sharing: those that it shares them with, by modality.
        context: the sequences that this rank shares with others, by modality.

    Attributes:
        active: the run that patched callables obey.
        skip_inputs: what layers behind a stage need, by structure of the batch.
    """

    def __init__(
        self,
        root: nn.Module,
        partition: Partition,
        stages: Mapping[StageView, frozenset[str]],
        *,
        defers: bool = False,
        tensor: TensorParallel | None = None,
        sharing: Mapping[str, TensorGroup] | None = None,
        context: Mapping[str, ContextParallel] | None = None,
    ) -> None:
        self.active: Run | None = None
        self._tensor, self._sharing, self._context = tensor, sharing or {}, context or {}
        self._groups = [*self._sharing.values(), *(group for one in self._context.values() for group in one.groups)]
        if tensor is not None:
            self._groups += tensor.groups.values()
        self._defers = defers
        self.skip_inputs: dict[Any, frozenset] = {}
        self.loss_modality = partition.loss_modality
        self._root, self._partition, self._stages = root, partition, stages
        self._shapes = ShapeMemory()
        self._returns_tuple: dict[str, int | None] = {}
        self._undo: list[Callable[[], None]] = []
        self._modality_of = {
            cut.name: name for name, encoder in partition.encoders.items() for cut in encoder.boundaries
        }
        self._wanted: dict[str, frozenset[str] | None] = {}
        self._lists = {
            name: list(root.get_submodule(path)) if path is not None else []  # type: ignore[call-overload]
            for name, path in partition.layers.items()
        }

    def num_layers(self, modality: str) -> int:
        """Return the length of a modality's list of layers."""
        return len(self._lists[modality])

    def last_stage(self, modality: str) -> int:
        """Return the index of a modality's last stage."""
        return len(self._partition.stages[modality]) - 1

    def sharing(self, modality: str) -> TensorGroup | None:
        """Return the ranks that share a modality's layers with this one."""
        return self._sharing.get(modality)

    def holders(self, modality: str, description: Any) -> Group:
        """Return what holds the parts of a divided tensor of a modality, of which a peer gave the description."""
        if description is not None:
            return self._context[modality].sequence(description)
        assert self._tensor is not None
        return self._tensor.groups[modality]

    def replaying(self) -> AbstractContextManager[Any]:
        """Around a backward, in which layers may be computed again."""
        stack = ExitStack()
        for shared in self._context.values():
            stack.enter_context(shared.replaying())
        return stack

    def modality_of(self, boundary: str) -> str:
        """Return the modality that a boundary belongs to."""
        return self._modality_of[boundary]

    def wanted(self, boundary: str, result: Any) -> Any:
        """Return `result` without the fields that no caller of the boundary reads."""
        fields = self._wanted[boundary]
        if fields is None or not isinstance(result, Mapping) or not fields.issubset(result):
            return result
        return type(result)(**{name: value for name, value in result.items() if name in fields})

    def install(self) -> None:
        """Put the patches in front of the module's own callables."""
        if self._defers:
            if self._tensor is not None:
                self._tensor.linear = self._linear
            held = frozenset().union(*self._stages.values())
            for path, module in self._root.named_modules():
                if is_linear(module) and f"{path}.weight" in held:
                    self._patch_linear(module)
        for name, encoder in self._partition.encoders.items():
            for cut in encoder.boundaries:
                self._wanted[cut.name] = used_fields(self._root, cut.path, cut.method)
                if any(name not in stage.cuts or not stage.is_last for stage in self._stages):
                    self._patch_boundary(self._root.get_submodule(cut.path), cut.method, cut.name, name)
        for name, layers in self._lists.items():
            whole = all(
                name in stage.cuts and stage.cuts[name].last - stage.cuts[name].first == len(layers)
                for stage in self._stages
            )
            if not whole:
                for index, layer in enumerate(layers):
                    self._patch_layer(layer, name, index)
        patched = {module for layers in self._lists.values() for layer in layers for module in layer.modules()}
        patched |= {
            self._root.get_submodule(cut.path) for e in self._partition.encoders.values() for cut in e.boundaries
        }
        for path, module in self._root.named_modules():
            own = [f"{path}.{name}" if path else name for name in module._parameters]
            leaf = own and not any(True for child in module.children() for _ in child.parameters())
            remote = frozenset(stage.name for stage, held in self._stages.items() if not held.intersection(own))
            if leaf and remote and module not in patched and module is not self._root:
                self._patch_leaf(module, remote)

    def remove(self) -> None:
        """Take the patches away again."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _replace(self, module: nn.Module, method: str, replacement: Callable) -> None:
        had = module.__dict__.get(method)
        module.__dict__[method] = replacement

        def undo() -> None:
            if had is None:
                module.__dict__.pop(method, None)
            else:
                module.__dict__[method] = had

        self._undo.append(undo)

    def _patch_boundary(self, module: nn.Module, method: str, name: str, modality: str) -> None:
        original = getattr(module, method)

        def boundary(*args: Any, **kwargs: Any) -> Any:
            run = self.active
            return original(*args, **kwargs) if run is None else run.boundary(name, modality, original, args, kwargs)

        self._replace(module, method, boundary)

    def _patch_leaf(self, module: nn.Module, remote: frozenset[str]) -> None:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            run = self.active
            if run is None or run.stage.name not in remote:
                return original(*args, **kwargs)
            with dry_run(self._groups):  # the ranks that share it may be elsewhere
                return self._shapes.placeholder(module, original, args, kwargs)

        self._replace(module, "forward", forward)

    def _patch_linear(self, module: nn.Module) -> None:
        def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            if self._puts_off(layer, args, kwargs):
                return self._linear(layer, args[0], layer.bias)  # type: ignore[arg-type]
            return type(layer).forward(layer, *args, **kwargs)

        # bound, so that a copy of the module computes with its own weights
        self._replace(module, "forward", MethodType(forward, module))

    def _puts_off(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> bool:
        run = self.active
        if run is None or run.deferred is None or kwargs or isinstance(args[0], Sharded):  # it would be gathered
            return False
        return defers(layer, *args)

    def _linear(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """A linear layer, whose weight gradient is put off where the active run does that."""
        run = self.active
        if run is None or run.deferred is None or not defers(layer, x):
            return linear(layer, x, bias)
        return deferred_linear(layer, x, bias, run.deferred)

    def _patch_layer(self, layer: nn.Module, modality: str, index: int) -> None:
        original = layer.forward
        checked = False

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal checked
            run = self.active
            cut = run.stage.cuts.get(modality) if run is not None else None
            if run is None:
                return original(*args, **kwargs)
            if cut is not None and cut.first <= index < cut.last:
                result = original(*args, **kwargs)
                if not checked:
                    checked = True
                    self._learn(modality, index, hidden_of(args, kwargs), result)
                return result
            hidden = run.skip(modality, index, args, kwargs)
            if modality not in self._returns_tuple:
                self._probe(modality, index, original, args, kwargs)
            length = self._returns_tuple[modality]
            return hidden if length is None else (hidden, *[None] * (length - 1))

        def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
            run = self.active
            cut = run.stage.cuts.get(modality) if run is not None else None
            if run is None or cut is None or not cut.first <= index < cut.last:
                return None
            return run.enters(modality, index, args, kwargs)

        self._replace(layer, "forward", forward)
        # a hook, not the forward: it stays outside of activation checkpointing
        self._undo.append(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)

    def _probe(self, modality: str, index: int, original: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        """Find out what a remote layer returns by running it once on its NaN parameters."""
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), dry_run(self._groups):
                self._learn(modality, index, None, original(*args, **kwargs))
        except RuntimeError:  # it writes to its parameters, and placeholders have no memory; a tensor is the rule
            self._returns_tuple[modality] = None

    def _learn(self, modality: str, index: int, hidden: Tensor | None, result: Any) -> None:
        first = result[0] if isinstance(result, (tuple, list)) else result
        self._returns_tuple[modality] = len(result) if isinstance(result, (tuple, list)) else None
        if hidden is not None and isinstance(first, Tensor) and first.shape != hidden.shape:
            raise StageError(
                f"layer {index} of {modality} turns a hidden state of shape {list(hidden.shape)} into "
                f"{list(first.shape)}; layers that change its shape cannot be split over stages: set "
                f"modalities.{modality}.pp_size to 1"
            )


def views(
    partition: Partition, names: Mapping[StageKey, Sequence[StageKey]], consumes: Mapping[StageKey, frozenset[str]]
) -> dict[StageKey, StageView]:
    """Return a `StageView` for each stage.

    Args:
        partition: what is cut where.
        names: for each stage, the partition's stages that run as this one.
        consumes: for each stage, the encoders whose results it is sent.
    """
    cuts = {cut.name: cut for stages in partition.stages.values() for cut in stages}
    last = partition.stages[partition.loss_modality][-1].name
    found = {}
    for key, members in names.items():
        held = {cuts[member].modality: cuts[member] for member in members}
        found[key] = StageView(
            name=key,
            cuts=held,
            consumes=consumes.get(key, frozenset()),
            is_last=last in members,
            stops_early=all(name in partition.encoders and partition.encoders[name].precedes for name in held),
        )
    return found
