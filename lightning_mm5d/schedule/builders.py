"""Builds schedules by name, from a table or from a function.

Each name stands for one or more sets of rules for the greedy scheduler, or is that of a feature, which says how it is
built; `build` takes the shortest schedule. The graph
has the placement of stages: ``interleaved`` is made for chunks in turn and ``zbv`` for two chunks in a V (see `place`).
With one chunk a rank they equal ``1f1b`` and ``zero_bubble``.

`check_fields` checks all that a user says to the strategy, as far as neither the model nor the number of ranks matters.
It imports no torch, so that a wrong field is refused before anything slow starts.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from lightning_mm5d.config.checks import check
from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.features import check_features, parts, schedules
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.config.options import BACKENDS, check_options
from lightning_mm5d.schedule.graph import Graph, Kind, Schedule
from lightning_mm5d.schedule.greedy import Pipeline, Rules, gpipe, interleaved, one_f_one_b, zero_bubble
from lightning_mm5d.schedule.validate import from_csv, from_function

_RULES: dict[str, Callable[[Graph], list[Rules]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zbv": zero_bubble,
}

AnySchedule = str | Callable[[Graph], Schedule]
"""What a user may give: a name, a table, or a function of the graph."""
SCHEDULES = (*_RULES, *schedules())
"""The names that `build` knows, of its own and of features."""
UNSPLIT_SCHEDULES = ("gpipe", "1f1b", "interleaved")
"""The named schedules that never split a backward."""


def build(
    schedule: str | Callable[[Graph], Schedule],
    graph: Graph,
    *,
    forward_only: bool = False,
    max_activations: int | Mapping[int, int] | None = None,
) -> Schedule:
    """Builds a schedule that passes `validate`. Processes that pass equal graphs get equal schedules.

    Args:
        schedule: one of `SCHEDULES`; the path of a table that ends in ``.csv``, or its text (see `custom`); or a
            function that makes one.
        graph: the stages. Their costs decide what a rank runs first where it has a choice.
        forward_only: leave out backwards, for validation and prediction. All named schedules are then equal.
        max_activations: for ``auto``, the most activations that a rank may hold, one number for all ranks or by rank.

    Returns:
        For every rank of the graph its actions in order.

    Raises:
        ConfigError: the name is not known.
        ScheduleError: the user's schedule does not fit the graph, or ``auto`` finds none within ``max_activations``.
    """
    if callable(schedule):
        return _forwards(from_function(schedule, graph), forward_only)
    if is_table(schedule):
        return _forwards(from_csv(table_text(schedule), graph), forward_only)
    check_schedule(schedule)
    if forward_only:
        return Pipeline(graph, forward_only=True).play(Rules()).schedule
    if schedule in _RULES:
        return Pipeline(graph).best(_RULES[schedule](graph)).schedule
    builders = {name: builder for module in parts("schedules") for name, builder in module.BUILDERS.items()}
    return builders[schedule](graph, max_activations)


def check_schedule(schedule: object) -> None:
    """Refuse what no schedule can be made of, whatever the graph.

    Raises:
        ConfigError: the name is not known, the table cannot be read, or the function does not take a graph alone.
    """
    if callable(schedule):
        try:
            inspect.signature(schedule).bind(None)
        except (TypeError, ValueError) as error:
            rule = f"It is called with the graph of stages alone, which fails: {error}"
            fix = "Use a function such as `def schedule(graph): ...`"
            raise ConfigError("schedule", schedule, rule, fix) from error
    elif is_table(schedule):
        table_text(str(schedule))
    elif schedule not in SCHEDULES:
        rule = f"It must be one of {', '.join(SCHEDULES)}, a table or a function"
        raise ConfigError("schedule", schedule, rule, did_you_mean(schedule, SCHEDULES))


def is_table(schedule: object) -> bool:
    """Whether a schedule is a table: a path that ends in ``.csv``, or a table's text."""
    return isinstance(schedule, str) and re.search(r"\.csv$|^\s*\d+\s*,|\n", schedule) is not None


def name_of(schedule: AnySchedule) -> str:
    """Return a schedule's name, the path of its table, ``table`` for a table's text, or the name of its function."""
    if not isinstance(schedule, str):
        return getattr(schedule, "__name__", type(schedule).__name__)
    return schedule if schedule in SCHEDULES or schedule.endswith(".csv") else "table"


def place(schedule: str, stages: int, ranks: int) -> list[int]:
    """Return the pipeline rank of each stage: for 4 stages on 2 ranks [0, 1, 1, 0] under ``zbv``, else [0, 1, 0, 1].

    Args:
        schedule: one of `SCHEDULES`.
        stages: number of stages of the modality.
        ranks: number of its pipeline ranks.
    """
    return [pp_rank_of(stage, ranks, v_shaped=schedule == "zbv") for stage in range(stages)]


def pp_rank_of(stage: int, ranks: int, *, v_shaped: bool) -> int:
    """Return the pipeline rank, from 0, of stage number `stage` of a modality with `ranks` pipeline ranks."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if v_shaped and turn % 2 else place


def loaded(schedule: AnySchedule) -> AnySchedule:
    """Return the schedule, or the text of the table whose path it is, so that a later change of the file has no effect.

    Raises:
        ConfigError: the table cannot be read.
    """
    return table_text(schedule) if isinstance(schedule, str) and is_table(schedule) else schedule


def table_text(schedule: str) -> str:
    """Return the text of a table, which may be given as the path of a file.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not schedule.endswith(".csv"):
        return schedule
    try:
        return Path(schedule).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"It cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError("schedule", schedule, rule, "Name an existing table of actions") from error


def _forwards(schedule: Schedule, forward_only: bool) -> Schedule:
    """The schedule, or its forwards alone."""
    if not forward_only:
        return schedule
    return {rank: [action for action in actions if action.kind is Kind.F] for rank, actions in schedule.items()}


def check_fields(fields: Mapping[str, Any], backends: Collection[str] = BACKENDS) -> None:
    """Refuse fields of the strategy that cannot work with any model and number of ranks.

    Args:
        fields: by name; those that are missing have their defaults.
        backends: that torch.distributed knows here.

    Raises:
        ConfigError: at the first field that cannot work.
    """
    schedule, modalities = fields.get("schedule", "1f1b"), fields.get("modalities")
    check_schedule(schedule)
    check(
        {"model": Modality()} if modalities is None else modalities,
        num_microbatches=fields.get("num_microbatches"),
        microbatch_size=fields.get("microbatch_size"),
        schedule=schedule if isinstance(schedule, str) and schedule in SCHEDULES else "own",
    )
    check_options(fields, backends)
    check_features(fields)
    if fields.get("microbatch_size") is not None and schedule not in SCHEDULES:
        rule = "A table or a function is for one number of microbatches, and with a size it follows from each batch"
        raise ConfigError("batching.microbatch_size", fields["microbatch_size"], rule, "Set num_microbatches instead")
