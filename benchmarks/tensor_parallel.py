"""A Llama on two tensor parallel ranks: time against ModelParallelStrategy, memory against half, bytes against theory.

Time: the other side is Lightning's own strategy for tensor parallelism, with torch's styles for the same layers and the
cross entropy of divided logits, as its users write them. Both train in float32 with the AdamW that is fastest there,
and must have the same losses. With sequence parallelism, theirs divides sequences too.

Memory: what a rank holds behind the second step in parameters, gradients and AdamW's moments, counted in whole
storages, against half of what one process holds.

Bytes: what a rank sends, counted where torch.distributed is called, against what must be sent by the shapes; two depths
tell a layer from the rest. A layer has two all-reduces of a hidden state [B, S, D] in the forward and two in the
backward. With sequence parallelism these are all-gathers and reduce-scatters, of half the bytes and twice as many; the
backward gathers the two inputs again, which were not kept; and the gradients of its two norms are summed, which saw a
part of the sequence. The rest is as much as one all-reduce for
the embedding and one for the head, three numbers a row for the cross entropy, and one norm.

Shapes: B batch, S sequence, D width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from time import process_time
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from turns import WARMUP, Side, Turns, fit, median_ratio, milliseconds, race, row, run

from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.tensor_parallel import entrance

STEPS, RANKS, FLOAT_BYTES = 20 + WARMUP, 2, 4
TIMEOUT = timedelta(seconds=90)  # of an operation between ranks


@dataclass(frozen=True)
class Size:
    """What is trained: widths, depth, vocabulary, and the shape of a batch."""

    width: int
    hidden: int
    layers: int = 4
    vocabulary: int = 8192
    batch: int = 4
    tokens: int = 128

    @property
    def state_bytes(self) -> int:
        """One hidden state [B, S, D]."""
        return self.batch * self.tokens * self.width * FLOAT_BYTES


NARROW = Size(width=256, hidden=688)
WIDER = Size(width=512, hidden=1376)
WIDE = Size(width=768, hidden=2048, layers=2)
LARGE_VOCABULARY = Size(width=256, hidden=688, vocabulary=32000, batch=1)
UNEVEN = Size(width=256, hidden=683, vocabulary=32001, batch=1)


class Llama(L.LightningModule):
    """The ordinary module around an ordinary Hugging Face model; the same weights in every process."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
        self.model = LlamaForCausalLM(config)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=True)


class ByHand(Llama):
    """The same for ModelParallelStrategy, which leaves to the user what is divided."""

    def __init__(self, size: Size, sequence_parallel: bool) -> None:
        super().__init__(size)
        self._sequence_parallel = sequence_parallel

    def configure_model(self) -> None:
        around, layer = (_sequence_plan if self._sequence_parallel else _plan)()
        plan = around | {
            f"model.layers.{index}.{name}": style
            for index in range(len(self.model.model.layers))
            for name, style in layer.items()
        }
        parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with loss_parallel():
            return super().training_step(batch, batch_idx)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with loss_parallel():
            super().backward(*args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # foreach takes no DTensors beside plain tensors
        groups: dict[bool, list[Tensor]] = {}
        for parameter in self.parameters():
            groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, foreach=True)


Styles = dict[str, ParallelStyle]
_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def _plan() -> tuple[Styles, Styles]:
    """Styles of what is around the layers, and of what is in each."""
    around: Styles = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(use_local_output=False),
    }
    return around, {name: ColwiseParallel() for name in _COLUMNS} | {name: RowwiseParallel() for name in _ROWS}


def _sequence_plan() -> tuple[Styles, Styles]:
    """The same with the sequence divided between the divided layers; hidden states are DTensors there."""
    apart: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    norm = SequenceParallel(use_local_output=False)
    around: Styles = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **apart),
        "model.norm": norm,
        "lm_head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    layer: Styles = {
        "input_layernorm": norm,
        "post_attention_layernorm": norm,
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
            use_local_output=True,
        ),
        "mlp": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
        ),
    }
    layer |= {name: ColwiseParallel() for name in _COLUMNS} | {name: RowwiseParallel(**apart) for name in _ROWS}
    return around, layer


class Texts(Dataset):
    """Random tokens."""

    def __init__(self, count: int, size: Size) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(size.vocabulary, (count, size.tokens), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def loader(steps: int, size: Size) -> DataLoader:
    """`steps` batches, the same on all ranks."""
    return DataLoader(Texts(steps * size.batch, size), batch_size=size.batch)


def by_hand() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=RANKS)


def ours(sequence_parallel: bool = False) -> MultimodalStrategy:
    """All that a user of the strategy writes."""
    return MultimodalStrategy(
        {"language": Modality(tp_size=RANKS, tensor={"sequence_parallel": sequence_parallel})},
        launch={"timeout": TIMEOUT},
    )


# --- time ---


class Processor(Callback):
    """Counts the processor time of steps behind the warm-up; waiting takes none, so it knows little of other work."""

    def __init__(self) -> None:
        self._since = 0.0
        self.seconds = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARMUP:
            self._since = process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds = process_time() - self._since


def train(
    turns: Turns, module: Llama, strategy: Any, size: Size, accelerator: Any = "cpu", steps: int = STEPS
) -> tuple[list[float], float]:
    """Returns this rank's losses and processor time."""
    processor = Processor()
    fit(module, loader(steps, size), strategy, RANKS, turns, processor, accelerator=accelerator)
    return module.losses, processor.seconds


