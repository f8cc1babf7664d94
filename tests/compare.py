"""Compares what ranks found with one process: losses, every gradient of every step, and the parameters at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parity.harness import Recorder

State = dict[str, torch.Tensor]


def tolerance(exact: bool, off: float = 1e-7) -> dict[str, float]:
    """Tolerances of models that compute in float64 throughout, or of those that drop to float32 somewhere.

    Args:
        exact: whether the model computes in float64 throughout.
        off: absolute tolerance where it does not; gradients are of the order of 0.1.
    """
    return {"rtol": 1e-9, "atol": 1e-12} if exact else {"rtol": 1e-6, "atol": off}


def assert_equal_to_one_process(
    ranks: Sequence[tuple[Any, ...]],
    expected: Recorder,
    parameters: State,
    *,
    rtol: float,
    atol: float,
    with_losses: bool = True,
    where: str = "",
) -> None:
    """Compare losses and full gradients, which a hook sees on every rank, and the parameters of rank 0.

    Args:
        ranks: of each rank its losses, the gradients of each step and its parameters at the end.
        expected: what one process recorded.
        parameters: of one process, at the end.
        rtol: relative tolerance.
        atol: absolute tolerance.
        with_losses: whether losses are equal; replicas have those of their own samples.
        where: begins each message.
    """

    def close(found: torch.Tensor, wanted: torch.Tensor, key: str) -> None:
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, msg=lambda m: f"{where}: {key}: {m}")

    for losses, gradients, *_ in ranks:
        assert len(gradients) == len(expected.gradients), where
        if with_losses:
            close(torch.tensor(losses), torch.tensor(expected.losses), "losses")
    for step, wanted in enumerate(expected.gradients):
        for rank, (_, gradients, *_) in enumerate(ranks):
            for key, gradient in gradients[step].items():
                close(gradient, wanted[key], f"rank {rank}, step {step}, gradient of {key}")
        found = set().union(*(gradients[step] for _, gradients, *_ in ranks))
        assert found == set(wanted), f"{where}: some gradient is on no rank, or on one too many"
    state = ranks[0][2]
    assert list(state) == list(parameters), where
    for key, value in parameters.items():
        close(state[key], value, key)
