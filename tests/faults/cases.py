"""The faults of process trees, by class: what fires, where, and which rank and error the last line must name."""

from __future__ import annotations

import random
from typing import Any

from .trees import TreeCase

PHASES = ("group", "setup", "first step", "forward", "backward", "sum", "validation", "checkpoint", "teardown")
"""in the order of a run: before the process group, in `setup`, in the first training step, in a layer's forward and
backward, between the gradient sum and the optimizer's step, in validation, while a checkpoint is saved, at the end"""
WATCHDOG: dict[str, Any] = {"watchdog": 8.0}
"""options of the strategy that let a hang be found within seconds"""
LOST = r"(?i)lost|died|killed|ended|exit|signal|SIGKILL|no longer|gone"
STOPPED = r"(?i)watchdog|no longer answers|no progress|stopped|hang|hung|waits? for|lost"
MISTAKE = "the user's own mistake"


def _rank_of(spec: dict[str, Any]) -> tuple[int, ...]:
    rank = spec.get("rank", 0)
    return (0, 1, 2, 3) if rank == -1 else (rank,)


def _fails(name: str, words: str, **spec: Any) -> TreeCase:
    start, within, blamed = (spec.pop(key, None) for key in ("start", "within", "blamed"))
    return TreeCase(
        name=name,
        spec=spec,
        words=words,
        blamed=blamed or _rank_of(spec),
        start=start or "fork",
        within=within or 30.0,
    )


def kills() -> list[TreeCase]:
    return [
        _fails(f"{phase}, rank {rank}", LOST, action="kill", phase=phase, rank=rank)
        for phase in PHASES
        for rank in range(4)
    ]


def hangs() -> list[TreeCase]:
    found = []
    for action, phase, rank in (
        ("stop", "forward", 2),
        ("stop", "backward", 0),
        ("stop", "step", 3),
        ("stop", "validation", 1),
        ("stop", "setup", 1),
        ("hang", "forward", 1),
        ("hang", "batch end", 0),
        ("hang", "loader", 2),
        ("spin", "sum", 3),
    ):
        name = f"{action} in {phase}, rank {rank}"
        found.append(_fails(name, STOPPED, action=action, phase=phase, rank=rank, options=dict(WATCHDOG), within=60.0))
    return found


def signals() -> list[TreeCase]:
    """As under Lightning alone: SIGTERM ends a run cleanly after its batch, with exit code 0, an interrupt with 1."""
    found = [
        TreeCase(
            name=f"{action}, rank {rank} in {phase}", spec={"action": action, "phase": phase, "rank": rank}, codes=(0,)
        )
        for action, phase, rank in (
            ("term", "forward", 1),
            ("term", "backward", 3),
            ("term", "first step", 0),
            ("term", "validation", 2),
            ("term", "sum", 0),
            ("term", "checkpoint", 1),
            ("term_parent", "forward", 2),
            ("term_parent", "batch end", 3),
            ("term_all", "backward", 1),
            ("term_all", "step", 0),
        )
    ]
    spec = {"action": "interrupt_all", "phase": "forward", "rank": 2}
    return [*found, TreeCase(name="interrupt_all, rank 2 in forward", spec=spec, codes=(1,), words="KeyboardInterrupt")]


