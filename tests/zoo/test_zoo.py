"""The zoo keeps its promises: every case trains in float64, freezes, splits, and is cut where it says."""

import warnings
from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from . import CASES, Case, apply_freeze
from .case import Batch

MANY_COUNTS = [name for name, case in CASES.items() if 2 in case.image_counts]
FROZEN = [(name, variant) for name, case in CASES.items() for variant in case.frozen]


pytestmark = pytest.mark.usefixtures("float64")


def step(module: L.LightningModule, batch: Batch | None) -> Tensor:
    assert batch is not None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*self.trainer.*")  # `self.log` outside a trainer
        loss = module.training_step(batch, 0)
    assert isinstance(loss, Tensor)
    return loss


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_trains_all_but_the_unused_parameters_in_float64(name: str) -> None:
    case = CASES[name]
    module = case.build()
    trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
    assert all(p.dtype == torch.float64 for p in module.parameters())
    loss = step(module, case.batch(4))
    loss.backward()
    assert torch.isfinite(loss)
    for parameter_name, parameter in trainable.items():
        if any(parameter_name == p or parameter_name.startswith(p + ".") for p in case.unused):
            assert parameter.grad is None, parameter_name
        else:
            assert parameter.grad is not None, parameter_name
            assert 0 < parameter.grad.abs().max() < torch.inf, parameter_name


@pytest.mark.parametrize("name", CASES)
def test_has_no_randomness_in_train_mode(name: str) -> None:
    module, batch = CASES[name].build(), CASES[name].batch(2)
    assert all(part.training for part in module.modules())
    assert torch.equal(step(module, batch), step(module, batch))


@pytest.mark.parametrize("name", ["handwritten_flat", "llava"])
def test_runs_under_the_trainer_and_logs_its_losses(name: str) -> None:
    case = CASES[name]
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=1,
        limit_train_batches=1,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, batch = case.build(), case.batch(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning itself, on deprecated names of torch
        batches: Any = [batch]
        loader: DataLoader[Batch] = DataLoader(batches, batch_size=None)
        trainer.fit(module, loader, loader)
    before, after = trainer.callback_metrics["train_loss"], trainer.callback_metrics["val_loss"]
    assert after < before


@pytest.mark.parametrize("name", CASES)
def test_is_tiny_and_cuttable(name: str) -> None:
    case = CASES[name]
    module = case.build()
    assert 5_000 < sum(p.numel() for p in module.parameters()) < 80_000
    for modality in case.modalities:
        lengths = [len(list(module.get_submodule(path).children())) for path in case.layers[modality]]
        assert max(lengths) >= (4 if modality == "language" else 2)


@pytest.mark.parametrize("name", CASES)
def test_equal_seeds_give_equal_parameters_and_batches(name: str) -> None:
    case = CASES[name]
    first, second, other = case.build(1).state_dict(), case.build(1).state_dict(), case.build(2).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    one, same = case.batch(4, 3), case.batch(4, 3)
    assert one is not None
    assert same is not None
    assert all(torch.equal(one[key], same[key]) for key in one)


@pytest.mark.parametrize("name", CASES)
def test_calls_each_boundary_once(name: str) -> None:
    case = CASES[name]
    module = case.build()
    calls: Counter[str] = Counter()
    for modality, path in case.boundaries.items():
        count_calls(module, path, modality, calls)
    step(module, case.batch(4))
    assert calls == Counter(case.boundaries.keys())


def count_calls(module: nn.Module, path: str, modality: str, calls: Counter[str]) -> None:
    owner, _, name = path.rpartition(".")
    original = getattr(module.get_submodule(owner), name)
    if isinstance(original, nn.Module):
        original.register_forward_pre_hook(lambda *_: calls.update([modality]))
        return

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.update([modality])
        return original(*args, **kwargs)

    setattr(module.get_submodule(owner), name, counted)


@pytest.mark.parametrize(("name", "variant"), FROZEN)
def test_frozen_parameters_get_no_gradient_and_others_do(name: str, variant: str) -> None:
    case = CASES[name]
    module = case.build()
    apply_freeze(module, case, variant)
    step(module, case.batch(2)).backward()
    found = gradients(module)
    assert found
    for prefix in case.frozen[variant]:
        assert not [n for n in found if n.startswith(prefix + ".")]
    if variant == "projector_only":
        assert not [n for n in found if any(n.startswith(p) for paths in case.layers.values() for p in paths)]


def check_split(case: Case, batch: Batch | None, parts: int = 2) -> None:
    assert batch is not None
    module = case.build()
    pieces = case.split(batch, parts)
    for key, value in batch.items():
        assert torch.equal(torch.cat([piece[key] for piece in pieces if key in piece]), value)
    whole = step(module, batch)
    mean = torch.stack([step(module, piece) for piece in pieces]).mean()
    torch.testing.assert_close(mean, whole, rtol=1e-6, atol=1e-6)  # the loss itself may be float32


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.mean_of_samples])
def test_loss_is_the_mean_of_the_losses_of_its_halves(name: str) -> None:
    check_split(CASES[name], CASES[name].batch(4))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if 0 in case.image_counts])
def test_half_without_images_is_the_mean_of_its_halves(name: str) -> None:
    batch = CASES[name].batch(4, some_without=True)
    check_split(CASES[name], batch)
    assert batch is not None
    first, second = CASES[name].split(batch, 2)
    assert set(first) < set(second)


@pytest.mark.parametrize("name", MANY_COUNTS)
def test_unequal_numbers_of_images_split_by_sample(name: str) -> None:
    counts = [0, 2, 1, 1] if 0 in CASES[name].image_counts else [1, 2, 1, 1]
    check_split(CASES[name], CASES[name].batch(4, images=counts))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if 0 not in case.image_counts])
def test_families_that_need_their_images_say_so(name: str) -> None:
    assert CASES[name].batch(4, some_without=True) is None


@pytest.mark.parametrize("name", CASES)
def test_follows_the_default_dtype(name: str) -> None:
    torch.set_default_dtype(torch.float32)
    batch = CASES[name].batch(2)
    assert batch is not None
    floats = {t.dtype for t in (*CASES[name].build().parameters(), *batch.values()) if t.is_floating_point()}
    assert floats == {torch.float32}


def test_a_wrong_prefix_is_refused() -> None:
    case = CASES["handwritten"]
    with pytest.raises(ValueError, match="no parameters"):
        apply_freeze(CASES["handwritten_two"].build(), case, "encoder")


def test_a_batch_that_does_not_divide_is_refused() -> None:
    batch = CASES["llama"].batch(4)
    assert batch is not None
    with pytest.raises(ValueError, match="4 samples does not divide into 3"):
        CASES["llama"].split(batch, 3)
