"""How each layer of one modality runs on sharded sequences: which of its modules, if any, work on whole sequences.

A layer starts with the modules that its code shows to mix tokens. A probe runs it on some tokens; where the result
depends on other tokens, all its attentions run on whole sequences too, and where that is not enough the whole layer
does. Every rank then computes what one process computes. All ranks take the same way.

Runs a layer on some tokens and again on single ones: where the results differ, more than its attention mixes tokens.

Meanwhile the attention works on each token by itself. Where ranks have whole items of a batch, the layer runs on some
items, with its own attention.

It raises `MixingError` for layers that mix tokens beside their attention.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.context_parallel.hooks.layer_attention import Attention, Call
from lightning_mm5d.context_parallel.hooks.layer_tensors import (
    Arguments,
    Assigned,
    Ranks,
    item_dim,
    nothing,
    replaced,
    token_dim,
)
from lightning_mm5d.context_parallel.hooks.whole_modules import (
    BATCH_NORMS,
    Dims,
    Key,
    Mixers,
    Reader,
    Surveying,
    WholeModules,
)
from lightning_mm5d.data.random_state import kept_random_state
from lightning_mm5d.partition.parts import Place, at
from lightning_mm5d.sharded.collectives import in_one_piece
from lightning_mm5d.sharded.kept_results import unseen
from lightning_mm5d.sharded.tensor import Sharded

_TOKENS = 8  # that a probe looks at
_OFF = {torch.float64: 1e-4, torch.float32: 1e-3}  # rounding differs by how many tokens there are, mixing by much more
_OFF_16 = 3e-2


class MixingError(Exception):
    """Says what a layer does that depends on other tokens."""


class LayerInput(NamedTuple):
    """What a layer is about to work on.

    Attributes:
        forward: of the layer.
        local: the arguments, of this rank's tokens.
        names: of its positional arguments.
        hidden: place of the hidden state.
        dim: the sharded dim of the hidden state, from the last: -2 for tokens, less for items.
    """

    forward: Callable[..., Any]
    local: Arguments
    names: tuple[str, ...]
    hidden: Place
    dim: int

    @property
    def argument_names(self) -> tuple[str, ...]:
        """The names of all arguments that are given."""
        args, kwargs = self.local
        return (*self.names[: len(args)], *(name for name, value in kwargs.items() if value is not None))


def probe(
    layer: nn.Module, given: LayerInput, attention: Attention, size: int, whole: Surveying | None = None
) -> tuple[bool, ...]:
    """Return, for each attention of a layer in turn, whether its keys are the tokens of another sequence.

    A token that is alone is the first and the last, so special treatment of an end shows as well.

    Args:
        layer: runs in eval mode meanwhile, and keeps nothing of it.
        given: its input.
        attention: of the modality.
        size: tokens of this rank, at least 2, or its items.
        whole: the modules that work on whole sequences, if any.

    Raises:
        MixingError: tokens mix, or what is given with them does not follow them.
    """

    def run(tokens: Tensor) -> tuple[Tensor, list[bool]]:
        return _run(given, attention, tokens, size, whole)

    try:
        with _put_back(layer), torch.no_grad(), kept_random_state(at(given.hidden, *given.local).device):
            for count in range(min(size, _TOKENS), 1, -1) if size > 1 else (1,):
                few = torch.arange(count)
                if whole is not None:
                    whole.learn(lambda tokens, few=few: run(few[:tokens]), count)  # type: ignore[misc]
                places = [*range(count)] if count <= 3 else [1, count // 2, count - 2]
                together, is_own = run(few)
                singles = [run(few[place : place + 1]) for place in places]
                if all(is_own_alone == is_own for _, is_own_alone in singles):
                    break  # else another sequence happens to be of this length
    except Exception as error:
        cause = f"{error.got}: {error.rule}" if isinstance(error, ConfigError) else error
        raise MixingError(f"fails on some of its tokens ({cause})") from error
    _compare(layer, together, [single for single, _ in singles], places, count, given.dim)
    return tuple(not own_keys for own_keys in is_own)


def _run(
    given: LayerInput, attention: Attention, tokens: Tensor, size: int, whole: Surveying | None
) -> tuple[Tensor, list[bool]]:
    """Run the layer on some of its `size` tokens or items.

    Returns:
        The hidden state ``[..., S, W]``, and for each attention in turn whether it had as many keys as queries.
    """
    state = at(given.hidden, *given.local)
    state = state.full() if isinstance(state, Sharded) else state
    tokens = tokens.to(state.device)

    def only(argument: str, value: Any) -> Any:
        if isinstance(value, MutableMapping):  # states that layers share, of this rank's tokens
            return {key: _entry_of(entry, tokens, size) for key, entry in value.items()}
        if hasattr(value, "get_seq_length"):  # a cache, which would keep these
            return None
        if not isinstance(value, Tensor):
            return value
        along = token_dim(argument, value, size) if given.dim == -2 else item_dim(argument, value, size, -given.dim)
        return value if along is None else value.index_select(along, tokens)

    args, kwargs = replaced(given.local, given.names, only, given.hidden, state.index_select(given.dim, tokens))
    surveyed = nullcontext() if whole is None else whole.during()
    with surveyed, attention.during(Call(None, is_probe=given.dim == -2)) as call:
        result = given.forward(*args, **kwargs)
    if any(queries != len(tokens) for queries, _ in call.seen):
        raise ValueError(f"its attention has {call.seen[0][0]} queries for {len(tokens)} tokens")
    hidden: Tensor = result[0] if isinstance(result, (tuple, list)) else result
    is_own = [queries == keys for queries, keys in call.seen]
    return hidden.full() if isinstance(hidden, Sharded) else hidden, is_own


def _entry_of(entry: Any, tokens: Tensor, size: int) -> Any:
    """Some tokens of an entry of a dict that layers share."""
    if isinstance(entry, (list, tuple)):
        return type(entry)(_entry_of(part, tokens, size) for part in entry)
    fits = isinstance(entry, Tensor) and entry.dim() > 2 and entry.shape[-2] == size
    return entry.index_select(-2, tokens) if fits else entry


def _compare(
    layer: nn.Module, together: Tensor, singles: Sequence[Tensor], places: Sequence[int], count: int, dim: int
) -> None:
    """Raise `MixingError` where results of single tokens differ from those of `count` tokens."""
    single = torch.cat([*singles], dim)
    if together.shape[dim] != count or single.shape[dim] != len(places):
        raise MixingError(f"returns {together.shape[dim]} tokens for {count}")
    same = together.index_select(dim, torch.tensor(places, device=together.device))
    is_rounded = torch.is_autocast_enabled(single.device.type) or any(p.dtype.itemsize < 4 for p in layer.parameters())
    if differ(same, single, _OFF_16 if is_rounded else _OFF.get(single.dtype, _OFF_16)):
        raise MixingError("computes something else of a token when other tokens are elsewhere")


def differ(same: Tensor, single: Tensor, allowed: float) -> bool:
    """Whether tokens among others are by more than a part of `allowed` what they are not alone."""
    off = (same - single).abs().amax(-1) > allowed * single.abs().amax(-1).clamp_min(1e-6)
    # a router may send a token elsewhere for a rounding; where tokens mix, all of them differ
    return bool(off.float().mean() >= 0.5)


@contextmanager
def _put_back(layer: nn.Module) -> Iterator[None]:
    """Enter around runs in eval mode, after which attributes and buffers of the layer are what they were."""
    before = [(held, {**held}) for part in layer.modules() for held in (vars(part), part._buffers)]
    public = [value for part in layer.modules() for name, value in vars(part).items() if not name.startswith("_")]
    inside = [(value, copy(value)) for value in public if type(value) in (list, dict, set)]
    tensors = [value for value in (*public, *layer.buffers()) if type(value) is Tensor and not value.is_inference()]
    copies = [(value, value._version, value.detach().clone()) for value in tensors]
    layer.eval()
    try:
        yield
    finally:
        for owner, values in before:
            owner.clear()
            owner.update(values)
        for container, items in inside:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(items)
        for tensor, version, value in copies:
            if tensor._version != version:
                tensor.detach().copy_(value)


_log = logging.getLogger(__name__)
_BY_CODE, _ALL_ATTENTION, _WHOLE = range(3)


class Way(NamedTuple):
    """How a layer runs on this rank's tokens or items.

    Attributes:
        crosses: for each replaced attention in turn, whether its keys are the tokens of another sequence.
        modules: ids of those that work on whole sequences.
        dims: for each of these, which dims of its arguments count tokens.
        is_left_alone: whether all attention is the model's own, as where ranks have whole items.
    """

    crosses: tuple[bool, ...] = ()
    modules: frozenset[int] = frozenset()
    dims: dict[Key, Dims] = {}  # noqa: RUF012
    is_left_alone: bool = False


class LayerWays:
    """Finds the ways of one modality's layers.

    Args:
        name: the modality, for errors and warnings.
        layers: the list of layers.
        attention: of the modality.
        modules: runs modules on whole sequences.
        ranks: that share the layers.
        patch: puts the forward of `modules` in front of a module.
        device: where this rank computes.
    """

    def __init__(
        self,
        name: str,
        layers: nn.Module,
        attention: Attention,
        modules: WholeModules,
        ranks: Ranks,
        patch: Callable[[nn.Module], None],
        device: torch.device,
    ) -> None:
        self._name, self._attention, self._modules, self._patch = name, attention, modules, patch
        self._ranks, self._device = ranks, device
        reader = Reader()
        self._mixers: dict[int, tuple[nn.Module, Mixers]] = {}  # by the id of a layer, which is kept for it
        self._levels: dict[int, int] = {}
        self._known: dict[Any, Way | None] = {}
        self._warned: set[tuple[str, str]] = set()
        for layer in layers.children():
            mixers = reader.mixers(layer)
            self._mixers[id(layer)] = layer, mixers
            self._levels[id(layer)] = _WHOLE if "" in mixers.whole else _BY_CODE
            for path, why in mixers.whole.items():
                patch(layer.get_submodule(path))
                self._warn(layer.get_submodule(path), why)

    def mixes(self, layer: nn.Module) -> bool:
        """Whether some of a layer works on whole sequences."""
        return bool(self._levels[id(layer)] or self._mixers[id(layer)][1].whole)

    def of(self, layer: nn.Module, given: LayerInput, assigned: Assigned) -> Way | None:
        """Return the way of a layer that is about to run; None where all of it works on whole sequences.

        Args:
            layer: about to run.
            given: its local arguments.
            assigned: how its hidden state is sharded.
        """
        key = (id(layer), given.dim, given.argument_names)
        if key in self._known:
            return self._known[key]
        if given.dim != -2 and layer.training and any(isinstance(module, BATCH_NORMS) for module in layer.modules()):
            return None  # items of all ranks are normalised together
        if self._ranks.context.is_silent:  # a dry run
            return None if self.mixes(layer) else Way()
        if given.dim == -2 and min(assigned.sequence.coarse.lengths) < 2:  # too short to tell this time
            return None
        while not self.is_whole(layer):
            try:  # it changes modules meanwhile, which no other microbatch may see
                with nothing(), unseen(), in_one_piece(self._ranks.groups), torch.compiler.set_stance("force_eager"):
                    way = self._probed(layer, given, assigned)
            except MixingError as error:
                way, why = None, str(error)
            # all ranks take the same way: a rank with another one would wait for the others
            if not self._ranks.sharing.max(torch.tensor(float(way is None), device=self._device)):
                self._known[key] = way
                return way
            self._raise(layer, why if way is None else "mixes tokens on another rank")
        self._known[key] = None
        return None

    def is_whole(self, layer: nn.Module) -> bool:
        """Whether all of a layer works on whole sequences."""
        return self._levels[id(layer)] == _WHOLE

    def _probed(self, layer: nn.Module, given: LayerInput, assigned: Assigned) -> Way:
        """The way of a layer with what works on whole sequences now; `MixingError` where other modules mix tokens."""
        size = assigned.sequence.coarse.lengths[self._ranks.context.whole.index]
        modules = frozenset(id(layer.get_submodule(path)) for path in self._paths(layer))
        if given.dim != -2 and modules:
            with self._modules.inside():
                probe(layer, given, self._attention, size)
            return Way(is_left_alone=True)
        whole = Surveying(self._modules, modules, assigned.sequence.coarser)
        crosses = probe(layer, given, self._attention, size, whole)
        return Way(crosses, modules, whole.dims)

    def _paths(self, layer: nn.Module) -> list[str]:
        mixers = self._mixers[id(layer)][1]
        paths = [*mixers.whole, *(mixers.likely if self._levels[id(layer)] == _ALL_ATTENTION else ())]
        return [path for path in paths if path]

    def _raise(self, layer: nn.Module, why: str) -> None:
        """Let more of a layer work on whole sequences."""
        before, levels = self._paths(layer), self._levels
        levels[id(layer)] += 1
        if levels[id(layer)] == _ALL_ATTENTION and self._paths(layer) == before:
            levels[id(layer)] = _WHOLE
        if self.is_whole(layer):
            self._refuse_joined(layer)
            self._warn(layer, why)
            return
        for path in self._paths(layer):
            self._patch(layer.get_submodule(path))
            if path not in before:
                self._warn(layer.get_submodule(path), why)

    def _refuse_joined(self, layer: nn.Module) -> None:
        """Refuse a layer that takes queries and a text as one sequence, as InstructBLIP's does: its result is wrong."""
        if "query_length" in inspect.signature(type(layer).forward).parameters:
            rule = f"{type(layer).__name__} works on queries and a text that are joined, which cannot be sharded yet"
            raise ConfigError(f"modalities.{self._name}.cp_size", self._ranks.context.whole.size, rule, "Use 1")

    def _warn(self, module: nn.Module, why: str) -> None:
        key = type(module).__name__, why
        if self._ranks.context.whole.index == 0 and key not in self._warned:
            self._warned.add(key)
            sentence = "modalities.%s.cp_size: every context parallel rank runs %s on whole sequences. It %s"
            _log.warning(sentence, self._name, *key)
