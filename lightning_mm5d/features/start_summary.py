"""What a run prints once at its start, beside Lightning's summary of the model: which rank holds what.

One row for each stage, or for each modality where there are many stages. It is counted from the plan that the run
executes anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_mm5d.config.tables import Table, spans
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import name_of
from lightning_mm5d.trainer.feature import Feature, Running

_ROWS = 10
_RANKS = 4  # runs of ranks in a cell


class StartSummary(Feature):
    """Prints one table at the start of a fit."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._schedule = name_of(fields["schedule"])
        count, size = fields["num_microbatches"], fields["microbatch_size"]
        self._microbatches = str(count or 1) if count or size is None else f"of {size} samples"

    def attach(self, running: Running) -> None:
        """Print on rank 0, where Lightning prints its own; without a `ModelSummary` among the callbacks nothing."""
        callbacks, layout = vars(running.trainer)["callbacks"], running.plan.layout
        summaries = [callback for callback in callbacks if isinstance(callback, ModelSummary)]
        if running.trainer.state.fn != TrainerFn.FITTING or running.rank != 0 or not summaries:
            return
        title = (
            f"MultimodalStrategy: {layout.size} {'rank' if layout.size == 1 else 'ranks'}, {layout.num_replicas} "
            f"{'replica' if layout.num_replicas == 1 else 'replicas'}, {self._schedule}, "
            f"microbatches: {self._microbatches}"
        )
        table = summary(running.plan)
        if not any(isinstance(callback, RichModelSummary) for callback in summaries):
            rank_zero_info(f"{title}\n{table}")
            return
        from rich.console import Console
        from rich.table import Table as RichTable

        rich_table = RichTable(title=title, title_justify="left", header_style="bold magenta")
        for name, right in zip(table.header, table.numeric, strict=True):
            rich_table.add_column(name, justify="right" if right else "left", overflow="fold")
        for row in table.rows:
            rich_table.add_row(*row)
        Console().print(rich_table)


def summary(plan: Plan) -> Table:
    """Return a row for each stage, or for each modality where there are more than ten stages."""
    members = plan.topology.members
    parts = [tuple(names) for names in members.values()]
    ranks = [set(plan.topology.ranks_of(stage)) for stage in members]
    cuts = {cut.name: cut for row in plan.partition.stages.values() for cut in row}
    if len(parts) > _ROWS:
        parts = [tuple(cut.name for cut in row) for row in plan.partition.stages.values()]
        ranks = [
            {place.rank for place in plan.layout.places if place.modality == name} for name in plan.partition.stages
        ]
    sizes = [0] * len(parts)
    at = {name: index for index, names in enumerate(parts) for name in names}
    for parameter, size in plan.sizes.items():  # buffers have owners too
        if parameter in plan.tied:
            continue
        for index in {at[owner] for owner in plan.partition.owners[parameter]}:
            sizes[index] += size
    rows = []
    for names, held, size in zip(parts, ranks, sizes, strict=True):
        modalities = list(dict.fromkeys(cuts[name].modality for name in names))
        where = [_layers(plan, modality, [cuts[name] for name in names]) for modality in modalities]
        title = "+".join(names) if len(members) <= _ROWS else "+".join(modalities)
        layout = "; ".join(_degrees(plan, modality) for modality in modalities)
        rows.append((title, spans(held, most=_RANKS), layout, ", ".join(where), size))
    return Table.of(("stage" if len(members) <= _ROWS else "modality", "ranks", "layout", "layers", "parameters"), rows)


def _layers(plan: Plan, modality: str, cuts: Sequence[object]) -> str:
    stages = [cut for cut in plan.partition.stages[modality] if cut in cuts]
    path = plan.partition.layers[modality]
    return f"{path}[{stages[0].first}:{stages[-1].last}]" if path is not None else "-"


def _degrees(plan: Plan, modality: str) -> str:
    axes, ep = plan.layout.axes[modality], plan.modalities[modality].ep_size
    pp = "+".join(map(str, plan.layout.pipelines.get(modality, (axes.pp,))))  # of unlike pipelines each
    sizes = {"dp": axes.dp, "pp": pp, "cp": axes.cp, "tp": axes.tp, "ep": ep}
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size not in (None, 0, 1, "1")) or "whole"


FEATURE = StartSummary
