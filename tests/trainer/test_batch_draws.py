"""What a batch takes of iterators and random generators that a LightningModule holds.

Layout of the runs on ranks: vision and the first two layers of language: rank 0; the last two: rank 1. So rank 0 runs
the step twice for each of two microbatches, and rank 1 once.
"""

from __future__ import annotations

import gc
import itertools
import random
import warnings
import weakref
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from features.toys import LANGUAGE, PAIR, VISION, Layout, Run, Samples, Toy, assert_same, figures, outcomes, weights
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.random_state import generator_states, moved
from lightning_mm5d.trainer.user_step import BatchDraws

TWO_STAGES = Layout(
    {"vision": Modality(colocate_with="language", **VISION), "language": Modality(pp_size=2, **LANGUAGE)}, 2
)

EYES = Layout({"vision": Modality(dp_size=2, **VISION), "language": Modality(**LANGUAGE)}, 3)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.items = iter(range(10))
        self.tables = {"rows": itertools.cycle([torch.zeros(2), torch.ones(2)])}
        self.chance, self.noise = random.Random(0), np.random.default_rng(0)
        self.torch_noise = torch.Generator().manual_seed(0)


def run_of(draws: BatchDraws, module: Module, stage: int, replica: int = 0, *, counts: bool = True) -> list[Any]:
    with draws.run((stage, replica), counts=counts):
        row = next(module.tables["rows"])
        taken = [next(module.items), next(module.items), row.clone().tolist()]
        row += 5.0  # a copy of its own
        return [*taken, module.chance.random(), float(module.noise.random())]


def test_all_runs_of_a_batch_get_the_same_items_and_the_next_batch_the_ones_after() -> None:
    module = Module()
    own = module.items
    first, second = BatchDraws(module), None
    assert [run_of(first, module, stage)[:3] for stage in (0, 0, 1, 1)] == [[0, 1, [0.0, 0.0]]] * 4
    assert module.items is own
    second = BatchDraws(module)
    assert [run_of(second, module, 0)[:3] for _ in range(2)] == [[2, 3, [1.0, 1.0]]] * 2


class Endless:
    """Passes over a dataloader, one after another, and how many items it gave."""

    def __init__(self) -> None:
        self.loader = DataLoader(range(3), batch_size=None)
        self.pass_, self.given = iter(self.loader), 0

    def __next__(self) -> int:
        self.given += 1
        try:
            return next(self.pass_)
        except StopIteration:
            self.pass_ = iter(self.loader)
            return next(self.pass_)


def test_iterators_in_objects_of_the_users_own_give_an_item_once_too() -> None:
    module = Module()
    module.endless = Endless()
    for batch in range(5):
        draws = BatchDraws(module)
        for index in range(2):
            with draws.run((index, 0), counts=True):
                assert next(module.endless) == batch % 3
    assert module.endless.given == 10, "attributes are the object's own"


def test_iterators_under_a_name_that_lightning_has_in_a_module_give_an_item_once_too() -> None:
    module = Module()
    module.sets = {"training": iter(range(10))}
    for batch in range(2):
        draws = BatchDraws(module)
        for stage in range(2):
            with draws.run((stage, 0), counts=True):
                assert next(module.sets["training"]) == batch


def test_iterators_in_lists_give_an_item_once_too() -> None:
    module = Module()
    module.pair = [iter("abc"), itertools.cycle([1, 2, 3])]
    for expected in (["a", 1], ["b", 2]):
        draws = BatchDraws(module)
        for index in (0, 1, 0):
            with draws.run((index, 0), counts=True):
                assert [next(items) for items in module.pair] == expected
    assert next(module.pair[0]) == "c"


def test_the_first_run_gets_the_item_itself_and_later_ones_what_it_was() -> None:
    module = Module()
    bank = torch.zeros(2)
    module.items = itertools.repeat({"bank": bank})  # type: ignore[assignment]
    draws = BatchDraws(module)
    for index in range(2):
        with draws.run((index, 0), counts=True):
            item: Any = next(module.items)
            assert item.pop("bank").add_(1.0).tolist() == [1.0, 1.0]
    assert bank.tolist() == [1.0, 1.0]


def test_items_are_drawn_from_a_random_state_of_the_batch() -> None:
    def noise() -> Any:
        while True:
            yield random.random()

    drawn = []
    for seed in (0, 1):
        module = Module()
        module.items = noise()  # type: ignore[assignment]
        draws = BatchDraws(module, (7, 0, 3))
        random.seed(seed)
        with draws.run((0, 0), counts=True):
            drawn.append(next(module.items))
            assert random.random() == random.Random(seed).random()
    assert drawn[0] == drawn[1]


