"""Encoders whose calls divide into items only at first sight, or whose state shows late, train as without a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel

from features.cached_features.test_cached_features import cached, trained
from features.toys import PIXELS, SHARED, WIDTH, Run, Toy, together
from lightning_mm5d import MultimodalStrategy
from lightning_mm5d.config.errors import ConfigError


class Reader(Toy):
    """Encoders whose calls divide into items only at first sight, or whose state shows late, by `kind`."""

    def __init__(self, kind: str, mean: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.encoder = Unlike(kind, mean).double()
        self.encoder.requires_grad_(False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        images, kind = batch["images"], self.kind
        if kind == "list of images":
            features = self.encoder([image.view(1, PIXELS, 1).expand(3, PIXELS, 2) for image in images])
        elif kind == "sizes":
            features = self.encoder(images, [(2, 3)] * len(images))
        elif kind == "changing arguments":
            features = self.encoder(images, float(images.sum()))
        elif kind == "lengths":  # 1, 2 or 3 rows of an image, as its mask tells
            mask = torch.arange(3) <= batch["tokens"][:, :1] % 3
            rows = self.encoder(images, mask)
            features = torch.stack([one.sum(dim=0) for one in rows.split(mask.sum(dim=1).tolist())])
        else:
            features = self.encoder(images)
        return self.decoder(batch["tokens"], features)


class Unlike(nn.Module):
    def __init__(self, kind: str, mean: float) -> None:
        super().__init__()
        self.kind, self.mean, self.patch = kind, [mean], nn.Linear(PIXELS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.register_buffer("scale", torch.ones(()))

    def forward(self, images: Any, extra: Any = None) -> Tensor:
        if self.kind == "list of images":
            images = torch.stack([nn.functional.avg_pool1d(image, 2).mean(dim=(0, 2)) for image in images])
        if self.kind == "sizes":
            assert len(extra) == len(images)
        hidden = self.layers[0](self.patch(images - self.mean[0])) * self.scale
        if self.kind == "lengths":
            steps = torch.arange(1, 4, dtype=hidden.dtype)
            hidden = (hidden[:, None] * steps[:, None])[extra]
        if self.kind == "late buffer":
            self.scale += 1
        return hidden


class Fields(Toy):
    """Reads one of two fields of its encoder's result, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=WIDTH,
                intermediate_size=WIDTH,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=2,
                patch_size=1,
            )
        ).double()
        self.encoder.requires_grad_(False).eval()


class Pooled(Fields):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.encoder(batch["images"][:, :1, None, None].expand(-1, 3, 2, 2))
        return self.decoder(batch["tokens"], out.pooler_output)


class Both(Fields):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out = self.encoder(batch["images"][:, :1, None, None].expand(-1, 3, 2, 2))
        features = out.pooler_output
        if out.last_hidden_state is not None:
            features = features + out.last_hidden_state.mean(dim=1)
        return self.decoder(batch["tokens"], features)


def replace_buffers(strategy: MultimodalStrategy) -> None:
    """Put other tensors in the places of buffers, as a move to a GPU does."""
    for module in strategy.lightning_module.modules():  # type: ignore[union-attr]
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.clone()


def test_features_of_hard_cases_are_computed_or_found_without_a_change(tmp_path: Path) -> None:
    """One process; each kind trains as without the folder, in batches of other orders and sizes too."""
    one = replace(SHARED, world=1, replicas=1)

    def scenario(run: Run) -> Any:
        found: dict[str, Any] = {}
        calls: dict[str, Callable[[], Toy]] = {
            kind: partial(Reader, kind) for kind in ("list of images", "sizes", "changing arguments", "lengths", "mean")
        }
        calls |= {"other mean": partial(Reader, "mean", 5.0), "pooled": Pooled, "both": Both}
        for name, module in calls.items():
            layout = cached(one, tmp_path / ("fields" if module in (Pooled, Both) else "folder"))
            torch.manual_seed(0)
            plain = trained(run, cached(one, None), module(), shuffle=True)[0]
            torch.manual_seed(0)
            kept = trained(run, layout, module(), shuffle=True)[0]
            found[name] = max(float((kept[key] - plain[key]).abs().max()) for key in plain)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MultimodalStrategy, "model_to_device", replace_buffers)
            try:
                trained(run, cached(one, tmp_path / "buffers"), Reader("late buffer"))
            except ConfigError as error:
                found["late buffer"] = str(error)
        return found

    (found,) = together(one, scenario)
    assert "writes the buffer encoder.scale" in found.pop("late buffer")
    assert found == dict.fromkeys(found, pytest.approx(0, abs=1e-9))
    assert len(found) == 8
