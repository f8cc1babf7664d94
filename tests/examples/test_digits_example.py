"""The digits example: its data, its model on one batch, its comparison, and the shape of its configuration."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
NAMES = ("data", "model", "compare", "make_audio", "train")


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    """The example's modules, imported as its scripts import each other and forgotten afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        hidden = {name: sys.modules.pop(name) for name in NAMES if name in sys.modules}
        yield {name: importlib.import_module(name) for name in NAMES}
        for name in NAMES:
            del sys.modules[name]
        sys.modules.update(hidden)


def test_splits_share_neither_a_scan_nor_a_voice(example: dict[str, ModuleType]) -> None:
    train, held_out = (example["data"].Pairs(8, held_out=flag, seed=0) for flag in (False, True))
    assert len(train.scans) + len(held_out.scans) == 1797
    variants = [{voice.split("+")[1] for voice in pairs.voices} for pairs in (train, held_out)]
    assert variants[0] == set(example["make_audio"].TRAIN_VARIANTS)
    assert variants[1] == set(example["make_audio"].HELD_OUT_VARIANTS)
    assert not variants[0] & variants[1]


@pytest.mark.parametrize("held_out", [False, True])
def test_every_voice_says_every_digit(example: dict[str, ModuleType], held_out: bool) -> None:
    pairs = example["data"].Pairs(1, held_out=held_out, seed=0)
    assert {(voice, digit) for voice, digit in zip(pairs.voices, pairs.heard.tolist(), strict=True)} == {
        (voice, digit) for voice in set(pairs.voices) for digit in range(10)
    }


def test_pairs_are_a_function_of_seed_and_index(example: dict[str, ModuleType]) -> None:
    first, again, other = (example["data"].Pairs(40, held_out=False, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(first[i][key], again[i][key]) for i in range(40) for key in first[i])
    assert not torch.equal(first.scan_order, other.scan_order)


def test_an_item_holds_the_question_and_the_answer(example: dict[str, ModuleType]) -> None:
    data = example["data"]
    pairs = data.Pairs(20, held_out=True, seed=0)
    for item in (pairs[index] for index in range(20)):
        seen, heard = item["seen"].item(), item["heard"].item()
        assert data.decode(item["labels"][-data.ANSWER_LENGTH :]) == f"{seen}+{heard}={seen + heard:2d}"
        assert (item["labels"][: -data.ANSWER_LENGTH] == -100).all()
        assert (item["input_ids"] == data.IMAGE_ID).sum() == data.IMAGE_TOKENS
        assert (item["input_ids"] == data.AUDIO_ID).sum() == data.AUDIO_TOKENS
        assert item["pixel_values"].shape == (1, 8, 8)
        assert item["input_features"].shape == (data.MELS, data.FRAMES)
        assert item["input_features"].isfinite().all()


def test_mu_law_is_undone_to_within_its_step(example: dict[str, ModuleType]) -> None:
    wave = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    stored = torch.from_numpy(example["make_audio"].mu_law(wave.numpy()))
    assert (example["data"].mu_law_decoded(stored) - wave).abs().max() < 0.03


def test_a_step_gives_every_weight_a_gradient_and_needs_both_inputs(example: dict[str, ModuleType]) -> None:
    torch.manual_seed(0)
    data = example["data"]
    model = example["model"].DigitsModel(
        encoder_width=16, encoder_layers=1, language_width=16, language_layers=2, heads=2
    )
    batch = next(iter(torch.utils.data.DataLoader(data.Pairs(4, held_out=False, seed=0), batch_size=4)))
    batch = {key: batch[key] for key in ("input_ids", "pixel_values", "input_features", "labels")}
    output = model(**batch)
    output.loss.backward()
    assert output.logits.shape == (4, batch["input_ids"].shape[1], len(data.VOCABULARY))
    # the class token's output is dropped, yet it is attended to, so nothing trainable is left out
    assert [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None] == []
    for key in ("pixel_values", "input_features"):
        changed = model(**{**batch, key: torch.zeros_like(batch[key])})
        assert not torch.allclose(changed.loss, output.loss)


def test_a_wrong_answer_ends_at_its_first_wrong_character(example: dict[str, ModuleType]) -> None:
    assert example["train"].judged("7+5=12", "7+5=12") == ("7+5=12", True)
    assert example["train"].judged("5+2=11", "9+2=11") == ("5…", False)
    assert example["train"].judged("9+2=12", "9+2=11") == ("9+2=12", False)


def test_compare_passes_equal_losses_and_fails_others(
    example: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, last in (("a", 0.5), ("b", 0.50001), ("c", 0.6), ("d", float("nan"))):
        (tmp_path / name).write_text(f"step,loss\n0,1.0\n1,{last}\n")
    a, b, c, d = (str(tmp_path / name) for name in "abcd")
    assert example["compare"].main([b, a]) == 0
    assert "first 2 of 2 steps: largest relative difference 2.00e-05" in capsys.readouterr().out
    assert example["compare"].main([c, a]) == 1
    assert example["compare"].main([c, a, "--tolerance", "0.5"]) == 0
    assert example["compare"].main([c, a, "--steps", "1"]) == 0
    assert example["compare"].main([d, a]) == 1


@pytest.mark.parametrize(("first", "second"), [({0: 1.0}, {0: 1.0, 1: 1.0}), ({}, {})])
def test_compare_refuses_runs_of_other_or_no_steps(
    example: dict[str, ModuleType], first: dict[int, float], second: dict[int, float]
) -> None:
    with pytest.raises(ValueError, match="different steps, or none"):
        example["compare"].relative_differences(first, second)


def test_the_configuration_fits_its_own_sizes(example: dict[str, ModuleType]) -> None:
    config = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    strategy = config["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_mm5d.MultimodalStrategy"
    stages = [modality.get("pp_size", 1) for modality in strategy["init_args"]["modalities"].values()]
    assert sum(stages) == config["trainer"]["devices"] == 4
    batch_size, held_out = config["data"]["batch_size"], example["data"].HELD_OUT_SCANS
    assert batch_size % strategy["init_args"]["batching"]["num_microbatches"] == 0
    assert config["data"]["train_samples"] % batch_size == held_out % batch_size == 0
    assert config["trainer"]["use_distributed_sampler"] is False  # it would shuffle, and the losses would differ
    overlay = yaml.safe_load((EXAMPLE / "one_process.yaml").read_text())["trainer"]
    assert (overlay["devices"], overlay["strategy"]) == (1, "auto")
    assert overlay["default_root_dir"] != config["trainer"]["default_root_dir"]
