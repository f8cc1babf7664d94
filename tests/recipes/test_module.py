"""The ready LightningModule: what it trains and logs, and that any layout gives the numbers of one process."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Qwen2Config, Qwen2ForCausalLM, ViTConfig, ViTModel

from lightning_mm5d import (
    ConfigError,
    Modality,
    ModalityEncoder,
    MultimodalModel,
    MultimodalModule,
    MultimodalStrategy,
)
from ranks import call_ranks

pytestmark = pytest.mark.usefixtures("float64")
IMAGE, IGNORED = 31, -100


def model() -> MultimodalModel:
    torch.manual_seed(0)
    vision = ViTModel(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=8,
            patch_size=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        add_pooling_layer=False,
    )
    language = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=0,
            eos_token_id=None,
            bos_token_id=None,
        )
    )
    return MultimodalModel(
        encoders={"vision": ModalityEncoder(vision)}, language_model=language, token_ids={"vision": IMAGE}
    ).double()


def samples() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    found = []
    for _ in range(8):
        ids = torch.randint(1, 30, (10,), generator=draw)
        ids[1:5] = IMAGE
        labels = ids.clone()
        labels[: 6 + len(found) % 2] = IGNORED
        pixels = torch.randn(3, 8, 8, generator=draw, dtype=torch.float64)
        found.append(
            {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
        )
    return found


def fitted(rank: int, strategy: dict[str, Any] | None, world: int, options: dict[str, Any]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    module = MultimodalModule(model(), **options)
    chosen: Any = "auto"
    if strategy is not None:
        layout = {name: Modality(**said) for name, said in strategy.items()}
        chosen = MultimodalStrategy(modalities=layout, batching={"num_microbatches": 2, "loss_weight": "tokens"})
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=chosen,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(samples(), batch_size=4), DataLoader(samples(), batch_size=4))
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups] if trainer.optimizers else []
    return {
        "logged": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "rates": rates,
        "state": {key: value for key, value in module.state_dict().items()} if rank == 0 else {},
    }


LAYOUTS = {
    "modalities": (2, {"vision": {}, "language": {}}),
    "stages": (3, {"vision": {}, "language": {"pp_size": 2}}),
    "shards": (3, {"vision": {}, "language": {"tp_size": 2}}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "everything": {"learning_rate": 1e-3, "learning_rates": {"vision": 1e-4}, "weight_decay": 0.1},
    "projector": {"train": {"vision": False, "language": False}, "learning_rate": 1e-2},
    "adapters": {"lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]}, "train": {"vision_projector": True}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_layouts_give_the_numbers_of_one_process(name: str) -> None:
    (one,) = call_ranks(1, fitted, None, 1, OPTIONS[name])
    layouts = LAYOUTS if name == "everything" else {"stages": LAYOUTS["stages"]}
    for world, layout in layouts.values():
        got = call_ranks(world, fitted, layout, world, OPTIONS[name])[0]
        assert got["logged"].keys() == one["logged"].keys()
        for key, value in one["logged"].items():
            assert got["logged"][key] == pytest.approx(value, rel=1e-6), key
        for key, tensor in one["state"].items():
            torch.testing.assert_close(got["state"][key], tensor, rtol=1e-6, atol=1e-7, msg=key)


def test_parts_have_learning_rates_of_their_own_and_norms_no_decay() -> None:
    module = MultimodalModule(model(), learning_rate=1e-3, learning_rates={"vision": 1e-4}, weight_decay=0.1, warmup=0)
    module.configure_model()
    module.trainer = L.Trainer(max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False)
    groups = module.configure_optimizers()["optimizer"].param_groups  # type: ignore[index]
    found = {group["name"]: (group["initial_lr"], group["weight_decay"]) for group in groups}
    assert found == {
        "vision": (1e-4, 0.1),
        "vision, no decay": (1e-4, 0.0),
        "vision_projector": (1e-3, 0.1),
        "vision_projector, no decay": (1e-3, 0.0),
        "language": (1e-3, 0.1),
        "language, no decay": (1e-3, 0.0),
    }


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"train": {"visoin": False}}, "train.visoin"),
        ({"learning_rates": {"audio": 1e-3}}, "learning_rates.audio"),
        ({"train": {"vision": False, "vision_projector": False, "language": False}}, "train"),
    ],
)
def test_refuses_parts_that_do_not_exist(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        MultimodalModule(model(), **options).configure_model()


@pytest.mark.parametrize("options", [{"learning_rate": -1.0}, {"samples": 2}, {"max_new_tokens": 0}])
def test_refuses_arguments_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MultimodalModule(model(), **options)
