"""Shares the sequences of one modality's layers over context parallel ranks, in place.

Each layer gets an instance attribute in front of its `forward`, which runs a call in numbered phases (`_run`). Inside,
the layer works on plain local tensors, and only its attention communicates. A layer's result is a `Sharded` that acts
as the full tensor and enters the next layer without communication, so whatever a model does between layers or after
them is right, and costs a gather only where it needs one.

While a model generates, every rank computes full sequences: it looks at one token at a time, and at a cache.

Modules that mix tokens beside the attention run on whole sequences, and so do layers where nothing else is right
(layer_ways.py, whole_modules.py).

It refuses (`ConfigError`) keys of earlier calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.context_parallel.hooks.layer_attention import Attention, Interface
from lightning_mm5d.context_parallel.hooks.layer_tensors import (
    Arguments,
    Assignment,
    Ranks,
    local_argument,
    local_state,
    names_of,
    replaced,
    shard_entries,
    sharded_records,
    sharded_result,
)
from lightning_mm5d.context_parallel.hooks.layer_ways import LayerInput, LayerWays
from lightning_mm5d.context_parallel.hooks.whole_modules import WholeCall, WholeModules, takes_products
from lightning_mm5d.context_parallel.masks.mask import Cache
from lightning_mm5d.data.random_state import drawing_together
from lightning_mm5d.partition.parts import at, hidden_place
from lightning_mm5d.sharded.kept_results import unseen
from lightning_mm5d.sharded.removable import Removable, meanwhile
from lightning_mm5d.sharded.sequence import ShardedSequence
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.source.trees import method_of, names
from lightning_mm5d.tensor_parallel.region import Region, drops

_BY_SIZE = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal}
_BY_FIRST_ARGUMENT = {
    *(torch.bernoulli, torch.rand_like, torch.randn_like, torch.randint_like),
    *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_),
    *(F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, torch.dropout),
}

_NAMES = {"drop_path", "stochastic_depth"} | {
    function.__name__ for function in _BY_SIZE | _BY_FIRST_ARGUMENT if "dropout" not in function.__name__
}


def drawing(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules, beside torch's own dropouts, whose code names a function that draws random numbers."""
    parts = list(layers)
    drawers = {cls for cls in {type(part) for part in parts} if _draws(cls)}
    return [part for part in parts if type(part) in drawers]


def _draws(cls: type) -> bool:
    forward = None if cls.__module__.startswith("torch.") else method_of(cls, "forward")
    named = None if forward is None else names(forward, variables=False)
    return named is not None and not named.isdisjoint(_NAMES)


class Draws(TorchFunctionMode):
    """Enter around code that works on local tokens: what it draws for whole samples is equal on all ranks.

    A layer may drop whole samples (stochastic depth, also called DropPath), by one number for each sample: ranks that
    hold tokens of the same sample must draw the same number. Draws for tokens come from a stream of each rank's own.

    Args:
        index: of the rank in its group.
        shape: of the local tokens, ``[..., B, S, D]``, or ``[S, D]`` where samples are packed.
        device: where this rank computes.
    """

    def __init__(self, index: int, shape: torch.Size, device: torch.device) -> None:
        super().__init__()
        self._index, self._shape, self._device = index, shape, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shape = None
        if func in _BY_FIRST_ARGUMENT:
            shape = (args[0] if args else kwargs["input"]).shape
        elif func in _BY_SIZE and kwargs.get("generator") is None and kwargs.get("out") is None:
            shape = func(*args, **{**kwargs, "device": "meta"}).shape
        if shape is None or self.has_tokens(shape):
            return func(*args, **kwargs)
        with drawing_together(self._index, self._device):
            return func(*args, **kwargs)

    def has_tokens(self, shape: torch.Size) -> bool:
        """Whether something of `shape` has values for each token, not for each sample."""
        length = self._shape[-2]
        if len(shape) == len(self._shape):
            return shape[-2] == length and (length > 1 or shape == self._shape)
        if len(self._shape) == 2:  # packed
            return length in shape
        batch = self._shape[:-2].numel()
        return length in shape[1:] or (len(shape) > 0 and shape[0] != batch and shape[0] in (length, batch * length))


