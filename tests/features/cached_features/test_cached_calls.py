"""A boundary of the LightningModule itself is looked up by all that it computes with, and each row by its own item.

One process.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from features.cached_features.test_cached_features import cached
from features.toys import PIXELS, SHARED, WIDTH, Run, Samples, Toy, together, weights
from lightning_mm5d.config.errors import ConfigError

ONE = replace(SHARED, world=1, replicas=1)
WIDTHS = [2, 1, 2, 3, 2, 2, 3, 1]
"""of the images of `Sized`; in the first epoch's microbatches: (2, 2), (1, 3), (2, 2), (1, 3), in other orders later"""


class Own(Toy):
    """Its own method shifts, encodes, squashes and scales images."""

    def __init__(self, scale: float = 1.0, does: str = "") -> None:
        super().__init__()
        self.encoder.requires_grad_(False)
        self._scale, self._mean, self._tiles, self._does = scale, torch.tensor(0.1), 0, does
        self.squash, self.dropout, self.average = nn.LeakyReLU(), nn.Dropout(0.0), MeanMetric()
        self.encoder.eval()
        self.squash.eval()

    def get_image_features(self, images: Tensor) -> Tensor:
        if self._does == "writes":
            self._tiles += 1
        features = self.squash(self.encoder(images - self._mean)) * self._scale
        if self._does == "counts":
            self.average.update(features.mean())
        return features

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.decoder(batch["tokens"], self.dropout(self.get_image_features(batch["images"])))
        if self._does != "counts":
            self.average.update(logits.mean().detach())
        return logits


class Sized(Samples):
    """Images of unequal widths, in the first token."""

    def __init__(self) -> None:
        super().__init__(len(WIDTHS))
        self.tokens[:, 0] = torch.tensor(WIDTHS)


class Rows(Toy):
    """Gives one or several rows of features for an image, by `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.encoder: Any = Unequal(kind).double()
        self.encoder.requires_grad_(False)
        self.kind = kind

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        images, widths = batch["images"], batch["tokens"][:, 0]
        if self.kind == "mask of floats":
            rows = self.encoder(images, (torch.arange(3) < widths[:, None]).to(images.dtype)).split(widths.tolist())
        elif self.kind == "breaks":
            table = torch.stack([torch.ones_like(widths), 2 * torch.ones_like(widths), widths], dim=1)
            packed = images.repeat_interleave(2 * widths, dim=0)
            rows = self.encoder(packed, table).split((2 * widths + 2).tolist())
        else:
            rows = self.encoder(images)[: len(images), None]
        return self.decoder(batch["tokens"], torch.stack([one.sum(dim=0) for one in rows]))


class Unequal(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.patch = kind, nn.Linear(PIXELS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.register_buffer("marked", Sized().images[-1])

    def forward(self, images: Tensor, extra: Any = None) -> Tensor:
        hidden = self.layers[0](self.patch(images))
        if self.kind == "mask of floats":
            return (hidden[:, None] * torch.arange(1.0, 4.0).double()[:, None])[extra.bool()]
        if self.kind == "breaks":  # 2 rows of w patches, each with one more at its end
            items = hidden.split(extra.prod(dim=1).tolist())
            return torch.cat([torch.cat([one, one.new_ones(2, WIDTH)]) for one in items])
        if (images == self.marked).all(dim=1).any():  # one row more than images
            hidden = torch.cat([hidden, hidden[:1]])
        return hidden


def fitted(run: Run, folder: Path | None, module: Any, *, validates: bool = False, **options: Any) -> Any:
    """Train for two epochs; return the weights, and of each call of the encoder the trainer's stage and epoch."""
    calls: list[tuple[str, int]] = []
    hook = module.encoder.patch.register_forward_pre_hook(
        lambda *_: calls.append((str(module.trainer.state.stage), module.current_epoch))
    )
    torch.manual_seed(0)
    own = {"module": None, "boundary": "get_image_features"} if isinstance(module, Own) else {}
    layout = cached(ONE, folder, **own)
    run = replace(run, layout=layout)
    loaders = [run.training(Sized(), 4, **options)] + [run.loader(Sized(), 4)] * validates
    run.trainer(max_epochs=2).fit(module, *loaders)
    hook.remove()
    return weights(module), calls


def off(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[key] - other[key]).abs().max()) for key in one)


def test_calls_are_found_by_all_that_they_depend_on_and_rows_belong_to_their_items(tmp_path: Path) -> None:
    def scenario(run: Run) -> dict[str, Any]:
        found: dict[str, Any] = {"calls": [], "epochs": []}
        plains = {scale: fitted(run, None, Own(scale), validates=True)[0] for scale in (1.0, 2.0)}
        for scale in (1.0, 2.0, 1.0):
            kept, calls = fitted(run, tmp_path / "own", Own(scale), validates=True)
            found[f"scale {len(found)}"] = off(kept, plains[scale])
            found["calls"].append({stage for stage, _ in calls})
        for does in ("writes", "counts"):
            with pytest.raises(ConfigError) as caught:
                fitted(run, tmp_path / "own", Own(does=does))
            found[does] = str(caught.value)
        for kind in ("mask of floats", "breaks", "one row more"):
            _, calls = fitted(run, tmp_path / kind, Rows(kind))
            found["epochs"].append([sum(one == epoch for _, one in calls) for epoch in range(2)])
            if kind != "one row more":  # in other batches, whose rows the first run may have filed
                plain, _ = fitted(run, None, Rows(kind), shuffle=True)
                found[kind] = off(fitted(run, tmp_path / kind, Rows(kind), shuffle=True)[0], plain)
        return found

    (found,) = together(ONE, scenario)
    assert "writes the attribute _tiles" in found.pop("writes")
    assert "updates a metric" in found.pop("counts")
    sanity = {"RunningStage.SANITY_CHECKING"}
    assert found.pop("calls") == [sanity, sanity, set()], "training finds those, and the third run those of the first"
    _, breaks, more = found.pop("epochs")  # of the masked ones only equal batches would be found
    assert min(breaks[0], more[0]) > 0 == max(breaks[1], more[1])
    assert found == dict.fromkeys(found, pytest.approx(0, abs=1e-9))
    assert len(found) == 5
