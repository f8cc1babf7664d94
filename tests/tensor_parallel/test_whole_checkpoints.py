"""What tensor parallel ranks save is what one process would have, and any layout goes on from it.

The model is in float64 and has one table for both ends of the vocabulary. Queries, keys and values are one projection:
of 2 ranks each has one of the two key and value heads, of 3 ranks two share one. Neither the vocabulary nor the widths
divide by the ranks. Replicas of such ranks are `exhaustive`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from features.toys import Layout, Run, alone, assert_same, figures, outcomes, together, weights
from lightning_mm5d import Modality
from lightning_mm5d.tensor_parallel.family_plans import TensorParallelPlan
from lightning_mm5d.tensor_parallel.plan_lookup import register_tensor_parallel_plan
from sweeps import swept

VOCABULARY, WIDTH, HEAD = 17, 8, 2


class Attention(nn.Module):
    """Queries, keys and values of hidden states [B, S, D] in one projection; several queries have one key."""

    def __init__(self, heads: int = 6, key_value_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.key_value_heads = heads, key_value_heads
        self.qkv = nn.Linear(WIDTH, (heads + 2 * key_value_heads) * HEAD)
        self.query_norm = nn.LayerNorm(HEAD)
        self.out = nn.Linear(heads * HEAD, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        counts = (self.heads, self.key_value_heads, self.key_value_heads)
        q, k, v = self.qkv(hidden).unflatten(-1, (-1, HEAD)).transpose(1, 2).split(counts, dim=1)
        attended = F.scaled_dot_product_attention(self.query_norm(q), k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = Perceptron()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.mlp(hidden)


class Decoder(nn.Module):
    """Tokens [B, S] -> logits [B, S, VOCABULARY], with one table for both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.table.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


register_tensor_parallel_plan(
    Attention,
    TensorParallelPlan(
        column={"qkv": ("heads", "key_value_heads", "key_value_heads")},
        row={"out": ("heads",)},
        heads="heads",
        key_value_heads="key_value_heads",
        shared=("query_norm",),
    ),
)
register_tensor_parallel_plan(Perceptron, TensorParallelPlan(column={"up": ("width",)}, row={"down": ("width",)}))


class Language(L.LightningModule):
    """AdamW in groups, clipped, and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = Decoder()
            for parameter in self.model.parameters():
                nn.init.normal_(parameter, std=0.3)
        self.double()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["tokens"])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [
            {"params": [p for name, p in named if "mlp" in name], "weight_decay": 0.1},
            {"params": [p for name, p in named if "mlp" not in name], "lr": 0.003},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.01], total_steps=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def language(world: int, replicas: int = 1, **fields: int) -> Layout:
    return Layout({"language": Modality(**fields)}, world, replicas)


LAYOUTS = {
    "tp 2": language(2, tp_size=2),
    "tp 2 x pp 2": language(4, tp_size=2, pp_size=2),
    "tp 2 x dp 2": language(4, 2, tp_size=2, dp_size=2),
    "tp 3": language(3, tp_size=3),
    "pp 2": language(2, pp_size=2),
}


def fit(run: Run, epochs: int, name: str = "", ckpt_path: Any = None) -> dict[str, Any]:
    """Train for epochs of two steps; the weights are those of the module afterwards."""
    module = Language()
    saver = ModelCheckpoint(run.folder / (name or "unused"), save_last=True)
    trainer = run.trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=[saver], gradient_clip_val=0.5)
    trainer.fit(module, run.training(), run.loader(8), ckpt_path=ckpt_path)
    return {"weights": weights(module), "metrics": figures(trainer), "steps": trainer.global_step}


def uninterrupted(run: Run) -> Any:
    return fit(run, 4)


def half(run: Run) -> Any:
    return fit(run, 2, "half")


def after_the_end(run: Run) -> Any:
    """A trainer that has ended saves, and the module of its ranks is trained and evaluated by others."""
    module = Language()
    trainer = run.trainer(max_epochs=1)
    trainer.fit(module, run.training())
    trainer.save_checkpoint(run.folder / "after.ckpt")
    validated = run.trainer().validate(module, run.loader(8), verbose=False)
    run.trainer(max_epochs=1).fit(module, run.training())
    return {"validated": validated, "weights": weights(module)}


def evaluated(run: Run) -> Any:
    path = run.folder / "half/last.ckpt"
    plain = Language.load_from_checkpoint(path, weights_only=True)
    return weights(plain), run.trainer().validate(Language(), run.loader(8), ckpt_path=path, verbose=False)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of one process that stopped halfway, and what it has where it does not."""
    folder = tmp_path_factory.mktemp("one")
    alone(half, folder)
    return folder, alone(uninterrupted, folder)


