"""Users' own schedules: a table of actions, or a function of the graph.

A table is CSV text. Each row begins with a rank, then come its actions in order::

    rank
    0, F0, F1, F2, I0, F3, W0, ...
    1, F0, B0, F1, B1, ...

An action is its kind (F forward, B full backward, I input gradient, W weight gradient), the microbatch's global id
and, where the rank has several stages, a dot and the chunk: ``F3.1`` is the forward of microbatch 3 through the second
of the rank's stages in the order of the pipeline (`Graph.stages_of`). Rows of one rank continue each other. Empty
cells, empty lines, a first line of headings and comments after ``#`` are skipped. `to_csv` writes this form.

Text that is no such table is refused with its line; `validate` refuses a schedule that does not fit the graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from lightning_mm5d.schedule.actions import Action, Kind, Schedule
from lightning_mm5d.schedule.graph import Graph
from lightning_mm5d.schedule.validate import ScheduleError, validate

_ACTION = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")


def from_csv(text: str, graph: Graph) -> Schedule:
    """Reads a schedule from a table and validates it.

    Args:
        text: the table (see the module's docstring).
        graph: the stages that it is for.

    Raises:
        ScheduleError: a line cannot be read, or `validate` refuses the schedule.
    """
    schedule: Schedule = {rank: [] for rank in graph.ranks}
    rows = 0
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in line.partition("#")[0].split(",")]
        if not any(cells):
            continue
        rows += 1
        if rows == 1 and not cells[0].lstrip("-").isdigit():
            continue
        if not cells[0].isdigit() or int(cells[0]) not in schedule:
            raise ScheduleError(
                f"schedule, line {number}: got {cells[0]!r} as the rank. A row begins with the number of a rank of "
                f"the graph. Use one of {', '.join(map(str, graph.ranks))}."
            )
        rank = int(cells[0])
        schedule[rank] += [_parse(cell, rank, graph, number) for cell in cells[1:] if cell]
    validate(schedule, graph)
    return schedule


def to_csv(schedule: Schedule, graph: Graph) -> str:
    """Writes a schedule as a table that `from_csv` reads."""
    return "".join(
        ",".join([str(rank), *(label(action, rank, graph) for action in schedule[rank])]) + "\n"
        for rank in sorted(schedule)
    )


def from_function(make: Callable[[Graph], Schedule], graph: Graph) -> Schedule:
    """Calls ``make(graph)`` and validates the schedule that it returns.

    Raises:
        ScheduleError: it returns something else than a list of actions for each rank, or `validate` refuses it.
    """
    schedule = make(graph)
    if not isinstance(schedule, Mapping) or not all(
        isinstance(actions, list | tuple) and all(isinstance(action, Action) for action in actions)
        for actions in schedule.values()
    ):
        got = type(schedule).__name__ if not isinstance(schedule, Mapping) else schedule
        raise ScheduleError(
            f"schedule: the function returned {got!r}. It returns a list of Action for each rank, as a dict. "
            "Return for instance build('1f1b', graph)."
        )
    validate(schedule, graph)
    return schedule


def label(action: Action, rank: int, graph: Graph) -> str:
    """Return an action as tables write it: ``F3``, or ``F3.1`` where ``rank`` has several stages."""
    mine = graph.stages_of(rank)
    chunk = f".{mine.index(action.stage)}" if len(mine) > 1 else ""
    return f"{action.kind.value}{action.microbatch}{chunk}"


def _parse(cell: str, rank: int, graph: Graph, line: int) -> Action:
    match, mine = _ACTION.fullmatch(cell), graph.stages_of(rank)
    if match is None or (match[3] is None and len(mine) > 1) or int(match[3] or 0) >= len(mine):
        example = f"F0.{len(mine) - 1}" if len(mine) > 1 else "F0"
        raise ScheduleError(
            f"schedule, line {line}: got {cell!r}. An action of rank {rank}, which has "
            f"{', '.join(mine)}, is F, B, I or W, a microbatch"
            + (f" and a chunk from 0 to {len(mine) - 1}" if len(mine) > 1 else "")
            + f". Write for instance {example}."
        )
    return Action(Kind(match[1]), mine[int(match[3] or 0)], int(match[2]))
