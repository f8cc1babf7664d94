"""Views of tensors without rows are those of one row, where torch cannot tell; without processes."""

from __future__ import annotations

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

from lightning_mm5d.features.empty_calls import ViewsOfOneRow

VIEWS = {
    "sizes": (lambda x: x.view(0, 5, -1, 4), (0, 5, 2, 4)),
    "a tuple": (lambda x: x.view((0, 5, -1, 4)), (0, 5, 2, 4)),
    "by name": (lambda x: x.view(size=(0, 5, -1, 4)), (0, 5, 2, 4)),
    "reshape": (lambda x: x.reshape(0, -1, 4), (0, 10, 4)),
    "torch.reshape": (lambda x: torch.reshape(x, (0, -1, 4)), (0, 10, 4)),
    "what torch can tell": (lambda x: x.view(-1, 8), (0, 8)),
    "a dtype": (lambda x: x.view(torch.int64), (0, 5, 8)),
}


@pytest.mark.parametrize(("change", "shape"), VIEWS.values(), ids=VIEWS)
def test_a_view_without_rows_has_the_sizes_of_one_row(change, shape) -> None:
    with ViewsOfOneRow():
        assert change(torch.empty(0, 5, 8, dtype=torch.float64)).shape == shape


@pytest.mark.parametrize("sizes", [(0, 3, -1), (0, 0, -1), (0, -1, -1)], ids=str)
def test_what_one_row_does_not_tell_is_refused_as_before(sizes) -> None:
    with ViewsOfOneRow(), pytest.raises(RuntimeError):
        torch.empty(0, 5, 8).view(sizes)


def test_an_encoder_brings_zeros_to_the_gradients() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=8, patch_size=4))
    with ViewsOfOneRow():
        states = model(torch.empty(0, 3, 8, 8)).last_hidden_state
    states.sum().backward()
    assert states.shape == (0, 5, 8)
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
    assert sum(parameter.grad is not None for parameter in model.parameters()) > 10