@pytest.mark.parametrize("layout", swept(["tp 2", "tp 2 x pp 2", "tp 2 x dp 2"], "tp 2", "tp 2 x dp 2"))
def test_the_file_is_that_of_one_process_which_goes_on_from_it(layout: str, one: Any, tmp_path: Path) -> None:
    folder, expected = one
    for rank in together(LAYOUTS[layout], half, tmp_path):
        assert rank["steps"] == 4
    found, wanted = (torch.load(path / "half/last.ckpt", weights_only=True) for path in (tmp_path, folder))
    assert list(found["state_dict"]) == list(wanted["state_dict"])
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert_same(found[key], wanted[key], where=key)
    assert found.keys() - {"lightning_mm5d"} == wanted.keys()

    def resume(run: Run) -> Any:
        return fit(run, 4, ckpt_path=tmp_path / "half/last.ckpt")

    assert_same(alone(resume, tmp_path), expected)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two tensor parallel ranks that stopped halfway."""
    folder = tmp_path_factory.mktemp("two")
    together(LAYOUTS["tp 2"], half, folder)
    return folder


@pytest.mark.parametrize("layout", swept(["tp 2 x dp 2", "tp 3", "pp 2"], "tp 2 x dp 2"))
def test_other_layouts_go_on_from_it(layout: str, one: Any, of_two: Path, tmp_path: Path) -> None:
    """From the file of two tensor parallel ranks."""

    def resume(run: Run) -> Any:
        return fit(run, 4, ckpt_path=of_two / "half/last.ckpt")

    ranks = together(LAYOUTS[layout], resume, tmp_path)
    assert_same(ranks[0]["weights"], one[1]["weights"])
    for rank in ranks:
        assert_same(rank["metrics"], one[1]["metrics"])
        assert rank["steps"] == 8


@pytest.mark.parametrize("layout", swept(["tp 2 x pp 2", "tp 3"], "tp 3"))
def test_the_module_is_whole_after_the_end(layout: str, tmp_path: Path) -> None:
    got = outcomes(LAYOUTS[layout], after_the_end, folder=tmp_path)["after_the_end"]
    files = (torch.load(tmp_path / name / "after.ckpt", weights_only=True) for name in ("one", "ranks"))
    expected, found = files
    assert_same(found["state_dict"], expected["state_dict"])
    assert_same(found["optimizer_states"], expected["optimizer_states"])
    assert_same(got.ranks[0], got.one)
    for rank in got.ranks:
        assert_same(rank["validated"], got.one["validated"])
        assert {name: value.shape for name, value in rank["weights"].items()} == {
            name: value.shape for name, value in got.one["weights"].items()
        }


def test_the_file_loads_into_a_plain_module_and_into_an_evaluation(one: Any, tmp_path: Path) -> None:
    """language: ranks 0-1, tensor parallel."""
    got = outcomes(LAYOUTS["tp 2"], half, evaluated, folder=tmp_path)["evaluated"]
    for rank in got.ranks:
        assert_same(rank, got.one)


def refused(run: Run) -> str:
    try:
        run.trainer().validate(Language(), run.loader(8), ckpt_path=run.folder / "changed.ckpt", verbose=False)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_every_rank_refuses_tensors_of_other_shapes(one: Any, tmp_path: Path) -> None:
    """One that has the shape of a part as well. language: ranks 0-1, tensor parallel."""
    checkpoint = torch.load(one[0] / "half/last.ckpt", weights_only=True)
    name = "model.layers.0.mlp.up.weight"
    weight = checkpoint["state_dict"][name]
    checkpoint["state_dict"][name] = weight[: len(weight) // 2]
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    for error in together(LAYOUTS["tp 2"], refused, tmp_path):
        assert "size mismatch" in error
        assert name in error
