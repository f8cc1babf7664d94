"""A Llama whose sequences two ranks share, against one process: time of a step, and what attention keeps by rank.

Time: 4,096 tokens of four packed documents with images in them, one sequence a step, float32, SGD, one thread a rank.
The one process has neither the strategy nor its kernel: PyTorch's attention with the dense mask, as transformers makes
it, so the ratio is of both, two ranks and tiles; the other one process has the strategy's kernel and no second rank.

Memory: bytes that autograd keeps on one rank of attention over S tokens on R ranks, against S / R times what it keeps
per token in one process.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from turns import WARMUP, Side, Turns, fit, median_ratio, milliseconds, race, row, run

from lightning_mm5d import Modality, MultimodalStrategy, multimodal_mask
from lightning_mm5d.context_parallel.balance import uniform
from lightning_mm5d.context_parallel.exchange.attention import ContextGroups, context_attention
from lightning_mm5d.context_parallel.masks.mask import Mask
from lightning_mm5d.sharded.collectives import TensorGroup

STEPS, TOKENS, VOCABULARY = 8 + WARMUP, 4096, 2048
HEADS, KEY_HEADS, WIDTH = 8, 4, 32
MODES = ("allgather", "ring", "ulysses")


def documents(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Modality, image and document of each token: four documents of uneven lengths, an image of 256 in each 700."""
    at = torch.arange(size)
    document = (at[:, None] >= (torch.tensor([0.22, 0.47, 0.8]) * size).long()).sum(1)
    modality = ((at % 700 >= 100) & (at % 700 < 356)).long()
    return modality[None], (at // 700)[None], document[None]


class Module(L.LightningModule):
    """The ordinary module around an ordinary Hugging Face model; the same weights in every process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            num_hidden_layers=4,
            hidden_size=HEADS * WIDTH,
            intermediate_size=688,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
            vocab_size=VOCABULARY,
            max_position_embeddings=TOKENS,
        )
        self.model = LlamaForCausalLM(config)
        self.losses: list[float] = []

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        modality, image, document = documents(ids.shape[1])
        mask = multimodal_mask(modality, group=image, document=document)
        return self.model(ids, attention_mask=mask, labels=ids, use_cache=False).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Samples(Dataset):
    """Random text; equal indices give equal samples."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(index))


def train(turns: Turns, rank: int, strategy: Any, world: int) -> list[float]:
    """Returns this rank's losses."""
    module = Module()
    fit(module, DataLoader(Samples(), batch_size=1), strategy, world, turns)
    return module.losses


def time() -> None:
    for mode in MODES:
        strategy = MultimodalStrategy({"language": Modality(cp_size=2, context={"cp_mode": mode})})
        single, pair = race(
            Side(1, partial(train, strategy="auto", world=1)),
            Side(2, partial(train, strategy=strategy, world=2)),
            STEPS,
        )
        torch.testing.assert_close(torch.tensor(single.results[0]), torch.tensor(pair.results[0]), rtol=1e-4, atol=1e-4)
        figure = f"{TOKENS} tokens, documents with images: two ranks, {mode} / one process, dense mask"
        row(figure, median_ratio(pair, single), "", f"{milliseconds(pair)} / {milliseconds(single)}")


def saved_bytes(turns: Turns, rank: int, mode: Any, size: int, ranks: int) -> int:
    """Bytes that autograd keeps of attention on this rank."""
    torch.distributed.init_process_group("gloo")
    whole = TensorGroup(torch.distributed.group.WORLD)  # type: ignore[arg-type]
    split = uniform(size, ranks)
    shape = (1, split.lengths[rank], WIDTH)
    q, k, v = (torch.randn(1, heads, *shape[1:], requires_grad=True) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    _, _, document = documents(size)
    same = document[0]
    mask = Mask(lambda b, h, i, j: (i >= j) & (same[i] == same[j]), batch=1, q_length=size, k_length=size, device="cpu")
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = context_attention(q, k, v, mask, split, ContextGroups(whole=whole), mode=mode, scale=WIDTH**-0.5)
    out.sum().backward()
    return sum(storages.values())


def memory() -> None:
    for mode in MODES:
        per_token = run(Side(1, partial(saved_bytes, mode=mode, size=2048, ranks=1)))[0] / 2048
        for size, ranks in ((4096, 2), (8192, 2), (8192, 4), (16384, 4)):
            most = max(run(Side(ranks, partial(saved_bytes, mode=mode, size=size, ranks=ranks))))
            figure = f"attention kept by a rank, {mode}, {size} tokens on {ranks} ranks / S / R of one process"
            row(figure, most / (per_token * size / ranks), "1.00", f"{most / 2**20:.2f} MiB")


def main(names: list[str]) -> None:
    for name, measure in (("memory", memory), ("time", time)):
        if not names or name in names:
            measure()


if __name__ == "__main__":
    main(sys.argv[1:])
