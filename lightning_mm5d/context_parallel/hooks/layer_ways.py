"""How each layer of one modality runs on sharded sequences: which of its modules, if any, work on whole sequences.

A layer starts with the modules that its code shows to mix tokens. A probe runs it on some tokens; where the result
depends on other tokens, all its attentions run on whole sequences too, and where that is not enough the whole layer
does. Every rank then computes what one process computes. All ranks take the same way.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.context_parallel.hooks.assignment import Assigned, Ranks
from lightning_mm5d.context_parallel.hooks.layer_attention import Attention
from lightning_mm5d.context_parallel.hooks.probe import LayerInput, MixingError, probe
from lightning_mm5d.context_parallel.hooks.recorded_states import nothing
from lightning_mm5d.context_parallel.hooks.support import BATCH_NORMS, Mixers, Reader
from lightning_mm5d.context_parallel.hooks.whole_modules import Dims, Key, WholeModules
from lightning_mm5d.sharded.collectives import in_one_piece
from lightning_mm5d.sharded.kept_results import unseen

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
        if given.dim != -2 and layer.training and any(isinstance(one, BATCH_NORMS) for one in layer.modules()):
            return None  # items of all ranks are normalised together
        if self._attention.is_silent:
            return None if self.mixes(layer) else Way()
        if given.dim == -2 and min(assigned.sequence.coarse.lengths) < 2:  # too short to tell this time
            return None
        while not self.is_whole(layer):
            try:  # it changes modules meanwhile, which no other microbatch may see
                with nothing(), unseen(), in_one_piece(self._ranks.groups), torch.compiler.set_stance("force_eager"):
                    found = self._probed(layer, given, assigned)
            except MixingError as error:
                found, why = None, str(error)
            # all ranks take the same way: a rank with another one would wait for the others
            if not self._ranks.sharing.max(torch.tensor(float(found is None), device=self._device)):
                self._known[key] = found
                return found
            self._raise(layer, why if found is None else "mixes tokens on another rank")
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
        whole = self._modules.surveying(modules, assigned.sequence.coarser)
        crosses = probe(layer, given, self._attention, size, whole)
        return Way(crosses, modules, whole.dims)

    def _paths(self, layer: nn.Module) -> list[str]:
        mixers = self._mixers[id(layer)][1]
        paths = [*mixers.whole, *(mixers.likely if self._levels[id(layer)] == _ALL_ATTENTION else ())]
        return [path for path in paths if path]

    def _raise(self, layer: nn.Module, why: str) -> None:
        """Let more of a layer work on whole sequences."""
        before, own = self._paths(layer), self._levels
        own[id(layer)] += 1
        if own[id(layer)] == _ALL_ATTENTION and self._paths(layer) == before:
            own[id(layer)] = _WHOLE
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
