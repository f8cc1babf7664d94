"""The state that features depend on: every value that may change them changes the digest, and equal ones do not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from transformers import CLIPVisionConfig, CLIPVisionModel

from lightning_mm5d.features.cached_features.encoder_state import EncoderState
from lightning_mm5d.models.modality_encoder import ModalityEncoder, ProjectorConfig


@dataclass
class Settings:
    mean: list[float]


def scaled(by: float) -> Callable[[Any], Any]:
    def after(items: Any) -> Any:
        return [item * by for item in items]

    return after


def first(items: Any) -> Any:
    return items[:1]


def last(items: Any) -> Any:
    return items[-1:]


class Items(dict[str, Any]):
    """A configuration that is a dict, with an attribute of its own."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.frozen = True

    def to_dict(self) -> dict[str, Any]:
        return dict(self)


class Private(nn.Module):
    def __init__(self, mean: float) -> None:
        super().__init__()
        self._mean = mean


class Encoder(nn.Module):
    def __init__(self, held: Any = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.linear.weight.data.fill_(1.0)
        self.linear.bias.data.fill_(0.0)
        self.register_buffer("scale", torch.ones(()))
        self.held = held


class Root(nn.Module):
    """An encoder, and weights of another modality beside it; its method computes with some attributes."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(3, 2)
        self.factor, self.losses = 1.0, list[float]()

    def encode(self, images: Tensor) -> Tensor:
        return scaled_by(self, self.encoder(images))


def scaled_by(root: Root, features: Tensor) -> Tensor:
    return features * root.factor


def state(root: nn.Module, path: str = "encoder", method: str = "forward") -> EncoderState:
    owned = [name for name in root.state_dict() if name.startswith("encoder.")]
    return EncoderState(root, path, method, owned, torch.device("cpu"))


def digest(held: Any) -> str:
    return state(Root(Encoder(held))).fingerprint()


PAIRS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "list": (lambda: [0.1], lambda: [0.9]),
    "none": (lambda: None, lambda: 3),
    "nested tuple": (lambda: ((0.1,),), lambda: ((0.9,),)),
    "dict": (lambda: {"mean": [0.1]}, lambda: {"mean": [0.2]}),
    "set": (lambda: {"a", "b"}, lambda: {"a", "c"}),
    "dtype": (lambda: torch.float32, lambda: torch.bfloat16),
    "tensor": (lambda: torch.tensor(0.1), lambda: torch.tensor(0.9)),
    "array": (lambda: torch.ones(2).numpy(), lambda: torch.zeros(2).numpy()),
    "dataclass": (lambda: Settings([0.1]), lambda: Settings([0.9])),
    "object": (lambda: SimpleNamespace(mean=0.1), lambda: SimpleNamespace(mean=0.9)),
    "configuration": (lambda: CLIPVisionConfig(num_hidden_layers=8), lambda: CLIPVisionConfig(num_hidden_layers=16)),
    "configuration that is a dict": (lambda: Items(mean=0.1), lambda: Items(mean=0.9)),
    "private attribute of a module that is not registered": (lambda: [Private(0.1)], lambda: [Private(0.9)]),
    "function": (lambda: first, lambda: last),
    "closure": (lambda: scaled(1.0), lambda: scaled(5.0)),
    "lambda": (lambda: lambda x: x * 1.0, lambda: lambda x: x * 5.0),
    "partial": (lambda: partial(scaled, by=1.0), lambda: partial(scaled, by=5.0)),
    "method": (lambda: Encoder().forward, lambda: Encoder().train),
    "function of torch": (lambda: torch.nn.functional.gelu, lambda: torch.nn.functional.relu),
    "modules that are not registered": (lambda: [Encoder(1.0)], lambda: [Encoder([2.0])]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_attributes_of_any_kind_are_part_of_the_state(name: str) -> None:
    one, other = PAIRS[name]
    assert digest(one()) == digest(one())
    assert digest(one()) != digest(other())


def test_an_attribute_that_nobody_can_copy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"encoder.held holds a value of type _thread.lock"):
        digest([threading.Lock()])


def test_an_attribute_that_holds_itself_is_written_once() -> None:
    held: list[Any] = [1]
    held.append(held)
    assert digest(held) != digest([1])


def test_tensors_are_those_that_the_module_has_at_the_call() -> None:
    def assign(root: nn.Module) -> None:
        root.load_state_dict({name: value + 1 for name, value in root.state_dict().items()}, assign=True)

    def swap(root: nn.Module) -> None:  # what a move to another device does
        for module in root.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.clone()

    changes: list[Callable[[Any], Any]] = [
        lambda root: setattr(root.encoder, "scale", torch.tensor(5.0)),
        lambda root: root.encoder.scale.mul_(7),
        assign,
        lambda root: root.encoder.scale.mul_(3),
        lambda root: root.double(),
        lambda root: root.encoder.linear.weight.data.mul_(1) is None or root.encoder.linear.bias.detach().add_(1),
        lambda root: root.encoder.register_buffer("late", torch.ones(2)),
    ]
    root = Root(Encoder())
    watched = state(root)
    seen = [watched.fingerprint()]
    for change in changes:
        swap(root)
        assert watched.fingerprint() == seen[-1], "equal numbers in other tensors"
        change(root)
        seen.append(watched.fingerprint())
    assert len({*seen}) == len(seen)
    assert watched.fingerprint() == state(root).fingerprint() or "encoder.late" in dict(root.named_buffers())


def test_configurations_count_also_when_no_weight_changes() -> None:
    root = Root(Encoder())
    root.encoder.config = CLIPVisionConfig(num_hidden_layers=8)
    root.encoder.linear.config = CLIPVisionConfig(num_hidden_layers=8)
    watched = state(root)
    seen = [watched.fingerprint()]
    for module in (root.encoder, root.encoder.linear):
        module.config.layer_norm_eps = 0.5
        seen.append(watched.fingerprint())
    assert len({*seen}) == 3


def test_settings_of_a_modality_encoder_are_part_of_its_state() -> None:
    config = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )

    def digest_of(**settings: Any) -> str:
        torch.manual_seed(0)
        encoder = ModalityEncoder(CLIPVisionModel(config), settings.pop("projector", "mlp"), **settings)
        return state(Root(encoder)).fingerprint()

    options: list[dict[str, Any]] = [{}, {"feature_layer": -2}, {"projector": ProjectorConfig(kind="mlp", depth=3)}]
    options += [
        {name: by} for name in ("before", "after", "after_projector") for by in (first, scaled(1.0), scaled(5.0))
    ]
    assert len({digest_of(**one) for one in options}) == len(options)
    assert digest_of(after=scaled(1.0)) == digest_of(after=scaled(1.0))


def test_of_a_module_with_other_weights_only_what_the_boundary_names_counts() -> None:
    root = Root(Encoder())
    watched = state(root, "", "encode")
    before = watched.fingerprint()
    root.losses.append(0.5)
    root.head.weight.data.mul_(2)
    with torch.no_grad():
        root.head.weight.add_(1)
    assert watched.fingerprint() == before
    root.factor = 2.0
    assert watched.fingerprint() != before


class Whole(L.LightningModule):
    """A LightningModule whose own method is the boundary; some of what it holds is of no account to it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(3, 2)
        self._scale, self._losses, self.first = 1.0, [1.0], "before"
        self.squash, self.dropout, self.mean = nn.LeakyReLU(0.1), nn.Dropout(), MeanMetric()
        self.ends = nn.ModuleDict({"before": nn.LeakyReLU(0.1), "after": self.head})

    def get_image_features(self, images: Tensor) -> Tensor:
        images = self.ends[self.first](images)
        return self.squash(self.encoder(images)) * scale_of.of_module(self)


def _of_module(module: Whole) -> float:
    return module._scale


scale_of: Any = ModuleType("scale_of")
scale_of.of_module = _of_module


def test_of_a_lightning_module_private_attributes_and_modules_count_that_the_boundary_names() -> None:
    root = Whole()
    watched = state(root, "", "get_image_features")
    seen = [watched.fingerprint()]
    root._losses.append(0.5)
    root.mean.update(2.0)
    root.dropout.p = 0.3
    root.train(not root.training)
    root.encoder.train()
    root.squash.train()
    root.ends.before.train()
    assert watched.fingerprint() == seen[0]
    for name, value in [("_scale", 2.0), ("squash.negative_slope", 0.5), ("ends.before.negative_slope", 0.5)]:
        path, _, own = name.rpartition(".")
        setattr(root.get_submodule(path), own, value)
        seen.append(watched.fingerprint())
    assert len({*seen}) == 4
