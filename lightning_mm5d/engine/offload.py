"""What this rank keeps in host memory while a step runs, and when it travels.

The actions of a step are known before it begins. So what an action needs is fetched while the action before it runs:
the saved activations of a microbatch before its backward, and the parameters of a frozen encoder before its first
forward. These leave again after its last one, or after its last backward where gradients pass through it.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from lightning_mm5d.engine.host_memory import HostMemory
from lightning_mm5d.engine.offloaded_parameters import OffloadedParameters
from lightning_mm5d.engine.saved_activations import SavedActivations
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action, Graph, Kind
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.stage import Deferred, Run, Runtime

Flight = tuple[StageKey, int]  # a stage, and the number of a microbatch


def long_flights(actions: Sequence[Action], begins: Kind = Kind.F) -> frozenset[Flight]:
    """Return the forwards of a rank whose backward comes at least three actions later: what it saves has time to leave.

    Args:
        actions: of one rank in their order.
        begins: ``F``; or ``I``, for input gradients whose weight gradients come at least three actions later.
    """
    ends = (Kind.W,) if begins is Kind.I else (Kind.B, Kind.I)
    found, starts = set(), dict[Flight, int]()
    for number, action in enumerate(actions):
        key = action.stage, action.microbatch
        if action.kind is begins:
            starts[key] = number
        elif action.kind in ends and key in starts and number - starts[key] >= 3:
            found.add(key)
    return frozenset(found)


def most_away(actions: Sequence[Action], flights: Collection[Flight], stage: StageKey) -> int:
    """Return how many microbatches of `stage` among `flights` are between their forward and their backward at once."""
    away, most = 0, 0
    for action in actions:
        if action.stage == stage and (stage, action.microbatch) in flights and action.kind is not Kind.W:
            away += 1 if action.kind is Kind.F else -1
            most = max(most, away)
    return most


class Offload:
    """What one rank keeps in host memory between uses.

    Args:
        plan: all stages.
        runtime: the patched module.
        memory: of this rank's host.

    Attributes:
        checked: stages of which the host has room for what their forwards save.
    """

    def __init__(self, plan: Plan, runtime: Runtime, memory: HostMemory) -> None:
        self.memory, self._runtime = memory, runtime
        self.checked: set[StageKey] = set()
        offloads = {name: modality.offloads for name, modality in plan.modalities.items()}
        self.activations = frozenset(name for name, kinds in offloads.items() if "activations" in kinds)
        named = dict(runtime.root.named_parameters(remove_duplicate=False))
        held = {name for names in runtime.stages.values() for name in names}
        self.parameters = {
            modality: OffloadedParameters(
                modality,
                [p for name in own_names(plan, modality) if name in held and not (p := named[name]).requires_grad],
                memory,
            )
            for modality, kinds in offloads.items()
            if "parameters" in kinds and any(modality in view.cuts for view in runtime.stages)
        }

    def rest(self) -> None:
        """Leave parameters on the host until a step uses them."""
        for one in self.parameters.values():
            one.leave()

    @contextmanager
    def present(self) -> Generator[None, None, None]:
        """Enter around what uses modules in an order that no schedule knows."""
        for one in self.parameters.values():
            one.arrive()
        yield
        self.rest()

    def end(self) -> None:
        """Leave everything on the device."""
        for one in self.parameters.values():
            one.arrive()

    def step(self, graph: Graph, actions: Sequence[Action]) -> Moves:
        """Return what travels during the actions of one step."""
        return Moves(self, self._runtime, graph, actions)


class Moves:
    """What travels during one step.

    Args:
        offload: what this rank keeps in host memory.
        runtime: the patched module.
        graph: of the step.
        actions: of this rank.
    """

    def __init__(self, offload: Offload, runtime: Runtime, graph: Graph, actions: Sequence[Action]) -> None:
        self._offload, self._runtime, self._graph, self._actions = offload, runtime, graph, actions
        self._long = long_flights(actions) if offload.activations else frozenset()
        self._put_off = long_flights(actions, Kind.I) if offload.activations else frozenset()
        self._saved: dict[Flight, SavedActivations] = {}
        self._passes_back: set[str] = set()
        self._cuts = cuts = {view.name: view.cuts for view in runtime.stages}
        self._uses: dict[str, list[int]] = {}  # by modality the actions of the stages that hold some of it
        for number, action in enumerate(actions if offload.parameters else ()):
            for modality in offload.parameters.keys() & cuts[action.stage].keys():
                self._uses.setdefault(modality, []).append(number)
        self._last_forwards = {
            modality: max(use for use in uses if actions[use].kind is Kind.F) for modality, uses in self._uses.items()
        }

    def before(self, number: int) -> None:
        """Have what an action needs on the device, and begin to fetch what the next one needs."""
        upcoming = [number, number + 1]
        for modality, uses in self._uses.items():
            if uses[0] in upcoming:
                self._offload.parameters[modality].fetch()
            if uses[0] == number:
                self._offload.parameters[modality].arrive()
        if number + 1 < len(self._actions):
            action = self._actions[number + 1]
            if action.kind is not Kind.F and (saved := self._saved.pop((action.stage, action.microbatch), None)):
                saved.fetch()

    def saving(self, run: Run, action: Action) -> SavedActivations | None:
        """Return what is entered around a forward whose saved activations leave; None where they stay."""
        key, names = (action.stage, action.microbatch), self._offload.activations
        if key not in self._long or names.isdisjoint(run.stage.cuts):
            return None
        self._saved[key] = SavedActivations(self._offload.memory, lambda: run.computes in names)
        return self._saved[key]

    def ran(self, run: Run, stage: StageKey, saved: SavedActivations | None, stays: Iterable[Tensor]) -> None:
        """Note a forward, and let go of what it saved but for the tensors that stay."""
        if saved is not None:
            root = self._runtime.root
            saved.leave([*stays, *root.parameters(), *root.buffers()], partial(self._check_room, stage))
        for modality in self._uses.keys() & run.stage.cuts.keys():
            alone = len(run.stage.cuts) == 1
            if self._graph.has_backward(stage) if alone else run.passes_back(modality):
                self._passes_back.add(modality)

    def _check_room(self, stage: StageKey, count: int) -> None:
        """Refuse the first forward of a stage where the host has no room for as many as will be away at once."""
        if stage not in self._offload.checked:
            self._offload.checked.add(stage)
            most = most_away(self._actions, self._long, stage)
            what = f"saved activations of {most} microbatches of {stage}"
            self._offload.memory.check_room(f"modalities.{stage.modality}.offload", count * most, what)

    def after(self, number: int, deferred: Deferred | None) -> None:
        """Let go of parameters that no later action uses, and of what weight gradients that are put off need.

        Args:
            number: of the action in the step.
            deferred: what it has put off.
        """
        action = self._actions[number]
        key, names = (action.stage, action.microbatch), self._offload.activations
        if deferred is not None and key in self._put_off and names.issuperset(self._cuts[action.stage]):
            self._saved[key] = SavedActivations(self._offload.memory, lambda: True)
            deferred.keep(self._saved[key].keep)
            self._saved[key].leave(self._runtime.root.parameters(), lambda count: None)
        for modality, uses in self._uses.items():
            last = uses[-1] if modality in self._passes_back else self._last_forwards[modality]
            if number == last:
                self._offload.parameters[modality].leave()


def own_names(plan: Plan, modality: str) -> tuple[str, ...]:
    """Return the names of the parameters that this modality uses and no other."""
    owners = plan.partition.owners
    return tuple(name for name in plan.shapes if {key.modality for key in owners.get(name, ())} == {modality})


def offloads_parameters(modalities: Mapping[str, Any]) -> bool:
    """Whether parameters of any modality are in host memory between their uses."""
    return any("parameters" in modality.offloads for modality in modalities.values())
