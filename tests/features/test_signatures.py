"""Every signature of a step or a batch hook that Lightning calls is called with what Lightning passes.

vision: rank 0; language: rank 1
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from features.refusals.test_own_norms import CPU, REFUSALS, plan_of
from features.toys import PAIR, PIPE, Outcome, Run, Toy, assert_same, figures, outcomes
from lightning_mm5d import ConfigError


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def without_index(self: Any, batch: Any) -> Any:
    return self.did(batch, [])


def with_index(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.did(batch, [batch_idx])


def with_annotated_default(self: Any, batch: Any, batch_idx: int | None = None) -> Any:
    return self.did(batch, [batch_idx])


def with_other_names(self: Any, items: Any, number: int) -> Any:
    return self.did(items, [number])


def with_index_by_keyword(self: Any, batch: Any, *, batch_idx: int = 7) -> Any:
    return self.did(batch, [batch_idx])


def with_positions_only(self: Any, batch: Any, batch_idx: int, /) -> Any:
    return self.did(batch, [batch_idx])


def with_rest(self: Any, batch: Any, *args: Any) -> Any:
    return self.did(batch, args)


def with_keywords(self: Any, batch: Any, **kwargs: Any) -> Any:
    return self.did(batch, [*kwargs.values()])


def with_anything(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.did(args[0], [*args[1:], *kwargs.values()])


@wrapped
def decorated(self: Any, batch: Any) -> Any:
    return self.did(batch, [])


def with_loader(self: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
    return self.did(batch, [batch_idx, dataloader_idx])


def with_loader_default(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
    return self.did(batch, [batch_idx, dataloader_idx])


STEPS = (
    without_index,
    with_index,
    with_annotated_default,
    with_other_names,
    with_index_by_keyword,
    with_positions_only,
    with_rest,
    with_keywords,
    with_anything,
    decorated,
    with_loader_default,
)
OF_LOADERS = (with_loader, with_loader_default, with_rest, with_anything)
"""signatures of evaluation with several dataloaders"""


class Called(Toy):
    """Logs what its steps are given, and keeps what its hooks are."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked: list[Any] = []

    def did(self, batch: dict[str, Tensor], rest: Any) -> Any:
        loss = F.cross_entropy(self(batch), batch["label"])
        name = self.trainer.state.stage
        if name != "predict":
            self.log(f"{name}_loss", loss, on_epoch=True)
            for place, value in enumerate(rest):
                self.log(f"{name}_{place}_of_{len(rest)}", float(value), on_epoch=True)
        return loss if name == "train" else batch["images"].sum(1)


def hook(name: str, form: str) -> Callable[..., Any]:
    """Return the batch hook `name` with all arguments named, with what Lightning may leave out, or with any."""
    ends = name.endswith("end")

    def heard(self: Any, args: Any) -> None:
        rest = args[2:] if ends else args[1:]
        self.hooked.append((name, len(args), *rest))

    def start(self: Any, batch: Any, batch_idx: int) -> None:
        heard(self, (batch, batch_idx))

    def end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        heard(self, (outputs, batch, batch_idx))

    def start_of_loader(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        heard(self, (batch, batch_idx, dataloader_idx))

    def end_of_loader(self: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        heard(self, (outputs, batch, batch_idx, dataloader_idx))

    def anything(self: Any, *args: Any, **kwargs: Any) -> None:
        heard(self, (*args, *kwargs.values()))

    if form == "any":
        return anything
    if form == "loader" and "train" not in name:
        return end_of_loader if ends else start_of_loader
    return end if ends else start


HOOKS = [
    f"on_{loop}_batch_{place}" for loop in ("train", "validation", "test", "predict") for place in ("start", "end")
]
STEP_NAMES = ("training_step", "validation_step", "test_step", "predict_step")


def made(step: Callable[..., Any], form: str) -> Called:
    steps: dict[str, Any] = dict.fromkeys(STEP_NAMES, step)
    if step in OF_LOADERS:
        steps["training_step"] = with_index
    return type("Module", (Called,), {**steps, **{name: hook(name, form) for name in HOOKS}})()


def ran(run: Run, module: Called, loaders: int) -> Any:
    """Fit, validate, test and predict with `loaders` dataloaders for evaluation."""

    def data() -> Any:
        found = [run.loader(16) for _ in range(loaders)]
        return found if loaders > 1 else found[0]

    trainer = run.trainer(num_sanity_val_steps=1)
    trainer.fit(module, run.training(), data())
    fitted = figures(trainer)
    results = [trainer.validate(module, data(), verbose=False), trainer.test(module, data(), verbose=False)]
    return fitted, results, trainer.predict(module, data()), module.hooked


def signatures(run: Run) -> Any:
    found = {}
    for index, step in enumerate(STEPS):
        form = ("all", "loader", "any")[index % 3]
        found[f"{step.__name__}, {form}"] = ran(run, made(step, form), 1)
    for step in OF_LOADERS:
        found[f"{step.__name__} of two loaders"] = ran(run, made(step, "loader"), 2)
    return found


@pytest.fixture(scope="module")
def found() -> Outcome:
    return outcomes(PAIR, signatures)["signatures"]


def test_steps_and_hooks_of_every_signature_get_what_lightning_passes(found: Outcome) -> None:
    for got in found.ranks:
        for name, expected in found.one.items():
            assert_same(got[name], expected, where=name)


def test_a_step_that_takes_batches_from_the_loader_by_itself_is_refused() -> None:
    class Fetching(Toy):
        def training_step(self, dataloader_iter: Any) -> Any:
            return self.loss(next(dataloader_iter)[0])

    with pytest.raises(ConfigError, match="dataloader_iter"):
        REFUSALS.check(Fetching(), plan_of(PIPE), CPU)
