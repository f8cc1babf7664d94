"""One microbatch of one stage: the user's own step, with the parts on other ranks cut off.

While a `Run` is active, patched callables ask it what to do:

- A boundary of this stage is recorded. A boundary of another stage returns the received result.
- Layers before this stage return a remote value, which nothing may keep (`sharded.remote_value`). At the entry of the
  first local layer the received hidden state takes its place. Skip inputs, which later layers take beside the hidden
  state, are swapped likewise.
- Layers after this stage return stand-ins too and note their skip inputs. After the last of these the step ends, by an
  exception that only `Run.execute` sees.

A step may pass several times through the model. The first run of each structure of batches goes on to the step's end,
and notes how often boundaries were called and layers were passed. Later runs end after as many. Where a stage has made
all that it was seen to make, an error ends its step too: it may throw away what follows, and remote values steer it.

It refuses a pass with an input that depends on the results of later stages, and layers that run in another order than
stages do.

The order in which a step enters layers that are split over stages.

Stages only fit together where all layers of a stage run after those of earlier stages, and where each stage begins with
the layer that it was cut at. Neither the list of layers nor the code that was read proves it, so it is checked whenever
a layer is entered, on every rank. Within a stage layers may run in any order, several times, or not at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.data.random_state import StepDraws
from lightning_mm5d.partition import Partition
from lightning_mm5d.sharded.remote_value import Origin, is_remote, marked
from lightning_mm5d.stage.deferred import Deferred
from lightning_mm5d.stage.payload import Packer, Path, Payload, arguments, copies, put, rebuild, tensors_in, unsharded
from lightning_mm5d.stage.remote import LayerCall, buffers_in_call, hidden_of, hidden_path, place_in, shown_stand_ins
from lightning_mm5d.stage.runtime import Runtime, check_used
from lightning_mm5d.stage.step_writes import StepWrites, Tail
from lightning_mm5d.stage.taps import Call, Taps, mark_dependent, mark_stand_in, must_travel, traced
from lightning_mm5d.stage.view import GraphEndError, StageError, StageView, StandIn, Stop

_OF_A_DEVICE = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""errors that other ranks, which run the same code, need not come to"""


class Pass:
    """The passes of one step through the layers of one modality, one after the other.

    Args:
        partition: what is cut where.
        modality: name of the modality.

    Attributes:
        number: of the pass that is under way, from 0.
    """

    def __init__(self, partition: Partition, modality: str) -> None:
        self._modality, self._paths = modality, partition.parts[modality].paths
        self._firsts = [cut.first for cut in partition.stages[modality]]
        self._stage = self._last = len(self._firsts) - 1
        self._layer, self.number = -1, 0

    def following(self, layers: Sequence[int]) -> int:
        """Return which of `layers`, the calls of one module, is the next one."""
        return next((layer for layer in layers if layer > self._layer), layers[0])

    def enter(self, layer: int) -> None:
        """Note that the step enters a layer.

        Raises:
            StageError: stages would run in another order than they are cut in.
        """
        stage = bisect_right(self._firsts, layer) - 1
        if self._layer < 0 or stage != self._stage:
            follows = stage == self._stage + 1 or (stage == 0 and self._stage == self._last)
            if not follows or (stage and layer != self._firsts[stage]):
                before = self._paths[self._layer] if self._layer >= 0 else "no other"
                self._refuse(f"enters {self._paths[layer]} after {before}")
            self.number += self._layer >= 0 and stage == 0
        elif stage and layer == self._firsts[stage]:
            self._refuse(f"enters {self._paths[layer]} twice")
        self._stage, self._layer = stage, layer

    def end(self) -> None:
        """Note that the step ended.

        Raises:
            StageError: it ended before the last stage.
        """
        if self._layer >= 0 and self._stage != self._last:
            self._refuse(f"ends after {self._paths[self._layer]}")

    def _refuse(self, what: str) -> None:
        firsts = ", ".join(self._paths[first] for first in self._firsts[1:])
        raise StageError(
            f"the step {what}, and the stages of {self._modality} begin with {firsts}, in this order: all that is "
            "before such a layer must run before it, and each of them once in every pass. Choose other cuts with "
            f"modalities.{self._modality}.pipeline.pipeline_template, or set modalities.{self._modality}.pp_size to 1"
        )


def _end_graph(gradient: Tensor) -> None:
    raise GraphEndError("a gradient reaches what an earlier stage has computed, in an evaluation")


