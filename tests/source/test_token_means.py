"""What a loss counts is read from the code of the model, as transformers' models write it in their several ways."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from lightning_mm5d.source.passed import counting
from lightning_mm5d.source.trees import method_of
from zoo import CASES

COUNTED = {
    "llama": "shifted",
    "bert": "all",
    "t5": "all",
    "whisper": "all",
    "blip_2": "shifted",
    "qwen2_audio": "shifted",
    "clip": None,
}


@pytest.mark.parametrize("name", COUNTED)
def test_models_count_the_labels_that_their_code_counts(name: str) -> None:
    assert counting(CASES[name].build()) == COUNTED[name]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_loss_is_the_mean_over_the_labels_that_are_counted(name: str) -> None:
    """Of one label alone, at the first position and at the second, the loss is that of a label, or of none."""
    module, batch = CASES[name].build(), CASES[name].batch(2, 1)
    ids = batch["input_ids"]
    first = torch.where(torch.arange(ids.shape[1]) == 0, ids, -100)
    model = module.model if hasattr(module, "model") else module
    loss = model(**{**batch, "labels": first}).loss
    assert bool(loss.isnan()) == (COUNTED[name] == "shifted")


def test_a_loss_that_is_no_mean_over_tokens_counts_none() -> None:
    sizes: Any = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    convolutions: Any = {"conv_dim": [8], "conv_kernel": [4], "conv_stride": [4], "num_conv_pos_embeddings": 4}
    grouped: Any = {"num_conv_pos_embedding_groups": 1, "num_feat_extract_layers": 1, "vocab_size": 5}
    holder = nn.ModuleList([Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, **convolutions, **grouped))])
    assert counting(holder) is None


class Handwritten(nn.Module):
    def next_token(self, logits: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def tagged(self, logits: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def regression(self, logits: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(logits, batch["labels"])


def test_a_step_that_computes_its_loss_is_read_where_no_model_takes_labels() -> None:
    def step(name: str) -> frozenset[FunctionType]:
        found = method_of(Handwritten, name)
        assert found is not None
        return frozenset((found,))

    found = [counting(nn.Linear(1, 1), step(name)) for name in ("next_token", "tagged", "regression")]
    assert found == ["shifted", "all", None]


class Speaks(nn.Module):
    """Steps that put a prefix in front of the labels, or padding after them."""

    def joined(self, batch: Any, sound: Tensor) -> Any:
        labels = torch.cat([batch["labels"].new_full((2, 3), -100), batch["labels"]], dim=1)
        return self.model(labels=labels)

    def padded(self, batch: Any, sound: Tensor) -> Any:
        return self.model(labels=F.pad(batch["labels"], (sound.shape[1], 0), value=-100))

    def behind(self, batch: Any, sound: Tensor) -> Any:
        labels = torch.cat([batch["labels"], batch["labels"].new_full((2, 3), -100)], dim=1)
        return self.model(labels=F.pad(labels, (0, 2), value=-100))

    def moved(self, batch: Any, sound: Tensor) -> Any:
        return self.model(labels=F.pad(batch["labels"], (-1, 1), value=-100))

    def batches(self, batch: Any, sound: Tensor) -> Any:
        return self.model(labels=torch.cat([batch["labels"], sound]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("joined", "all"), ("padded", "all"), ("behind", "shifted"), ("moved", "shifted"), ("batches", "shifted")],
)
def test_labels_behind_something_are_all_predicted(name: str, expected: str) -> None:
    step = method_of(Speaks, name)
    assert step is not None
    assert counting(CASES["llama"].build(), frozenset((step,))) == expected


class Prefixed(nn.Module):
    """A model of the user's own that puts its prefix before the labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, embeds: Tensor, labels: Tensor) -> Any:
        ignored = labels.new_full((len(labels), 3), -100)
        return self.model(inputs_embeds=embeds, labels=torch.cat((ignored, labels), dim=1))


def test_a_model_that_puts_its_prefix_before_the_labels_predicts_all_of_them() -> None:
    assert counting(nn.ModuleList([Prefixed(CASES["llama"].build())])) == "all"
