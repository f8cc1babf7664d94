"""Large remote values have no memory, and neither has what a step that is thrown away computes of them.

ranks 0-1: two stages, or an encoder and a language model; every remote value counts as large.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mm5d import Modality
from lightning_mm5d.sharded import remote_value
from lightning_mm5d.sharded.remote_value import Guard, Origin, RemoteValue, is_remote, without_memory
from parity.harness import fit, strategy
from ranks import run_ranks
from zoo import CASES

B, S, V = 2, 64, 4096
CPU = torch.device("cpu")


class Largest(TorchDispatchMode):
    """Notes the most bytes in memory of a result."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.device == CPU:
                self.nbytes = max(self.nbytes, one.untyped_storage().nbytes())
        return result


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Guard:
    monkeypatch.setattr(remote_value, "_LARGE", V)
    made = Guard(lambda _: "rank 1")
    made.ends_here = False
    return made


def logits_of(guard: Guard) -> RemoteValue:
    origin = Origin("model.lm_head.weight", guard)
    return without_memory((B, S, V), torch.bfloat16, CPU, origin, requires_grad=True)


def test_losses_of_remote_logits_take_no_memory(guard: Guard) -> None:
    labels = torch.randint(V, (B, S))
    logits = logits_of(guard)
    with Largest() as largest:
        shifted = logits[..., :-1, :].contiguous().float()
        loss = F.cross_entropy(shifted.view(-1, V), labels[:, 1:].reshape(-1), ignore_index=-100)
        chosen = torch.log_softmax(shifted, -1).gather(-1, labels[:, 1:, None])
        best = logits.argmax(-1)
    assert largest.nbytes <= 8 * labels.numel()
    for result, shape in ((loss, ()), (chosen, (B, S - 1, 1)), (best, (B, S))):
        assert is_remote(result)
        assert result.shape == shape
        assert result.device == CPU
    assert loss.requires_grad
    assert not best.requires_grad


def test_what_depends_on_values_is_computed_and_writes_are_dropped(guard: Guard) -> None:
    logits = logits_of(guard)
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[0, :3] = True
    chosen = logits[mask]
    assert is_remote(chosen)
    assert chosen.shape == (3, V)
    logits.detach()[mask] = 0.0
    guard.ends_here = True
    assert is_remote(logits.float()), "in a step that is kept nothing is guessed"


LAYOUTS: dict[str, tuple[str, dict[str, Modality]]] = {
    "two stages": ("llama", {"language": Modality(pp_size=2)}),
    "encoder | language": ("llava", {"vision": Modality(), "language": Modality()}),
}


def _trained(rank: int) -> list[Any]:
    torch.set_default_dtype(torch.float64)
    found = []
    for case, modalities in LAYOUTS.values():
        results = []
        for large in (remote_value._LARGE, 1):
            remote_value._LARGE = large
            batches = [CASES[case].batch(4, seed=step) for step in range(2)]
            recorder = fit(CASES[case].build(), batches, strategy(modalities, num_microbatches=2), 2)
            results.append((recorder.losses, recorder.gradients))
        found.append(results)
    return found


def test_stages_train_as_with_remote_values_in_memory() -> None:
    for found in run_ranks(2, _trained):
        for dense, large in found:
            torch.testing.assert_close(large, dense, rtol=0, atol=0, equal_nan=True)
