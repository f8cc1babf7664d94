"""Generation in evaluation steps gives the tokens of one process, whatever the layout; training goes on after it."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from features.toys import assert_same
from lightning_mm5d import Modality
from parity.harness import Batches, Recorder, strategy
from ranks import call_ranks
from zoo import CASES

PLACEHOLDERS = [1, 2, 3, 4, 5, 8, 9]  # tokens that stand for images and sound
PAD, EOS = 0, 7


class Speaker(L.LightningModule):
    """Trains a model; its validation reads the loss and then lets it speak, by `generate` and by a loop of its own."""

    def __init__(self, model: torch.nn.Module, end: int = EOS) -> None:
        super().__init__()
        self.model, self.end = model, end
        self.spoken: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch, use_cache=False).loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch, use_cache=False).loss
        self.log("val_loss", loss, batch_size=len(batch["labels"]), sync_dist=True)
        self.spoken.append(self.speak(batch))
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.speak(batch)

    def speak(self, batch: Any) -> dict[str, Any]:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        ends = {"eos_token_id": self.end, "pad_token_id": PAD, "max_new_tokens": 5, "suppress_tokens": PLACEHOLDERS}
        said = {
            "greedy": self.model.generate(**inputs, do_sample=False, **ends),  # type: ignore[operator]
            "static": self.model.generate(**inputs, do_sample=False, cache_implementation="static", **ends),  # type: ignore[operator]
            "beams": self.model.generate(**inputs, do_sample=False, num_beams=3, **ends),  # type: ignore[operator]
        }
        torch.manual_seed(3)
        said["sampled"] = self.model.generate(**inputs, do_sample=True, temperature=4.0, **ends)  # type: ignore[operator]
        return {
            name: [[token for token in row if token != PAD] for row in rows.tolist()] for name, rows in said.items()
        }

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def run(case_name: str, modalities: Any, devices: int) -> dict[str, Any]:
    """Two steps of training with validation after each, then predictions."""
    case = CASES[case_name]
    model = case.build().model
    if case_name == "t5":
        model.config.num_layers = 4  # of the decoder, which transformers asks when it makes a cache
    module, recorder = Speaker(model), Recorder()
    batches = [case.batch(2, seed=seed) for seed in range(2)]
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": devices,
        "max_epochs": 1,
        "val_check_interval": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = "auto" if modalities is None else strategy(modalities)
        trainer = L.Trainer(strategy=chosen, callbacks=[recorder], **options)
        loader = DataLoader(Batches(batches), batch_size=None)
        trainer.fit(module, loader, loader)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        predicted = trainer.predict(module, loader)
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "metrics": metrics,
        "spoken": module.spoken,
        "predicted": predicted,
    }


def on_rank(rank: int, *args: Any) -> dict[str, Any]:
    return run(*args)


def m(**sizes: Any) -> Modality:
    return Modality(**sizes)


LAYOUTS: dict[str, tuple[str, dict[str, Modality], int]] = {
    "vision pp 2 | language pp 2": ("qwen2_5_vl", {"vision": m(pp_size=2), "language": m(pp_size=2)}, 4),
    "vision with language pp 2": ("llava", {"vision": m(colocate_with="language"), "language": m(pp_size=2)}, 2),
    "vision | language tp 2": ("llava", {"vision": m(), "language": m(tp_size=2)}, 3),
    "vision | sliding windows pp 2": ("gemma3", {"vision": m(), "language": m(pp_size=2)}, 3),
    "encoder and decoder pp 2": ("t5", {"language": m(pp_size=2)}, 2),
    "audio | language pp 2": ("whisper", {"audio": m(), "language": m(pp_size=2)}, 3),
    "tp 2 pp 2": ("llama_tied", {"language": m(tp_size=2, pp_size=2)}, 4),
    "cp 2 pp 2": ("llama", {"language": m(cp_size=2, pp_size=2)}, 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.usefixtures("float64")
def test_generated_text_is_that_of_one_process(name: str) -> None:
    """Each layout is drawn by its name: ranks in that order."""
    case, modalities, world = LAYOUTS[name]
    one = run(case, None, 1)
    said = one["predicted"][0]
    assert said["sampled"] != said["greedy"]
    for rank in call_ranks(world, on_rank, case, modalities, world):
        for part in ("spoken", "predicted"):
            assert rank[part] == one[part]
        assert_same(rank["losses"], one["losses"], 1e-6)
        assert_same(rank["metrics"], one["metrics"], 1e-6)
