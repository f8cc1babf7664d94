"""Gradients are summed over ranks while backwards run, and are those of one process whatever comes when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from features.toys import LANGUAGE, SHARED, VISION, Layer, Layout, Run, Toy, assert_same, outcomes, together, weights
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError


def on_all(world: int, sharing: dict[str, Any] | None = None, **language: Any) -> Layout:
    """The encoder beside the language model's first stage, and replicas of both."""
    sharing = sharing or {}
    encoder = Modality(colocate_with="language", **sharing, **VISION)
    pp = language.get("pp_size", 1)
    return Layout({"vision": encoder, "language": Modality(**sharing, **language, **LANGUAGE)}, world, world // pp)


STAGES = on_all(4, pp_size=2)
"""vision: ranks 0-1; language: ranks 0-1 and 2-3 as stages"""
APART = Layout({"vision": Modality(dp_size=1, **VISION), "language": Modality(pp_size=2, dp_size=2, **LANGUAGE)}, 5, 2)
"""vision: rank 0; language: ranks 1-2 and 3-4 as stages"""
MIXED = Layout(
    {"vision": Modality(dp_size=2, sharding={"zero_stage": 2}, **VISION), "language": Modality(dp_size=2, **LANGUAGE)},
    4,
    2,
)
"""vision: ranks 0-1, with rows; language: ranks 2-3"""
SHARES = on_all(2, {"zero_stage": 2})
BLOCKS = on_all(4, {"zero_stage": 3, "dp_shard_size": 2})
"""two blocks of two ranks"""


# --- when messages leave ---


class Watch(L.Callback):
    """Notes of each batch how many gradients came before each message, and how long that message is."""

    def __init__(self) -> None:
        self.messages: list[list[tuple[int, int]]] = []
        self.came: list[int] = []

    def on_train_batch_start(self, _: Any, module: L.LightningModule, *args: Any) -> None:
        self.messages.append([])
        self.came.append(0)
        own = [p for p in module.parameters() if p.requires_grad and 0 not in p.stride()]
        self._nodes = [get_gradient_edge(p).node for p in own]
        self._hooks = [node.register_hook(self._count) for node in self._nodes]

    # callbacks of the package see what this rank holds, not full parameters
    on_train_batch_start.__module__ = "lightning_mm5d.tests"

    def on_train_batch_end(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _count(self, *_: Any) -> None:
        self.came[-1] += 1

    @contextmanager
    def spying(self) -> Iterator[None]:
        reduce, exchange = dist.all_reduce, dist.all_to_all_single

        def note(tensor: Tensor, *args: Any, **options: Any) -> None:
            if options.get("async_op"):
                self.messages[-1].append((self.came[-1], tensor.numel() * tensor.element_size()))

        def all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
            note(tensor, **options)
            return reduce(tensor, *args, **options)

        def all_to_all(arrives: Tensor, sent: Tensor, *args: Any, **options: Any) -> Any:
            note(sent, **options)
            return exchange(arrives, sent, *args, **options)

        dist.all_reduce, dist.all_to_all_single = all_reduce, all_to_all
        try:
            yield
        finally:
            dist.all_reduce, dist.all_to_all_single = reduce, exchange


def watched(run: Run) -> Any:
    """The messages of each batch, and how many gradients came in it."""
    module, watch = Toy(), Watch()
    with watch.spying():
        run.trainer(callbacks=[watch]).fit(module, run.training(24))
    return list(zip(watch.messages, watch.came, strict=True))


@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [(SHARED, 1), (SHARED, 2), (APART, 2), (SHARES, 2)],
    ids=["plain replicas", "two microbatches", "two stages", "rows of parameters"],
)
def test_the_first_sum_begins_before_half_of_the_last_gradients_are_there(layout: Layout, microbatches: int) -> None:
    for batches in together(layout, watched, num_microbatches=microbatches):
        for messages, came in batches:
            last = came / microbatches  # those of the last microbatch, which make gradients final
            assert len(messages) >= 4 or came == 2 * microbatches * 16  # one rank has the encoder to itself
            assert all(before <= came - last / 2 for before, _ in messages[:1])


def test_no_message_has_more_than_bucket_bytes_but_for_a_large_parameter() -> None:
    largest = max(p.numel() * p.element_size() for p in Toy().parameters())
    for batches in together(SHARED, watched, num_microbatches=1, bucket_bytes=512):
        for messages, _ in batches:
            assert max(size for _, size in messages) <= max(512, largest) + 8 * 45  # and flags
            assert len(messages) > 10


def accumulating(run: Run) -> list[int]:
    module, watch = Toy(), Watch()
    with watch.spying():
        run.trainer(callbacks=[watch], accumulate_grad_batches=3).fit(module, run.training(48))
    return [len(messages) for messages in watch.messages]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_only_the_last_batch_of_an_accumulation_sends_gradients(microbatches: int) -> None:
    for counts in together(SHARED, accumulating, num_microbatches=microbatches):
        assert counts[:2] == counts[3:5] == [0, 0]
        assert counts[2] == counts[5] == 4


# --- what comes when ---


class Branches(Toy):
    """Each sample takes a layer of its class, so that ranks lack gradients of other layers in each batch."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.encoder.branches = torch.nn.ModuleList([Layer() for _ in range(5)]).double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        features = self.encoder(batch["images"])
        ways = batch["tokens"][:, 0] % 4  # nobody takes the last one
        features = torch.stack([self.encoder.branches[int(way)](one) for one, way in zip(features, ways, strict=True)])
        return F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])


class Twice(Toy):
    """From the second batch on, a layer is checkpointed with reentrance and used three times."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        features = self.encoder(batch["images"])
        for _ in range(3 if batch_idx else 0):
            features = checkpoint(self.encoder.layers[1], features, use_reentrant=True)
        return F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])


