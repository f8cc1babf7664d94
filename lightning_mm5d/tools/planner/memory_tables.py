"""Tables of estimated memory: a row per rank, and a row per option with what the busiest rank would need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lightning_mm5d.config.checks import check_memory
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.features import check_features
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.config.tables import Table, memory_text
from lightning_mm5d.features.unlike_pipelines.pipelines import check_pipelines
from lightning_mm5d.partition.costs import kept_of
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.tools.planner.rank_memory import RankMemory, Step, memory_of


def changed(plan: Plan, modalities: Mapping[str, Modality]) -> Plan:
    """Return the plan with other options of memory in its modalities, whose layers stay where they are.

    Raises:
        ConfigError: a modality has no layers that could run again.
    """
    partition = plan.partition
    sizes = {name: [cut.last - cut.first for cut in cuts] for name, cuts in partition.stages.items()}
    kept = {name: kept_of(name, modality, sizes[name]) for name, modality in modalities.items()}
    partition = replace(partition, kept={name: one for name, one in kept.items() if one})
    return replace(plan, modalities=modalities, partition=partition)


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
