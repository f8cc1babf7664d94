"""Schedules as data: the graph of stages, action lists, their builders, a validator and a simulator.

Pure Python over plain values, so that any machine can plan for any cluster. It knows neither torch nor
transport, and refuses what could not be executed before a rank starts on it.
"""

from lightning_mm5d.schedule.actions import Action, Kind, Schedule, dependencies
from lightning_mm5d.schedule.builders import SCHEDULES, build, in_flight_limits
from lightning_mm5d.schedule.graph import Graph, Node
from lightning_mm5d.schedule.simulate import Simulation, Span, simulate
from lightning_mm5d.schedule.validate import ScheduleError, execution_order, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "Graph",
    "Kind",
    "Node",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "Span",
    "build",
    "dependencies",
    "execution_order",
    "in_flight_limits",
    "simulate",
    "validate",
]
