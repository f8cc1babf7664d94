"""One microbatch of one stage: the user's own step, with the parts on other ranks cut off.

While a `Run` is active, patched callables ask it what to do:

- A boundary of this stage is recorded. A boundary of another stage returns the received result.
- Layers before this stage return a remote value, which nothing may keep (`sharded.remote_value`). At the entry of the
  first local layer the received hidden state takes its place. Skip inputs, which later layers take beside the hidden
  state, are swapped likewise.
- Layers after this stage return stand-ins too and note their skip inputs. After the last of these the step ends, by an
  exception that only `Run.execute` sees.

It refuses a second pass through layers that are split over stages, and layers that run in another order than stages do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_mm5d.partition.hidden_state import at, hidden_place
from lightning_mm5d.sharded.remote_value import Origin, is_remote, marked
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.stage.deferred import Deferred
from lightning_mm5d.stage.passes import Pass
from lightning_mm5d.stage.payload import (
    Packer,
    Path,
    Payload,
    arguments,
    map_tensors,
    put,
    rebuild,
    tensors_in,
    unsharded,
)
from lightning_mm5d.stage.runtime import Runtime
from lightning_mm5d.stage.taint import mark_dependent, must_travel, traced
from lightning_mm5d.stage.view import Received, StageError, StageView, StandIn, Stop
from lightning_mm5d.stage.written import StaleAttributes, Written, attributes, written


@dataclass
class LayerCall:
    """One pass through a list of layers, as it leaves a stage.

    Attributes:
        hidden: the hidden state at the entry of the first layer after the stage: a tensor, or a tree of tensors.
        skip_inputs: other arguments of later layers, by (layer, path in ``(args, kwargs)``): tensors, and entries of
            dicts that layers share states in.
        returned: where the hidden state is in the result of the stage's last layer; None where code made it from that.
    """

    hidden: Any
    skip_inputs: dict[tuple[int, Path], Any]
    returned: Received


class Run:
    """The state of one forward, kept until its backward.

    Args:
        runtime: the patched module.
        stage: what is local.
        received: payloads of earlier stages.
        structure: key of batches that take the same way through the model, and so have the same skip inputs.
        reseed: called where the local layers begin, for a random state of their own; None leaves generators alone.
        deferred: collects the weight gradients that a split backward puts off; None puts none off.
        trains: whether it is a run of a training step.

    Attributes:
        is_traced: whether it looks for skip inputs, and compiled code runs uncompiled in it.
    """

    def __init__(
        self,
        runtime: Runtime,
        stage: StageView,
        received: Sequence[Payload],
        structure: Any,
        reseed: Callable[[], None] | None = None,
        deferred: Deferred | None = None,
        *,
        trains: bool = True,
    ) -> None:
        self.stage, self.trains = stage, trains
        self.deferred = deferred
        self.received = received
        self.result: Any = None
        self._runtime = runtime
        self._structure = (stage.name, structure)
        self._reseed = reseed
        self._replays = False
        self._inside: str | None = None  # the encoder whose boundary is being computed
        self._boundaries_in: dict[str, list[Any]] = {}
        self._boundaries_out: list[tuple[str, Any]] = []
        self._stale, self._stale_of = StaleAttributes(runtime.root, runtime.guard), dict[str, list[Written]]()
        self._consumed: dict[str, int] = {}
        self._calls_in: dict[str, list[LayerCall]] = {}
        self._calls_out: dict[str, list[LayerCall]] = {}
        self._entered: dict[str, int] = {}
        self._passes: dict[str, Pass] = {}
        self._results: dict[str, Any] = {}
        self._known_skips = runtime.skip_inputs.get(self._structure)
        self.is_traced = self._known_skips is None and any(
            cut.last < runtime.num_layers(modality) for modality, cut in stage.cuts.items()
        )
        self._found: set[tuple[str, int, Path]] = set()
        for payload in received:
            self._accept(payload)

    # --- in ---

    def _accept(self, payload: Payload) -> None:
        for tensor, has_grad in zip(payload.tensors, payload.meta["grads"], strict=True):
            tensor.requires_grad_(has_grad and torch.is_grad_enabled())
            mark_dependent(tensor)
        for index, path, exact in payload.meta["remote"]:  # unless nothing takes them, the last stage reports them
            payload.tensors[index] = marked(payload.tensors[index], Origin(path, self._runtime.guard), exact=exact)
            mark_dependent(payload.tensors[index])
        for name, description, stale in payload.meta["boundaries"]:
            self._boundaries_in.setdefault(name, []).append(rebuild(description, payload.tensors))
            self._stale_of[name] = stale
        for modality, hidden, returned, sides in payload.meta["calls"]:
            group = partial(self._runtime.holders, modality)
            found = {(layer, tuple(path)): rebuild(value, payload.tensors, group) for layer, path, value in sides}
            state = rebuild(hidden, payload.tensors, group)
            for _, tensor in tensors_in((state, list(found.values()))):
                mark_dependent(tensor)
            self._calls_in.setdefault(modality, []).append(LayerCall(state, found, returned))

    # --- the step ---

    def execute(self, step: Callable[[], Any]) -> Any:
        """Run `step` as this stage; return its result in the last stage, else None."""
        with self, traced() if self.is_traced else nullcontext():
            try:
                self.result = step()
                for end in self._runtime.ends:
                    end()
                for one in self._passes.values():
                    one.end()
            except Stop:
                self.result = None
        self._check_used()
        if self.is_traced and self._calls_out:
            self._runtime.skip_inputs[self._structure] = frozenset(self._found)
        if not self.stage.is_last:
            self.result = None
        return self.result

    def _check_used(self) -> None:
        """Refuse results of an encoder that arrived in its last consumer and were not used: they get no gradient."""
        for name, results in self._boundaries_in.items():
            used, modality = self._consumed.get(name, 0), self._runtime.modality_of(name)
            if modality in self.stage.must_use and used < len(results):
                raise StageError(
                    f"{len(results)} results of {name} arrived in stage {self.stage.name}, and the step used {used} of "
                    f"them there: set modalities.{modality}.feeds to the stages whose layers follow its use, or "
                    f"modalities.{modality}.boundary to the callable whose result the step uses"
                )

        for modality, calls in self._calls_in.items():
            if self._entered.get(modality, 0) < len(calls):
                raise StageError(
                    f"{len(calls)} hidden states arrived in stage {self.stage.name}, and the step entered its first "
                    f"layer {self._entered.get(modality, 0)} times: a layer that a stage begins with must run in every "
                    f"step. Choose another cut with modalities.{modality}.pipeline_template, or set pp_size to 1"
                )

    def __enter__(self) -> Run:
        assert self._runtime.active is None, "stages do not nest"
        self._runtime.active = self
        self._runtime.guard.ends_here = self.stage.is_last
        return self

    def __exit__(self, *_: object) -> None:
        self._stale.restore()
        self._runtime.active = None
        self._runtime.guard.ends_here = None

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Backpropagate, inside of `deferred`; a layer that runs again meanwhile sees what it saw before."""
        self._replays = True
        with self, self._runtime.replaying():
            torch.autograd.backward(outputs, gradients)

    @property
    def computes(self) -> str | None:
        """The modality that is being computed: of several in one stage, an encoder while its boundary is called."""
        if self._inside is not None:
            return self._inside
        cuts = self.stage.cuts
        return next(iter(cuts)) if len(cuts) == 1 else self._runtime.loss_modality

    def passes_back(self, modality: str) -> bool:
        """Whether a gradient goes back into what this run computed of an encoder."""
        results = [result for name, result in self._boundaries_out if self._runtime.modality_of(name) == modality]
        return any(tensor.requires_grad for _, tensor in tensors_in(results))

    def boundary(self, name: str, modality: str, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Stand in for a call of the boundary `name`."""
        if self._inside is not None:
            return original(*args, **kwargs)
        if self.trains and modality not in self.stage.cuts:
            self._runtime.handed |= {id(tensor) for _, tensor in tensors_in((args, kwargs))}
        if modality in self.stage.consumes:
            index = self._consumed.get(name, 0)
            self._consumed[name] = index + 1
            results = self._boundaries_in.get(name, [])
            if index >= len(results):
                raise StageError(
                    f"{name} is called {index + 1} times in stage {self.stage.name}, and the stage that computes it "
                    f"called it {len(results)} times: what the step does must not depend on the stage"
                )
            self._stale.mark(self._stale_of[name])
            return _copies(results[index])
        cut = self.stage.cuts.get(modality)
        self._inside = modality
        try:
            # what is compiled expects no stand-ins
            with nullcontext() if cut is not None else torch.compiler.set_stance("force_eager"):
                result = self._watched(name, original, args, kwargs)
        finally:
            self._inside = None
        if cut is not None and cut.index == self._runtime.last_stage(modality):
            self._boundaries_out.append((name, result))
            return _copies(result)
        return result

    def _watched(self, name: str, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a boundary; of the first call for a structure, note which attributes of modules it writes."""
        known, key = self._runtime.written, (self._structure, name)
        if key in known:
            return original(*args, **kwargs)
        path = self._runtime.path_of(name)
        module = self._runtime.root.get_submodule(path)
        before = attributes(module, path)
        result = original(*args, **kwargs)
        known[key] = written(before, attributes(module, path))
        return result

    def enters(self, modality: str, layer: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a local or later layer, with received tensors in their places."""
        cut = self.stage.cuts[modality]
        if not self._replays and layer < cut.last:
            self._pass(modality).enter(layer)
        if layer == cut.first and not self._replays:
            if self._reseed is not None:
                self._reseed()
            self._entered[modality] = self._entered.get(modality, 0) + 1
        if cut.index == 0:
            return args, kwargs
        call = self._call(modality)
        if layer == cut.first:
            args, kwargs = put((args, kwargs), hidden_path(args, kwargs), call.hidden)
        for (where, path), value in call.skip_inputs.items():
            if where == layer:
                args, kwargs = put((args, kwargs), path, value)
        return args, kwargs

    def _call(self, modality: str) -> LayerCall:
        calls, index = self._calls_in.get(modality, []), self._entered.get(modality, 0) - 1
        if index >= len(calls):
            raise StageError(
                f"the layers of {modality} ran {index + 1} times in one step in stage {self.stage.name}, where "
                f"{len(calls)} passes arrived: with pp_size > 1 a training step passes once through them. Call the "
                "model once in training_step, generate in validation_step or in a hook, or use pp_size=1"
            )
        return calls[index]

    def leaves(self, modality: str, layer: int, result: Any) -> None:
        """Note the result of a local layer."""
        if layer == self.stage.cuts[modality].last - 1:
            self._results[modality] = result

    def skip(self, modality: str, layer: int, args: tuple, kwargs: dict[str, Any]) -> StandIn:
        """Stand in for a remote layer."""
        cut, origin = self.stage.cuts.get(modality), self._runtime.partition.parts[modality].paths[layer]
        loss_modality = self._runtime.loss_modality
        if cut is None:
            if modality == loss_modality and self.stage.stops_early:
                raise Stop
            return StandIn(hidden_of(args, kwargs), origin)
        if not self._replays:
            self._pass(modality).enter(layer)
        if layer < cut.first:
            calls, index = self._calls_in.get(modality, []), self._entered.get(modality, 0)
            # the last one before the stage shows the real state to hooks that record it, as a copy: hooks on its
            # gradient have acted where it was computed
            if layer == cut.first - 1 and index < len(calls) and calls[index].returned:
                return StandIn(map_tensors(calls[index].hidden, _copy), origin, calls[index].returned)
            return StandIn(hidden_of(args, kwargs), origin)
        args, kwargs = self.enters(modality, layer, args, kwargs)
        hidden = hidden_of(args, kwargs)
        if layer == cut.last:
            returned = _place_in(self._results.pop(modality, None), hidden)
            self._calls_out.setdefault(modality, []).append(LayerCall(hidden, {}, returned))
        self._collect(modality, layer, args, kwargs)
        if modality == loss_modality and self._is_over(modality, layer):
            raise Stop
        return StandIn(hidden, origin)

    def _pass(self, modality: str) -> Pass:
        if modality not in self._passes:
            self._passes[modality] = Pass(self._runtime.partition, modality)
        return self._passes[modality]

    def _collect(self, modality: str, layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
        call = self._calls_out[modality][-1]
        hidden = hidden_path(args, kwargs)
        for path, value in arguments(args, kwargs):
            if path == hidden:
                continue
            if self._known_skips is None:
                if not any(must_travel(tensor) for _, tensor in tensors_in(value)):
                    continue
                self._found.add((modality, layer, path))
            elif (modality, layer, path) not in self._known_skips:
                continue
            call.skip_inputs[layer, path] = value

    def _is_over(self, modality: str, layer: int) -> bool:
        if self._known_skips is None:
            return layer == self._runtime.num_layers(modality) - 1
        return all(later <= layer for name, later, _ in self._known_skips if name == modality)

    # --- out ---

    def payload(self, modalities: frozenset[str], calls_of: str | None) -> Payload:
        """Return the payload for one later stage; its tensors still have their autograd history.

        Args:
            modalities: the encoders whose boundaries it consumes.
            calls_of: the modality that it continues, if any.
        """
        packer = Packer(keeps_sharded=True)
        boundaries = [
            # other modalities may be sharded over other ranks
            [
                name,
                packer.describe(unsharded(self._runtime.read_fields(name, result))),
                [[*one] for one in self._runtime.written[self._structure, name]],
            ]
            for name, result in self._boundaries_out
            if self._runtime.modality_of(name) in modalities
        ]
        calls = [
            [
                calls_of,
                packer.describe(call.hidden),
                call.returned,
                [[layer, list(path), packer.describe(value)] for (layer, path), value in call.skip_inputs.items()],
            ]
            for call in (self._calls_out.get(calls_of, []) if calls_of else [])
        ]
        grads = [tensor.requires_grad and not is_remote(tensor) for tensor in packer.tensors]
        remote = [[index, x.origin.name, x.exact] for index, x in enumerate(packer.tensors) if is_remote(x)]
        tensors = [tensor.as_subclass(Tensor) if is_remote(tensor) else tensor for tensor in packer.tensors]
        meta = {"boundaries": boundaries, "calls": calls, "grads": grads, "remote": remote}
        return Payload(meta, tensors, frozenset(packer.local), packer.has_values)


def hidden_path(args: tuple, kwargs: Mapping[str, Any]) -> Path:
    """Return where in ``(args, kwargs)`` the hidden state is: a tensor, else the first tuple or dict of tensors."""
    place: Path | None = hidden_place(args, kwargs)
    if place is None:
        place = next((path[:2] for path, _ in tensors_in((args, kwargs))), None)
    if place is None:
        raise StageError("a layer that is split over stages takes no tensor")
    return place


def hidden_of(args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Return the hidden state among a layer's arguments."""
    return at(hidden_path(args, kwargs), args, kwargs)  # type: ignore[arg-type]


def _place_in(result: Any, hidden: Any) -> Received:
    if hidden is result:
        return "result"
    return "first" if isinstance(result, (tuple, list)) and result and hidden is result[0] else None


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy that the model may write to, and register hooks on, while the original is sent or computed with."""
    return tensor if isinstance(tensor, Sharded) else tensor.clone()


def _copies(result: Any) -> Any:
    """Return `result` with copies of its tensors; a result with objects of the user's own stays as it is."""
    try:
        return map_tensors(result, _copy)
    except ValueError:
        return result
