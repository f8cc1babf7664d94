"""Layers that torch has written compute on ranks as on one process: ``nn.MultiheadAttention``, encoders, decoders.

Forms of calls are tried on two ranks that are threads; whole models train, validate and predict on processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from features.toys import Layout, Run, assert_same, figures, outcomes, weights
from lightning_mm5d import Modality
from lightning_mm5d.tensor_parallel.plan_lookup import plans_of
from sweeps import swept

from .two_ranks import Root, differences

B, L_, S, D = 3, 5, 7, 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"kdim": 6, "vdim": 10},
    {"add_bias_kv": True},
    {"add_zero_attn": True, "add_bias_kv": True},
]

pytestmark = pytest.mark.usefixtures("float64")


class Called(nn.Module):
    """Calls a module with keywords, in a way of its own."""

    def __init__(self, module: nn.Module, way: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.way = module, way

    def forward(self, **inputs: Tensor) -> Any:
        return self.way(self.module, **inputs)


def randomized(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.3)
    return module


def calls(heads: int, batch_first: bool, kdim: int, vdim: int) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Keywords, and inputs that get gradients."""
    width = heads * D

    def made(length: int, size: int) -> Tensor:
        return torch.randn(B, length, size) if batch_first else torch.randn(length, B, size)

    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, -2:] = True
    causal = torch.ones(L_, L_, dtype=torch.bool).triu(1)
    masks: list[tuple[dict[str, Any], dict[str, Tensor]]] = [
        ({}, {}),
        ({"need_weights": False}, {}),
        ({"average_attn_weights": False, "key_padding_mask": padding}, {}),
        ({"need_weights": False, "key_padding_mask": padding}, {}),
        ({}, {"attn_mask": torch.randn(L_, S)}),
        ({"need_weights": False}, {"attn_mask": torch.randn(B * heads, L_, S)}),
        ({}, {"attn_mask": torch.randn(B * heads, L_, S), "key_padding_mask": torch.randn(B, S)}),
    ]
    for keywords, masked in masks:
        yield keywords, {"query": made(L_, width), "key": made(S, kdim), "value": made(S, vdim), **masked}
    if kdim == width:
        for keywords in ({}, *({"need_weights": one, "attn_mask": causal, "is_causal": True} for one in (True, False))):
            yield keywords, {"query": made(L_, width)}
            yield keywords, {"query": torch.randn(L_, width)}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", [4, 3])
def test_an_attention_takes_every_call_that_torchs_takes(heads: int, options: dict[str, Any]) -> None:
    width = heads * D
    for batch_first in (True, False):
        attention = randomized(nn.MultiheadAttention(width, heads, batch_first=batch_first, **options))
        for keywords, inputs in calls(heads, batch_first, options.get("kdim", width), options.get("vdim", width)):

            def way(module: nn.Module, keywords: Any = keywords, **given: Tensor) -> Any:
                own = {"key": given["query"], "value": given["query"]} if "key" not in given else {}
                return module(**own, **given, **keywords)

            for training in (True, False):
                found = differences(Called(attention, way).train(training), inputs)
                assert found == [], (batch_first, keywords, {name: x.shape for name, x in inputs.items()})


@pytest.mark.parametrize("cls", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu, nn.Tanh()], ids=lambda one: type(one).__name__)
def test_layers_of_torch_are_sharded(cls: type[nn.Module], activation: Any) -> None:
    for norm_first in (True, False):
        for batch_first in (True, False):
            layer = randomized(cls(12, 3, 10, 0.0, activation, norm_first=norm_first, batch_first=batch_first))
            inputs = {"x": torch.randn(B, L_, 12)}
            if cls is nn.TransformerDecoderLayer:
                inputs["memory"] = torch.randn(B, S, 12) if batch_first else torch.randn(B, L_, 12)
            assert differences(Called(layer, lambda module, **given: module(*given.values())), inputs) == []
            plans = plans_of(Root(layer))
            assert {tuple(one.row) for several in plans.values() for one in several} == {("out_proj",), ("linear2",)}


class OwnFeedForward(nn.TransformerEncoderLayer):
    def _ff_block(self, x: Tensor) -> Tensor:
        return self.linear2(self.linear1(x).softmax(-1))


class ReadsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.attention.in_proj_weight)


class OwnForward(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, x, x)


@pytest.mark.parametrize(
    ("module", "rows"),
    [
        (OwnFeedForward(8, 2, 6), {"out_proj"}),
        (nn.TransformerEncoderLayer(8, 2, 6, activation=lambda x: x.softmax(-1)), {"out_proj"}),
        (ReadsWeights(), set()),
        (OwnForward(8, 2), set()),
    ],
    ids=["own feed forward", "own activation", "weights read", "own forward"],
)
def test_what_is_not_torchs_own_stays_whole(module: nn.Module, rows: set[str]) -> None:
    plans = plans_of(Root(module))
    assert {row for several in plans.values() for one in several for row in one.row} == rows


class Translator(L.LightningModule):
    """An encoder and a decoder of torch, over embeddings; padding at the end of samples."""

    def __init__(self, batch_first: bool = True, heads: int = 4) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.table = nn.Embedding(11, 16)
            layer = nn.TransformerEncoderLayer(16, heads, 20, 0.0, batch_first=batch_first)
            self.encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(16), enable_nested_tensor=batch_first)
            self.head = nn.Linear(16, 11)
        self.batch_first = batch_first
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        padding, x = ids == 0, self.table(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        y = self.encoder(x, src_key_padding_mask=padding)
        return self.head((y if self.batch_first else y.transpose(0, 1)).mean(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch), batch[:, 0])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self(batch), batch[:, 0]), sync_dist=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Decoder(Translator):
    """A decoder alone, over a memory of the same embeddings."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__(batch_first)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            layer = nn.TransformerDecoderLayer(16, 4, 20, 0.0, "gelu", batch_first=batch_first, norm_first=True)
            self.decoder = nn.TransformerDecoder(layer, 4)
        del self.encoder
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x if self.batch_first else x.transpose(0, 1)
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        y = self.decoder(x, x.flip(-1), causal, memory_key_padding_mask=ids == 0, tgt_is_causal=True)
        return self.head((y if self.batch_first else y.transpose(0, 1)).mean(1))


def sentences() -> Tensor:
    ids = torch.randint(1, 11, (8, 6), generator=torch.Generator().manual_seed(0))
    ids[::2, 4:] = 0
    return ids


def trained(run: Run, module: L.LightningModule) -> Any:
    trainer = run.trainer(max_epochs=2)
    trainer.fit(module, DataLoader(sentences(), 8), DataLoader(sentences(), 8))
    seen = figures(trainer)["val"]
    after = weights(module)
    predicted = trainer.predict(module, DataLoader(sentences(), 8))
    return seen, torch.cat([one for one in predicted or []]), after


def encoder(run: Run) -> Any:
    return trained(run, Translator())


def encoder_of_tokens_first(run: Run) -> Any:
    return trained(run, Translator(batch_first=False))


def encoder_of_one_head(run: Run) -> Any:
    return trained(run, Translator(heads=1))


def decoder(run: Run) -> Any:
    return trained(run, Decoder(batch_first=False))


SCENARIOS = (encoder, encoder_of_tokens_first, encoder_of_one_head, decoder)
LAYOUTS = {
    "pp 2": Layout({"language": Modality(pp_size=2)}, 2),
    "tp 2, sequence parallel": Layout({"language": Modality(tp_size=2, tensor={"sequence_parallel": True})}, 2),
    "tp 2 x pp 2": Layout({"language": Modality(tp_size=2, pp_size=2)}, 4),
}


@pytest.mark.parametrize("layout", swept(LAYOUTS, "tp 2 x pp 2"))
def test_models_of_torchs_layers_train_and_evaluate_like_one_process(layout: str) -> None:
    """language: ranks 0-1 as two stages, or as tensor parallel ranks; or two stages of two."""
    for name, outcome in outcomes(LAYOUTS[layout], *SCENARIOS).items():
        wanted, predicted, after = outcome.one
        for rank, (seen, got, held) in enumerate(outcome.ranks):
            assert_same(seen, wanted, where=f"{name}, rank {rank}")
            assert_same(got, predicted, where=f"{name}, prediction of rank {rank}")
            if rank == 0:
                assert_same(held, after, where=name)