def test_an_iterator_that_a_step_makes_is_refused_where_the_step_runs_again() -> None:
    module = Module()
    draws = BatchDraws(module)
    with draws.run((0, 0), counts=True):
        module.late = iter([1, 2])
    refused = pytest.raises(ConfigError, match=r"self\.late: got 'list_iterator that the step makes'.*on_train_start")
    with refused, draws.run((1, 0), counts=True):
        pass


def test_what_a_step_builds_on_an_iterator_keeps_no_items_after_the_batch() -> None:
    module = Module()
    tensors = (torch.ones(3) for _ in range(4))
    module.items = tensors  # type: ignore[assignment]
    draws = BatchDraws(module)
    with draws.run((0, 0), counts=True):
        first = weakref.ref(next(module.items))  # type: ignore[call-overload]
        module.items = itertools.chain([torch.zeros(3)], module.items)  # type: ignore[assignment]
    del draws
    gc.collect()
    assert first() is None
    assert [next(module.items).tolist() for _ in range(2)] == [[0.0] * 3, [1.0] * 3]  # type: ignore[attr-defined]


def test_microbatches_draw_one_after_another_and_each_stage_draws_the_same() -> None:
    expected = [[chance.random(), float(noise.random())] for chance, noise in [(random.Random(0), Module().noise)] * 3]
    module = Module()
    draws = BatchDraws(module)
    assert [run_of(draws, module, stage)[3:] for stage in (0, 0, 1, 1)] == [*expected[:2], *expected[:2]]
    assert run_of(BatchDraws(module), module, 0)[3:] == expected[2]


def test_each_replica_that_a_rank_serves_draws_the_same() -> None:
    module = Module()
    draws, before = BatchDraws(module), random.Random(0)
    expected = [before.random(), before.random()]
    assert [run_of(draws, module, 0, replica)[3] for replica in (0, 1, 0, 1)] == [expected[n] for n in (0, 0, 1, 1)]
    assert module.chance.random() == before.random()


def test_a_run_that_is_repeated_as_a_whole_draws_nothing_for_others() -> None:
    module = Module()
    draws = BatchDraws(module)
    state = module.chance.getstate()
    run_of(draws, module, 0, counts=False)
    module.chance.setstate(state)  # as those who repeat a run do
    assert run_of(draws, module, 0)[3] == random.Random(0).random()


class SecondLoader(Toy):
    """Takes a batch of other samples in each step."""

    def others(self) -> Any:
        return DataLoader(Samples(8, seed=3), batch_size=4)

    def on_train_start(self) -> None:
        self.cycled, self.passes, self.ends = itertools.cycle(self.others()), iter(self.others()), 0
        self.scales = iter([1.0, 2.0, 0.5, 3.0])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        try:
            other = next(self.passes)
        except StopIteration:
            self.passes = iter(self.others())
            other = next(self.passes)
        loss = next(self.scales) * (self.loss(batch) + 0.5 * self.loss(next(self.cycled)) + 0.1 * self.loss(other))
        self.log("train_loss", loss)
        return loss


def second_loader(run: Run) -> Any:
    module, trainer = SecondLoader(), run.trainer(max_epochs=2)
    trainer.fit(module, run.loader(16))
    return figures(trainer), weights(module) if trainer.global_rank == 0 else None


def test_a_second_loader_that_steps_read_by_next_trains_as_on_one_process() -> None:
    outcome = outcomes(TWO_STAGES, second_loader)["second_loader"]
    assert_same(outcome.ranks[0], outcome.one)
    assert_same(outcome.ranks[1][0], outcome.one[0])


class Noisy(Toy):
    """Adds noise to features, drawn for each sample from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.encoder(batch["images"])
        noise = torch.rand(features.shape, generator=self.noise, dtype=features.dtype)
        loss = F.cross_entropy(self.decoder(batch["tokens"], features + noise), batch["label"])
        self.log("train_loss", loss)
        return loss


def noisy(run: Run) -> Any:
    module, trainer = Noisy(), run.trainer(max_epochs=2)
    trainer.fit(module, run.loader(16))
    return figures(trainer), weights(module) if trainer.global_rank == 0 else None


def test_noise_that_a_step_draws_is_that_of_one_process_also_where_the_first_batch_runs_again() -> None:
    outcome = outcomes(TWO_STAGES, noisy)["noisy"]
    for losses, _ in outcome.ranks:
        assert_same(losses, outcome.one[0])
    assert_same(outcome.ranks[0][1], outcome.one[1])


def unlike(run: Run) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        noisy(run)
    return [text for warning in caught if "self.noise draws" in (text := str(warning.message))]


def test_draws_of_ranks_that_share_an_encoder_are_warned_of_once() -> None:
    """two encoder replicas, which take turns with microbatches: ranks 0-1; language: rank 2. And vision | language"""
    *encoders, language = outcomes(EYES, unlike)["unlike"].ranks
    assert [len(told) for told in encoders] == [1, 1]
    assert "training_step: self.noise draws for this rank's microbatches alone" in encoders[0][0]
    assert language == []
    assert outcomes(PAIR, unlike)["unlike"].ranks == [[], []]


def uneven(run: Run) -> list[str]:
    """Three batches, of eight, eight and one sample, in each of two epochs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.trainer(max_epochs=2).fit(Turned(iter(range(9))), run.loader(17))
    return [text for warning in caught if "takes nothing of self.scales" in (text := str(warning.message))]


