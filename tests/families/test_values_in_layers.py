"""Models whose layers look at values, or pass on more than a hidden state, train in two stages as on one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import transformers
from torch import Tensor

from lightning_mm5d import ConfigError, Modality
from parity.harness import fit, strategy
from ranks import run_ranks

SMALL = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
AUDIO = SMALL | {
    "num_hidden_layers": 4,
    "conv_dim": (8, 8),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "num_labels": 3,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
}


def switch() -> Any:
    """Experts of the remote encoder are picked by values: of a list that is no part of the cut."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_heads": 4, "num_layers": 4, "num_decoder_layers": 4}
    sparse = {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "num_experts": 4, "expert_capacity": 64}
    off = {"dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0}
    config = transformers.SwitchTransformersConfig(vocab_size=40, **sizes, **sparse, **off)
    return transformers.SwitchTransformersForConditionalGeneration(config)


def wavlm() -> Any:
    """The first layer returns the position bias that all others take, and have no weights for."""
    return transformers.WavLMForSequenceClassification(transformers.WavLMConfig(**AUDIO))


def data2vec() -> Any:
    """Norms without parameters before the layers."""
    config = transformers.Data2VecAudioConfig(**AUDIO, conv_pos_kernel_size=3)
    return transformers.Data2VecAudioForSequenceClassification(config)


def ibert() -> Any:
    """Layers refuse NaN."""
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"vocab_size": 40, "num_hidden_layers": 4, "max_position_embeddings": 32, "num_labels": 3}
    return transformers.IBertForSequenceClassification(transformers.IBertConfig(**SMALL, **sizes, **off))


def poolformer() -> Any:
    sizes = {"hidden_sizes": [8] * 4, "depths": [1, 1, 2, 1], "patch_sizes": [3] * 4, "strides": [2] * 4}
    config = transformers.PoolFormerConfig(**sizes, padding=[1] * 4, num_labels=3)
    return transformers.PoolFormerForImageClassification(config)


MODELS = (switch, wavlm, data2vec, ibert)


class Trained(L.LightningModule):
    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = make().double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def batches(make: Any) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(3):
        tokens = torch.randint(3, 40, (4, 6), generator=generator)
        waves = torch.randn(4, 800, dtype=torch.float64, generator=generator)
        inputs = {"input_values": waves} if make in (wavlm, data2vec) else {"input_ids": tokens}
        labels = tokens.flip(1) if make is switch else tokens[:, 0] % 3
        made.append({**inputs, "labels": labels})
    return made


def two_stages(rank: int) -> dict[str, list[float]]:
    layout = {"language": Modality(module="model", pp_size=2)}
    losses = {}
    for make in MODELS:
        losses[make.__name__] = fit(Trained(make), batches(make), strategy(layout, num_microbatches=2), 2).losses
    return losses


def test_layers_that_look_at_values_train_in_two_stages() -> None:
    """language: ranks 0-1 as stages."""
    expected = {make.__name__: fit(Trained(make), batches(make)).losses for make in MODELS}
    for losses in run_ranks(2, two_stages):
        for name, found in losses.items():
            assert found == pytest.approx(expected[name], rel=1e-9), name


def test_modules_between_lists_of_layers_are_refused_before_ranks_meet() -> None:
    layout = {"language": Modality(module="model", pp_size=2)}
    with pytest.raises(
        ConfigError, match=r"modalities.language.pp_size: got 2. 'model.poolformer.encoder.block' holds"
    ):
        fit(Trained(poolformer), [], strategy(layout), 2)
