"""The comparison of Cornstarch (Jang et al. 2025, arXiv:2503.11367) by simulation: multimodal pipelines on 24 devices.

Text with images, with sound and with both, at three scales, trained completely, and frozen but for the projectors.
Throughput is compared: microbatches per time, as the share of the devices' time that goes into needed work. Work is
counted in multiply-adds (`paper_models.py`), layouts are ours and three of others (`paper_layouts.py`), and each side
has the best of its layouts that fits into memory.

The published averages are of measurements on 24 GPUs. These also contain what is not simulated here: how well kernels
run, and what tensor and context parallelism cost and how even they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, product
from multiprocessing import Pool
from statistics import mean

from paper_layouts import Placed, Ranks, apart, colocated, ours, replicated, shortest
from paper_models import SCALES, Sample, model

from lightning_mm5d.partition import step_costs
from lightning_mm5d.schedule import SCHEDULES

ENCODERS = {"text + vision": ("vision",), "text + audio": ("audio",), "all three": ("vision", "audio")}
RANKS = {
    "6 stages of 4 devices": Ranks(replicas=1, stages=6, width=4, microbatches=24),
    "4 replicas of 6 stages": Ranks(replicas=4, stages=6, width=1, microbatches=6),
    "24 stages": Ranks(replicas=1, stages=24, width=1, microbatches=24),
}
OTHERS = {"apart": apart, "colocated": colocated, "replicated": replicated}
MOST_BYTES = 100 * 2**30
"""For weights, gradients and optimizer states on a device of 141 GB."""
MULTIPLY_ADDS_PER_BYTE = 200e12 / 50e9
"""What a device computes while a byte crosses to the next one: 400 TFLOP/s, 400 Gbit/s."""

STEPS: dict[str, tuple[Callable[[str], bool], tuple[str, ...]]] = {
    "search, 1f1b": (lambda layout: layout == "search, 1", ("1f1b",)),
    "search, auto": (lambda layout: layout == "search, 1", ("auto",)),
    "and chunks": (lambda layout: layout.startswith("search"), ("auto",)),
    "and encoders spread": (lambda layout: True, ("auto",)),
}
"""What ours is made of: which layouts, which schedules."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is assumed.

    Args:
        sample: of a microbatch.
        recomputed: whether layers run their forward again in backward.
        transfers: whether messages take time, as long as the language model's hidden state takes in bfloat16.
    """

    sample: Sample = field(default_factory=Sample)
    recomputed: bool = False
    transfers: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the comparison; the encoders' scale is that of the language model where it is not said."""

    encoders: str
    scale: str
    frozen: bool
    ranks: str
    setting: Setting = field(default_factory=Setting)
    encoder_scale: str | None = None


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the devices' time that go into work that is needed; 0 where nothing fits.

    Args:
        ours: the best.
        layout: what it is.
        steps: by the names of `STEPS`.
        others: by name of the layout, balanced as if all were trained.
        aware: of others, balanced with what is frozen in mind.
    """

    ours: float = 0.0
    layout: str = "none fits"
    steps: dict[str, float] = field(default_factory=dict)
    others: dict[str, float] = field(default_factory=dict)
    aware: dict[str, float] = field(default_factory=dict)


def evaluate(case: Case) -> Shares:
    """Find all sides' best layouts of one case and simulate them."""
    side = _Side(case)
    layouts = [candidate for candidate in ours(side.model, side.ranks) if candidate.bytes <= MOST_BYTES]
    schedules = SCHEDULES if case.setting.transfers else ("auto",)
    best, layout = side.share(layouts, schedules)
    steps = {
        name: side.share([candidate for candidate in layouts if wanted(candidate.name)], steps)[0]
        for name, (wanted, steps) in STEPS.items()
    }
    others, aware = side.others(OTHERS)
    return Shares(ours=best, layout=layout, steps=steps, others=others, aware=aware)


def evaluate_awareness(case: Case) -> Shares:
    """The shares with encoders on their own ranks only, without a limit on memory."""
    others, aware = _Side(case, most_bytes=float("inf")).others({"apart": apart})
    return Shares(others=others, aware=aware)


class _Side:
    """The layouts of one case, from what is placed to its share."""

    def __init__(self, case: Case, most_bytes: float = MOST_BYTES) -> None:
        setting = case.setting
        self.ranks, self.most_bytes = RANKS[case.ranks], most_bytes
        self.model = model(
            ENCODERS[case.encoders],
            case.scale,
            setting.sample,
            frozen=case.frozen,
            recomputed=setting.recomputed,
            encoder_scale=case.encoder_scale,
        )
        self.transfer_cost = 2 * self.model.message * MULTIPLY_ADDS_PER_BYTE if setting.transfers else 0.0
        rows, trained = self.model.rows, self.model.trained
        self.work = sum(sum(step_costs(row, trained, name == "language")) for name, row in rows.items())

    def others(self, layouts: dict[str, Callable[..., Placed | None]]) -> list[dict[str, float]]:
        """Their shares, without and with knowing what is frozen."""
        shares = []
        for believed in (self.model.everything, self.model.trained):
            placed = {name: lay(self.model, self.ranks, believed) for name, lay in layouts.items()}
            fits = {
                name: [layout]
                for name, layout in placed.items()
                if layout is not None and layout.bytes <= self.most_bytes
            }
            shares.append({name: self.share(fits.get(name, []), ("1f1b",))[0] for name in layouts})
        return shares

    def share(self, layouts: list[Placed], schedules: Collection[str]) -> tuple[float, str]:
        """The largest share of some layouts under some schedules, and which it is."""
        if not layouts:
            return 0.0, "none fits"
        makespan, placed, schedule = shortest(layouts, schedules, self.transfer_cost)
        return self.work * self.ranks.microbatches / self.ranks.stages / makespan, f"{placed.name}, {schedule}"


