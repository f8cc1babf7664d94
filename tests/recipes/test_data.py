"""Training from a JSONL file equals one process in any layout, packed or padded, and names the row of every error."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mm5d import ConfigError, Modality, MultimodalDataModule, MultimodalModule, MultimodalProcessor
from lightning_mm5d.models import item_inputs
from models.test_media import film
from models.tiny_composed import composed, processor
from parity.harness import Recorder, strategy
from ranks import call_ranks, run_ranks
from recipes.conversations import Learner, write

WITH = {"colocate_with": "language"}
PACKED = {"packing": True, "max_length": 64, "batch_size": 6}
PADDED = {"batch_size": 4}
# fields of vision, audio and language, ranks, how data is loaded, family of the language model
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int, dict[str, Any], str]] = {
    "vision on a rank of its own, padded": ({}, WITH, {}, 2, PADDED, "llama"),
    "pipeline, packed": (WITH, WITH, {"pp_size": 2}, 2, PACKED, "llama"),
    "pipeline, packed by a mask": (WITH, WITH, {"pp_size": 2}, 2, PACKED, "opt"),
    "tensor parallel, packed": (WITH, WITH, {"tp_size": 2}, 2, PACKED, "llama"),
    "context parallel, packed": (WITH, WITH, {"cp_size": 2}, 2, PACKED, "llama"),
}


def trainer(**options: Any) -> L.Trainer:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return L.Trainer(accelerator="cpu", max_epochs=1, **{**dict.fromkeys(quiet, False), "devices": 1, **options})


def train(family: str, path: Path, options: dict[str, Any], chosen: Any = "auto", devices: int = 1) -> Any:
    module, recorder = Learner(family), Recorder()
    data = MultimodalDataModule(path, processor=processor(module.model), shuffle=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        placed = {"strategy": chosen, "devices": devices, "use_distributed_sampler": False}
        trainer(**placed, callbacks=[recorder]).fit(module, datamodule=data)
    return recorder.losses, module.state_dict(), module.seen


def train_ranks(rank: int, case: str, path: Path) -> Any:
    vision, audio, language, ranks, options, family = CASES[case]
    modalities = {"vision": Modality(**vision), "audio": Modality(**audio), "language": Modality(**language)}
    chosen = strategy(modalities, num_microbatches=2, loss_weight="tokens")
    return train(family, path, options, chosen, ranks)


@lru_cache
def reference(family: str, path: Path, packed: bool) -> Any:
    return train(family, path, PACKED if packed else PADDED)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("conversations"))


@pytest.mark.parametrize("case", CASES)
def test_layouts_learn_from_a_file_as_one_process(case: str, path: Path) -> None:
    *_, ranks, options, family = CASES[case]
    losses, parameters, seen = reference(family, path, options is PACKED)
    results = call_ranks(ranks, train_ranks, case, path)
    for found, _, batches in results:
        assert found == pytest.approx(losses, rel=1e-6)
        for one, other in zip(batches, seen, strict=True):
            np.testing.assert_array_equal(one, other)
    for key, value in parameters.items():
        torch.testing.assert_close(
            results[0][1][key], value, rtol=1e-6, atol=1e-8, msg=lambda m, key=key: f"{key}: {m}"
        )


def resumed(rank: int, path: Path, folder: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What a run saw after its first batch, and what a run saw that went on after that batch."""
    seen = []
    for start in (None, folder / "step=1.ckpt"):
        L.seed_everything(3, verbose=False)
        module = Learner()
        data = MultimodalDataModule(path, processor=processor(module.model), batch_size=2)
        saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saver] if start is None else []}
        root = {"default_root_dir": folder, **options}
        run = trainer(strategy=strategy({"model": Modality()}), devices=2, **root)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.fit(module, datamodule=data, ckpt_path=start)
        seen.append(module.seen)
    return seen[0][1:], seen[1]


def test_replicas_go_on_in_the_midst_of_an_epoch(path: Path, tmp_path: Path) -> None:
    results = call_ranks(2, resumed, path, tmp_path)
    for expected, found in results:
        assert len(expected) == 2
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)
    first, second = ([batch.tolist() for batch in expected] for expected, _ in results)
    assert first != second


def decoding(rank: int, path: Path, lazy: bool) -> tuple[list[float], Counter[str]]:
    """Losses, and how many files this rank decodes."""
    decoded = Counter[str]()
    module, recorder = Learner(), Recorder()
    data = MultimodalDataModule(path, processor=processor(module.model), shuffle=False, batch_size=4)
    modalities = {"vision": Modality(), "audio": Modality(colocate_with="vision"), "language": Modality()}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("read_image", "read_sound", "_read_video"):
            read = getattr(item_inputs, name)
            patch.setattr(
                item_inputs, name, lambda *args, name=name, read=read: (decoded.update([name]), read(*args))[1]
            )
        if not lazy:
            patch.setattr(MultimodalProcessor, "_told", lambda *_: None)
        placed = {"strategy": strategy(modalities, num_microbatches=2, loss_weight="tokens"), "devices": 2}
        trainer(**placed, use_distributed_sampler=False, callbacks=[recorder]).fit(module, datamodule=data)
    return recorder.losses, decoded