class OnOneRank(Twice):
    """As `Twice`, on samples of one class alone."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        features = self.encoder(batch["images"])
        again = []
        for one, label in zip(features, batch["label"], strict=True):
            for _ in range(2 * batch_idx if int(label) == 1 else 0):
                one = checkpoint(self.encoder.layers[1], one, use_reentrant=True)
            again.append(one)
        return F.cross_entropy(self.decoder(batch["tokens"], torch.stack(again)), batch["label"])


class Freezing(Toy):
    """What is trained changes between batches."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.encoder.requires_grad_(batch_idx % 3 != 1)
        self.decoder.layers[2].requires_grad_(batch_idx != 2)


class Scaled(Toy):
    """A backward of the user's own."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (3.0 * loss).backward(*args, **kwargs)


class Again(Toy):
    """A backward in two parts."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2.0 * loss).backward(retain_graph=True)
        self.between()
        loss.backward(*args, **kwargs)

    def between(self) -> None:
        pass


class ClippedBetween(Again):
    """One that looks at the gradients of the first part, as under DDP."""

    def between(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class AgainWithoutGraph(Toy):
    """A second backward, for which the first one has kept nothing."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        loss.backward()


class Tied(Toy):
    """A parameter of the decoder works in the encoder too."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        features = self.encoder(batch["images"]) + self.decoder.norm.weight
        return F.cross_entropy(self.decoder(batch["tokens"], features), batch["label"])


class Clipped(Toy):
    """A backward that goes on to look at its gradients, as under DDP."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.global_step == 2:
            return
        super().backward(loss, *args, **kwargs)
        self.log("norm", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1))


def _fit(run: Run, module: Toy, **options: Any) -> Any:
    run.trainer(max_epochs=2, **options).fit(module, run.training(32))
    return weights(module)


def branches(run: Run) -> Any:
    return _fit(run, Branches())


def branches_accumulated(run: Run) -> Any:
    return _fit(run, Branches(), accumulate_grad_batches=3)


def twice(run: Run) -> Any:
    return _fit(run, Twice())


def on_one_rank(run: Run) -> Any:
    return _fit(run, OnOneRank())


def freezing(run: Run) -> Any:
    return _fit(run, Freezing())


def scaled(run: Run) -> Any:
    return _fit(run, Scaled(), gradient_clip_val=0.5)


def clipped(run: Run) -> Any:
    module = Clipped()
    return {**_fit(run, module), "norm": module.trainer.callback_metrics["norm"]}


def again(run: Run) -> Any:
    return _fit(run, Again())


def again_accumulated(run: Run) -> Any:
    return _fit(run, Again(), accumulate_grad_batches=3)


def clipped_between(run: Run) -> Any:
    return _fit(run, ClippedBetween())


def again_without_graph(run: Run) -> str:
    with pytest.raises(RuntimeError, match="a second time") as caught:
        run.trainer().fit(AgainWithoutGraph(), run.training())
    return type(caught.value).__name__


def hooked(run: Run) -> Any:
    module = Toy()
    module.decoder.norm.weight.register_hook(lambda gradient: gradient * 2)
    return _fit(run, module)


ANYWHERE = (twice, on_one_rank, freezing, scaled, branches, branches_accumulated)


@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [
        pytest.param(SHARED, 1, id="plain", marks=pytest.mark.exhaustive),
        pytest.param(SHARED, 2, id="microbatches", marks=pytest.mark.exhaustive),
        pytest.param(BLOCKS, 1, id="blocks"),
    ],
)
def test_gradients_are_those_of_one_process_whatever_comes_when(layout: Layout, microbatches: int) -> None:
    found = outcomes(layout, *ANYWHERE, num_microbatches=microbatches, bucket_bytes=2000)
    for scenario, outcome in found.items():
        assert_same(outcome.ranks[0], outcome.one, where=scenario)


@pytest.mark.parametrize(
    "layout", [STAGES, pytest.param(MIXED, marks=pytest.mark.exhaustive)], ids=["stages", "some share"]
)
def test_stages_sum_what_comes_when_as_one_process(layout: Layout) -> None:
    for scenario, outcome in outcomes(layout, freezing, scaled, hooked, num_microbatches=2).items():
        assert_same(outcome.ranks[0], outcome.one, where=scenario)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_backward_of_replicas_sees_the_gradients_of_all(microbatches: int) -> None:
    for scenario, outcome in outcomes(SHARED, clipped, clipped_between, num_microbatches=microbatches).items():
        assert_same(outcome.ranks[1], outcome.one, where=scenario)


@pytest.mark.parametrize("layout", [SHARED, BLOCKS, STAGES, MIXED], ids=["replicas", "blocks", "stages", "some share"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_second_backward_gives_its_gradients_too(layout: Layout, microbatches: int) -> None:
    found = outcomes(layout, again, again_accumulated, again_without_graph, num_microbatches=microbatches)
    for scenario, outcome in found.items():
        assert_same(outcome.ranks[0], outcome.one, where=scenario)


# --- the factor of a loss ---


class ScaledByRank(Toy):
    """A backward that gives each rank another factor."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        ((1.0 + self.global_rank) * loss).backward(*args, **kwargs)


def scaled_by_rank(run: Run) -> str:
    with pytest.raises(ConfigError) as caught:
        run.trainer().fit(ScaledByRank(), run.training())
    return str(caught.value)


def test_shared_gradients_are_not_multiplied_by_factors_that_differ() -> None:
    for message in together(SHARES, scaled_by_rank, num_microbatches=1):
        assert "a factor of the loss from 1.0 to 2.0" in message


def looked_at_by_one_rank(run: Run) -> Any:
    class Look(L.Callback):
        def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
            assert trainer.is_global_zero

    alone = run.layout is None
    trainer = run.trainer(max_epochs=2)
    if alone or trainer.global_rank == 0:
        trainer.callbacks.append(Look())
    module = Toy()
    trainer.fit(module, run.training(24))
    return weights(module)


def test_a_callback_of_one_rank_does_not_make_others_wait() -> None:
    for layout in (SHARES, STAGES):
        outcome = outcomes(layout, looked_at_by_one_rank, num_microbatches=2)["looked_at_by_one_rank"]
        assert_same(outcome.ranks[0], outcome.one)
