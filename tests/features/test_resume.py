"""A run that stops in the midst of an epoch goes on to the last bit as if it had not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from features.resuming import (
    Batches,
    Case,
    Drawn,
    Shuffled,
    Single,
    StatefulBatches,
    StatefulStream,
    Streamed,
    Watched,
    assert_exact,
    loader,
    stopped_and_resumed,
    train,
)
from features.toys import PIPE, TWINS, Layout, Run, alone, together
from lightning_mm5d import Modality
from sweeps import swept

ONE = Layout({"model": Modality()}, 1)
"""rank 0"""
TWO = Layout({"model": Modality()}, 2, 2)
"""two replicas: ranks 0-1"""
PLAIN = {"num_microbatches": 1}
OWN = {"use_distributed_sampler": False}

SAMPLERS = {
    "shuffled": Case(loader(shuffle=True)),
    "in order": Case(loader(), trainer=OWN),
    "random": Case(loader(shuffle=True), trainer=OWN),
    "generator": Case(
        lambda run: DataLoader(Drawn(24), 4, shuffle=True, generator=torch.Generator().manual_seed(3)), trainer=OWN
    ),
    "with replacement": Case(
        lambda run: DataLoader(Drawn(24), 4, sampler=RandomSampler(range(24), replacement=True)), trainer=OWN
    ),
    "subset": Case(lambda run: DataLoader(Drawn(30), 4, sampler=SubsetRandomSampler(range(4, 28)))),
    "weighted": Case(lambda run: DataLoader(Drawn(24), 4, sampler=WeightedRandomSampler([1.0] * 24, 24))),
    "batches": Case(lambda run: DataLoader(Drawn(26), batch_sampler=Shuffled(SequentialSampler(range(26)), 4, True))),
}
LOADERS = {
    "workers": Case(loader(shuffle=True, num_workers=2)),
    "persistent workers": Case(loader(shuffle=True, num_workers=1, persistent_workers=True)),
    "unbatched": Case(lambda run: DataLoader(Single(Drawn(24)), None, sampler=RandomSampler(range(6)), num_workers=2)),
    "stream": Case(lambda run: DataLoader(Streamed(24), 4)),
    "no dataloader": Case(lambda run: Batches(24, 4)),
    "stateful": Case(lambda run: StatefulDataLoader(Drawn(24), 4, shuffle=True)),
    "stateful stream": Case(lambda run: StatefulDataLoader(StatefulStream(24), 4)),
    "cycled": Case(lambda run: [DataLoader(Drawn(24), 4, shuffle=True), DataLoader(Drawn(12), 4, shuffle=True)]),
    "shortest": Case(
        lambda run: CombinedLoader([DataLoader(Drawn(24), 4), DataLoader(Drawn(40), 4, shuffle=True)], "min_size")
    ),
    "window": Case(loader(shuffle=True), trainer={"accumulate_grad_batches": 4}),
}


def exact(layout: Layout, cases: dict[str, Case], stops: list[int], folder: Path, **options: Any) -> None:
    """Every case, stopped after each of `stops` steps, on every rank; the weights on rank 0, which has them all."""

    def everything(run: Run) -> dict[tuple[str, int], Any]:
        return {
            (name, stop): stopped_and_resumed(run, case, stop, f"{name}{stop}")
            for name, case in cases.items()
            for stop in stops
        }

    ranks = together(layout, everything, folder, **options)
    for number, found in enumerate(ranks):
        for (name, stop), one in found.items():
            if number > 0 and len(layout.modalities) > 1:
                one["whole"]["weights"] = {}
            window = cases[name].trainer.get("accumulate_grad_batches", 1)
            steps = sum(epoch == 0 for epoch, _, _ in one["whole"]["steps"])
            is_split = layout.replicas == 1 and layout.world > 1
            assert_exact(one, stop % steps % window, goes_on_drawing=not is_split)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param(ONE, PLAIN, id="one"),
        pytest.param(TWO, PLAIN, id="replicas", marks=pytest.mark.exhaustive),
        pytest.param(TWINS, {}, id="modalities"),
    ],
)
def test_every_sampler_goes_on_to_the_last_bit(layout: Layout, options: dict[str, Any], tmp_path: Path) -> None:
    cases = SAMPLERS if layout is ONE else {name: SAMPLERS[name] for name in ("shuffled", "weighted", "batches")}
    exact(layout, cases, [4 if layout is TWO else 2], tmp_path, **options)


def test_every_kind_of_loader_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    exact(ONE, LOADERS, [5], tmp_path, **PLAIN)


@pytest.mark.parametrize("name", swept(["workers", "stateful"], "workers"))
def test_loaders_of_several_replicas_go_on_to_the_last_bit(name: str, tmp_path: Path) -> None:
    exact(TWINS, {name: LOADERS[name]}, [2], tmp_path)


def test_several_batches_for_each_step_go_on_to_the_last_bit(tmp_path: Path) -> None:
    cases = {"shuffled": Case(loader(batch=2, shuffle=True))}
    exact(PIPE, cases, [2], tmp_path, num_microbatches=3, microbatching="loader")


class SaveAtEnd(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def ended_by_max_steps(run: Run) -> list[Any]:
    found = []
    for number, made in enumerate(
        (
            lambda: StatefulBatches(24, 4),
            lambda: [StatefulBatches(24, 4), StatefulBatches(24, 4)],
            lambda: StatefulDataLoader(Drawn(24), 4),
            lambda: StatefulDataLoader(StatefulStream(24), 4),
        )
    ):
        seen: list[Any] = []
        path = None
        for steps in (2, 3, 5):
            module, saver = Watched(), SaveAtEnd(run.folder / f"{number}-{steps}")
            run.trainer(max_steps=steps, max_epochs=-1, callbacks=[saver]).fit(module, made(), ckpt_path=path)
            path = saver.path
            seen += [indices for _, _, indices in module.steps]
        found.append(seen)
    return found


def test_a_state_of_the_loader_goes_on_where_max_steps_ended_an_epoch(tmp_path: Path) -> None:
    """As in plain Lightning, which counts an epoch then and hands the loader its state."""
    found = together(ONE, ended_by_max_steps, tmp_path, num_microbatches=1)[0]
    batch = [tuple(range(start, start + 4)) for start in range(0, 20, 4)]
    assert found == [batch, [(one, one) for one in batch], batch, batch]


@pytest.mark.exhaustive
@pytest.mark.parametrize("stop", range(1, 12))
@pytest.mark.parametrize(
    ("layout", "options"),
    [(ONE, PLAIN), (ONE, {}), (TWO, PLAIN), (TWO, {}), (TWINS, {}), (PIPE, {}), (PIPE, {"microbatching": "loader"})],
)
def test_all_samplers_and_loaders_stop_anywhere(
    layout: Layout, options: dict[str, Any], stop: int, tmp_path: Path
) -> None:
    cases = SAMPLERS if options.get("microbatching") or layout is TWINS else SAMPLERS | LOADERS
    steps = 12 // layout.replicas
    if stop % steps == 0 or (layout.replicas > 1 and stop >= steps):
        pytest.skip("nothing is left")
    if layout.replicas > 1:  # replicas read such data in full, or some of it twice
        cases = {name: case for name, case in cases.items() if case.trainer != OWN and "stream" not in name}
    exact(layout, cases, [stop], tmp_path, **options)


def test_plain_lightning_resumes_from_the_file(tmp_path: Path) -> None:
    case = SAMPLERS["in order"]

    def saved(run: Run) -> Any:
        return train(run, case, path=tmp_path / "mid.ckpt", after=2)

    together(ONE, saved, tmp_path, **PLAIN)
    found = alone(lambda run: train(run, case, ckpt_path=tmp_path / "mid.ckpt"), tmp_path)
    assert found["global_step"] == 12


def test_a_file_that_does_not_tell_what_was_consumed_warns(tmp_path: Path) -> None:
    case = SAMPLERS["in order"]
    alone(lambda run: train(run, case, path=tmp_path / "plain.ckpt", after=2), tmp_path)

    def resumed(run: Run) -> Any:
        with pytest.warns(UserWarning, match="does not say which samples were consumed"):
            return train(run, case, ckpt_path=tmp_path / "plain.ckpt")

    assert together(ONE, resumed, tmp_path, **PLAIN)[0]["global_step"] == 12
