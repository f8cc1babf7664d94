"""Which arguments of a layer on a grid are refused, since nothing tells which rows of them belong to which samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.grids.block import GridShape
from lightning_mm5d.features.grids.grid_layers import GridChecks

WIDTH = 12


def given(samples: int, length: int, argument: Any) -> None:
    """Ask a grid of 2 x 2 whether a layer may take a hidden state and `argument`, after a batch of unlike sizes."""
    checks, layer, embedding = GridChecks("language", GridShape("2d", 1, 2)), nn.Identity(), nn.Embedding(4, WIDTH)
    for shape in ((samples + 1, length), (samples, length)):
        checks.note_ids(embedding, (torch.zeros(shape, dtype=torch.long),))
        taken = () if shape[0] != samples else (argument,)
        checks.hidden_state(layer, (torch.zeros(*shape, WIDTH), *taken), {})


@pytest.mark.parametrize("argument", [torch.ones(8, 8).tril().bool(), torch.zeros(8, 8)], ids=["bools", "numbers"])
def test_a_square_mask_is_refused_with_as_many_samples_as_tokens(argument: Any) -> None:
    """Its first dim may be samples, as in a mask of padding, or tokens, as in a causal one."""
    with pytest.raises(ConfigError, match="With as many samples as tokens its first dim may be either"):
        given(8, 8, argument)
    given(6, 8, argument)


@pytest.mark.parametrize("argument", [torch.ones(1, 1, 8, 8).bool(), torch.arange(8).expand(8, 8), None])
def test_masks_of_samples_and_heads_and_positions_are_taken(argument: Any) -> None:
    given(8, 8, argument)
