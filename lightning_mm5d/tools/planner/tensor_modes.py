"""Chooses `tp_mode` of each modality: of the modes that fit into memory, the one whose ranks send least.

Sending takes no time in the simulated step, so that modes do not differ in it: a grid is proposed where it sends less
than ``1d``, or where nothing else fits. A mode that sends more is never taken to compute less again. `tp_size` stays.

Each mode is tried on the one step that is traced. What a run on a grid would refuse is refused there, and so is what
would have ranks compute more than their share: samples that the rows of ranks do not divide, and modules that every
rank computes in full. Where no mode is left the configured one stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from lightning_mm5d.config.checks import check
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.features import check_features
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.config.tables import Table, memory_text
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.tools.planner.activation_trace import Trace, sent
from lightning_mm5d.tools.planner.rank_memory import Step

Modalities = Mapping[str, Modality]
Mode = tuple[str, int]
"""`tp_mode` and `tp_depth`"""


class Try(NamedTuple):
    """A mode of one modality.

    Attributes:
        mode: the mode.
        bytes: that a rank sends for its layers in a step, on average.
        refused: why it cannot be; empty where it can.
    """

    mode: Mode
    bytes: float
    refused: str


def modes_of(modalities: Modalities) -> tuple[Mode, ...]:
    """Return the modes of all modalities, in their order."""
    return tuple((one.tp_mode, one.tp_depth) for one in modalities.values())


def possible(tp_size: int) -> list[Mode]:
    """Return the modes that have so many ranks: ``[("1d", 1), ("2d", 1)]`` for 4."""
    depths = [depth for depth in range(2, tp_size // 4 + 1) if tp_size % depth == 0]
    found: list[Mode] = [("1d", 1)]
    for mode in (("2d", 1), *(("2.5d", depth) for depth in depths), ("3d", 1)) if tp_size > 1 else ():
        with suppress(ConfigError):
            check_features({"modalities": {"": _in(Modality(tp_size=tp_size), mode)}})
            found.append(mode)
    return found


@dataclass
class TensorModes:
    """The modes of a configuration.

    Args:
        plan: the configured one.
        step: what is known of its step, with a trace.
        traced: traces the step of another plan.
        plan_of: makes the plan of a layout.
    """

    plan: Plan
    step: Step
    traced: Callable[[Plan], Trace]
    plan_of: Callable[[Modalities], Plan]

    def __post_init__(self) -> None:
        assert self.step.trace is not None
        configured = modes_of(self.plan.modalities)
        self._plans = {configured: self.plan}
        self._traces: dict[tuple[Mode, ...], Trace | str] = {configured: self.step.trace}

    def ordered(self, modalities: Modalities) -> Iterator[dict[str, Modality]]:
        """Yield the modalities in all modes that can be, those first that send least, of equal ones ``1d`` first."""
        tries = self.tries(modalities)
        kept = {name: [Try((one.tp_mode, one.tp_depth), 0.0, "")] for name, one in modalities.items()}
        able = [[one for one in tries[name] if not one.refused] or kept[name] for name in modalities]
        for several in sorted(product(*able), key=lambda several: sum(one.bytes for one in several)):
            modes = zip(modalities.items(), several, strict=True)
            yield {name: _in(modality, one.mode) for (name, modality), one in modes}

    def step_of(self, modalities: Modalities) -> Step | None:
        """Return what is known of the step of modalities in their modes; None where they cannot be."""
        found = self._trace(modalities)
        return None if isinstance(found, str) else replace(self.step, trace=found)

    def tries(self, modalities: Modalities) -> dict[str, list[Try]]:
        """Return all modes of each modality of a layout."""
        found = {}
        for name, modality in modalities.items():
            modes = possible(modality.tp_size)
            plan = self.plan_of(modalities) if len(modes) > 1 else self.plan
            found[name] = [self._try(plan, name, mode) for mode in modes]
        return found

    def table(self, modalities: Modalities) -> Table | None:
        """Return a row for each mode of each modality that has a choice, with what its ranks would send."""
        rows = []
        for name, tries in self.tries(modalities).items():
            for one in tries if len(tries) > 1 else ():
                mode, depth = one.mode
                is_chosen = one.mode == (modalities[name].tp_mode, modalities[name].tp_depth)
                verdict = one.refused or ("proposed" if is_chosen else "possible")
                size = "-" if one.refused else memory_text(round(one.bytes))
                rows.append((name, f"{mode}, depth {depth}" if depth > 1 else mode, size, verdict))
        return Table.of(("modality", "tp_mode", "sent by a rank", ""), rows) if rows else None

    def _try(self, plan: Plan, name: str, mode: Mode) -> Try:
        changed = {other: _in(one, mode) if other == name else one for other, one in self.plan.modalities.items()}
        if len(possible(changed[name].tp_size)) == 1:
            return Try(mode, 0.0, "")
        found = self._trace(changed)
        if isinstance(found, str):
            return Try(mode, 0.0, found)
        if name in found.uneven:
            return Try(mode, 0.0, "ranks would have unlike numbers of a microbatch's samples")
        layers = f"{self.plan.partition.layers[name]}."
        if any(path.startswith(layers) for path in self._plan_in(modes_of(changed)).division.whole):
            return Try(mode, 0.0, "every rank would compute some modules in full")
        return Try(mode, self._sent(plan, name, changed, found), "")

    def _sent(self, plan: Plan, name: str, changed: Modalities, found: Trace) -> float:
        ranks, size = changed[name].tp_size, plan.layout.sizes(name)
        layers_in_blocks = self._plan_in(modes_of(changed)).division.in_blocks.get(name)
        costs = None if layers_in_blocks is None else layers_in_blocks.costs
        layers = found.units[name][1:-1]
        if not layers:
            return 0.0
        products = [one for unit in layers for one in unit.products]
        stages = len(plan.partition.stages[name])
        total = sum(sent(ranks, unit.products) if costs is None else costs.sent(unit.products) for unit in layers)
        if costs is not None:
            passes = any(one.passes for one in products)
            total += stages * costs.gathered(sum(layers[0].hidden.values()), passes=passes)
        microbatches = self.step.num_microbatches * plan.layout.num_replicas / size.dp
        # replicas, and ranks of a grid with equal weights, sum gradients once a step
        equal = 1 if costs is None else costs.copies
        weights = sum(one.weight for one in products if one.trains) * equal / ranks
        summed = 2 * (1 - 1 / (size.dp * equal)) * weights
        return (total * microbatches + summed) / stages

    def _trace(self, modalities: Modalities) -> Trace | str:
        key = modes_of(modalities)
        if key not in self._traces:
            try:
                self._traces[key] = self.traced(self._plan_in(key))
            except ConfigError as error:
                self._traces[key] = error.rule
            except Exception as error:  # a user's code
                self._traces[key] = f"a step without memory fails ({type(error).__name__})"
        return self._traces[key]

    def _plan_in(self, key: tuple[Mode, ...]) -> Plan:
        """The configured layout in some modes."""
        if key not in self._plans:
            configured = self.plan.modalities.items()
            changed = {name: _in(one, mode) for (name, one), mode in zip(configured, key, strict=True)}
            self._check(changed)
            self._plans[key] = self.plan_of(changed)
        return self._plans[key]

    def _check(self, modalities: Modalities) -> None:
        schedule: Any = self.step.schedule
        name = schedule if isinstance(schedule, str) else "1f1b"
        check(
            modalities,
            loss_modality=self.plan.partition.loss_modality,
            num_microbatches=self.step.num_microbatches,
            schedule=name,
            schedules=(name,),
        )
        check_features({"modalities": modalities})


def _in(modality: Modality, mode: Mode) -> Modality:
    return replace(modality, tp_mode=mode[0], tp_depth=mode[1])  # type: ignore[arg-type]
