"""Tables of estimated memory: a row per rank, and a row per option with what the busiest rank would need.

Makes layouts fit into the memory of a rank, at the least time that it can.

Three things are tried in this order, the first that fits is taken:

1. the configured options;
2. states of optimizers that replicas share (`zero_stage` 1), which takes no more communication;
3. experts that replicas share beside it, over more and more of them (`ep_size`);
4. recomputation beside both, stage by stage: by operation, then of a quarter, a half, three quarters and all of the
   layers, only in the stages of ranks that do not fit, and of the modality that keeps most there;
5. the same with `zero_stage` 3.

Sharing is left alone where a modality says anything about it, where it has one replica, and where the optimizers look
at more than one element at a time. Recomputation is left alone where a modality says anything about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_mm5d.config.checks import check_memory
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.features import check_features
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.config.tables import Table, memory_text
from lightning_mm5d.features.shared_experts.experts import find_experts
from lightning_mm5d.features.unlike_pipelines.pipelines import check_pipelines
from lightning_mm5d.partition.costs import kept_of
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.tools.planner.rank_memory import RankMemory, Step, memory_of

_LIMIT_KINDS: tuple[Any, ...] = ("none", "selective", {"fraction": 0.25}, {"fraction": 0.5}, {"fraction": 0.75}, "full")
"""by the time that they add"""

Modalities = Mapping[str, Modality]


@dataclass
class MemoryLimit:
    """What fits into the memory of a rank.

    Args:
        limit: bytes of each rank.
        step: what is known of a training step.
        plan_of: makes the plan of a layout.
        shares: whether optimizers may work on a part of each parameter.
    """

    limit: int
    step: Step
    plan_of: Callable[[Modalities], Plan]
    shares: bool = False
    _nearest: tuple[int, int, str] | None = field(default=None, init=False)

    def fitted(self, modalities: Modalities) -> dict[str, Modality] | None:
        """Return a layout's modalities with the options with which it fits; None where nothing helps."""
        plan = self.plan_of(modalities)
        for may_recompute, shared in self._sharings(plan):
            found = self._recomputed(shared, may_recompute)
            if found is not None:
                return found
        return None

    def refusal(self, said: object) -> ConfigError:
        """Return the error for a limit into which nothing fits."""
        assert self._nearest is not None
        size, rank, why = self._nearest
        rule = f"The layout that needs least takes {memory_text(size)} on rank {rank}, {why}"
        fix = (
            f"Allow {memory_text(size)}, take more ranks, smaller microbatches, a larger tp_size or cp_size, more "
            "replicas to share among, or offload"
        )
        return ConfigError("memory_limit", said, rule, fix)

    # --- the tries ---

    def _sharings(self, plan: Plan) -> Iterator[tuple[bool, Plan]]:
        """Plans in which replicas share more and more, and whether recomputation is tried with them."""
        now = plan.modalities
        able = {
            name
            for name, one in now.items()
            if self.shares
            and one.zero_stage is None
            and one.dp_shard_size is None
            and plan.layout.sizes(name).dp * plan.layout.sizes(name).cp > 1
        }
        yield not able, plan
        degrees = self._degrees(plan, able)
        most = degrees[-1]
        for stage, spread in [*((1, one) for one in degrees), (3, most)] if able else ():
            modalities = {name: replace(one, zero_stage=stage) if name in able else one for name, one in now.items()}
            modalities |= {name: replace(modalities[name], ep_size=degree) for name, degree in spread.items()}
            shared = self.plan_of(modalities) if spread else plan
            yield spread == most, changed(shared, modalities)

    def _degrees(self, plan: Plan, able: Iterable[str]) -> list[dict[str, int]]:
        """More and more ranks that could share the experts of modalities: none, then by modality."""
        fits: dict[str, list[int]] = {}
        for name in able:
            size, tried = plan.layout.sizes(name), replace(plan.modalities[name], ep_size=2)
            if plan.modalities[name].ep_size > 1 or "parameters" in tried.offloads:
                continue
            with suppress(ConfigError):  # it has no experts
                layers = find_experts(self.step.module, plan.partition, {name: tried}).values()
                most = min(layer.number for layer in layers)
                copies = size.dp * size.cp
                fits[name] = [degree for degree in range(2, min(copies, most) + 1) if copies % degree == 0]
        fits = {name: found for name, found in fits.items() if found}
        longest = max(map(len, fits.values()), default=0)
        return [{}, *({name: each[min(n, len(each) - 1)] for name, each in fits.items()} for n in range(longest))]

    def _recomputed(self, plan: Plan, may_recompute: bool) -> dict[str, Modality] | None:
        levels = {
            (name, cut.index): 0
            for name, cuts in plan.partition.stages.items()
            for cut in cuts
            if plan.modalities[name].activation_checkpointing == "none" and cut.last > cut.first
        }
        while True:
            modalities = _said(plan.modalities, levels)
            now = changed(plan, modalities)
            memory = memory_of(now, self.step)
            over = [one for one in memory if one.peak > self.limit]
            if not over:
                return modalities
            self._note(memory, modalities)
            raised = {key for one in over for key in self._next(now, one, levels)} if may_recompute else set()
            if not raised:
                return None
            for key in raised:
                levels[key] += 1

    def _next(self, plan: Plan, over: RankMemory, levels: Mapping[tuple[str, int], int]) -> Sequence[tuple[str, int]]:
        """The stage on a rank of which more is computed again next."""
        stages = [
            (cut.modality, cut.index)
            for place in plan.layout.places_of(over.rank)
            for cut in plan.topology.cuts_at(place.modality, place.pp, place.dp)
        ]
        able = [key for key in stages if levels.get(key, len(_LIMIT_KINDS)) + 1 < len(_LIMIT_KINDS)]
        return [max(able, key=lambda key: (-levels[key], self._keeps(plan, key)))] if able else []

    def _keeps(self, plan: Plan, key: tuple[str, int]) -> int:
        """Bytes that a stage saves of a microbatch."""
        trace = self.step.trace
        if trace is None:
            return 0
        cut = plan.partition.stages[key[0]][key[1]]
        return sum(sum(unit.saved.values()) for unit in trace.units[key[0]][cut.first + 1 : cut.last + 1])

    def _note(self, memory: Sequence[RankMemory], modalities: Modalities) -> None:
        worst = max(memory, key=lambda one: one.peak)
        if self._nearest is None or worst.peak < self._nearest[0]:
            parts = {
                "parameters": worst.parameters,
                "gradients": worst.gradients,
                "states of optimizers": worst.optimizer or 0,
                "activations": worst.activations or 0,
                "buffers": worst.buffers,
            }
            text = ", ".join(f"{memory_text(size)} of {name}" for name, size in parts.items())
            self._nearest = worst.peak, worst.rank, text


