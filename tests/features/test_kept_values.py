"""What steps keep in attributes of the module is there for hooks, on every rank: the idiom for the end of an epoch."""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from features.toys import (
    LANGUAGE,
    PAIR,
    PIPE,
    SHARED,
    TWINS,
    VISION,
    Decoder,
    Layout,
    Outcome,
    Run,
    Toy,
    assert_same,
    figures,
    outcomes,
    weights,
)
from lightning_mm5d import Modality
from lightning_mm5d.trainer.kept_values import KeptState, KeptValues, memory_kept, objects_of_hooks

FOUR = Layout({"vision": Modality(pp_size=2, **VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 4)
"""vision: ranks 0-1 as stages; language: ranks 2-3 as stages"""
ROUND = Layout(
    {
        "vision": Modality(colocate_with="language.0", **VISION),
        "language": Modality(pp_size=2, pipeline={"pp_chunks": 2}, **LANGUAGE),
    },
    2,
)
"""language: ranks 0-1 with two chunks each; vision: rank 0"""
LAYOUTS = {"pair": PAIR, "twins": TWINS, "four": FOUR, "round": ROUND}


class Meter:
    """An average as users write it."""

    def __init__(self) -> None:
        self.sum, self.count, self.values = 0.0, 0, list[float]()

    def update(self, value: float, count: int) -> None:
        self.sum, self.count = self.sum + value * count, self.count + count
        self.values.append(value)


@dataclass
class Scores:
    loss: Tensor
    name: str


class Kept(Toy):
    """Appends, adds and writes in its steps, and reads all of it in hooks for ends of epochs."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.outputs: list[Any] = []
        self.losses: list[Tensor] = []
        self.parts: dict[str, list[Any]] = {"logits": [], "arrays": []}
        self.by_label: dict[int, list[float]] = defaultdict(list)
        self.seen, self.worst, self.names = 0, 0.0, set[str]()
        self.total, self.counts = torch.zeros(()).double(), np.zeros(3)
        self.meter, self.shape = Meter(), (0, 0)
        self.reports: list[Any] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss)
        self.meter.update(loss.item(), len(batch["label"]))
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_loss", torch.stack(self.losses).mean(), sync_dist=True)
        self.log("metered", self.meter.sum / self.meter.count, sync_dist=True)
        self.reports.append(["train", self.meter.count])
        self.losses.clear()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self(batch)
        loss = F.cross_entropy(logits, batch["label"])
        self.outputs.append({"loss": loss, "samples": len(logits)})
        self.outputs += [Scores(loss, "x")]
        self.parts["logits"].append(logits)
        self.parts["arrays"].extend(logits.argmax(-1).cpu().numpy())
        for label, one in zip(batch["label"].tolist(), logits[:, 0].tolist(), strict=True):
            self.by_label[label].append(one)
        self.seen += len(logits)
        self.worst = max(self.worst, float(-logits.min()))
        self.names.add(f"batch {batch_idx}")
        self.total += (loss.detach() * len(logits)).cpu()
        self.counts += np.bincount(batch["label"].cpu().numpy(), minlength=3)
        self.shape = tuple(logits.shape[1:])
        self.last = logits.softmax(-1).cpu().numpy()[-1]
        self.drawing = object()

    def on_validation_epoch_end(self) -> None:
        found = {
            "loss": sum(one["loss"] * one["samples"] for one in self.outputs[::2]) / self.seen,
            "named": [one.name for one in self.outputs[1:2]],
            "logits": torch.cat(self.parts["logits"]),
            "classes": [int(one) for one in self.parts["arrays"]],
            "by_label": {str(label): values for label, values in sorted(self.by_label.items())},
            "seen": self.seen,
            "worst": self.worst,
            "names": sorted(self.names),
            "total": float(self.total),
            "counts": self.counts.tolist(),
            "shape": list(self.shape),
            "last": self.last.tolist(),
        }
        self.reports.append(found)
        if self.folder is not None and self.trainer.is_global_zero:
            (self.folder / "seen.json").write_text(json.dumps([found["classes"], found["total"]]))
        self.outputs.clear()
        self.parts = {"logits": [], "arrays": []}
        self.by_label.clear()
        self.seen = 0


def kept(run: Run) -> Any:
    run.folder.mkdir(parents=True, exist_ok=True)
    module, trainer = Kept(run.folder), run.trainer(max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(module, run.training(), run.loader(24))
    return module.reports, figures(trainer), json.loads((run.folder / "seen.json").read_text()), drawn(module)


def drawn(module: Kept) -> str:
    try:
        return str(module.drawing.width)
    except ValueError as error:
        return str(error)
    except AttributeError:
        return "it is here"


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request: Any, tmp_path_factory: Any) -> tuple[Layout, Outcome]:
    options = {"schedule": "interleaved"} if request.param == "round" else {}
    layout, folder = LAYOUTS[request.param], tmp_path_factory.mktemp("kept")
    return layout, outcomes(layout, kept, folder=folder, **options)["kept"]


def test_hooks_read_what_the_steps_of_the_whole_replica_kept(found: Any) -> None:
    layout, outcome = found
    reports, logged, file, _ = outcome.one
    for rank, (got, got_logged, got_file, told) in enumerate(outcome.ranks):
        names = ("epoch_loss", "metered") if layout.replicas > 1 else logged
        assert_same({name: got_logged[name] for name in names}, {name: logged[name] for name in names}, 1e-6)
        assert told == "it is here" or "self.drawing, of type object, cannot be sent" in told
        if layout.replicas == 1:
            assert_same(got, reports)
            assert_same(got_file, file)
        elif rank > 0:  # each replica has its own samples
            assert len(got[-2]["classes"]) == 12
            assert_same(got_file[0], outcome.ranks[1][0][-2]["classes"])


class Plain(Toy):
    """Puts lists of four into attributes, where microbatches have four samples: of samples, and of a shape."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.shape, self.fixed = [*batch["images"].shape, *batch["tokens"].shape], (4, 3)
        self.rows = [float(image.sum()) for image in batch["images"]]
        return super().training_step(batch, batch_idx)


def plain(run: Run) -> Any:
    module = Plain()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run.trainer().fit(module, run.training(8))
    told = [str(one.message) for one in seen if "the step put" in str(one.message)]
    return told, module.rows, module.fixed


class Again(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.read.append([*self.rows])


def again(run: Run) -> Any:
    """Batches of 8, 4, 8, 4 samples in microbatches of 4, 2, 4, 2."""
    module = Again()
    run.trainer(max_epochs=2).fit(module, run.training(12))
    return module.read


class Counts(torch.nn.Module):
    """Counts its calls, and keeps something else from the second batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.late, self.begins = 0, torch.zeros(1), False

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return hidden


class Late(Counts):
    def forward(self, hidden: Tensor) -> Tensor:
        if self.begins:
            self.late = hidden.detach()
        return hidden


class Inner(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.encoder.projector = torch.nn.Sequential(self.encoder.projector, Counts(), Late())

    def on_train_batch_end(self, *_: Any) -> None:
        self.encoder.projector[2].begins = True


def inner(run: Run) -> Any:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run.trainer().fit(Inner(), run.training(24))
    return [str(one.message) for one in seen if "is written" in str(one.message)]


def check_inner(outcome: Outcome) -> None:
    """The rank that computes the encoder tells once of each."""
    assert outcome.one == outcome.ranks[1] == []
    counts, late = outcome.ranks[0]
    assert "'encoder.projector.1' is written for each microbatch" in counts
    assert "calls of" in counts
    assert "'late' of 'encoder.projector.2'" in late


def test_a_list_that_may_tell_of_no_sample_and_what_inner_modules_count_is_told_of() -> None:
    found = outcomes(PAIR, plain, inner, again)
    check_inner(found["inner"])
    assert list(map(len, found["again"].one)) == [8, 4, 8, 4]
    for read in found["again"].ranks:
        assert_same(read, found["again"].one)
    outcome = found["plain"]
    assert outcome.one[0] == []
    for (told, *kept), ends_here in zip(outcome.ranks, (False, True), strict=True):
        assert_same(kept, [*outcome.one[1:]])
        assert len(told) == ends_here
        assert all("'shape'" in one and "keep a tuple" in one for one in told)


class CachingDecoder(Decoder):
    """Keeps what its own code reads again, what only hooks read, and what some data alone leave."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Any = None
        self.tables: dict[Any, Tensor] = {}
        self.seen: set[Any] = set()
        self.last_features: Any = None
        self.last_logits: Any = None
        self.rare: Any = None

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        if self.mask is None or self.mask.size(0) < tokens.size(1):
            self.mask = torch.full((600, 600), 0.5, dtype=torch.float64, device=tokens.device)  # too large to be sent
        key = tokens.size(1), tokens.device  # no key that crosses
        if key not in self.tables:
            self.tables[key] = self.mask[: tokens.size(1), :1]
        self.seen.add(key)
        if bool((tokens[:, 0] > 12).any()):
            self.rare = tokens[:, :1].double()
        self.last_features = features.detach()
        hidden = self.embedding(tokens) * self.tables[key] + features.unsqueeze(1)
        for layer in self.layers:
            hidden = layer(hidden)
        self.last_logits = self.head(self.norm(hidden).mean(dim=1)).detach() + 0  # which the loss does not need
        return self.head(self.norm(hidden).mean(dim=1))


class Caching(Toy):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.decoder = CachingDecoder().double()
        self.read: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.read.append(self.decoder.last_logits.clone())


def caching(run: Run) -> Any:
    module, trainer = Caching(), run.trainer(max_epochs=2)
    trainer.fit(module, run.training(40), run.loader(16))
    return weights(module), module.read


@pytest.mark.parametrize("name", ["pair", "pipe", "twins", "four"])
def test_modules_that_keep_caches_of_their_own_train_as_on_one_process(name: str) -> None:
    layout = {**LAYOUTS, "pipe": PIPE}[name]
    outcome = outcomes(layout, caching)["caching"]
    expected, read = outcome.one
    assert_same(outcome.ranks[0][0], expected, 1e-9)
    for _, got in outcome.ranks if layout.replicas == 1 else ():
        assert_same(got, read)


def test_what_a_step_changes_in_place_is_there_once_it_is_put_back_and_made_again() -> None:
    """as on ranks that share the last layers, of which the one that sends adopts what it sent"""
    module = Plain()
    module.ids, module.counts, module.rows, module.total = {1}, {"a": 1}, [1], np.zeros(2)
    values = KeptValues(module)
    module.ids.add(2)
    module.counts["b"] = 2
    module.rows.append(2)
    module.total += 3.0
    values.adopt(values.changes())
    assert (module.ids, module.counts, module.rows, module.total.tolist()) == ({1, 2}, {"a": 1, "b": 2}, [1, 2], [3, 3])


class Counting:
    """Counts calls, as a callback or a profiler does, by a method or as a hook itself."""

    def __init__(self) -> None:
        self.calls, self.shapes = 0, list[Any]()

    def __call__(self, _: Any, args: Any, output: Tensor) -> None:
        self.calls += 1
        self.shapes.append(tuple(output.shape))

    def note(self, module: Any, args: Any, output: Tensor) -> None:
        self(module, args, output)


def test_what_forward_hooks_write_to_beside_modules_is_put_back() -> None:
    layer, by_method, itself = torch.nn.Linear(2, 2), Counting(), Counting()
    shapes, names, count = list[Any](), list[str](), 0

    given, named, default, only_named = Counting(), list[Any](), list[Any](), Counting()

    def keep(
        first: Any, _: Any, args: Any, output: Tensor, second: Any = default, *, named: Any, third: Any = only_named
    ) -> None:
        for count in (first, third):
            count(_, args, output)
        for row in (second, named):
            row.append(1)

    def around(_: Any, args: Any, output: Tensor) -> None:
        nonlocal count
        count += 1
        shapes.append(output.shape)

    layer.register_forward_hook(by_method.note)
    layer.register_forward_hook(itself)
    layer.register_forward_hook(around)
    layer.register_forward_pre_hook(lambda *_: names.append("layer"))
    layer.register_forward_hook(partial(keep, given, named=named))
    layer(torch.zeros(1, 2))
    state = KeptState(layer)
    layer(torch.zeros(3, 2))
    state.restore()
    assert (by_method.calls, itself.calls, count, len(shapes), names) == (1, 1, 1, 1, ["layer"])
    assert by_method.shapes == itself.shapes == [(1, 2)]
    assert (given.calls, only_named.calls, named, default) == (1, 1, [1], [1])


def test_objects_of_hooks_may_have_attributes_of_names_that_lightning_has() -> None:
    layer, counting = torch.nn.Linear(2, 2), Counting()
    counting.training = torch.zeros(2)  # type: ignore[attr-defined]
    layer.register_forward_hook(counting.note)
    assert objects_of_hooks([layer]) == [counting]
    state = KeptState(layer)
    counting.training += 1  # type: ignore[attr-defined]
    state.restore()
    assert counting.training.tolist() == [0, 0]  # type: ignore[attr-defined]
    assert [name for name, _ in memory_kept(counting)] == ["training"]


class Means(L.Callback):
    """Sums up what layers give by forward hooks."""

    def __init__(self) -> None:
        self.sums, self.batches = {"encoder.patch": 0.0}, 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for path in self.sums:
            pl_module.get_submodule(path).register_forward_hook(partial(self.add, path))

    def add(self, path: str, module: Any, args: Any, output: Tensor) -> None:
        self.sums[path] += output.detach().sum().item()

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1


def means(run: Run) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.trainer(callbacks=[Means()], max_epochs=2).fit(Toy(), run.loader(16))
    return [text for warning in caught if "a forward hook of" in (text := str(warning.message))]


def test_what_forward_hooks_write_to_a_callback_is_told_where_ranks_hold_parts() -> None:
    """vision: rank 0, language: rank 1; and two replicas of everything"""
    (told,), nothing = outcomes(PAIR, means)["means"].ranks
    assert "training_step: a forward hook of 'encoder.patch' writes 'sums' of a Means" in told
    assert nothing == []
    assert outcomes(SHARED, means)["means"].ranks == [[], []]