class Run:
    """The state of one forward, kept until its backward.

    Args:
        runtime: the patched module.
        stage: what is local.
        received: payloads of earlier stages.
        structure: key of batches that take the same way through the model, and so have the same skip inputs.
        draws: gives the local layers a random state of their own where they begin; None leaves generators alone.
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
        draws: StepDraws | None = None,
        deferred: Deferred | None = None,
        *,
        trains: bool = True,
    ) -> None:
        self.stage, self.trains = stage, trains
        self.deferred = deferred
        self.received = received
        self.result, self._runtime = None, runtime
        self._structure = (stage.name, structure)
        self.draws = draws
        self._replays = False
        self._inside: list[str] = []  # modalities whose boundaries are being computed, the inner one last
        self._boundaries_in: dict[str, list[Any]] = {}
        self._boundaries_out: list[tuple[str, Any, frozenset[str]]] = []  # with the modalities that it is inside of
        self.writes = StepWrites(runtime, self._structure)
        self._consumed: dict[str, int] = {}
        self._calls_in, self._calls_out = dict[str, list[LayerCall]](), dict[str, list[LayerCall]]()
        self._entered: dict[str, int] = {}
        self._passes: dict[str, Pass] = {}
        self._results: dict[str, Any] = {}
        self._known_skips, self._new_skips = runtime.skip_inputs.get(self._structure), set[tuple[str, int, Path]]()
        self.is_traced = self._known_skips is None and any(
            cut.last < len(runtime.lists[modality]) for modality, cut in stage.cuts.items()
        )
        self._trace = runtime.trace(stage) if self.is_traced else None
        self._counts = runtime.passes.get(self._structure)  # None in the run that finds them
        self._fails_inside = False
        self._taps = Taps(runtime.taps.get(self._structure, frozenset()), self._trace)
        self._tail: Tail | None = None
        for payload in received:
            self._accept(payload)

    # --- in ---

    def _accept(self, payload: Payload) -> None:
        for tensor, has_grad in zip(payload.tensors, payload.meta["grads"], strict=True):
            tensor.requires_grad_(has_grad and (torch.is_grad_enabled() or not self.trains))
            if tensor.requires_grad and not self.trains:  # the step asks for gradients, which none takes from here
                tensor.register_hook(_end_graph)
            mark_dependent(tensor)
        for index, path, exact in payload.meta["remote"]:  # unless nothing takes them, the last stage reports them
            payload.tensors[index] = marked(payload.tensors[index], Origin(path, self._runtime.guard), exact=exact)
            mark_dependent(payload.tensors[index])
        for name, description in payload.meta["boundaries"]:
            self._boundaries_in.setdefault(name, []).append(rebuild(description, payload.tensors))
        self.writes.accept(payload.meta["writes"], payload.tensors)
        for modality, rows in payload.meta["taps"]:
            self._taps.accept(rows, payload.tensors, partial(self._runtime.holders, modality))
        for modality, hidden, returned, sides in payload.meta["calls"]:
            group = partial(self._runtime.holders, modality)
            side_inputs = {(layer, tuple(path)): rebuild(value, payload.tensors, group) for layer, path, value in sides}
            state = rebuild(hidden, payload.tensors, group)
            for _, tensor in tensors_in((state, list(side_inputs.values()))):
                mark_dependent(tensor)
            self._calls_in.setdefault(modality, []).append(LayerCall(state, side_inputs, returned))

    # --- the step ---

    def execute(self, step: Callable[[], Any]) -> Any:
        """Run `step` as this stage; return its result in the last stage, else None."""
        with self, nullcontext() if self._trace is None else traced(self._trace):
            try:
                self._run(step)
            except Stop:
                self.result = None
            except Exception as error:
                if isinstance(error, _OF_A_DEVICE) or (self._tail is None and not self._may_end_by(error)):
                    raise
            finally:
                self.give_up()
        if self._counts is None and not self.stage.is_last:
            self._runtime.passes[self._structure] = self._pass_counts()
        check_used(self.stage, self._runtime, self._boundaries_in, self._consumed, self._calls_in, self._entered)
        if self._trace is not None and self._calls_out:
            self._runtime.skip_inputs[self._structure] = frozenset(self._new_skips)
            self._runtime.taps[self._structure] = self._taps.needed
        if not self.stage.is_last:
            self.result = None
        return self.result

    def _run(self, step: Callable[[], Any]) -> None:
        self.result = step()
        if self._trace is not None:
            self._trace.needs(self.result)
            for value in vars(self._runtime.root).values():  # hooks read what the step kept where it ends
                if isinstance(value, (Tensor, list, tuple, dict, deque)):
                    tensors = tensors_in([*value] if isinstance(value, deque) else value)
                    self._trace.needs([tensor for _, tensor in tensors if not isinstance(tensor, nn.Parameter)])
        if self._tail is None:
            for end in self._runtime.ends:
                end()
            for modality_pass in self._passes.values():
                modality_pass.end()

    def _pass_counts(self) -> Counter[str]:
        """How often boundaries of each modality were called here to the end, and its layers were passed."""
        counts = Counter(self._runtime.modality_of[name] for name, *_ in self._boundaries_out)
        for modality, calls in self._calls_out.items():
            counts[modality] = max(counts[modality], len(calls))
        return counts

    def _is_made(self) -> bool:
        """Whether nothing is left to compute here, as far as is known; False while that is being found."""
        return self._counts is not None and self._pass_counts() >= self._counts

    def _may_end_by(self, error: Exception) -> bool:
        """Whether this stage, which has made something of each of its modalities, may throw away what raised `error`.

        What is an error by itself is raised in the last stage, too, which runs the same code outside of layers and
        boundaries.
        """
        if self.stage.is_last or self._fails_inside or isinstance(error, StageError):
            return False
        return self._pass_counts().keys() >= self.stage.cuts.keys()

    def _look_on(self) -> None:
        """Only look at what the step does from here on, until it computes something here again."""
        self._tail = self._tail or Tail(self._runtime.root)

    def give_up(self) -> None:
        """Put back what a run has changed that does not go on to its end."""
        if self._tail is not None:
            self._tail.undo()

    def _resume(self) -> None:
        """Compute again, in a further pass."""
        if self._tail is not None:
            self._tail.keep()
            self._tail = None

    def __enter__(self) -> Run:
        assert self._runtime.active is None, "stages do not nest"
        self._runtime.active = self
        self._runtime.guard.ends_here = self.stage.is_last
        self._runtime.guard.received = self._taps.received_parameters()
        return self

    def __exit__(self, *_: object) -> None:
        self.writes.restore()
        self._runtime.active = None
        self._runtime.guard.ends_here = None
        self._runtime.guard.received = {}

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Backpropagate, inside of `deferred`; a layer that runs again meanwhile sees what it saw before.

        It runs in this thread, on a GPU as on a CPU: hooks and layers that run again find its context, and the monitor
        sees where they wait.
        """
        self._replays = True
        with self, self._runtime.replaying(), torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(outputs, gradients)

    @property
    def computes(self) -> str | None:
        """The modality that is being computed: of several in one stage, an encoder while its boundary is called."""
        if self._inside:
            return self._inside[-1]
        cuts = self.stage.cuts
        return next(iter(cuts)) if len(cuts) == 1 else self._runtime.loss_modality

    def passes_back(self, modality: str) -> bool:
        """Whether a gradient goes back into what this run computed of an encoder."""
        results = [result for name, result, _ in self._boundaries_out if self._runtime.modality_of[name] == modality]
        return any(tensor.requires_grad for _, tensor in tensors_in(results))

    def boundary(self, name: str, modality: str, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Stand in for a call of the boundary `name`."""
        if modality in self._inside:
            return original(*args, **kwargs)
        call = self._taps.next_call("boundary", name)
        if self._runtime.handed is not None and self.trains and modality not in self.stage.cuts:
            self._runtime.handed |= {id(tensor) for _, tensor in tensors_in((args, kwargs))}
        if modality in self.stage.consumes:
            self._consumed[name] = 1 + (index := self._consumed.get(name, 0))
            results = self._boundaries_in.get(name, [])
            if index >= len(results):
                raise StageError(
                    f"{name} is called {index + 1} times in stage {self.stage.name}, and the stage that computes it "
                    f"called it {len(results)} times: what the step does must not depend on the stage"
                )
            if self._runtime.user_hooks[modality]:
                # they keep stand-ins, so that the step finds nothing that they kept of another batch
                with shown_stand_ins(self._runtime.root):
                    self._called(name, modality, original, args, kwargs)
            self.writes.skipped(name)
            return self._taps.result(call, copies(results[index]), computed=modality in self.stage.must_use)
        cut = self.stage.cuts.get(modality)
        if cut is not None:
            self._resume()
        result = self._called(name, modality, original, args, kwargs)
        if cut is not None and self._runtime.partition.encoders[modality].runs_after:
            result = unsharded(self._runtime.read_fields(name, result))
        if cut is not None and cut.index == len(self._runtime.partition.stages[modality]) - 1:
            self._boundaries_out.append((name, result, frozenset(self._inside)))
            return self._taps.result(call, copies(result), computed=True)
        if cut is not None and self._trace is not None:
            self._trace.needs(self._runtime.read_fields(name, result))
        if cut is None:
            self.writes.skipped(name)
        return self._taps.result(call, result, computed=False)

    def _called(self, name: str, modality: str, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the boundary `name`; in a stage that does not compute it, on stand-ins, which hooks in it see."""
        here = modality in self.stage.cuts
        self._inside.append(modality)
        try:
            # what is compiled expects no stand-ins
            eager = nullcontext() if here else torch.compiler.set_stance("force_eager")
            is_whole = here and not self._runtime.has_parts(modality)
            writer, places = self._runtime.call_buffers.get(modality, (None, ()))
            buffers = buffers_in_call(places, writes=writer == self.stage.name)
            with eager, buffers, self.writes.noted(name, self._runtime.path_of[name], is_whole=is_whole):
                return original(*args, **kwargs)
        except Exception:
            self._fails_inside = here
            raise
        finally:
            self._inside.pop()

    def turn(self, modality: str, layers: Sequence[int], args: tuple, kwargs: dict[str, Any]) -> int:
        """Return which of `layers`, the calls of one module, is being made."""
        if (cut := self.stage.cuts.get(modality)) is None:
            return layers[0]
        if not self._replays:
            return self._pass(modality).following(layers)
        here = [layer for layer in layers if cut.first <= layer < cut.last]
        return here[0 if any(is_remote(tensor) for _, tensor in tensors_in(hidden_of(args, kwargs))) else -1]

    def enters(self, modality: str, layer: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a local or later layer, with received tensors in their places."""
        cut = self.stage.cuts[modality]
        if not self._replays and layer < cut.last:
            self._resume()
            self._pass(modality).enter(layer)
            # a first stage is entered again with results of later ones
            again = self.stage.cuts[modality].index == 0 and self._pass(modality).number > 0
            if again and any(is_remote(tensor) for _, tensor in tensors_in((args, kwargs))):
                raise StageError(
                    f"the step passes again through the layers of {modality}, with an input that depends on what the "
                    "pass before gave, or on a result of an encoder that a later stage computes with: a training step "
                    "with pp_size > 1 may call the model several times, with inputs from the batch. Use pp_size=1, "
                    "generate in validation_step, or set feeds='all' of the encoder, where a second model uses it"
                )
        if layer == cut.first and not self._replays:
            if self.draws is not None:
                self.draws.layers()
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
                f"{len(calls)} passes arrived: how often a training step passes through them must not depend on "
                "values of the batch, on results of the model or their gradients, or on the stage. Generate in "
                "validation_step or in a hook, or use pp_size=1"
            )
        return calls[index]

    def leaves(self, modality: str, layer: int, result: Any) -> Any:
        """Note the result of a local layer, and return it."""
        if self._replays:
            return result
        if layer == self.stage.cuts[modality].last - 1:
            self._results[modality] = result
        return self._taps.result(self._layer_call(modality, layer), result, computed=True)

    def _layer_call(self, modality: str, layer: int) -> Call:
        return "layer", modality, layer, self._passes[modality].number if modality in self._passes else 0

    @contextmanager
    def inside(self, layer: nn.Module, modality: str, index: int, hidden: Callable[[], Any]) -> Iterator[None]:
        """Enter around the forward of a local layer with what `hidden` returns."""
        if self._replays:
            yield
            return
        path = self._runtime.partition.parts[modality].paths[index]
        noted = self.writes.noted(path, path, is_whole=not self._runtime.has_parts(modality))
        with self._taps.watching(layer, path, index, hidden), noted:
            try:
                yield
            except Exception:
                self._fails_inside = True
                raise

    def passed(
        self, modality: str, layer: int, result: Any, known: StandIn, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a remote layer, of which `result` stands in for what was not received."""
        if known.is_later or self._replays:
            return result
        path = self._runtime.partition.parts[modality].paths[layer]
        self.writes.skipped(path)
        if self._taps.has_received:
            self._taps.call_hooks(self._runtime.root, path, layer, hidden_of(args, kwargs), self._runtime.guard)
        entries = {"result": (None,), "first": (0,), None: ()}[known.received]
        return self._taps.result(self._layer_call(modality, layer), result, computed=entries)

    def computed(self, path: str, result: Any) -> Any:
        """Return the result of a module beside layers, or what was received of it."""
        if not self.stage.cuts.keys() >= {*self._inside}:
            return result
        if self._replays:
            if self._taps.has_arrived(("module", path, -1, 1)):
                raise StageError(f"{path} runs again in a backward, for one of several passes: do not checkpoint it")
            return self._taps.again(("module", path, -1, 0), result)
        is_computed = path in self._runtime.points[self.stage].modules
        return self._taps.result(self._taps.next_call("module", path), result, computed=is_computed)

    def answered(self, names: Collection[str], args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Note that a remote module with parameters `names` gave a placeholder."""
        if self._trace is not None and not self._runtime.points[self.stage].later.isdisjoint(names):
            self._trace.needs((args, kwargs))
            for _, tensor in tensors_in(result):
                mark_stand_in(tensor)

    def skip(self, modality: str, layer: int, args: tuple, kwargs: dict[str, Any]) -> StandIn:
        """Stand in for a remote layer."""
        cut, origin = self.stage.cuts.get(modality), self._runtime.partition.parts[modality].paths[layer]
        if cut is None:
            if modality in self.stage.stops_at:
                if self._is_made():
                    raise Stop
                self._look_on()
            return StandIn(hidden_of(args, kwargs), origin)
        if not self._replays:
            self._pass(modality).enter(layer)
        if layer < cut.first:
            calls, index = self._calls_in.get(modality, []), self._entered.get(modality, 0)
            # the last one before the stage shows the real state to hooks that record it, as a copy: hooks on its
            # gradient have acted where it was computed
            if layer == cut.first - 1 and index < len(calls) and calls[index].returned:
                return StandIn(copies(calls[index].hidden), origin, calls[index].returned)
            return StandIn(hidden_of(args, kwargs), origin)
        args, kwargs = self.enters(modality, layer, args, kwargs)
        hidden = hidden_of(args, kwargs)
        if layer == cut.last:
            returned = place_in(self._results.pop(modality, None), hidden)
            self._calls_out.setdefault(modality, []).append(LayerCall(hidden, {}, returned))
        self._collect(modality, layer, args, kwargs)
        if modality == self._runtime.loss_modality and self._is_over(modality, layer):
            if self._trace is None and self._is_made():
                raise Stop
            self._look_on()
        return StandIn(hidden, origin, is_later=True)

    def _pass(self, modality: str) -> Pass:
        if modality not in self._passes:
            self._passes[modality] = Pass(self._runtime.partition, modality)
        return self._passes[modality]

    def _collect(self, modality: str, layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
        call = self._calls_out[modality][-1]
        hidden = hidden_path(args, kwargs)
        for path, value in arguments(args, kwargs):
            if path == hidden:
                if self._trace is not None and layer > self.stage.cuts[modality].last:
                    self._trace.needs(value)
                continue
            if self._known_skips is None:
                if not any(must_travel(tensor) for _, tensor in tensors_in(value)):
                    continue
                self._new_skips.add((modality, layer, path))
            elif (modality, layer, path) not in self._known_skips:
                continue
            call.skip_inputs[layer, path] = value

    def _is_over(self, modality: str, layer: int) -> bool:
        if self._known_skips is None:
            return layer == len(self._runtime.lists[modality]) - 1
        later = any(other > layer for name, other, _ in self._known_skips if name == modality)
        return self._taps.is_complete and not later

    # --- out ---

    def payload(self, modalities: frozenset[str], calls_of: str | None) -> Payload:
        """Return the payload for one later stage; its tensors still have their autograd history.

        Args:
            modalities: those whose boundaries it consumes; it makes no calls inside of these.
            calls_of: the modality that it continues, if any.
        """
        packer = Packer(keeps_sharded=True)
        boundaries = [
            # other modalities may be sharded over other ranks
            [name, packer.describe(unsharded(self._runtime.read_fields(name, result)))]
            for name, result, outside in self._boundaries_out
            if self._runtime.modality_of[name] in modalities and outside.isdisjoint(modalities)
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
        taps = [[calls_of, self._taps.described(packer, self._runtime.root)]] if calls_of else []
        writes = self.writes.described(packer, [name for name, _ in boundaries], calls_of)
        grads = [tensor.requires_grad and not is_remote(tensor) for tensor in packer.tensors]
        remote = [[index, x.origin.name, x.exact] for index, x in enumerate(packer.tensors) if is_remote(x)]
        tensors = [tensor.as_subclass(Tensor) if is_remote(tensor) else tensor for tensor in packer.tensors]
        meta = {"boundaries": boundaries, "calls": calls, "taps": taps, "writes": writes}
        meta |= {"grads": grads, "remote": remote}
        return Payload(meta, tensors, frozenset(packer.local), packer.has_values)