def changed(plan: Plan, modalities: Modalities) -> Plan:
    """Return the plan with other options of memory in its modalities, whose layers stay where they are.

    Raises:
        ConfigError: a modality has no layers that could run again.
    """
    partition = plan.partition
    sizes = {name: [cut.last - cut.first for cut in cuts] for name, cuts in partition.stages.items()}
    kept = {name: kept_of(name, modality, sizes[name]) for name, modality in modalities.items()}
    partition = replace(partition, kept={name: one for name, one in kept.items() if one})
    return replace(plan, modalities=modalities, partition=partition)


def _said(modalities: Modalities, levels: Mapping[tuple[str, int], int]) -> dict[str, Modality]:
    """The modalities with the recomputation of each stage as the configuration has it."""
    found = dict(modalities)
    for name in {name for name, _ in levels}:
        stages = sorted((number, level) for (other, number), level in levels.items() if other == name)
        kinds = [deepcopy(_LIMIT_KINDS[level]) for _, level in stages]  # YAML would write one object as a reference
        same = all(kind == kinds[0] for kind in kinds)
        found[name] = replace(found[name], activation_checkpointing=kinds[0] if same else {"per_stage": kinds})
    return found


_UNKNOWN = "?"


def memory_table(memory: Sequence[RankMemory]) -> Table:
    """Return a row per rank; ranks in a row that need the same share one."""
    runs: list[list[RankMemory]] = []
    for one in memory:
        if runs and one[1:] == runs[-1][0][1:]:
            runs[-1].append(one)
        else:
            runs.append([one])
    rows = []
    for first, *others in runs:
        ranks = f"{first.rank}-{others[-1].rank}" if others else str(first.rank)
        rows.append((ranks, *(_UNKNOWN if size is None else memory_text(size) for size in first[1:])))
    return Table.of(
        ("rank", "parameters", "gradients", "optimizer", "activations", "buffers", "peak", "on the host"), rows
    )


def options_table(plan: Plan, step: Step) -> Table:
    """Return what the rank that needs most would need with each option, and without each one that is configured."""
    rows = [("as configured", *_most(plan, step))]
    for name, modalities in _variants(plan):
        try:
            for modality, changes in modalities.items():
                check_memory(f"modalities.{modality}", changes)
            check_pipelines(modalities, "1f1b")
            check_features({"modalities": modalities})
            rows.append((name, *_most(changed(plan, modalities), step)))
        except ConfigError:  # it does not go with what is configured
            continue
    return Table.of(("all modalities", "largest peak", "on the host"), rows)


def _most(plan: Plan, step: Step) -> tuple[str, str]:
    memory = memory_of(plan, step)
    return memory_text(max(one.peak for one in memory)), memory_text(max(one.host for one in memory))


def _variants(plan: Plan) -> Iterator[tuple[str, Mapping[str, Modality]]]:
    """Names of options, and the modalities with them."""
    now = plan.modalities
    shares = any(plan.layout.sizes(name).dp * plan.layout.sizes(name).cp > 1 for name in now)
    changes: list[tuple[str, dict[str, object]]] = []
    if shares:
        changes += [
            (f"zero_stage: {stage}", {"zero_stage": stage, "dp_shard_size": None, "reshard_after_forward": False})
            for stage in (0, 1, 2, 3)
        ]
        changes.append(("zero_stage: 3, reshard_after_forward", {"zero_stage": 3, "reshard_after_forward": True}))
    changes += [(f"activation_checkpointing: {kind}", {"activation_checkpointing": kind}) for kind in _KINDS]
    changes.append(("offload: nothing", {"offload": None}))
    changes += [(f"offload: {kind}", {"offload": [kind]}) for kind in ("activations", "optimizer", "parameters")]
    for name, fields in changes:
        others = {
            key: replace(modality, **fields)  # type: ignore[arg-type]
            if plan.partition.parts[key].paths or "activation_checkpointing" not in fields
            else modality
            for key, modality in now.items()
        }
        if others != dict(now):
            yield name, others


_KINDS = ("none", "selective", "full")
