"""What this rank keeps in host memory while a step runs, and when it travels.

The actions of a step are known before it begins. So what an action needs is fetched while the action before it runs:
the saved activations of a microbatch before its backward, and the parameters of a frozen encoder before its first
forward. These leave again after its last one, or after its last backward where gradients pass through it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_mm5d.engine.flight import AroundStep, AroundSteps, Course, Forward
from lightning_mm5d.features.offload.host_memory import HostMemory, SavedActivations, Stored
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import Action, Kind
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.stage import Deferred, Run, Runtime
from lightning_mm5d.stage.payload import tensors_in
from lightning_mm5d.trainer.feature import Attached

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


class Moves(Attached, AroundSteps):
    """What one rank keeps in host memory between uses.

    Args:
        plan: all stages.
        runtime: the patched module.
        memory: of this rank's host.

    Attributes:
        activations: modalities whose saved activations leave.
        parameters: those of each modality that leave.
        checked: stages of which the host has room for what their forwards save.
    """

    def __init__(self, plan: Plan, runtime: Runtime, memory: HostMemory) -> None:
        self.memory, self.runtime = memory, runtime
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
    def unscheduled(self) -> Generator[None, None, None]:
        """Have all parameters on the device while modules are used in an order that no schedule knows."""
        self.remove()
        yield
        self.rest()

    def remove(self) -> None:
        """Leave everything on the device."""
        for one in self.parameters.values():
            one.arrive()

    def step(self, course: Course) -> AroundStep:
        """Return what travels during the actions of one step."""
        return StepMoves(self, course.actions)


class StepMoves(AroundStep):
    """What travels during one step.

    Args:
        moves: what this rank keeps in host memory.
        actions: of this rank.
    """

    def __init__(self, moves: Moves, actions: Sequence[Action]) -> None:
        self._moves, self._actions = moves, actions
        self._long = long_flights(actions) if moves.activations else frozenset()
        self._put_off = long_flights(actions, Kind.I) if moves.activations else frozenset()
        self._saved: dict[Flight, SavedActivations] = {}
        self._leaving: dict[Flight, SavedActivations] = {}  # of forwards that have not passed their results on
        self._deferred: dict[Flight, Deferred] = {}
        self._passes_back: set[str] = set()
        self._have_backwards = {action.stage for action in actions if action.kind is not Kind.F}
        self._cuts = cuts = {view.name: view.cuts for view in moves.runtime.stages}
        self._uses: dict[str, list[int]] = {}  # by modality the actions of the stages that hold some of it
        for number, action in enumerate(actions if moves.parameters else ()):
            for modality in moves.parameters.keys() & cuts[action.stage].keys():
                self._uses.setdefault(modality, []).append(number)
        self._last_forwards = {
            modality: max(use for use in uses if actions[use].kind is Kind.F) for modality, uses in self._uses.items()
        }

    def before(self, numbers: range) -> None:
        """Have what actions need on the device, and begin to fetch what the next ones need."""
        for number in numbers:
            for modality, uses in self._uses.items():
                if uses[0] in (number, number + 1):
                    self._moves.parameters[modality].fetch()
                if uses[0] == number:
                    self._moves.parameters[modality].arrive()
            if number + 1 < len(self._actions):
                action = self._actions[number + 1]
                if action.kind is not Kind.F and (saved := self._saved.pop((action.stage, action.microbatch), None)):
                    saved.fetch()

    def forward(self, run: Run, action: Action) -> AbstractContextManager[Any]:
        """Enter around a forward: notes the saved activations that leave after it."""
        key, names = (action.stage, action.microbatch), self._moves.activations
        if key not in self._long or names.isdisjoint(run.stage.cuts):
            return nullcontext()
        saved = SavedActivations(self._moves.memory, lambda: run.computes in names)
        self._saved[key] = self._leaving[key] = saved
        return saved

    def ran(self, made: Forward, passed: Sequence[Tensor]) -> None:
        """Let go of what a forward saved but for what others hold: its batch, and what was received and sent."""
        run, stage = made.run, made.action.stage
        key = stage, made.action.microbatch
        if (saved := self._leaving.pop(key, None)) is not None:
            root = self._moves.runtime.root
            held = tensors_in([made.part.batch, passed, *(payload.tensors for payload in made.payloads)])
            stays = [*(tensor for _, tensor in held), *root.parameters(), *root.buffers()]
            saved.leave(stays, partial(self._check_room, stage))
        if run.deferred is not None and key in self._put_off:
            self._deferred[key] = run.deferred
        for modality in self._uses.keys() & run.stage.cuts.keys():
            alone = len(run.stage.cuts) == 1
            if stage in self._have_backwards if alone else run.passes_back(modality):
                self._passes_back.add(modality)

    def _check_room(self, stage: StageKey, count: int) -> None:
        """Refuse the first forward of a stage where the host has no room for as many as will be away at once."""
        if stage not in self._moves.checked:
            self._moves.checked.add(stage)
            most = most_away(self._actions, self._long, stage)
            what = f"saved activations of {most} microbatches of {stage}"
            self._moves.memory.check_room(f"modalities.{stage.modality}.memory.offload", count * most, what)

    def after(self, numbers: range) -> None:
        """Let go of parameters that no later action uses, and of what weight gradients that are put off need."""
        for number in numbers:
            action = self._actions[number]
            key, names = (action.stage, action.microbatch), self._moves.activations
            deferred = self._deferred.pop(key, None) if action.kind is Kind.I else None
            if deferred is not None and names.issuperset(self._cuts[action.stage]):
                self._saved[key] = SavedActivations(self._moves.memory, lambda: True)
                deferred.keep(self._saved[key].keep)
                self._saved[key].leave(self._moves.runtime.root.parameters(), lambda count: None)
            for modality, uses in self._uses.items():
                last = uses[-1] if modality in self._passes_back else self._last_forwards[modality]
                if number == last:
                    self._moves.parameters[modality].leave()


class OffloadedParameters:
    """The frozen parameters of one modality on this rank.

    Args:
        modality: its name, for messages.
        parameters: that this modality alone uses, and that nothing trains.
        memory: of the host.
    """

    def __init__(self, modality: str, parameters: Sequence[nn.Parameter], memory: HostMemory) -> None:
        self._modality, self._memory = modality, memory
        self._parameters = parameters
        self._stored: list[tuple[nn.Parameter, Stored, int]] = []
        self._is_away = False
        self._stays = False

    def leave(self) -> None:
        """Show the copies on the host, and free the device's memory."""
        if self._is_away or self._stays or self._is_trained():
            return
        known = {id(parameter): (stored, version) for parameter, stored, version in self._stored}
        self._stored = []
        for parameter in self._parameters:
            stored, version = known.get(id(parameter), (None, 0))
            if stored is None or version != parameter._version:
                stored = self._memory.store(parameter.detach())
            self._stored.append((parameter, stored, parameter._version))
        for parameter, stored, _ in self._stored:
            parameter.data = stored.wait()
        self._is_away = True

    def fetch(self) -> None:
        """Begin to copy them to the device."""
        if self._is_away:
            for _, stored, _ in self._stored:
                stored.fetch()

    def arrive(self) -> None:
        """Show the tensors on the device."""
        self.fetch()
        if self._is_away:
            for parameter, stored, _ in self._stored:
                parameter.data = stored.take()
                stored.drop()
            self._is_away = False

    def _is_trained(self) -> bool:
        """Whether somebody has begun to train them since; they stay on the device from then on."""
        trained = any(parameter.requires_grad for parameter in self._parameters)
        if trained and not self._stays:
            warnings.warn(
                f"modalities.{self._modality}.memory.offload: parameters of {self._modality} require a gradient now, "
                "so all of them stay on the device from here on",
                stacklevel=2,
            )
        self._stays |= trained
        return self._stays


def own_names(plan: Plan, modality: str) -> tuple[str, ...]:
    """Return the names of the parameters that this modality uses and no other."""
    return tuple(name for name in plan.shapes if plan.partition.users(name) == {modality})