def times() -> None:
    for size, divided in ((NARROW, False), (WIDER, False), (WIDE, False), (NARROW, True), (WIDE, True)):
        mine, theirs = race(
            Side(RANKS, lambda turns, rank, s=size, d=divided: train(turns, Llama(s), ours(d), s)),
            Side(RANKS, lambda turns, rank, s=size, d=divided: train(turns, ByHand(s, d), by_hand(), s)),
            STEPS,
        )
        for losses, _ in (*mine.results, *theirs.results):
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(mine.results[0][0]), rtol=1e-5, atol=0)
        name = _name(size, divided)
        measured = f"{milliseconds(mine)} / {milliseconds(theirs)}"
        row(f"{name}: time of a step, strategy / ModelParallelStrategy", median_ratio(mine, theirs), "0.9", measured)
        a, b = (sum(seconds for _, seconds in side.results) for side in (mine, theirs))
        each = 1e3 / (STEPS - WARMUP) / RANKS
        row(f"{name}: the same in processor time", a / b, "", f"{a * each:.1f} ms / {b * each:.1f} ms")


def train_in_order(turns: Turns, module: Llama, strategy: Any, size: Size) -> tuple[list[float], float]:
    """The same, with weight gradients before the sum of input gradients starts."""
    with patch.object(entrance, "renumber_in_backward", lambda *_: None):
        return train(turns, module, strategy, size)


def overlap() -> None:
    for size, divided in ((WIDE, False), (WIDE, True)):
        beside, before = race(
            Side(RANKS, lambda turns, rank, s=size, d=divided: train(turns, Llama(s), ours(d), s)),
            Side(RANKS, lambda turns, rank, s=size, d=divided: train_in_order(turns, Llama(s), ours(d), s)),
            STEPS,
        )
        what = f"{_name(size, divided)}: time of a step, weight gradients beside the sum / before it"
        row(what, median_ratio(beside, before), "", f"{milliseconds(beside)} / {milliseconds(before)}")


# --- memory ---


class Held(Callback):
    """Counts what is held behind the last batch: parameters, gradients and what the optimizer keeps."""

    def __init__(self) -> None:
        self.total = 0

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.total = _storage_bytes(_tensors(trainer, pl_module))


def _tensors(trainer: L.Trainer, module: L.LightningModule) -> Iterable[Tensor]:
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Each storage once and as long as it is: a view keeps all of it alive."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def hold(turns: Turns, size: Size, strategy: Any, world: int) -> int:
    """Returns the bytes that this rank holds behind two steps."""
    held = Held()
    fit(Llama(size), loader(2, size), strategy, world, held)
    return held.total


def memory() -> None:
    for size in (LARGE_VOCABULARY, UNEVEN):
        whole = run(Side(1, lambda turns, rank, s=size: hold(turns, s, "auto", 1)))[0]
        parts = run(Side(RANKS, lambda turns, rank, s=size: hold(turns, s, ours(), RANKS)))
        what = f"tp {RANKS}, vocabulary {size.vocabulary}, MLP {size.hidden}: bytes of training state a rank / half"
        row(what, max(parts) * RANKS / whole, "1.05", f"{max(parts) / 2**20:.1f} / {whole / RANKS / 2**20:.1f} MiB")


# --- bytes ---


class Counter(Callback):
    """Counts what this rank sends in rings: ``2 (R - 1) / R`` of what is summed, half of that in the other two."""

    def __init__(self) -> None:
        self.sent = 0.0

    def on_train_start(self, *_: Any) -> None:
        """From here on."""
        self._count("all_reduce", lambda tensor, *_: 2 * tensor.nbytes)
        self._count("all_gather_single", lambda whole, part, *_: whole.nbytes)
        self._count("reduce_scatter_single", lambda part, whole, *_: whole.nbytes)

    def _count(self, name: str, cost: Callable[..., int]) -> None:
        original = getattr(dist, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            groups = (argument for argument in (*args, *kwargs.values()) if isinstance(argument, dist.ProcessGroup))
            ranks = dist.get_world_size(next(groups, None))
            self.sent += cost(*args) * (ranks - 1) / ranks
            return original(*args, **kwargs)

        setattr(dist, name, counted)  # for good: the process ends with the training


def send(turns: Turns, size: Size, sequence_parallel: bool) -> float:
    """Returns the bytes that this rank sends in a step."""
    steps, counter = 4, Counter()
    fit(Llama(size), loader(steps, size), ours(sequence_parallel), RANKS, counter)
    return counter.sent / steps


def traffic() -> None:
    size, share = NARROW, 2 * (RANKS - 1) / RANKS
    for divided in (False, True):
        sides = [
            Side(RANKS, lambda turns, rank, s=replace(size, layers=layers), d=divided: send(turns, s, d))  # noqa: B008
            for layers in (2, 4)
        ]
        shallow, deep = (max(run(side)) for side in sides)
        layer = (deep - shallow) / 2
        norm = size.width * FLOAT_BYTES * divided
        rows = 3 * size.batch * size.tokens * FLOAT_BYTES  # greatest logit, sum of exponentials, logit of the target
        for what, sent, needed, aim in (
            ("a layer", layer, share * ((4 + divided) * size.state_bytes + 2 * norm), "1.00"),
            (
                "the rest",
                shallow - 2 * layer,
                share * ((2 + divided / 2) * size.state_bytes + norm + RANKS * rows / 2),
                "",
            ),
        ):
            measured = f"{sent / 2**20:.4f} MiB / {needed / 2**20:.4f} MiB"
            row(f"{_name(size, divided)}: bytes that {what} sends / needed", sent / needed, aim, measured)


def _name(size: Size, divided: bool) -> str:
    return f"tp {RANKS}, width {size.width}" + ", sequence_parallel" * divided


if __name__ == "__main__":
    figures = {"time": times, "overlap": overlap, "memory": memory, "bytes": traffic}
    for name in sys.argv[1:] or figures:
        figures[name]()
