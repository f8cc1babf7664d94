"""How much communication of layers hides behind computation where microbatches are computed side by side, or in rings.

Two ranks share the layers or the sequences of a Llama, or the experts of a mixture. The collectives of its layers end
as late as a link of a stated bandwidth would let them: each waits until all bytes before it, and its own, would have
passed (`Link`). Nobody computes for that, so the ranks' cores are free. Sums of gradients over replicas or parts of
sequences, which are no part of it, move nothing in any run.

Computation is a step in which these collectives move nothing and end at once, communication the time that the
link is busy in a step. Gloo's own messages cost processor time, too, which no link of the same bandwidth can hide on
two cores; the step whose collectives wait for gloo alone tells how much. The optimizer is SGD, a small part of a step.
All of them
train in one run and in turns, and each figure is the median over its rounds: the speed of a machine changes from one
minute to the next by more than what is measured.

``rings`` compares sequence shards that travel around a ring beside products (``sequence_parallel: ring``) with shards
that are gathered and scattered at once (``true``); ``frozen`` does so with frozen layers above a trained embedding.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import expert_parallel
import lightning as L
import torch
import torch.distributed as dist
import turns
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from turns import Side, Turns, fit, milliseconds, race_all, row

import tensor_parallel
from lightning_mm5d import Modality, MultimodalStrategy

RANKS, MICROBATCHES, SAMPLES = 2, 4, 1  # of a microbatch
STEPS = turns.WARMUP + 15
BATCH = MICROBATCHES * SAMPLES
DENSE = tensor_parallel.Size(width=768, hidden=2048, layers=6, vocabulary=256, batch=BATCH, tokens=192)
SPARSE = expert_parallel.Size(
    experts=8, hidden=1024, width=512, layers=6, vocabulary=256, batch=RANKS * BATCH, tokens=192
)
OF_LAYERS = ("layers", "tokens")  # what the groups are for whose collectives the link carries
# shares of the largest tensor that a rank sends in a ring of two
SENT = {"all_reduce": 1.0, "all_gather_single": 0.5, "reduce_scatter_single": 0.5, "all_to_all_single": 0.5}


class Link:
    """Lets the collectives of layers end when a link would have carried them.

    Args:
        bytes_per_second: of a rank; infinite lets them end when they do, and None at once, without moving anything.

    Attributes:
        sent: bytes.
        threads: names of those that have started a collective.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self._bandwidth, self._free = bytes_per_second, 0.0
        self.sent = 0.0
        self.threads: set[str] = set()
        for name, share in SENT.items():  # for good: the process ends with the training
            setattr(dist, name, self._slowed(getattr(dist, name), share))
        dist.batch_isend_irecv = self._slowed_hop(dist.batch_isend_irecv)

    def _slowed(self, original: Callable[..., Any], share: float) -> Callable[..., Any]:
        def start(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            tag = group.group_desc if kwargs.get("async_op") and group is not None else ""
            if tag == "gradients":
                return Delayed(None, 0.0)
            if tag not in OF_LAYERS:
                return original(*args, **kwargs)
            tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
            nbytes = share * max(tensor.nbytes for tensor in tensors)
            return self._sends(nbytes, lambda: original(*args, **kwargs), lambda: _fill(*tensors))

        return start

    def _slowed_hop(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(operations: list[dist.P2POp]) -> list[Any]:
            sent, received = (operation.tensor for operation in operations)
            return [self._sends(sent.nbytes, lambda: Together(original(operations)), lambda: _fill(received, sent))]

        return start

    def _sends(self, nbytes: float, start: Callable[[], Any], fill: Callable[[], None]) -> Delayed:
        self.sent += nbytes
        self.threads.add(threading.current_thread().name)
        if self._bandwidth is None:
            fill()
            return Delayed(None, 0.0)
        work = start()
        self._free = max(self._free, time.perf_counter()) + nbytes / self._bandwidth
        return Delayed(work, self._free)


def _fill(received: Tensor, sent: Tensor | None = None) -> None:
    """Put this rank's own numbers where those of both would arrive."""
    if sent is None:
        return
    numbers, length = sent.detach().flatten(), received.numel()
    if len(numbers) < length:
        numbers = numbers.repeat(-(-length // len(numbers))) if len(numbers) else numbers.new_zeros(length)
    received.copy_(numbers[:length].view_as(received))


class Together:
    """The messages of one hop."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class Delayed:
    """A collective that ends no sooner than `until`."""

    def __init__(self, work: Any, until: float) -> None:
        self._work, self._until = work, until

    def wait(self, *args: Any) -> Any:
        result = None if self._work is None else self._work.wait(*args)
        time.sleep(max(0.0, self._until - time.perf_counter()))
        return result

    def is_completed(self) -> bool:
        return (self._work is None or self._work.is_completed()) and time.perf_counter() >= self._until


class Sent(Callback):
    """What the link had carried before each batch."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.bytes: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.bytes.append(self._link.sent)


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        name: of the layout.
        fields: of the modality.
        module: makes it.
        loader: makes the batches of a rank.
    """

    name: str
    fields: dict[str, Any]
    module: Callable[[], L.LightningModule]
    loader: Callable[[int], DataLoader]


class Hidden:
    """Shows a loss of 1: where nothing moves, ranks compute unlike ones. The optimizer takes little time."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)  # type: ignore[misc]
        return loss - loss.detach() + 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, foreach=True)  # type: ignore[attr-defined]


class HiddenLlama(Hidden, tensor_parallel.Llama):
    pass


class HiddenMixture(Hidden, expert_parallel.Mixture):
    pass


def llama() -> L.LightningModule:
    return HiddenLlama(DENSE)


def frozen() -> L.LightningModule:
    """Layers that are not trained, between an embedding and a head that are."""
    module = llama()
    for part in module.modules():
        if isinstance(part, torch.nn.ModuleList):
            part.requires_grad_(False)
    return module


def mixture() -> L.LightningModule:
    return HiddenMixture(SPARSE)


def texts(rank: int) -> DataLoader:
    return tensor_parallel.loader(STEPS, DENSE)


def halves(rank: int) -> DataLoader:
    """Batches of which each rank has every second sample."""
    return DataLoader(expert_parallel.Texts(STEPS * SPARSE.batch, SPARSE, rank), batch_size=BATCH)


CASES = {
    "tensor": Case("tp 2", {"tp_size": RANKS}, llama, texts),
    "context": Case("cp 2", {"cp_size": RANKS}, llama, texts),
    "experts": Case("ep 2, 8 experts", {"ep_size": RANKS}, mixture, halves),
}
RINGS = {"rings": llama, "frozen": frozen}
SHARES = {"tensor": (0.55, 1.0)}  # of communication in computation


def side(case: Case, together: int, bandwidth: float | None) -> Side:
    """Return ranks that train `case`; each returns the bytes of a step, and the threads that communicate."""

    def train(turn: Turns, rank: int) -> tuple[float, set[str]]:
        link = Link(bandwidth)
        sent = Sent(link)
        language = Modality(**case.fields, pipeline={"interleaved_microbatches": together})
        chosen = MultimodalStrategy({"language": language}, batching={"num_microbatches": MICROBATCHES})
        fit(case.module(), case.loader(rank), chosen, RANKS, turn, sent)
        return sent.bytes[-1] - sent.bytes[-2], link.threads

    return Side(RANKS, train)


def compare(case: Case, share: float) -> None:
    """Print how long steps are where communication takes about `share` of computation."""
    (plain,) = race_all([side(case, 1, None)], STEPS)
    nbytes = plain.results[0][0]
    bandwidth = nbytes / (share * statistics.median(plain.seconds))
    communication = nbytes / bandwidth
    chosen = [(1, None), (1, float("inf")), (2, float("inf")), (1, bandwidth), (2, bandwidth)]
    raced = race_all([side(case, *way) for way in chosen], STEPS)
    for (together, _), timed in zip(chosen, raced, strict=True):
        threads = timed.results[0][1]
        if (len(threads) > 1) != (together > 1):
            raise RuntimeError(f"collectives of {together} microbatches side by side started in {sorted(threads)}")
    computation = raced[0].seconds
    larger = [max(seconds, communication) for seconds in computation]
    unhidden = statistics.median((a + communication) / b for a, b in zip(computation, larger, strict=True))
    print(
        f"{case.name}: computation {milliseconds(raced[0])}, communication {communication * 1e3:.0f} ms "
        f"({nbytes / 1e6:.0f} MB at {bandwidth / 1e6:.0f} MB/s), sum / larger {unhidden:.2f}",
        flush=True,
    )
    for what, timed in zip(
        ("gloo alone, one after another", "gloo alone, two side by side", "one after another", "two side by side"),
        raced[1:],
        strict=True,
    ):
        ratio = statistics.median(a / b for a, b in zip(timed.seconds, larger, strict=True))
        row(f"{case.name}: step / larger, {what}", ratio, "1.15" if timed is raced[-1] else "", milliseconds(timed))


def compare_rings(name: str, share: float) -> None:
    """Print how long steps are with shards in rings and with shards that are gathered at once."""
    fields = {"tp_size": RANKS, "tensor": {"sequence_parallel": True}}
    gathered, ring = (Case(name, {**fields, "sequence_parallel": way}, RINGS[name], texts) for way in (True, "ring"))
    (plain,) = race_all([side(gathered, 1, None)], STEPS)
    nbytes = plain.results[0][0]
    bandwidth = nbytes / (share * statistics.median(plain.seconds))
    at_once, in_ring = race_all([side(way, 1, bandwidth) for way in (gathered, ring)], STEPS)
    print(
        f"tp {RANKS}, {name}: computation {milliseconds(plain)}, communication {nbytes / bandwidth * 1e3:.0f} ms "
        f"({nbytes / 1e6:.0f} MB at {bandwidth / 1e6:.0f} MB/s)",
        flush=True,
    )
    ratio, text = turns.median_ratio(in_ring, at_once), f"{milliseconds(in_ring)} / {milliseconds(at_once)}"
    row(f"sequence shards, {name}: step with ring / with true", ratio, "", text)


if __name__ == "__main__":
    for name in sys.argv[1:] or (*CASES, *RINGS):
        for share in SHARES.get(name, (0.55,)):
            if name in RINGS:
                compare_rings(name, share)
            else:
                compare(CASES[name], share)