def exceptions() -> list[TreeCase]:
    found = [
        _fails(f"in {phase}, rank {rank}", MISTAKE, action="boom", phase=phase, rank=rank)
        for phase, rank in (
            ("group", 2),
            ("setup", 1),
            ("setup", 0),
            ("optimizers", 3),
            ("optimizers", 0),
            ("fit start", 2),
            ("train start", 1),
            ("first step", 0),
            ("step", 3),
            ("step", 2),
            ("forward", 1),
            ("backward", 2),
            ("after backward", 0),
            ("sum", 3),
            ("batch end", 1),
            ("validation start", 3),
            ("validation", 2),
            ("epoch end", 1),
            ("checkpoint", 2),
            ("checkpoint", 0),
            ("loader", 2),
            ("loader", 0),
            ("worker", 1),
            ("worker", 0),
            ("teardown", 3),
        )
    ]
    found += [
        _fails("an assertion", MISTAKE, action="failed_assert", phase="step", rank=2),
        _fails("an assertion of a script", MISTAKE, action="failed_assert", phase="step", rank=2, start="script"),
        _fails("out of memory", MISTAKE, action="out_of_memory", phase="forward", rank=3),
        _fails("wrong shapes", "mat1 and mat2", action="wrong_shape", phase="forward", rank=1),
        _fails("an error of many lines", MISTAKE, action="many_lines", phase="step", rank=3),
        _fails("on all ranks", MISTAKE, action="boom", phase="step", rank=-1),
        _fails("in replicas", MISTAKE, action="boom", phase="step", rank=3, layout="twins"),
        _fails("in a mesh", MISTAKE, action="boom", phase="backward", rank=2, layout="mesh"),
        _fails("in copies", MISTAKE, action="boom", phase="step", rank=1, layout="copies"),
        _fails("os._exit", r"(?i)lost|exit|ended", action="leave", phase="forward", rank=1),
        _fails("sys.exit", r"(?i)exit", action="exit", phase="step", rank=3),
        _fails("abort", LOST + "|SIGABRT", action="abort", phase="forward", rank=2),
        _fails("a worker that is killed", r"(?i)worker", action="kill", phase="worker", rank=2),
        _fails("killed, as a script", LOST, action="kill", phase="forward", rank=2, start="script"),
        _fails("the script's own error on one rank", MISTAKE, action="boom", phase="script", rank=2),
    ]
    return found


def disagreements() -> list[TreeCase]:
    differs = r"(?i)mismatch|differ|disagree|unequal|ended|batch"
    everyone = (0, 1, 2, 3)
    found = [
        _fails(f"{what}, rank {rank}, {layout}", differs, differs=what, rank=rank, layout=layout, blamed=everyone)
        for what, rank, layout in (
            ("fewer batches", 0, "pipe"),
            ("fewer batches", 2, "pipe"),
            ("fewer batches", 3, "twins"),
            ("fewer batches", 1, "copies"),
            ("more batches", 1, "pipe"),
            ("more batches", 0, "mesh"),
            ("no batches", 2, "pipe"),
            ("microbatches", 1, "pipe"),
            ("schedule", 2, "pipe"),
            ("loss weight", 3, "pipe"),
            ("layout", 3, "pipe"),
            ("shape", 2, "pipe"),
            ("frozen", 1, "pipe"),
            ("name", 2, "mesh"),
            ("extra layer", 1, "pipe"),
            ("dtype", 3, "twins"),
            ("version", 2, "pipe"),
        )
    ]
    found += [
        TreeCase(
            name=f"seed, rank {rank}, {layout}",
            spec={"differs": "seed", "rank": rank, "layout": layout},
            blamed=everyone,
            words=r"(?i)seed",
            either=layout == "pipe",
        )
        for rank, layout in ((2, "pipe"), (1, "pipe"))
    ]
    alone = differs + r"|alone|only|waits?|collective|save_checkpoint|all_gather|barrier|broadcast|reduce|watchdog"
    found += [
        _fails(
            f"{what} on rank {rank} only, {layout}",
            alone,
            alone=what,
            rank=rank,
            layout=layout,
            options=dict(WATCHDOG),
            blamed=everyone,
            within=60.0,
        )
        for what, rank, layout in (
            ("save", 0, "pipe"),
            ("save", 0, "copies"),
            ("gather", 0, "pipe"),
            ("gather", 2, "twins"),
            ("barrier", 0, "pipe"),
            ("barrier", 3, "mesh"),
            ("broadcast", 0, "pipe"),
            ("log", 0, "copies"),
        )
    ]
    return found


def not_finite() -> list[TreeCase]:
    everyone = (0, 1, 2, 3)
    found = []
    for value, layout, rank in (
        ("nan", "pipe", -1),
        ("inf", "pipe", -1),
        ("nan", "twins", 3),
        ("nan", "mesh", -1),
        ("-inf", "copies", 1),
    ):
        spec = {"loss": value, "layout": layout, "rank": rank}
        name = f"a loss that is {value}, {layout}"
        found.append(
            TreeCase(
                name=f"{name}, raise",
                spec={**spec, "options": {"on_nonfinite": "raise"}},
                blamed=everyone,
                words="(?i)NonFiniteError|not finite|non-finite|NaN",
            )
        )
        found.append(TreeCase(name=f"{name}, skip", spec={**spec, "options": {"on_nonfinite": "skip"}}))
    found.append(TreeCase(name="a loss that is nan, as Lightning", spec={"loss": "nan", "rank": -1}, equal=True))
    found.append(TreeCase(name="a batch with nan, as Lightning", spec={"batch_is": "nan", "rank": -1}, equal=True))
    found.append(_fails("a loss without a gradient", r"(?i)grad", loss="no gradient", rank=-1))
    found.append(_fails("no loss", r"(?i)loss|None", loss="none", rank=-1))
    return found


