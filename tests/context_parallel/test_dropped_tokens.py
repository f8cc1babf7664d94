"""Random numbers in layers whose sequences ranks share: units and whole samples that are dropped.

Ranks 0-1 share each sequence.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning import seed_everything
from torch import Tensor, nn

from context_parallel.runs import shared, steps
from features.toys import Run, assert_same, together
from zoo import CASES
from zoo.case import TinyModule


class Dropping(TinyModule):
    """Drops hidden units, and keeps which."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__(CASES["bert"].build().model)
        bert: Any = self.model.bert  # type: ignore[union-attr]
        # ranks share what the module itself keeps
        self.model.dropped = {"embeddings": [], "layer": [], "next layer": []}
        for part in bert.modules():
            if isinstance(part, nn.Dropout) and "attention.self" not in str(part):
                part.p = 0.1
        for layer in bert.encoder.layer:
            layer.attention.self.dropout.p = 0.0
        if recomputes:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        layers = bert.encoder.layer
        watched = (bert.embeddings.dropout, layers[0].output.dropout, layers[1].output.dropout)
        for name, part in zip(self.model.dropped, watched, strict=True):
            part.register_forward_hook(partial(self._keep, name))

    def _keep(self, name: str, part: nn.Module, args: Any, out: Tensor) -> None:
        if part.training:
            self.model.dropped[name].append(out.detach() == 0)


def dropped(run: Run) -> Any:
    found = []
    for recomputes in (False, True):
        seed_everything(3, verbose=False)
        module = Dropping(recomputes=recomputes)
        result = steps(run, module, [CASES["bert"].batch(4, seed=0)] * 2)
        found.append({**result, "dropped": module.model.dropped, "after": torch.rand(3)})
    return found


@pytest.mark.usefixtures("float64")
def test_ranks_drop_units_of_their_own_tokens_and_agree_on_the_rest() -> None:
    """Ranks 0-1 with even tokens; a layer that is computed again drops the same units again."""
    layout = shared(cp_distribution="uniform")
    (first, first_again), (second, second_again) = together(layout, dropped, num_microbatches=1)
    for one, other in ((first, second), (first_again, second_again), (first, first_again)):
        assert_same(one["losses"], other["losses"], 1e-9)
        assert_same(one["weights"], other["weights"], 1e-9)
        assert_same(one["gradients"], other["gradients"], 1e-9)
        assert torch.equal(one["after"], other["after"])
    assert first["losses"][0] != first["losses"][1], "the same batch with other units"
    masks = [rank["dropped"] for rank in (first, second)]
    for one, other in zip(*(mask["embeddings"] for mask in masks), strict=True):
        assert torch.equal(one, other), "outside of the layers all ranks have all tokens"
    for name in ("layer", "next layer"):
        one, other = (torch.stack(mask[name]) for mask in masks)
        assert one.shape == (2, 4, 8, 32), "steps, samples, tokens of this rank, width"
        assert not torch.equal(one, other)
        assert not torch.equal(one[0], one[1])
        assert abs(float(torch.cat([one, other]).double().mean()) - 0.1) < 0.03
    assert not torch.equal(masks[0]["layer"][0], masks[0]["next layer"][0])


class DropPath(nn.Module):
    """Drops whole samples, drawn as timm, transformers and torchvision do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.drop_prob = how, 0.5

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden
        shape = (hidden.shape[0], 1, 1)
        if self.how == "timm":
            kept = hidden.new_empty(shape).bernoulli_(0.5)
        elif self.how == "transformers":
            kept = (0.5 + torch.rand(shape, dtype=hidden.dtype, device=hidden.device)).floor_()
        else:
            kept = torch.rand(hidden.shape[0]).lt(0.5).view(shape).to(hidden)
        return hidden * kept + torch.randn_like(hidden) * 1e-6


class DroppingSamples(Dropping):
    def __init__(self) -> None:
        super().__init__(recomputes=True)
        for layer, how in zip(self.model.bert.encoder.layer, ("timm", "transformers", "flat", "timm"), strict=True):  # type: ignore[union-attr,arg-type]
            drop = layer.output.dropout = DropPath(how)
            drop.register_forward_hook(partial(self._keep_samples, how))

    def _keep_samples(self, how: str, part: nn.Module, args: Any, out: Tensor) -> None:
        if part.training:
            self.model.dropped.setdefault(how, []).append(out.detach().abs().amax(dim=(1, 2)) < 1e-4)
            self.model.dropped.setdefault("noise", []).append(out.detach()[:, :2, 0])


def dropped_samples(run: Run) -> Any:
    seed_everything(3, verbose=False)
    module = DroppingSamples()
    return {**steps(run, module, [CASES["bert"].batch(4, seed=0)] * 2), "dropped": module.model.dropped}


@pytest.mark.usefixtures("float64")
def test_ranks_drop_the_same_samples() -> None:
    """Ranks 0-1 with even tokens, and with layers that are computed again."""
    first, second = together(shared(cp_distribution="uniform"), dropped_samples, num_microbatches=1)
    assert_same(first["losses"], second["losses"], 1e-9)
    assert_same(first["gradients"], second["gradients"], 1e-9)
    for how in ("timm", "transformers", "flat"):
        one, other = (torch.stack(rank["dropped"][how]) for rank in (first, second))
        assert torch.equal(one, other), how
        assert one.any(), how
        assert not one.all(), how
    assert not torch.equal(*(torch.stack(rank["dropped"]["noise"]) for rank in (first, second)))
