"""The placement whose simulated step is shortest, where sending takes no time, as the papers' cases are compared.

The placements with the smallest largest loads are simulated, in the order of a lower bound on their makespans, until no
other can be shorter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from lightning_mm5d.config.modality import Modality
from lightning_mm5d.features.auto_schedule import lower_bound
from lightning_mm5d.partition.costs import Unit, step_costs
from lightning_mm5d.schedule import AnySchedule, build, simulate
from lightning_mm5d.tools.planner.placements import Space, configured, layer_costs, plain, replica_graph

_JUDGED = 48  # placements whose schedules may be simulated
_SAME = 1e-9  # makespans that differ by less than this share count as equal


def search(
    rows: Mapping[str, Sequence[Unit]],
    modalities: Mapping[str, Modality],
    num_ranks: int,
    *,
    loss_modality: str,
    trainable: Collection[str],
    num_microbatches: int,
    schedule: AnySchedule = "1f1b",
    late: Collection[str] = (),
) -> dict[str, Modality]:
    """Return the placement of the modalities on `num_ranks` ranks whose simulated step is shortest.

    Args:
        rows: for each modality the units of a forward: one before its layers, one for each layer, one after them.
        modalities: the configuration; its pipelines, costs and shared ranks are replaced.
        num_ranks: ranks of one replica; all of them are used.
        loss_modality: name of the modality that computes the loss.
        trainable: names of the parameters that require a gradient.
        num_microbatches: M.
        schedule: as `build` takes it.
        late: encoders whose result the loss modality uses after its last layer.

    Returns:
        The placement with the shortest step; of equally short ones, the one with the fewest shared stages.
    """
    simple = {name: plain(name, row, frozenset(trainable)) for name, row in rows.items()}
    trained = frozenset(key for row in simple.values() for unit in row for key in unit.costs)
    encoders_train = any(
        trained.intersection(unit.costs)
        for name in simple
        if name != loss_modality and not (name in late and modalities[name].feeds == "first")
        for unit in simple[name]
    )
    costs = {
        name: layer_costs(step_costs(row, trained, encoders_train and name == loss_modality))
        for name, row in simple.items()
    }
    space = Space(costs, modalities, num_ranks, loss_modality=loss_modality, num_microbatches=num_microbatches)
    placements = space.best(_JUDGED)
    graphs = [
        replica_graph(simple, modalities, placement, loss_modality, num_microbatches, late) for placement in placements
    ]
    bounds = list(map(lower_bound, graphs))
    best, makespan = 0, math.inf
    for index in sorted(range(len(graphs)), key=bounds.__getitem__):
        if bounds[index] > makespan * (1 + _SAME):
            break
        shortest = simulate(build(schedule, graphs[index]), graphs[index]).makespan
        fewer = (placements[index].shared, index) < (placements[best].shared, best)
        if shortest < makespan * (1 - _SAME) or (fewer and shortest <= makespan * (1 + _SAME)):
            best, makespan = index, shortest
    return configured(modalities, placements[best], loss_modality)
