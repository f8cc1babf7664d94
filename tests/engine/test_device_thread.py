"""Backwards run in another thread, as on a GPU, and give what they give in the thread that asks for them.

Autograd runs the nodes of a GPU, with their hooks and what is computed again, in a thread of that device, while the
thread that called ``backward`` waits. On a CPU it runs them in the calling thread. `in_another_thread` has it call from
a thread that begins without any state, so that what depends on the thread shows without a GPU.

ranks 0-1: two stages, an encoder and a language model, one layer over both, or replicas that share rows or sequences.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_mm5d import Modality
from parity.harness import fit, strategy
from ranks import run_ranks
from zoo import CASES

LAYOUTS: dict[str, tuple[str, dict[str, Modality], dict[str, Any]]] = {
    "encoder | language": ("llava", {"vision": Modality(), "language": Modality()}, {"num_microbatches": 2}),
    "recomputed": (
        "llava",
        {"vision": Modality(), "language": Modality(memory={"activation_checkpointing": "full"})},
        {"num_microbatches": 2},
    ),
    "zero bubble": ("llama", {"language": Modality(pp_size=2)}, {"schedule": "zbv", "num_microbatches": 4}),
    "tp": ("llama", {"language": Modality(tp_size=2, tensor={"sequence_parallel": True})}, {"num_microbatches": 2}),
    "cp, recomputed": (
        "llama",
        {"language": Modality(cp_size=2, memory={"activation_checkpointing": "full"})},
        {"num_microbatches": 2},
    ),
    "rows": ("llama", {"language": Modality(dp_size=2, sharding={"zero_stage": 3})}, {"num_microbatches": 2}),
    "rows, recomputed": (
        "llama",
        {"language": Modality(dp_size=2, sharding={"zero_stage": 3}, memory={"activation_checkpointing": "full"})},
        {"num_microbatches": 2},
    ),
    "offloaded": (
        "llama",
        {"language": Modality(pp_size=2, memory={"offload": "activations"})},
        {"num_microbatches": 2},
    ),
}


@contextmanager
def in_another_thread() -> Iterator[list[str]]:
    """Enter around trainings; gives the names of the threads that called autograd."""
    threads: list[str] = []
    kept = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}

    def moved(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name.startswith("device"):
                return call(*args, **kwargs)  # within a node of another backward
            found: list[Any] = []
            errors: list[BaseException] = []

            def work() -> None:
                threads.append(threading.current_thread().name)
                try:
                    found.append(call(*args, **kwargs))
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=work, name="device")
            thread.start()
            thread.join()
            if errors:
                raise errors[0]
            return found[0]

        return run

    for name, call in kept.items():
        setattr(torch.autograd, name, moved(call))
    try:
        yield threads
    finally:
        for name, call in kept.items():
            setattr(torch.autograd, name, call)


def trained(rank: int, names: list[str]) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    for name in names:
        case, modalities, options = LAYOUTS[name]
        model = CASES[case]

        def run(modalities: Any = modalities, options: Any = options, model: Any = model) -> Any:
            recorder = fit(
                model.build(), [model.batch(4, seed=step) for step in range(2)], strategy(modalities, **options), 2
            )
            return recorder.losses, recorder.gradients

        plain = run()
        with in_another_thread() as threads:
            moved = run()
        found[name] = plain, moved, len(threads)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, trained, [*LAYOUTS])


@pytest.mark.parametrize("name", LAYOUTS)
def test_backwards_in_a_thread_of_the_device_equal_those_of_the_caller(name: str, results: list[Any]) -> None:
    for found in results:
        plain, moved, backwards = found[name]
        assert backwards >= 2, "autograd was called from another thread"
        torch.testing.assert_close(moved, plain, rtol=1e-9, atol=1e-12, equal_nan=True)