def test_an_encoder_that_has_no_microbatch_and_takes_no_item_is_warned_of() -> None:
    """two encoder replicas, which take turns with microbatches: ranks 0-1; language: rank 2"""
    first, second, language = outcomes(EYES, uneven)["uneven"].ranks
    assert (first, language) == ([], [])
    assert len(second) == 1
    assert second[0].startswith("training_step: this rank's replica of an encoder has no microbatch in a batch")


def test_generators_that_have_drawn_are_known_by_their_states() -> None:
    module = Module()
    generators = [module.chance, module.noise, module.torch_noise, np.random.Generator(np.random.MT19937(0))]
    for drawn, draw in zip(
        generators, ("random", "random", lambda own: torch.rand(1, generator=own), "random"), strict=True
    ):
        states = generator_states(generators)
        assert moved(states) == []
        draw(drawn) if callable(draw) else getattr(drawn, draw)()
        assert moved(states) == [drawn]


def test_a_list_of_iterators_may_be_turned_and_shortened() -> None:
    module = Module()
    module.several = [iter(range(9)), iter(range(10, 19)), iter(range(20, 29))]
    for batch in range(3):
        draws = BatchDraws(module)
        for stage in range(3):
            with draws.run((stage, 0), counts=True):
                assert next(module.several[0]) == (0, 10, 1)[batch]
                module.several.append(module.several.pop(0))
                if batch == 1:
                    module.several.pop(0)
        assert all(type(iterator) is type(iter(range(1))) for iterator in module.several)
        assert len(module.several) == (3 if batch < 1 else 2)


def test_a_new_list_of_iterators_is_refused_where_the_step_runs_again() -> None:
    module = Module()
    module.several = [iter(range(9)), iter(range(10, 19))]
    draws = BatchDraws(module)
    with draws.run((0, 0), counts=True):
        assert next(module.several[0]) == 0
        module.several = module.several[1:] + module.several[:1]
    assert [type(iterator).__name__ for iterator in module.several] == ["range_iterator"] * 2
    refused = pytest.raises(ConfigError, match=r"self\.several: got 'a new list of iterators'")
    with refused, draws.run((1, 0), counts=True):
        pass


def test_iterators_beside_other_things_in_a_list_give_an_item_once_too() -> None:
    module = Module()
    module.mixed = ["photos", iter(range(9)), 0]
    for batch in range(2):
        draws = BatchDraws(module)
        for stage in range(3):
            with draws.run((stage, 0), counts=True):
                assert next(module.mixed[1]) == batch
                module.mixed[2] += 1
                module.mixed.append("kept")
    assert (type(module.mixed[1]), module.mixed[2], len(module.mixed)) == (type(iter(range(1))), 6, 9)


@pytest.mark.parametrize("move", [lambda row: row.pop(0), lambda row: row.append(iter("ab")), lambda row: row.pop()])
def test_iterators_that_a_step_moves_beside_other_things_are_refused_where_it_runs_again(move: Any) -> None:
    module = Module()
    module.mixed = ["photos", iter(range(9))]
    draws = BatchDraws(module)
    with draws.run((0, 0), counts=True):
        move(module.mixed)
    refused = pytest.raises(ConfigError, match=r"self\.mixed: got 'a list whose iterators the step moves'")
    with refused, draws.run((1, 0), counts=True):
        pass


class Turned(Toy):
    """Weighs its loss by streams in turn."""

    def __init__(self, scales: Any = None) -> None:
        super().__init__()
        self.streams = [itertools.count(1), itertools.count(10)]
        self.scales = scales

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch) * next(self.streams[0])
        self.streams.append(self.streams.pop(0))
        self.log("train_loss", loss)
        return loss


def turned(run: Run) -> Any:
    module, trainer = Turned(), run.trainer(max_epochs=2)
    trainer.fit(module, run.loader(16))
    return figures(trainer), [next(stream) for stream in module.streams]


@pytest.mark.parametrize("layout", [PAIR, TWO_STAGES], ids=["vision | language", "two stages"])
def test_streams_that_a_step_reads_in_turn_are_those_of_one_process(layout: Layout) -> None:
    outcome = outcomes(layout, turned)["turned"]
    for losses, _ in outcome.ranks:
        assert_same(losses, outcome.one[0])
    assert outcome.ranks[-1][1] == outcome.one[1], "the rank where the step ends has read them"
