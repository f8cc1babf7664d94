"""When the parameters that ranks share (`zero_stage` 3) are gathered in a training step, and freed.

A *unit* is what is gathered at once: a layer, or all that is in no layer. Gathers are collectives of the ranks that
share a copy, which are different replicas: one has no images, another skips a layer or runs layers in another order.
So gathers follow what the schedule does and never what a batch does. Each *walk* has a fixed list of units: it gathers
those that are used before they are used, the next ones meanwhile, and at its end those that were not used.

- One walk takes a whole step. It has the units that stay gathered: all, or those in no layer. All its gathers begin at
  once, and each unit waits for its own when it is used.
- With `reshard_after_forward` each forward of a stage has a walk through its layers, and each backward one in the other
  direction. A layer has memory around its forward and around its backward. Autograd keeps views of its weights, so the
  memory is freed and given again under the same storage.

It refuses a layer that runs twice in one forward, and parameters that are read outside of their layer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data_parallel.shared_parameters import Fetch, Groups, SharedParameter, SharedParameters
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.remote_value import tensors_of
from lightning_mm5d.sharded.removable import Removable


class Unit:
    """Parameters that are gathered at once.

    Args:
        path: of the layer; "" for all that is in none.
        parameters: of stage 3.
        begin: begins to gather them.
        use: called before the first use of their values where nobody has opened the unit.

    Attributes:
        is_open: whether the parameters show their local tensors.
    """

    def __init__(
        self,
        path: str,
        parameters: Sequence[SharedParameter],
        begin: Callable[[Sequence[SharedParameter]], list[Fetch]],
        use: Callable[[Unit], None],
    ) -> None:
        self.path, self.parameters = path, parameters
        self.is_open = False
        self._begin, self._use = begin, use
        self._fetches: list[Fetch] | None = None

    def start(self) -> None:
        """Begin to gather; collective."""
        assert not self.is_open
        self._fetches = self._begin(self.parameters)

    def open(self) -> None:
        """Wait for the rows, and show local tensors."""
        if self.is_open:
            return
        assert self._fetches is not None
        for fetch in self._fetches:
            fetch.finish()
        self._fetches = None
        for parameter in self.parameters:
            parameter.reopen()
        self.is_open = True

    def show_rows(self) -> None:
        """Show this rank's rows, of what is not gathered."""
        for parameter in self.parameters:
            parameter.show_rows()

    def close(self) -> None:
        """Show NaN, and free memory; gathers under way come to their end."""
        for fetch in self._fetches or ():
            fetch.drop()
        self._fetches = None
        for parameter in self.parameters:
            parameter.show_closed(self._opens)
        self.is_open = False

    @torch.compiler.disable  # a use of a value may be in code that is compiled
    def _opens(self) -> None:
        self._use(self)


class _Walk:
    """One pass through units, in an order that is the same on all ranks.

    Args:
        units: in that order.
        ahead: how many gathers beyond the unit in use are under way.

    Attributes:
        left: units that were used and closed.
        touched: units that were used without being entered.
    """

    def __init__(self, units: Sequence[Unit], ahead: int) -> None:
        self._units, self._ahead = units, ahead
        self._places = {unit: place for place, unit in enumerate(units)}
        self._started = 0
        self.left: set[Unit] = set()
        self.touched: set[Unit] = set()
        self._start(ahead)

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._places

    def reach(self, unit: Unit) -> None:
        """Open a unit."""
        self._start(self._places[unit] + 1)
        unit.open()
        self._start(self._places[unit] + 1 + self._ahead)

    def leave(self, unit: Unit) -> None:
        """Close a unit for good."""
        unit.close()
        self.left.add(unit)

    def end(self) -> None:
        """Gather what is left, for other ranks, and close all."""
        self._start(len(self._units))
        for unit in self._units:
            if unit not in self.left:
                unit.close()

    def _start(self, stop: int) -> None:
        while self._started < min(stop, len(self._units)):
            self._units[self._started].start()
            self._started += 1


