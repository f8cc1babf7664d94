"""Proposes a layout for a model: searches one, sets it beside the configured one, and writes it as YAML to paste.

Costs are estimated from the model's parameters, without the number of tokens of each modality. Where these numbers
differ, give durations: of each modality's whole forward, of each of its layers as `profile` measures them, or as the
`cost` of the configured modalities for each pipeline rank. Durations of whole modalities or ranks scale the estimates
of their layers.

It refuses worlds that the replicas of the loss modality do not divide, durations of some modalities only, and what
`search` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import yaml
from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality, PipelineTemplate, decoders_of
from lightning_mm5d.config.tables import Page, Table, memory_text
from lightning_mm5d.features.shared_experts.experts import find_experts
from lightning_mm5d.features.timeline.drawing import COSTS, WORK, TimeUnit
from lightning_mm5d.layout.layout import Layout
from lightning_mm5d.partition import StageCut, partition
from lightning_mm5d.partition.costs import Unit, costed, depends_on_cut, units
from lightning_mm5d.partition.find import find
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import AnySchedule
from lightning_mm5d.tensor_parallel.division import divide
from lightning_mm5d.tensor_parallel.resolve import Division
from lightning_mm5d.tools.planner.activation_trace import Trace
from lightning_mm5d.tools.planner.memory_tables import MemoryLimit, memory_table
from lightning_mm5d.tools.planner.outcomes import Outcome, compare
from lightning_mm5d.tools.planner.rank_memory import RankMemory, memory_of
from lightning_mm5d.tools.planner.rank_memory import Step as MemoryStep
from lightning_mm5d.tools.planner.search import Found, NothingFitsError, search
from lightning_mm5d.tools.planner.tensor_modes import TensorModes, modes_of, possible


@dataclass(frozen=True)
class Step:
    """A layout and the simulated step that it gives.

    Attributes:
        plan: what runs where.
        outcome: of its schedule.
        num_microbatches: of all replicas together.
    """

    plan: Plan
    outcome: Outcome
    num_microbatches: int

    @property
    def pace(self) -> float:
        """Time per microbatch: a step of more replicas does more."""
        return self.outcome.simulation.makespan / self.num_microbatches

    def as_json(self) -> dict[str, Any]:
        """Return ``{"replicas", "makespan", "busiest", "idle", "pace"}``: busiest is the work of the busiest rank."""
        return {
            "replicas": self.plan.layout.num_replicas,
            "makespan": self.outcome.simulation.makespan,
            "busiest": max(self.outcome.simulation.busy.values()),
            "idle": self.outcome.bubble,
            "pace": self.pace,
        }


@dataclass(frozen=True)
class Proposal:
    """What was found, beside what was configured.

    Attributes:
        found: by the search; where durations are known its modalities have them as `cost`.
        proposed: the step of the layout that was found.
        configured: the step of the configured one.
        unit: of all durations.
        memory: of each rank of the proposed layout; empty where it is not estimated.
        configured_memory: of the configured one.
        memory_limit: bytes that a rank may need at most; None for any number.
        modes: each `tp_mode` that was tried; None where there is no choice.
    """

    found: Found
    proposed: Step
    configured: Step
    unit: TimeUnit
    memory: Sequence[RankMemory] = ()
    configured_memory: Sequence[RankMemory] = ()
    memory_limit: int | None = None
    modes: Table | None = None

    def as_json(self) -> dict[str, Any]:
        """Return ``{"modalities", "proposed", "configured", "placed", "simulated", "unit", "memory"}``.

        Steps are as in `Step`, ``memory`` is as in `RankMemory`, of each rank of the proposed layout.
        """
        return {
            "modalities": self._said(),
            "proposed": self.proposed.as_json(),
            "configured": self.configured.as_json(),
            "placed": self.found.placed,
            "simulated": self.found.simulated,
            "unit": self.unit.meaning,
            "memory": [one._asdict() for one in self.memory],
        }

    def as_yaml(self) -> str:
        """Return the proposed modalities as YAML, a line for each; laid over the configuration they replace it."""
        lines = (
            yaml.safe_dump(said, default_flow_style=True, sort_keys=False, width=1000) for said in self._said().values()
        )
        return "".join(f"{name}: {line}" for name, line in zip(self.found.modalities, lines, strict=True))

    def page(self) -> Page:
        """Return it as a page: both layouts in numbers, each rank of the proposed one, and what to paste."""
        found, plan, outcome = self.found, self.proposed.plan, self.proposed.outcome
        replicas = plan.layout.num_replicas
        steps = {"configured": self.configured.as_json(), "proposed": self.proposed.as_json()}
        unit = self.unit.fitted(max(step["makespan"] for step in steps.values()))
        layouts = []
        memory = {"configured": self.configured_memory, "proposed": self.memory}
        for name, step in steps.items():
            durations = [unit.text(step[key]) for key in ("makespan", "busiest", "pace")]
            peak = [memory_text(max(one.peak for one in memory[name]))] if memory[name] else []
            layouts.append((name, step["replicas"], *durations, f"{step['idle']:.1%}", *peak))
        busy, bubble = outcome.simulation.busy, outcome.simulation.bubble
        # of ranks that share a stage (tp, cp) the first one
        each = [(n, _holds(plan, n), unit.text(busy[n]), f"{bubble[n]:.1%}") for n in sorted(busy)]
        times = [f"{what} ({unit.symbol})" for what in ("makespan", "busiest rank", "per microbatch")]
        page: Page = [
            f"ranks: {plan.layout.size}, microbatches: {self.proposed.num_microbatches // replicas} per replica, "
            f"placements split: {found.placed}, simulated under {outcome.schedule}: {found.simulated}, "
            f"times in {unit.meaning}",
            Table.of(("layout", "replicas", *times, "idle", *(["largest peak"] if self.memory else [])), layouts),
            Table.of(("rank", "layers", f"busy ({unit.symbol})", "idle"), each),
            *([memory_table(self.memory)] if self.memory else []),
            *([self.modes] if self.modes else []),
            "modalities:" + "".join(f"\n  {line}" for line in self.as_yaml().splitlines()),
        ]
        largest = max((one.peak for one in self.configured_memory), default=0)
        fits = self.memory_limit is None or largest <= self.memory_limit
        if not fits:
            page.insert(2, f"The configured layout needs more than {memory_text(self.memory_limit or 0)}.")
        elif self.proposed.pace > self.configured.pace * (1 - 1e-6):
            page.insert(2, "The configured layout is as good as the best that was found.")
        return page

    def _said(self) -> dict[str, dict[str, Any]]:
        before = self.configured.plan.modalities
        return {name: _said(modality, before[name]) for name, modality in self.found.modalities.items()}


def propose(
    plan: Plan,
    module: nn.Module,
    *,
    schedule: AnySchedule,
    num_microbatches: int,
    durations: Mapping[str, float | Sequence[float]] | None = None,
    unit: TimeUnit | None = None,
    step: MemoryStep | None = None,
    memory_limit: int | None = None,
    shares: bool = False,
    traced: Callable[[Plan], Trace] | None = None,
) -> Proposal:
    """Search a layout for the ranks of a plan.

    Args:
        plan: the configured one. Its loss modality's `dp_size` says how many replicas share the ranks, one where
            it is unset.
        module: the full module; the meta device will do.
        schedule: by which layouts are judged.
        num_microbatches: per replica, M.
        durations: of the forward of each whole modality, or of each of its units as `measure` returns them, in any
            unit; by default those of the configured `cost`, or estimates where there are none.
        unit: of the durations; by default what is known of it, `COSTS` or `WORK`.
        step: what is known of a training step, for estimates of its memory; None for none.
        memory_limit: bytes that a rank may need at most; None for any number.
        shares: whether replicas may share what optimizers work on, to fit into it.
        traced: traces the step on ranks of another plan, to choose `tp_mode`; None to keep it.

    Raises:
        ConfigError: nothing fits into `memory_limit`, replicas do not divide the ranks, only some durations are known,
            or the search refuses.
    """
    loss_modality, size = plan.partition.loss_modality, plan.layout.size
    if decoders := decoders_of(plan.modalities):
        rule = f"The search places encoders before one modality, and {', '.join(decoders)} runs after that"
        raise ConfigError(
            "modalities", list(plan.modalities), rule, "Choose sizes by hand; mm5d simulate compares them"
        )
    for name, modality in plan.modalities.items():
        if modality.lengths or modality.speeds is not None:
            field = "pipelines" if modality.lengths else "speeds"
            rule = "The search lays out replicas that are equal"
            fix = "Leave it unset for the search"
            raise ConfigError(f"modalities.{name}.{field}", getattr(modality, field), rule, fix)
    replicas = plan.modalities[loss_modality].dp_size or 1
    if size % replicas:
        rule = f"The {replicas} replicas of {loss_modality!r} must divide the {size} ranks"
        fix = f"Use a dp_size that divides {size}, or {size - size % replicas or replicas} ranks"
        raise ConfigError(f"modalities.{loss_modality}.dp_size", replicas, rule, fix)
    said = {name: modality.cost for name, modality in plan.modalities.items() if modality.cost is not None}
    costs: Mapping[str, object] = durations or said
    missing = [name for name in plan.modalities if name not in costs]
    if costs and missing:
        rule = f"Those of {', '.join(missing)} would be estimated in another unit"
        raise ConfigError("cost", costs, rule, "Give a duration for every modality, or for none")
    rows = _timed(plan, module, durations or {})

    divisions: dict[object, Division] = {modes_of(plan.modalities): plan.division}

    def plan_of(modalities: Mapping[str, Modality]) -> Plan:
        layout = Layout.build(
            modalities, world_size=size, loss_modality=loss_modality, ranks_per_node=plan.layout.ranks_per_node
        )
        cut = partition(module, modalities)
        found = replace(plan, layout=layout, partition=cut, modalities=modalities)
        experts = find_experts(module, cut, modalities)
        names = {path: layer.parameters for path, layer in experts.items()}
        if experts != plan.experts:
            return replace(found, division=divide(module, cut, modalities, names), experts=experts)
        modes = modes_of(modalities)
        if modes not in divisions:
            divisions[modes] = divide(module, cut, modalities, names)
        return replace(found, division=divisions[modes])

    modes: TensorModes | None = None
    has_choice = any(len(possible(modality.tp_size)) > 1 for modality in plan.modalities.values())
    if has_choice and traced is not None and step is not None and step.trace is not None:
        modes = TensorModes(plan, step, traced, plan_of)
    limit: MemoryLimit | None = None
    if memory_limit is not None:
        assert step is not None, "a limit needs estimates"
        limit = MemoryLimit(memory_limit, step, plan_of, shares)

    def fitted(modalities: dict[str, Modality]) -> dict[str, Modality] | None:
        for tried in [modalities] if modes is None else modes.ordered(modalities):
            known = step if modes is None else modes.step_of(tried)
            if known is None:
                continue
            if limit is None:
                return tried
            limit.step = known
            if (fits := limit.fitted(tried)) is not None:
                return fits
        return modalities if limit is None else None

    try:
        found = search(
            rows,
            plan.modalities,
            size // replicas,
            loss_modality=loss_modality,
            trainable={name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad},
            num_microbatches=num_microbatches,
            schedule=schedule,
            late={name for name, encoder in plan.partition.encoders.items() if encoder.used_late},
            fitted=fitted,
        )
    except NothingFitsError:
        assert limit is not None
        raise limit.refusal(memory_text(limit.limit)) from None
    proposed = plan_of(found.modalities)
    of_proposed = step if modes is None else modes.step_of(found.modalities)
    memory = [memory_of(proposed, of_proposed), memory_of(plan, step)] if step and of_proposed else []
    steps = []
    for one in (proposed, plan):
        costed = replace(one, modalities=_costed(one, rows)) if costs else one
        graph = costed.graphs.full_graph(schedule, num_microbatches, module)
        outcome = compare(graph, [schedule])[0]
        steps.append(Step(costed, outcome, num_microbatches * one.layout.num_replicas))
    unit = unit or (COSTS if costs else WORK)
    found = replace(found, modalities=dict(steps[0].plan.modalities))
    tried = None if modes is None else modes.table(found.modalities)
    proposal = Proposal(found, steps[0], steps[1], unit, memory_limit=memory_limit, modes=tried)
    return replace(proposal, memory=memory[0], configured_memory=memory[1]) if memory else proposal


def _timed(plan: Plan, module: nn.Module, durations: Mapping[str, float | Sequence[float]]) -> dict[str, list[Unit]]:
    """The units of each modality, scaled to how long their forwards take, where that is known."""
    rows = {
        name: list(row if depends_on_cut(plan.modalities[name]) else costed(row, plan.partition.kept.get(name, ())))
        for name, row in units(module, find(module, plan.modalities)).items()
    }
    for name, modality in plan.modalities.items():
        cost = modality.cost
        if durations:
            told = durations[name]
            if isinstance(told, Sequence):
                rows[name] = [part for unit, one in zip(rows[name], told, strict=True) for part in _scaled([unit], one)]
            else:
                rows[name] = _scaled(rows[name], told)
        elif cost is not None:
            cuts = plan.partition.stages[name]
            each = [
                cost if isinstance(cost, int | float) else cost[plan.topology.pp_of(name, cut.index)] for cut in cuts
            ]
            parts = [
                _scaled(rows[name][_span(cut, cuts)], duration / modality.pp_chunks)
                for cut, duration in zip(cuts, each, strict=True)
            ]
            rows[name] = [unit for part in parts for unit in part]
    return rows


def _scaled(row: Sequence[Unit], duration: float) -> list[Unit]:
    estimate = sum(unit.forward for unit in row)
    if not estimate:  # no matrices: it takes its time nevertheless
        return [replace(row[0], forward=duration), *row[1:]]
    return [unit.scaled(duration / estimate) for unit in row]


def _span(cut: StageCut, cuts: Sequence[StageCut]) -> slice:
    """Where the units of a stage are in the row of its modality, of which unit 0 runs before the first layer."""
    return slice(cut.first + (cut.index > 0), None if cut is cuts[-1] else cut.last + 1)


def _costed(plan: Plan, rows: Mapping[str, Sequence[Unit]]) -> dict[str, Modality]:
    """The modalities with the duration of a forward on each pipeline rank, to six digits."""
    moment = 1e-6 * sum(unit.forward for row in rows.values() for unit in row)  # for layers without matrices
    found = {}
    for name, modality in plan.modalities.items():
        cuts = plan.partition.stages[name]
        durations = [
            sum(unit.forward for cut in plan.topology.cuts_at(name, pp) for unit in rows[name][_span(cut, cuts)])
            for pp in range(plan.layout.sizes(name).pp)
        ]
        cost = [float(f"{duration or moment:.6g}") for duration in durations]
        found[name] = replace(modality, cost=cost if len(cost) > 1 else cost[0])
    return found


def _said(modality: Modality, instead_of: Modality) -> dict[str, Any]:
    """The fields that are not at their defaults, or were not, as plain values.

    A LightningCLI lays one file over another field by field, so what is no longer set must be said too.
    """
    said: dict[str, Any] = {}
    for field in fields(modality):
        value, before = getattr(modality, field.name), getattr(instead_of, field.name)
        if isinstance(value, PipelineTemplate):
            had_offsets = before is not None and before.offsets is not None
            said[field.name] = {"stages": value.stages, **({"offsets": None} if had_offsets else {})}
        elif value != field.default or before != field.default:
            said[field.name] = value
    return said


def _holds(plan: Plan, rank: int) -> str:
    """What a rank runs: ``vision 5, language 0-4``."""
    found = []
    for place in plan.layout.places_of(rank):
        for cut in plan.topology.cuts_at(place.modality, place.pp, place.dp):
            layers = {0: "", 1: f" {cut.first}"}.get(cut.last - cut.first, f" {cut.first}-{cut.last - 1}")
            found.append(f"{place.modality}{layers}")
    return ", ".join(found)
