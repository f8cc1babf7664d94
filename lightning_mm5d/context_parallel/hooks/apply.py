"""Shares the sequences of one modality's layers over context parallel ranks, in place.

Each layer gets an instance attribute in front of its `forward`, which runs a call in numbered phases (`_run`). Inside,
the layer works on plain local tensors, and only its attention communicates. A layer's result is a `Sharded` that acts
as the full tensor and enters the next layer without communication, so whatever a model does between layers or after
them is right, and costs a gather only where it needs one.

While a model generates, every rank computes full sequences: it looks at one token at a time, and at a cache.

It refuses (`ConfigError`) keys of earlier calls, and layers in which tokens mix beside the attention (probe.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.context_parallel.hooks.arguments import Arguments, names_of, replaced
from lightning_mm5d.context_parallel.hooks.assignment import Assigned, Assignment, Ranks
from lightning_mm5d.context_parallel.hooks.draws import Draws, drawing
from lightning_mm5d.context_parallel.hooks.interface import Interface
from lightning_mm5d.context_parallel.hooks.layer_attention import Attention
from lightning_mm5d.context_parallel.hooks.layer_tensors import (
    local_argument,
    local_state,
    shard_entries,
    sharded_result,
)
from lightning_mm5d.context_parallel.hooks.probe import LayerInput, mixed, probe
from lightning_mm5d.context_parallel.hooks.recorded_states import nothing, sharded_records
from lightning_mm5d.context_parallel.hooks.support import takes_products
from lightning_mm5d.context_parallel.masks.caches import Cache
from lightning_mm5d.partition.hidden_state import at, hidden_place
from lightning_mm5d.sharded.kept_results import unseen
from lightning_mm5d.sharded.sequence import ShardedSequence
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.tensor_parallel.region import Region, drops


class ContextParallel:
    """The sharded layers of one modality on one rank.

    Args:
        name: the modality.
        modality: its configuration.
        root: the LightningModule.
        path: of the list of layers in it.
        ranks: that share the layers.
        averages: whether the gradient of a leaf belongs to a parameter whose mean over ranks is taken in the end.
        interface: of this rank; its attention puts itself there.
        active: gives the run of a stage on a microbatch that is under way, forward or backward, if any.
        device: where this rank computes.
    """

    def __init__(
        self,
        name: str,
        modality: Modality,
        root: nn.Module,
        path: str,
        ranks: Ranks,
        *,
        averages: Callable[[Tensor], bool],
        interface: Interface,
        active: Callable[[], Any] = lambda: None,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self._name, self._group, self._device = name, ranks.context.whole, device
        self.groups = ranks.groups
        layers: nn.Module = root.get_submodule(path)
        drawers = drawing(layers.modules())
        self._stream = Region(self._group, drops=drops(layers) or bool(drawers), device=device)
        self._undo: list[Callable[[], object]] = []
        self._known: dict[Any, tuple[tuple[bool, ...], nn.Module]] = {}
        self._recent = Cache(16)
        self._generates = False
        members = [module for layer in layers.children() for module in layer.modules()]
        mode: Any = "allgather" if modality.cp_mode == "items" else modality.cp_mode
        self._attention = Attention(name, mode, ranks.context, members, active, interface.caches)
        self._attention.takes_products = takes_products(members)
        self.replaying = self._attention.replaying
        work = self._attention.masks.work
        self._assignment = Assignment(modality, ranks, averages, work, interface.caches)
        parent = root.get_submodule(path.rpartition(".")[0])
        holders = [module for module in (*members, parent) if hasattr(getattr(module, "config", None), "model_type")]
        packed = any("cu_seqlens" in names_of(module.forward) for module in members)
        interface.add(self._attention, {id(one.config): one.config for one in holders}.values(), packed)
        for index, layer in enumerate(layers.children()):
            self._patch(layer, index)
        if modality.cp_mode != "items":
            for module in drawers:
                self._patch_draws(module)
        for module in root.modules():
            if hasattr(module, "prepare_inputs_for_generation"):
                self._patch_generate(module)

    def remove(self) -> None:
        """Take the patches away again."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._recent.clear()
        self._assignment.clear()
        self._attention.forget()

    def sequence(self, description: Any) -> ShardedSequence:
        """Return the sequence that a peer described by `ShardedSequence.description`."""
        return self._assignment.described(description)

    # --- patches ---

    def _patch(self, layer: nn.Module, index: int) -> None:
        own = vars(layer).get("forward")
        names = names_of(layer.forward)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inner = partial(type(module).forward, module) if own is None else own
            if not self._generates:
                self._refuse_cache((*args, *kwargs.values()), index)
            return self._run(module, inner, Arguments(args, kwargs), names)

        # bound, so that a copy of the module computes with its own weights
        self._put(layer, "forward", MethodType(forward, layer))

    def _patch_draws(self, module: nn.Module) -> None:
        """Let a module draw for whole samples as all ranks do, also where a checkpoint computes it again."""
        own = vars(module).get("forward")

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inner = partial(type(module).forward, module) if own is None else own
            tokens = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 1), None)
            if tokens is None or not module.training or isinstance(tokens, Sharded):
                return inner(*args, **kwargs)
            with Draws(self._group.index, tokens.shape, self._device):
                return inner(*args, **kwargs)

        self._put(module, "forward", MethodType(forward, module))

    def _patch_generate(self, module: nn.Module) -> None:
        original = module.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            before, self._generates = self._generates, True
            try:
                return original(*args, **kwargs)  # type: ignore[operator]
            finally:
                self._generates = before

        self._put(module, "generate", generate)

    def _put(self, module: nn.Module, name: str, value: Any) -> None:
        """Set an instance attribute until `remove`."""
        own = vars(module).get(name)
        vars(module)[name] = value

        def undo() -> None:
            vars(module).pop(name, None)
            if own is not None:
                vars(module)[name] = own

        self._undo.append(undo)

    def _refuse_cache(self, values: tuple[Any, ...], index: int) -> None:
        """Refuse keys of earlier calls: they are keys of some tokens, or of all tokens on every rank."""
        for value in values:
            count = getattr(value, "get_seq_length", None)
            if count is not None and int(count(index)):
                raise ConfigError(
                    f"modalities.{self._name}.cp_size",
                    f"past_key_values of {int(count(index))} tokens",
                    "A step works on whole sequences, without keys of earlier calls",
                    "Call model.generate, or use cp_size=1",
                )

    # --- a call of a layer ---

    @torch.compiler.disable
    def _run(self, layer: nn.Module, inner: Callable[..., Any], given: Arguments, names: tuple[str, ...]) -> Any:
        """Run a layer on this rank's tokens.

        1. Assign tokens to ranks; run the layer as it is where every rank works on all of them.
        2. Make the arguments local.
        3. Find out, once for a layer, whether only its attention mixes tokens.
        4. Run the layer.
        5. Return its results as sharded tensors.
        """
        where = hidden_place(*given)
        if where is None or self._generates:
            return inner(*given.args, **given.kwargs)
        state = at(where, *given)
        with unseen():
            assigned = self._assignment.of(state, given.kwargs)
        if assigned is None:
            return inner(*given.args, **given.kwargs)
        tokens = local_state(state, assigned, is_assigned=self._assignment.holds(state))
        local = replaced(given, names, partial(local_argument, assigned, self._recent), where, tokens)
        call = assigned.call
        call.crosses = self._crosses(layer, LayerInput(inner, local, names, assigned.dim), assigned)
        call.is_differentiated = state.requires_grad or any(one.requires_grad for one in layer.parameters())
        with ExitStack() as stack:
            stack.enter_context(self._attention.during(call))
            if layer.training:
                stack.enter_context(self._stream.inside())
            if assigned.dim == -2:
                batch = state.shape[0] if state.dim() > 2 else 1
                stack.enter_context(sharded_records(self._name, assigned.sequence.coarser, batch))
            result = inner(*local.args, **local.kwargs)
        shard_entries(given, assigned)
        return sharded_result(result, assigned, self._name)

    def _crosses(self, layer: nn.Module, given: LayerInput, assigned: Assigned) -> tuple[bool, ...]:
        """For each attention of a layer, whether its keys are of another sequence; found out once for each layer."""
        key = (id(layer), given.dim, given.argument_names)
        if key in self._known:
            return self._known[key][0]
        lengths = assigned.sequence.coarse.lengths
        if min(lengths) < 2 or self._attention.is_silent:  # too short to tell this time
            return ()
        found: tuple[bool, ...] = ()
        failed = None
        try:
            with nothing(), unseen(), torch.compiler.set_stance("force_eager"):
                found = probe(self._name, layer, given, self._attention, lengths[self._group.index])
        except ConfigError as error:
            failed = error
        # all ranks raise or none does: a rank that went on alone would wait for the others
        somewhere = self._group.max(torch.tensor(float(failed is not None), device=self._device))
        if failed is not None:
            raise failed
        if somewhere:
            raise mixed(self._name, layer, "was refused on another rank")
        self._known[key] = found, layer  # which keeps its id
        return found