def batches() -> list[TreeCase]:
    """What loaders may yield: right as on one process, or one error."""
    everyone = (0, 1, 2, 3)
    right = (
        "one sample",
        "three samples",
        "extra string",
        "extra strings",
        "extra none",
        "extra scalar",
        "extra object",
    )
    wrong = {
        "none": r"(?i)batch|None",
        "empty": r"(?i)sample|batch|empty",
        "string": r"(?i)batch|str",
        "number": r"(?i)batch|int",
        "empty dict": r"(?i)batch|KeyError|sample",
        "unequal": r"(?i)batch|sample",
        "meta device": r"(?i)meta|device",
        "without images": r"(?i)images",
        "images none": r"(?i)NoneType|None|images",
        "float32": r"(?i)dtype|float",
        "wider": r"(?i)shape|mat1",
        "bad label": r"(?i)target|index|range|bounds",
        "list": r"(?i)list|batch|indices",
    }
    found = [TreeCase(name=what, spec={"batch_is": what, "rank": -1}, equal=True) for what in right]
    found += [
        TreeCase(name=what, spec={"batch_is": what, "rank": -1}, blamed=everyone, words=words)
        for what, words in wrong.items()
    ]
    found += [
        TreeCase(
            name=f"{what}, {layout}",
            spec={"batch_is": what, "rank": -1, "layout": layout},
            blamed=everyone,
            words=wrong[what],
        )
        for what, layout in (("empty", "twins"), ("none", "mesh"), ("unequal", "copies"))
    ]
    found += [
        TreeCase(name="an empty loader", spec={"differs": "no batches", "rank": -1}, equal=False),
        TreeCase(
            name="one sample, one rank",
            spec={"batch_is": "one sample", "rank": 2, "options": dict(WATCHDOG)},
            blamed=everyone,
            words=r"(?i)batch|sample|shape|size|microbatch|differ|watchdog",
        ),
        TreeCase(
            name="first batch of one sample",
            spec={"batch_is": "one sample", "rank": -1, "batch": 0},
            blamed=everyone,
            words="num_microbatches",
        ),
    ]
    return found


def randoms(seed: int, count: int = 50) -> list[TreeCase]:
    """Faults drawn at random: what, where, on which rank and in which layout."""
    choose = random.Random(seed)
    found = []
    phases = [*PHASES, "optimizers", "fit start", "train start", "step", "after backward", "batch end", "epoch end"]
    for number in range(count):
        action = choose.choice(["kill", "kill", "boom", "boom", "failed_assert", "leave", "abort", "stop", "term"])
        phase, rank = choose.choice(phases), choose.randrange(4)
        layout = choose.choice(["pipe", "pipe", "twins", "mesh", "copies"])
        spec: dict[str, Any] = {"action": action, "phase": phase, "rank": rank, "layout": layout}
        if phase not in ("group", "setup", "optimizers", "fit start", "train start", "first step", "epoch end"):
            spec["batch"] = choose.randrange(1, 3)
        words = MISTAKE
        if action in ("kill", "leave", "abort", "term"):
            words = LOST + "|SIGABRT"
        elif action == "stop":
            words, spec["options"] = STOPPED, dict(WATCHDOG)
        name = f"{number}: {action} in {phase}, rank {rank}, {layout}"
        if action == "term" and phase not in ("group", "setup", "optimizers"):  # else before Lightning's own handler
            found.append(TreeCase(name=name, spec=spec, codes=(0, -15)))
        else:
            found.append(_fails(name, words, within=60.0 if action == "stop" else None, **spec))
    return found


def trees(seed: int) -> dict[str, list[TreeCase]]:
    """All classes by name."""
    return {
        "kill -9": kills(),
        "hangs": hangs(),
        "signals": signals(),
        "exceptions": exceptions(),
        "disagreements": disagreements(),
        "not finite": not_finite(),
        "batches": batches(),
        f"random, seed {seed}": randoms(seed),
    }
