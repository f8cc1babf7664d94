"""A LLaVA that ranks read in parts trains like one that a single process has loaded as ever."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import peft
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlavaForConditionalGeneration

from features.toys import assert_same
from lightning_mm5d import CheckpointCorruptError, Modality, MultimodalStrategy, from_pretrained
from ranks import run_ranks
from zoo import CASES

from .hugging_face import rewritten

LAYOUTS: dict[str, dict[str, Modality]] = {
    "pipeline": {"vision": Modality(), "language": Modality(pp_size=3)},
    "tensor": {"vision": Modality(tp_size=2), "language": Modality(tp_size=2)},
    "shared": {"vision": Modality(colocate_with="language"), "language": Modality(pp_size=2, tp_size=2)},
    "rows": {
        "vision": Modality(colocate_with="language", tp_size=2, sharding={"zero_stage": 3}),
        "language": Modality(tp_size=2, sharding={"zero_stage": 3}),
    },
}
LOSS = 1e-6  # transformers computes the loss in float32
KINDS = ("as it is", "with adapters", "with a new head")


class Tuned(L.LightningModule):
    """Fine-tunes what a folder holds."""

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__()
        self.folder, self.kind = folder, kind
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.model = from_pretrained(LlavaForConditionalGeneration, self.folder, dtype="auto")
        self.model.train()
        if self.kind == "with a new head":
            self.model.resize_token_embeddings(72)
        if self.kind == "with adapters":
            config = peft.LoraConfig(
                r=2, target_modules=r".*language_model.*\.(q_proj|v_proj)", init_lora_weights="gaussian"
            )
            self.model = peft.get_peft_model(self.model, config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch, use_cache=False).loss  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Start(Callback):
    """What a rank holds when training starts."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        named = [*pl_module.named_parameters(), *pl_module.named_buffers()]
        self.tensors = {name: tensor.detach().clone() for name, tensor in named}


def fit(folder: Path, kind: str, world: int, **options: Any) -> dict[str, Any]:
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.*", FutureWarning)  # of peft
    torch.manual_seed(5)
    batches = [CASES["llava"].batch(4, seed) for seed in range(2)]
    module, start = Tuned(folder, kind), Start()
    trainer = L.Trainer(
        accelerator="cpu", devices=world, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, callbacks=[start],
        **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(batches, batch_size=None))
    end = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    return {"start": start.tensors, "losses": module.losses, "end": end}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in several files, without those of a projector's layer."""
    path = tmp_path_factory.mktemp("llava")
    CASES["llava"].build().double().model.save_pretrained(path)  # type: ignore[union-attr]
    rewritten(path, lambda tensors: {name: value for name, value in tensors.items() if "linear_2.weight" not in name})
    return path


CASES_OF_RANKS = [
    pytest.param(layout, kind, marks=() if row == column else pytest.mark.exhaustive)
    for row, layout in enumerate(LAYOUTS)
    for column, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("layout", "kind"), CASES_OF_RANKS)
def test_ranks_start_and_train_with_the_weights_of_one_process(layout: str, kind: str, folder: Path) -> None:
    """Ranks 0-3, as the layout says."""

    def train(rank: int) -> dict[str, Any]:
        strategy = MultimodalStrategy(modalities=LAYOUTS[layout], batching={"num_microbatches": 2})
        return fit(folder, kind, 4, strategy=strategy)

    ranks, one = run_ranks(4, train), fit(folder, kind, 1)
    held = set[str]()
    for rank in ranks:
        assert rank["start"].keys() == one["start"].keys()
        full = {name for name, value in rank["start"].items() if not bool(value.isnan().all())}
        held |= full
        for name in full:
            assert _is_part(rank["start"][name], one["start"][name]), name
        assert_same(rank["losses"], one["losses"], LOSS)
    assert held == one["start"].keys()
    assert_same(ranks[0]["end"], one["end"], LOSS)


def _is_part(part: Tensor, full: Tensor) -> bool:
    """Whether `part` is `full`, or rows or columns of it, or columns of rows."""
    dims = [dim for dim in range(full.dim()) if part.shape[dim] != full.shape[dim]]
    if not dims:
        return torch.equal(part, full)
    if len(dims) == 2:
        lengths = part.shape[dims[1]]
        starts = range(full.shape[dims[1]] - lengths + 1)
        return any(_is_part(part, full.narrow(dims[1], start, lengths)) for start in starts)
    slices = list(full.unbind(dims[0]))
    return all(any(torch.equal(row, other) for other in slices) for row in part.unbind(dims[0]))


def test_a_damaged_file_ends_all_ranks(folder: Path, tmp_path: Path) -> None:
    """vision: rank 0; language: rank 1."""
    transformers.LlavaConfig.from_pretrained(folder).save_pretrained(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])

    def train(rank: int) -> str:
        strategy = MultimodalStrategy(
            modalities={"vision": Modality(), "language": Modality()}, batching={"num_microbatches": 2}
        )
        with pytest.raises(CheckpointCorruptError, match=r"model\.safetensors") as error:
            fit(tmp_path, "as it is", 2, strategy=strategy)
        return type(error.value).__name__

    assert run_ranks(2, train) == ["CheckpointCorruptError"] * 2