class Gathering(Removable):
    """The gathers of one rank's training steps.

    Args:
        shared: the parameters of which this rank owns rows.
        layers: paths and modules of the layers of each stage, in one order on all ranks.
        names: of all parameters of this rank, with each name of a tied one.
        reshards: paths of the layers that are gathered for each forward and backward.
        groups: for gathers alone, by their ranks.
        is_dry: whether nothing but shapes is kept of what runs at the moment.
    """

    def __init__(
        self,
        shared: SharedParameters,
        layers: Mapping[StageKey, Sequence[tuple[str, nn.Module]]],
        names: Iterable[tuple[str, nn.Parameter]],
        reshards: Container[str],
        groups: Groups,
        is_dry: Callable[[], bool],
    ) -> None:
        self._is_dry = is_dry
        self._shared, self._layers, self._names = shared, layers, list(names)
        self._reshards, self._groups = reshards, groups
        self._rest: list[Unit] = []
        self._units: dict[StageKey, list[Unit]] = {}
        self._resharded: dict[StageKey, list[Unit]] = {}  # of the step
        self._experts: list[Unit] = []
        self._opened: list[Unit] = []  # by the backward that runs
        self._step: _Walk | None = None
        self._action: _Walk | None = None
        self._is_forward = False
        self._hiding = 0  # forwards under way that hide rows
        self._late: dict[Any, set[Unit]] = {}  # by flight, units that nothing announces in its backward
        self._stays: set[Unit] = set()  # those of the backward that runs

    def attach(self) -> None:
        """Find the units, and watch their layers until `remove`; after the parameters are shared."""
        self.remove()
        paths = [(path, module) for stage in self._layers.values() for path, module in stage]
        inside: dict[int, set[str]] = {}
        for name, parameter in self._names:
            path = next((path for path, _ in paths if name.startswith(f"{path}.")), "")
            inside.setdefault(id(parameter), set()).add(path)
        held: dict[str, list[SharedParameter]] = {}
        experts = [shared for shared in self._shared.all if shared.shard.of_experts]
        self._experts = [Unit("", experts, self._begin, self._touch)] if experts else []
        for shared in self._shared.all:
            if shared.rests_own and not shared.shard.of_experts:
                places = inside[id(shared.parameter)]
                held.setdefault(places.pop() if len(places) == 1 else "", []).append(shared)
        self._units = {}
        units = {path: Unit(path, parameters, self._begin, self._touch) for path, parameters in held.items()}
        self._rest = [units[""]] if "" in units else []
        for stage, layers in self._layers.items():
            self._units[stage] = [units[path] for path, _ in layers if path in units]
        for path, module in paths:
            if path in units:
                self._watch(module, units[path])

    # --- a step ---

    def prepare(self) -> None:
        """Let all parameters show the shape of their local tensors; those of stage 3 are closed."""
        for shared in self._shared.all:
            if not shared.rests_own:
                shared.show_whole()
        for unit in self._every():
            unit.close()

    def begin(self, *, per_action: bool) -> None:
        """Begin a step: units that stay gathered are on their way; collective.

        Args:
            per_action: whether ranks meet in each forward and backward: layers are gathered there where `reshards` says
                so, and tokens travel to their experts.
        """
        self._resharded, self._hiding = {}, 0
        for stage, units in self._units.items() if per_action else ():
            if resharded := [unit for unit in units if unit.path in self._reshards]:
                self._resharded[stage] = resharded
        apart = {unit for units in self._resharded.values() for unit in units}
        if per_action:  # their tokens travel
            apart.update(self._experts)
            for unit in self._experts:
                unit.show_rows()
        staying = [unit for unit in self._every() if unit not in apart]
        self._step = _Walk(staying, len(staying))

    @contextmanager
    def hiding_rows(self) -> Iterator[None]:
        """Enter around a forward in which tokens travel: code of the step's own would take a rank's rows for all.

        Forwards may run side by side; rows are hidden until the last one ends.
        """
        self._hiding += 1
        for unit in self._experts if self._hiding == 1 else ():
            for shared in unit.parameters:
                shared.hide_rows(partial(self._touch_rows, shared))
        yield
        self._hiding -= 1
        for unit in self._experts if self._hiding == 0 else ():
            unit.show_rows()

    @contextmanager
    def showing_rows(self, experts: nn.Module) -> Iterator[None]:
        """Enter around the forward of experts that computes with this rank's rows."""
        held = [shared for parameter in experts.parameters() if (shared := self._shared.get(parameter)) is not None]
        hidden = [shared for shared in held if shared.is_hidden]
        for shared in hidden:
            shared.show_rows()
        try:
            yield
        finally:
            for shared in hidden:
                shared.hide_rows(partial(self._touch_rows, shared))

    def _touch_rows(self, touched: SharedParameter) -> None:
        if not self._is_dry():
            name = next(name for name, parameter in self._names if parameter is touched.parameter)
            rule = (
                "Ranks share these experts (ep_size), and each of them has its own rows alone while a step runs, so "
                "that a result would be another one on each rank"
            )
            fix = "Use the optimizer's weight_decay in place of a penalty, or ep_size=1"
            raise ConfigError(name, "read in a step", rule, fix)

    def end(self) -> None:
        """End a step: all is closed."""
        if self._step is not None:
            self._step.end()
        self._step = None
        self._late.clear()

    @contextmanager
    def during(self, stage: StageKey, flight: Any, *, forward: bool) -> Iterator[None]:
        """Enter around a forward, or a backward that computes input gradients, of a stage in a step.

        Args:
            stage: that runs.
            flight: equal for a forward and its backward.
            forward: whether it is a forward.
        """
        units = self._resharded.get(stage) if self._step is not None else None
        if units is None:
            yield
            return
        self._action = walk = _Walk(units if forward else units[::-1], 1)
        self._is_forward, self._opened = forward, []
        try:
            if not forward:
                self._stays = self._late.pop(flight, set())
                for unit in sorted(self._stays, key=units.index, reverse=True):
                    walk.reach(unit)
            yield
        finally:
            self._action = None
        walk.end()
        if forward:
            self._late[flight] = walk.touched

    def _every(self) -> list[Unit]:
        return [*self._rest, *self._experts, *(unit for units in self._units.values() for unit in units)]

    # --- what layers tell ---

    def _watch(self, layer: nn.Module, unit: Unit) -> None:
        @torch.compiler.disable  # where what holds the layer is compiled
        def enter(*_: Any) -> None:
            self._enter(unit)

        @torch.compiler.disable
        def leave(_: nn.Module, args: Any, result: Any) -> None:
            self._leave(unit, result)

        self.changes.callback(layer.register_forward_pre_hook(enter, prepend=True).remove)
        self.changes.callback(layer.register_forward_hook(leave).remove)

    def _enter(self, unit: Unit) -> None:
        if self._action is not None and unit in self._action:
            if unit in self._action.left:
                raise _refused(unit, "It runs twice in one forward or backward")
            self._action.reach(unit)
        elif self._step is not None and unit in self._step:
            self._step.reach(unit)

    def _leave(self, unit: Unit, result: Any) -> None:
        walk = self._action
        if walk is None or unit not in walk:
            return
        outputs = [tensor for tensor in tensors_of(result) if tensor.requires_grad and tensor.grad_fn is not None]
        for tensor in outputs:
            tensor.register_hook(lambda _: self._backpropagates(unit))
        if self._is_forward:
            walk.leave(unit)
            trains = torch.is_grad_enabled() and any(shared.parameter.requires_grad for shared in unit.parameters)
            if trains and not outputs:
                walk.touched.add(unit)

    def _backpropagates(self, unit: Unit) -> None:
        """Open a layer whose backward begins; those that ran after it in the forward have all their gradients."""
        walk = self._action
        if walk is None or unit not in walk or self._is_forward or unit in self._opened:
            return
        walk.reach(unit)
        for done in self._opened:
            if done not in walk.left and done not in self._stays:
                walk.leave(done)
        self._opened.append(unit)

    def _touch(self, unit: Unit) -> None:
        """Open a unit whose parameters are used by something else than the call of its layer."""
        if self._is_dry():
            return
        if self._step is not None and unit in self._step:
            self._step.reach(unit)
        elif self._action is not None and unit in self._action and unit not in self._action.left:
            self._action.reach(unit)
            self._action.touched.add(unit)
        else:
            raise _refused(unit, "Its parameters are read where the layer does not run")

    def _begin(self, wanted: Sequence[SharedParameter]) -> list[Fetch]:
        return list(self._shared.started(wanted, self._groups))


def _refused(unit: Unit, what: str) -> ConfigError:
    rule = (
        f"{what}: {unit.path or 'parameters outside of layers'}. Each layer has memory around one forward and around "
        "its backward"
    )
    fix = "Use reshard_after_forward=False, which gathers once for a step"
    return ConfigError("reshard_after_forward", True, rule, fix)
