"""Builds schedules by name, from a table or from a function: which rank runs which action when.

Each name stands for one or more sets of rules for the greedy scheduler; the set that gives the shortest schedule is
taken. The placement of stages comes with the graph: ``interleaved`` wants chunks that lie round after round, ``zbv``
two that lie in a V (see `place`); on one chunk a rank they are ``1f1b`` and ``zero_bubble``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.schedule.actions import Kind, Schedule
from lightning_mm5d.schedule.auto import auto
from lightning_mm5d.schedule.custom import from_csv, from_function
from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.greedy import Pipeline, Rules
from lightning_mm5d.schedule.interleaved import interleaved
from lightning_mm5d.schedule.plain import gpipe, one_f_one_b
from lightning_mm5d.schedule.zero_bubble import zero_bubble

_RULES: dict[str, Callable[[Graph], list[Rules]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zbv": zero_bubble,
}

AnySchedule = str | Callable[[Graph], Schedule]
"""What a user may say: a name, a table, or a function of the graph."""
SCHEDULES = (*_RULES, "auto")
"""The names that `build` knows."""
UNSPLIT_SCHEDULES = ("gpipe", "1f1b", "interleaved")
"""The named schedules that never split a backward."""


def build(
    schedule: str | Callable[[Graph], Schedule],
    graph: Graph,
    *,
    forward_only: bool = False,
    max_activations: int | Mapping[int, int] | None = None,
) -> Schedule:
    """Builds a schedule that passes `validate`; the same one in every process that passes an equal graph.

    Args:
        schedule: one of `SCHEDULES`; the path of a table that ends in ``.csv``, or its text (see `custom`); or a
            function that makes one.
        graph: the stages, with costs, which decide on the order where ranks have a choice.
        forward_only: leave out backwards, for validation and prediction. All named schedules are then the same.
        max_activations: for ``auto``, the most activations that a rank may hold, for all or by rank.

    Returns:
        For every rank of the graph its actions in order.

    Raises:
        ConfigError: for a name that is not known.
        ScheduleError: for a schedule of the user's that does not fit, and for ``max_activations`` that none keeps.
    """
    if callable(schedule):
        return _part(from_function(schedule, graph), forward_only)
    if is_table(schedule):
        return _part(from_csv(_table(schedule), graph), forward_only)
    if schedule not in SCHEDULES:
        nearest = difflib.get_close_matches(str(schedule), SCHEDULES, n=1, cutoff=0.4) or ["1f1b"]
        names = ", ".join(SCHEDULES)
        raise ConfigError(
            "schedule", schedule, f"It must be one of {names}, a table or a function", f"Use {nearest[0]!r}"
        )
    if forward_only:
        return Pipeline(graph, forward_only=True).play(Rules()).schedule
    if schedule == "auto":
        return auto(graph, max_activations).schedule
    return Pipeline(graph).best(_RULES[schedule](graph)).schedule


def is_table(schedule: object) -> bool:
    """Whether a schedule is given as a table: the path of one that ends in ``.csv``, or its text."""
    return isinstance(schedule, str) and re.search(r"\.csv$|^\s*\d+\s*,|\n", schedule) is not None


def place(schedule: str, stages: int, ranks: int) -> list[int]:
    """Which rank, from 0, runs which stage of a modality: in a V for ``zbv``, else round after round.

    Args:
        schedule: one of `SCHEDULES`.
        stages: of the modality, all chunks.
        ranks: that it has.
    """
    return [pp_rank_of(stage, ranks, v_shaped=schedule == "zbv") for stage in range(stages)]


def pp_rank_of(stage: int, ranks: int, *, v_shaped: bool) -> int:
    """Which rank, from 0, runs stage number `stage` of a modality that has so many ranks."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if v_shaped and turn % 2 else place


def loaded(schedule: AnySchedule) -> AnySchedule:
    """The same schedule; where it is the path of a table, its text, so that all who ask later get the same.

    Raises:
        ConfigError: it cannot be read.
    """
    return _table(schedule) if isinstance(schedule, str) and is_table(schedule) else schedule


def _table(schedule: str) -> str:
    if not schedule.endswith(".csv"):
        return schedule
    try:
        return Path(schedule).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"It cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError("schedule", schedule, rule, "Name a table of actions that is there") from error


def _part(schedule: Schedule, forward_only: bool) -> Schedule:
    if not forward_only:
        return schedule
    return {rank: [action for action in actions if action.kind is Kind.F] for rank, actions in schedule.items()}