def cases(setting: Setting, ranks: Iterable[str]) -> list[Case]:
    """All cases of one setting."""
    return [
        Case(encoders=encoders, scale=scale, frozen=frozen, ranks=name, setting=setting)
        for frozen, encoders, scale, name in product((False, True), ENCODERS, SCALES, ranks)
    ]


def best_ranks(by_case: dict[Case, Shares], ranks: Collection[str]) -> dict[Case, Shares]:
    """For each case every side's best over some ranks."""
    best: dict[Case, Shares] = {}
    for case, shares in by_case.items():
        if case.ranks in ranks:
            key = replace(case, ranks="the better of both")
            known = best.get(key, Shares())
            longer = shares if shares.ours > known.ours else known
            larger = {name: max(share, known.others.get(name, 0.0)) for name, share in shares.others.items()}
            aware = {name: max(share, known.aware.get(name, 0.0)) for name, share in shares.aware.items()}
            best[key] = replace(longer, others=larger, aware=aware)
    return best


def show(by_case: dict[Case, Shares]) -> None:
    """Print a line for each case."""
    _row("case", "trained", "ranks", "ours", *(f"ours / {name}" for name in OTHERS), "our layout, schedule", head=True)
    for case, shares in by_case.items():
        ratios = [_ratio(shares.ours, shares.others[name]) for name in OTHERS]
        our_share = f"{shares.ours:.3f}" if shares.ours else "-"
        _row(f"{case.encoders}, {case.scale}", _trained(case.frozen), case.ranks, our_share, *ratios, shares.layout)


def summary(title: str, by_case: dict[Case, Shares]) -> None:
    """Print the averages of `by_case`, apart for trained and frozen: over each layout of others, and over all."""
    for frozen in (False, True):
        mine = [shares for case, shares in by_case.items() if case.frozen == frozen]
        pairs = [(name, shares.ours, shares.others[name]) for shares in mine for name in OTHERS]
        aware = [shares.ours / share for shares in mine for share in shares.aware.values() if shares.ours and share]
        ratios = {name: [a / b for other, a, b in pairs if other == name and a and b] for name in OTHERS}
        means = [*map(mean, ratios.values()), mean(chain.from_iterable(ratios.values())), mean(aware)]
        _row(title, _trained(frozen), *(f"{ratio:.2f}" for ratio in means))


def show_awareness(title: str, all_shares: Iterable[Shares]) -> None:
    """Print what knowing of frozen modules gives where nothing else differs."""
    gains = [shares.aware["apart"] / shares.others["apart"] for shares in all_shares if shares.others["apart"]]
    _row(title, f"{mean(gains):.2f}", f"{max(gains):.2f}")


def show_steps(by_case: dict[Case, Shares]) -> None:
    """Print what each part of ours gives: the average share of the devices' time."""
    _row("ranks", "trained", "apart", *STEPS, head=True)
    for name, frozen in product(RANKS, (False, True)):
        mine = [
            shares for case, shares in by_case.items() if (case.ranks, case.frozen) == (name, frozen) and shares.ours
        ]
        means = [
            mean(shares.others["apart"] for shares in mine),
            *(mean(shares.steps[step] for shares in mine) for step in STEPS),
        ]
        _row(name, _trained(frozen), *(f"{share:.3f}" for share in means))


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if ours and theirs else "-"


def _trained(frozen: bool) -> str:
    return "projectors" if frozen else "all"


def _row(*cells: str, head: bool = False) -> None:
    print(f"{chr(10) * head}| {' | '.join(cells)} |" + f"\n|{' --- |' * len(cells)}" * head, flush=True)


def main() -> None:
    many = Sample(images=4, clips=4)
    settings = {
        "": Setting(),
        "recomputed, ": Setting(recomputed=True),
        "four images and clips, ": Setting(sample=many),
        "text of 4,096, ": Setting(sample=Sample(text=4096)),
        "messages take time, ": Setting(transfers=True),
    }
    published, *pure = RANKS
    with Pool(len(os.sched_getaffinity(0))) as pool:

        def run(every: list[Case], function: Callable[[Case], Shares] = evaluate) -> dict[Case, Shares]:
            return dict(zip(every, pool.map(function, every, chunksize=1), strict=True))

        by_case = run(cases(Setting(), RANKS))
        better = best_ranks(by_case, pure)
        show({**by_case, **better})
        show_steps(by_case)
        _row("averages", "trained", *(f"ours / {name}" for name in OTHERS), "over all", "over all, aware", head=True)
        for prefix, setting in settings.items():
            more = run(cases(setting, RANKS if not prefix else [published, pure[0]])) if prefix else by_case
            for name in dict.fromkeys(case.ranks for case in more):
                summary(f"{prefix}{name}", {case: shares for case, shares in more.items() if case.ranks == name})
            if not prefix:
                summary("the better of the last two", better)
        _row("apart, 1f1b, projectors trained: balanced with that in mind / not", "mean", "most", head=True)
        for sample, recomputed, encoder_scale in product((Sample(), many), (False, True), (None, "large")):
            setting = Setting(sample=sample, recomputed=recomputed)
            every = [case for case in cases(setting, RANKS) if case.frozen]
            if encoder_scale:
                every = [replace(case, encoder_scale=encoder_scale) for case in every if case.scale == "small"]
            title = f"{sample.images} image, clip{', recomputed' * recomputed}"
            title += ", small language models after large encoders" if encoder_scale else ""
            show_awareness(title, run(every, evaluate_awareness).values())


if __name__ == "__main__":
    main()
