"""What a recipe says wrongly is told in one sentence, and a validation without labels spoils no figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig

from lightning_mm5d import ConfigError, MultimodalModule
from lightning_mm5d.recipes.module import EncoderSource, ModelSource, named_class, prompts
from recipes.test_module import IGNORED, model, samples

pytestmark = pytest.mark.usefixtures("float64")


def _trainer(**options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **options)


def test_batches_without_labels_count_for_nothing() -> None:
    rows = samples()
    for row in rows[:4]:
        row["labels"][:] = IGNORED
    module, trainer = MultimodalModule(model()), _trainer()
    (mixed,) = trainer.validate(module, DataLoader(rows, batch_size=2), verbose=False)
    (labelled,) = trainer.validate(module, DataLoader(rows[4:], batch_size=2), verbose=False)
    assert mixed == pytest.approx(labelled)
    del rows[0]["labels"]
    with pytest.raises(ConfigError, match=r"batch\.labels.*Use a MultimodalCollator"):
        trainer.validate(module, DataLoader(rows[:1]), verbose=False)


def test_a_row_without_labels_or_mask_is_a_prompt_as_a_whole() -> None:
    class Tokenizer:
        pad_token_id = 0

    ids = torch.tensor([[5, 6, 7]])
    found = prompts({"input_ids": ids, "labels": torch.full_like(ids, IGNORED)}, Tokenizer())
    assert torch.equal(found["input_ids"], ids)
    assert found["attention_mask"].all()


def test_a_constant_schedule_follows_the_warm_up() -> None:
    module = MultimodalModule(model(), warmup=4, schedule="constant", learning_rate=1.0)
    module.configure_model()
    module.trainer = _trainer(max_steps=8)
    found: Any = module.configure_optimizers()
    assert found["optimizer"].param_groups[0]["lr"] == 0
    assert [found["lr_scheduler"]["scheduler"].lr_lambdas[0](step) for step in (2, 4, 8)] == [0.5, 1, 1]


def _endless(path: Path) -> None:
    loader = DataLoader(samples())
    _trainer(max_steps=-1, max_epochs=-1).fit(MultimodalModule(model()), loader, loader)


def _source(**options: Any) -> None:
    MultimodalModule(ModelSource(**options)).configure_model()


REFUSED: dict[str, tuple[Any, str]] = {
    "training without an end": (_endless, r"trainer\.max_steps.*Set max_steps"),
    "adapters for nothing": (
        lambda path: MultimodalModule(model(), lora={"target_modules": ["nothing"]}).configure_model(),
        r"lora: .*not found in the base model",
    ),
    "an argument that PEFT does not know": (
        lambda path: MultimodalModule(model(), lora={"rr": 2}).configure_model(),
        r"lora: .*'rr'",
    ),
    "two models": (lambda path: _source(pretrained="a", language_model="b"), r"model\.model: .*Name one of the two"),
    "a folder without a model": (lambda path: _source(pretrained=str(path)), r"model\.model: .*Check the names"),
    "an encoder's folder without a model": (
        lambda path: _source(encoders={"vision": EncoderSource(model=str(path))}, language_model=str(path)),
        r"model\.model: .*Check the names",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_told_in_one_sentence(case: str, tmp_path: Path) -> None:
    act, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as caught:
        act(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_names_no_class_but_a_model(tmp_path: Path) -> None:
    fields = {"model_type": "llava", "architectures": ["Trainer", "LlavaForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert named_class(AutoConfig.from_pretrained(tmp_path)).__name__ == "LlavaForConditionalGeneration"