class ContextParallel(Removable):
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
        self._interface = interface
        self.groups = ranks.groups
        layers: nn.Module = root.get_submodule(path)
        drawers = drawing(layers.modules())
        self._stream = Region(self._group, drops=drops(layers) or bool(drawers), device=device)
        self._recent = Cache(16)
        self._generates = False
        members = [module for layer in layers.children() for module in layer.modules()]
        mode: Any = "allgather" if modality.context.cp_mode == "items" else modality.context.cp_mode
        self._attention = Attention(name, mode, ranks.context, members, active, interface.caches)
        self._attention.takes_products = takes_products(members)
        self.replaying = self._attention.replaying
        self._modules = WholeModules(
            name,
            partial(self._left_alone, interface),
            active,
            lambda: self._attention.is_replaying,
            drops=drops(layers),
        )
        work = self._attention.masks.work
        self._assignment = Assignment(modality, ranks, averages, work, interface.caches)
        parent = root.get_submodule(path.rpartition(".")[0])
        holders = [module for module in (*members, parent) if hasattr(getattr(module, "config", None), "model_type")]
        packed = any("cu_seqlens" in names_of(module.forward) for module in members)
        interface.add(self._attention, {id(holder.config): holder.config for holder in holders}.values(), packed)
        self._ways = LayerWays(name, layers, self._attention, self._modules, ranks, self._patch_whole, device)
        for index, layer in enumerate(layers.children()):
            self._patch(layer, index)
        if modality.context.cp_mode != "items":
            for module in drawers:
                self._patch_draws(module)
        for module in root.modules():
            if hasattr(module, "prepare_inputs_for_generation"):
                self._patch_generate(module)

    def remove(self) -> None:
        """Take the patches away again."""
        super().remove()
        self._recent.clear()
        self._assignment.clear()
        self._attention.forget()

    @property
    def scopes(self) -> list[Any]:
        """What is of one microbatch at a time."""
        return [self._stream, self._attention, self._attention.masks, self._modules, self._interface]

    def sequence(self, description: Any) -> ShardedSequence:
        """Return the sequence that a peer described by `ShardedSequence.description`."""
        return self._assignment.described(description)

    # --- patches ---

    def _patch(self, layer: nn.Module, index: int) -> None:
        instance_forward = vars(layer).get("forward")
        names = names_of(layer.forward)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inner = partial(type(module).forward, module) if instance_forward is None else instance_forward
            if not self._generates:
                self._refuse_cache((*args, *kwargs.values()), index)
            return self._run(module, inner, Arguments(args, kwargs), names)

        self.put_forward(layer, forward)

    def _patch_draws(self, module: nn.Module) -> None:
        """Let a module draw for whole samples as all ranks do, also where a checkpoint computes it again."""
        instance_forward = vars(module).get("forward")

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inner = partial(type(module).forward, module) if instance_forward is None else instance_forward
            tokens = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 1), None)
            if tokens is None or not module.training or isinstance(tokens, Sharded):
                return inner(*args, **kwargs)
            with Draws(self._group.index, tokens.shape, self._device):
                return inner(*args, **kwargs)

        self.put_forward(module, forward)

    def _patch_generate(self, module: nn.Module) -> None:
        original = module.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            with meanwhile(self, _generates=True):
                return original(*args, **kwargs)  # type: ignore[operator]

        self.put_attribute(module, "generate", generate)

    def _patch_whole(self, module: nn.Module) -> None:
        forward = self._modules.forward_of(module)
        if forward is not None:
            self.put_forward(module, forward)

    @contextmanager
    def _left_alone(self, interface: Interface) -> Iterator[None]:
        """Run modules as without context parallelism; all ranks draw the same random numbers."""
        with interface.left_alone(self._attention), self._stream.outside():
            yield

    def _refuse_cache(self, values: tuple[Any, ...], index: int) -> None:
        """Refuse keys of earlier calls: they are keys of some tokens, or of all tokens on every rank."""
        for value in values:
            count = getattr(value, "get_seq_length", None)
            if count is not None and int(count(index)):
                rule = "A step works on whole sequences, without keys of earlier calls"
                fix = "Call model.generate, or use cp_size=1"
                raise ConfigError(
                    f"modalities.{self._name}.cp_size", f"past_key_values of {int(count(index))} tokens", rule, fix
                )

    # --- a call of a layer ---

    @torch.compiler.disable
    def _run(self, layer: nn.Module, inner: Callable[..., Any], given: Arguments, names: tuple[str, ...]) -> Any:
        """Run a layer on this rank's tokens.

        1. Assign tokens to ranks; run the layer as it is where every rank works on all of them.
        2. Make the arguments local.
        3. Find out, once for a layer, which of its modules work on whole sequences.
        4. Run the layer.
        5. Return its results as sharded tensors.
        """
        where = hidden_place(*given)
        if where is None or self._generates:
            return self._run_whole(layer, inner, given)
        state = at(where, *given)
        with unseen():
            assigned = self._assignment.of(state, given.kwargs)
        if assigned is None or self._ways.is_whole(layer):
            return self._run_whole(layer, inner, given)
        tokens = local_state(state, assigned, is_assigned=self._assignment.holds(state))
        local = replaced(given, names, partial(local_argument, assigned, self._recent), where, tokens)
        way = self._ways.of(layer, LayerInput(inner, local, names, where, assigned.dim), assigned)
        if way is None:
            return self._run_whole(layer, inner, given)
        call, whole = assigned.call, WholeCall(way.modules, assigned.sequence.coarser, way.dims)
        call.crosses = way.crosses
        call.is_differentiated = state.requires_grad or any(parameter.requires_grad for parameter in layer.parameters())
        if way.modules:
            whole.note(given, local)
        with ExitStack() as stack:
            stack.enter_context(self._attention.during(call))
            if layer.training:
                stack.enter_context(self._stream.inside())
            stack.enter_context(self._modules.inside() if way.is_left_alone else self._modules.during(whole))
            if assigned.dim == -2:
                batch = state.shape[0] if state.dim() > 2 else 1
                stack.enter_context(sharded_records(self._name, assigned.sequence.coarser, batch))
            result = inner(*local.args, **local.kwargs)
        shard_entries(given, assigned)
        return sharded_result(result, assigned, self._name, whole.is_whole)

    def _run_whole(self, layer: nn.Module, inner: Callable[..., Any], given: Arguments) -> Any:
        """Run a layer on all tokens, as every rank does."""

        def full(x: Any) -> Any:
            return x.full() if self._assignment.holds(x) else x

        args, kwargs = tuple(map(full, given.args)), {name: full(value) for name, value in given.kwargs.items()}
        with self._modules.inside() if self._ways.mixes(layer) else nullcontext():
            return inner(*args, **kwargs)
