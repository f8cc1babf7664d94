"""Pictures of a simulated schedule: a Gantt chart for people, a trace for Perfetto and chrome://tracing.

A bubble is easier to see than to compute, and the picture of a plan beside the trace of a run shows where they differ.
The chart is refused where matplotlib is missing.

A `TimeUnit` says what a duration is a number of: milliseconds after a measurement, else a relative unit. An estimate in
multiply-adds looks like a time and is none, so every table, picture and trace names its unit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_mm5d.schedule import Kind, Simulation, Span
from lightning_mm5d.schedule.graph import StageKey

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_POWERS = ("", "thousand ", "million ", "billion ", "trillion ")


@dataclass(frozen=True)
class TimeUnit:
    """A unit of time.

    Attributes:
        symbol: stands in the headers of columns.
        meaning: the unit in words.
        factor: a duration times this is a number of units.
    """

    symbol: str
    meaning: str
    factor: float = 1.0

    def fitted(self, longest: float) -> TimeUnit:
        """The unit, or thousands, millions and so on of it, so that `longest` has at most four digits before the dot.

        Milliseconds stay milliseconds.
        """
        power = 0
        while self.symbol != "ms" and longest * self.factor >= 1000 ** (power + 1) * 10 and power < len(_POWERS) - 1:
            power += 1
        words = {"symbol": _POWERS[power] + self.symbol, "meaning": _POWERS[power] + self.meaning}
        return replace(self, **words, factor=self.factor / 1000**power)

    def text(self, duration: float) -> str:
        """The duration as a number of five digits, never with an exponent."""
        number = f"{duration * self.factor:.5g}"
        if "e" not in number:
            return number
        return f"{duration * self.factor:.5f}".rstrip("0").rstrip(".")


SECONDS = TimeUnit("ms", "milliseconds", 1e3)
"""Of durations in seconds; they are shown in milliseconds."""
WORK = TimeUnit("units", "units of work (multiply-adds per token)")
COSTS = TimeUnit("units", "units of the given costs")


_COLOURS = (  # (forward, weight gradient, backward), for modalities in the order in which they start
    ("#a9c9ec", "#6f9fd2", "#2b69ae"),
    ("#fac88c", "#e29a4f", "#c0600a"),
    ("#abdcb5", "#6cb27d", "#237a3c"),
    ("#d8b9e5", "#b184c4", "#7f4196"),
    ("#f3b1b6", "#d97780", "#b22f3a"),
    ("#d6c3af", "#ab8e74", "#755030"),
)
_SHADES = {Kind.F: 0, Kind.B: 2, Kind.I: 2, Kind.W: 1}
_WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
_INK, _MUTED, _IDLE = "#22272e", "#66707c", "#eef0f2"
_BAR = 0.84  # height of a bar, where rows are 1 apart
_WIDTH, _ROW = 13.0, 0.42  # inches
_SIDE_BY_SIDE = 6  # entries of the legend in one line
_LINE = 0.2  # inches, of the legend
_FONT = 8.0  # points, of the microbatch numbers


def draw(
    simulation: Simulation,
    path: str | PathLike[str],
    *,
    names: Mapping[int, str] | None = None,
    title: str | None = None,
    unit: TimeUnit = COSTS,
) -> None:
    """Draw a row per rank: a hue per modality, forwards light, backwards dark, idle time grey.

    Of split backwards the input gradient is dark and the weight gradient has a medium shade.

    Boxes hold the microbatch's id where a row's longest fits, as in ``3``; where a rank has several stages of a
    modality it is followed by which of them, as in ``3.1``. The column on the right is the bubble, the share of idle
    time.

    Args:
        simulation: what to draw; a stage's modality is what stands before the dot in its name.
        path: the picture; its suffix (``.png``, ``.svg``, ``.pdf``) is its format.
        names: labels of ranks; by default the rank's number and its stages.
        title: a line above the chart.
        unit: of the simulation's times.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "lightning_mm5d.features.timeline.drawing.draw: matplotlib cannot be imported. It draws the "
            "pictures. Install it with: pip install 'lightning_mm5d[plot]'."
        ) from error
    ranks = sorted(simulation.busy)
    legend = _legend_columns(simulation)
    depth = max(map(len, legend), default=1)
    figure = Figure(figsize=(_WIDTH, 1.2 + _LINE * depth + _ROW * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    if title:
        figure.suptitle(title, x=0.008, ha="left", fontsize=13, color=_INK)
    labels = {rank: _label(simulation, rank) for rank in ranks} | dict(names or {})
    _frame(axes, simulation, [labels[rank] for rank in ranks], unit.fitted(simulation.makespan))
    _legend(axes, legend)
    figure.draw_without_rendering()  # settles the layout, after which widths in points are known
    points_per_unit = axes.get_window_extent().width * 72 / figure.dpi / (simulation.makespan or 1.0)
    for row, rank in enumerate(ranks):
        spans = [span for span in simulation.spans if span.rank == rank]
        _bars(axes, simulation, spans, row, points_per_unit)
    figure.savefig(path, dpi=160)


def chrome_trace(
    simulation: Simulation,
    path: str | PathLike[str],
    *,
    names: Mapping[int, str] | None = None,
    unit: TimeUnit = COSTS,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write the simulation as JSON in the Trace Event Format, which Perfetto and chrome://tracing open.

    A thread per rank. These viewers show seconds only, so a relative unit is written as a millisecond, which the name
    of the process and ``otherData`` say. `names` are labels of ranks, as in `draw`; `about` is added to ``otherData``.
    """
    labels = {rank: _label(simulation, rank) for rank in simulation.busy} | dict(names or {})
    unit = unit.fitted(simulation.makespan)
    microseconds = unit.factor * 1e3
    shown = unit.meaning if unit.symbol == "ms" else f"{unit.meaning}, written as ms"
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": f"ranks ({shown})"}},
        *(
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": labels[rank]}}
            for rank in sorted(simulation.busy)
        ),
    ]
    for span in simulation.spans:
        action = span.action
        events.append(
            {
                "name": str(action),
                "cat": _WORDS[action.kind],
                "ph": "X",
                "pid": 0,
                "tid": span.rank,
                "ts": span.start * microseconds,
                "dur": (span.end - span.start) * microseconds,
                "args": {"stage": action.stage, "microbatch": action.microbatch},
            }
        )
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"unit of time": shown, **(about or {})}}
    Path(path).write_text(json.dumps(trace), encoding="utf-8")


def _bars(axes: Axes, simulation: Simulation, spans: list[Span], row: int, points_per_unit: float) -> None:
    colours = _colours(simulation)
    axes.broken_barh([(0, simulation.makespan)], (row - _BAR / 2, _BAR), facecolors=_IDLE)
    narrowest = points_per_unit * min((span.end - span.start for span in spans), default=0.0)
    axes.broken_barh(
        [(span.start, span.end - span.start) for span in spans],
        (row - _BAR / 2, _BAR),
        facecolors=[colours[_modality(span), span.action.kind] for span in spans],
        edgecolors="white",
        linewidth=min(0.8, narrowest / 6),
    )
    chunks = _chunks(spans)
    numbers = [f"{span.action.microbatch}{chunks[span.action.stage]}" for span in spans]
    # a digit is some 0.64 of the font's size wide, a dot half of that
    needed = _FONT * (0.64 * max(len(n) - 0.5 * n.count(".") for n in numbers) + 0.3) if numbers else 0.0
    for span, number in zip(spans, numbers, strict=True):
        if points_per_unit * (span.end - span.start) < needed:
            continue
        axes.text(
            (span.start + span.end) / 2,
            row,
            number,
            ha="center",
            va="center_baseline",
            fontsize=_FONT,
            color=_INK if _SHADES[span.action.kind] < 2 else "white",
        )


def _frame(axes: Axes, simulation: Simulation, labels: list[str], unit: TimeUnit) -> None:
    axes.set_xlim(0, simulation.makespan or 1.0)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels, fontsize=9, color=_INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8.5, colors=_MUTED)
    axes.xaxis.set_major_formatter(lambda time, _: unit.text(time))
    axes.set_xlabel(f"time in {unit.meaning}", fontsize=9, color=_MUTED)
    axes.spines[:].set_visible(False)
    idle = [f"{simulation.bubble[rank]:.0%}" for rank in sorted(simulation.busy)]
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(idle)), idle, fontsize=9, color=_INK)
    right.tick_params(axis="y", length=0)
    right.spines[:].set_visible(False)
    axes.annotate(
        "bubble", (1, 1), (8, 6), xycoords="axes fraction", textcoords="offset points", fontsize=9, color=_MUTED
    )


def _legend_columns(simulation: Simulation) -> list[list[tuple[str, str]]]:
    """Colours and labels, one below the other in each column: a column for each, or for each modality if too many."""
    kinds: dict[str, list[Kind]] = {}
    for modality, kind in _colours(simulation):
        if any(kind is span.action.kind and modality == _modality(span) for span in simulation.spans):
            kinds.setdefault(modality, []).append(kind)
    columns = []
    for modality, modality_kinds in kinds.items():
        words: dict[str, list[str]] = {}
        for kind in modality_kinds:
            words.setdefault(_colours(simulation)[modality, kind], []).append(_WORDS[kind])
        columns.append([(colour, f"{modality} {' or '.join(several)}") for colour, several in words.items()])
    entries = [entry for column in columns for entry in column]
    return [[entry] for entry in entries] if len(entries) <= _SIDE_BY_SIDE else columns


def _legend(axes: Axes, columns: list[list[tuple[str, str]]]) -> None:
    from matplotlib.patches import Patch

    depth = max(map(len, columns), default=1)
    nothing = Patch(facecolor="none", label=" ")  # fills a column up, for a legend is filled column by column
    patches = [
        patch
        for column in columns
        for patch in (
            *(Patch(facecolor=colour, label=label) for colour, label in column),
            *[nothing] * (depth - len(column)),
        )
    ]
    axes.legend(
        handles=patches,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=max(len(columns), 1),
        fontsize=9,
        labelcolor=_INK,
        frameon=False,
        borderaxespad=0.3,
        borderpad=0,
        handlelength=1.2,
        columnspacing=1.4,
    )


def _chunks(spans: list[Span]) -> dict[str, str]:
    """For each stage of a rank ``.0``, ``.1`` and so on where it has several of the modality, else nothing."""
    stages: dict[str, set[StageKey]] = {}
    for span in spans:
        stages.setdefault(_modality(span), set()).add(span.action.stage)
    return {
        stage: f".{number}" if len(several) > 1 else ""
        for several in stages.values()
        for number, stage in enumerate(sorted(several, key=lambda stage: stage.number))
    }


def _colours(simulation: Simulation) -> dict[tuple[str, Kind], str]:
    modalities = dict.fromkeys(_modality(span) for span in simulation.spans)
    return {
        (modality, kind): _COLOURS[number % len(_COLOURS)][shade]
        for number, modality in enumerate(modalities)
        for kind, shade in _SHADES.items()
    }


def _modality(span: Span) -> str:
    return span.action.stage.modality


def _label(simulation: Simulation, rank: int) -> str:
    stages = dict.fromkeys(span.action.stage for span in simulation.spans if span.rank == rank)
    return f"{rank}  {', '.join(stages)}"
