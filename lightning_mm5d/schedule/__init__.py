"""Schedules as data: the graph of stages, lists of actions, their builders, a validator and a simulator.

This is pure Python over plain values without torch, so any machine can plan for any cluster. Schedules that could not
be executed are refused before a rank starts one.
"""

from lightning_mm5d.schedule.builders import (
    SCHEDULES,
    UNSPLIT_SCHEDULES,
    AnySchedule,
    build,
    check_fields,
    is_table,
    loaded,
    name_of,
    place,
    pp_rank_of,
    table_text,
)
from lightning_mm5d.schedule.graph import Action, Graph, Kind, Node, Schedule, dependencies
from lightning_mm5d.schedule.greedy import held_limits, in_flight_limits
from lightning_mm5d.schedule.issue_order import Grouping, IssueOrder, Message, side_by_side
from lightning_mm5d.schedule.validate import (
    ScheduleError,
    Simulation,
    Span,
    execution_order,
    from_csv,
    measured,
    simulate,
    to_csv,
    validate,
)