def test_a_rank_decodes_the_files_that_it_encodes_and_losses_are_those_of_all_decoded(tmp_path: Path) -> None:
    """vision and audio: rank 0; language: rank 1."""
    path = write(tmp_path, rows=48)
    eager, lazy = (run_ranks(2, decoding, path, kind) for kind in (False, True))
    assert [decoded for _, decoded in eager] == [{"read_image": 48, "read_sound": 12}] * 2
    assert [losses for losses, _ in lazy] == [losses for losses, _ in eager]
    encoding, others = (decoded for _, decoded in lazy)
    assert not others
    assert 48 <= encoding["read_image"] <= 1.05 * 48
    assert 12 <= encoding["read_sound"] <= 1.05 * 12


def test_a_rank_decodes_the_video_files_that_it_encodes(tmp_path: Path) -> None:
    """vision and audio: rank 0; language: rank 1."""
    film(tmp_path / "film.mp4", 3, "mpeg4")
    turns = [{"from": "human", "value": "<image> what"}, {"from": "gpt", "value": "this"}]
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join([json.dumps({"image": ["film.mp4"], "conversations": turns})] * 12))
    (losses, encoding), (same, others) = run_ranks(2, decoding, path, True)
    assert losses == same
    assert (encoding, others) == ({"_read_video": 12}, {})


def test_workers_load_what_one_process_loads(path: Path) -> None:
    made = processor(Learner().model)
    options: dict[str, Any] = {"processor": made, "batch_size": 4, "shuffle": False, "packing": True, "max_length": 64}
    alone = list(MultimodalDataModule(path, **options).train_dataloader())
    for one, other in zip(MultimodalDataModule(path, num_workers=2, **options).train_dataloader(), alone, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_training_data_says_what_its_conversations_cost(path: Path) -> None:
    loader = MultimodalDataModule(path, processor=processor(Learner().model)).train_dataloader()
    found = loader.dataset.sample_costs()
    assert found["vision"] == [row % 3 for row in range(12)]
    assert sum(found["audio"]) == 3


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`:UserWarning")
@pytest.mark.filterwarnings("ignore:The .* does not have many workers:UserWarning")
def test_prompts_are_generated_from_and_validation_is_padded(path: Path, tmp_path: Path) -> None:
    module = Learner()
    made = processor(module.model)
    made.save_pretrained(tmp_path)
    options: dict[str, Any] = {"batch_size": 3, "packing": True, "max_length": 64}
    data = MultimodalDataModule(val=path, test=path, predict=path, processor=tmp_path, **options)
    (batch, *_) = data.predict_dataloader()
    assert "labels" not in batch
    for loader in (data.val_dataloader(), data.test_dataloader()):
        assert "attention_mask" in next(iter(loader))
    with pytest.raises(ConfigError, match="train"):
        data.train_dataloader()
    found = trainer(limit_predict_batches=1).predict(module, datamodule=data)
    assert found[0].shape[0] == 3
    assert MultimodalDataModule(path, processor=made).val_dataloader() == []


def answers(rank: int | None, path: Path) -> list[Any]:
    """What the module predicts for the prompts of a file, as text and as tokens, on two ranks or one process."""
    warnings.simplefilter("ignore")
    made = composed().double()
    read = processor(made)
    found = []
    for known in (read, None):
        module = MultimodalModule(made, known, max_new_tokens=4)
        data = MultimodalDataModule(predict=path, processor=read, batch_size=3)
        modalities = {"vision": Modality(), "audio": Modality(colocate_with="language"), "language": Modality()}
        run = trainer(
            devices=1 if rank is None else 2,
            strategy="auto"
            if rank is None
            else strategy(modalities, num_microbatches=2, batching={"balance": known is None}),
            precision="64-true",
            limit_predict_batches=2,
        )
        found.append(run.predict(module, datamodule=data))
    return found


def test_predicts_answers_to_the_prompts_of_a_file(path: Path) -> None:
    """vision: rank 0; audio and language: rank 1."""
    texts, tokens = answers(None, path)
    assert [[type(text) for text in batch] for batch in texts] == [[str] * 3] * 2
    assert [batch.shape for batch in tokens] == [(3, 4)] * 2, "without the prompt"
    tokenizer = processor(composed()).tokenizer
    assert texts == [[text.strip() for text in tokenizer.batch_decode(one, skip_special_tokens=True)] for one in tokens]
    for got_texts, got_tokens in call_ranks(2, answers, path):
        assert got_texts == texts
        torch.testing.assert_close(got_tokens, tokens)


def test_errors_name_the_file_and_the_line(path: Path, tmp_path: Path) -> None:
    lines = path.read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join([lines[0].replace("0.wav", "missing.wav"), *lines[1:]]))
    options: dict[str, Any] = {"processor": processor(Learner().model), "shuffle": False}
    for workers, error in ((0, ConfigError), (1, RuntimeError)):
        data = MultimodalDataModule(tmp_path / "train.jsonl", root=path.parent, num_workers=workers, **options)
        with pytest.raises(error, match=r"train\.jsonl, line 1.*missing\.wav"):
            next(iter(data.train_dataloader()))
    for wrong, said in (({"batch_size": 0}, "batch_size"), ({"processor": tmp_path / "none"}, "processor")):
        with pytest.raises(ConfigError, match=said):
            MultimodalDataModule(path, **{**options, **wrong})
