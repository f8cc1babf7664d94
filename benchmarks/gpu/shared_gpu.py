"""Ranks that share one GPU, over gloo: any layout gives the losses, gradients and parameters of one process on it.

NCCL refuses two ranks on one GPU; gloo takes their tensors through host memory. The models are those of the parity
tests, in float64, and so are the comparison and its tolerances. This process never trains: Lightning saves the random
state of GPUs when it begins, which would initialise CUDA before ranks are forked.

The same under torch's debug mode for synchronisation counts how often a schedule makes the host wait for the GPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import Row
from benchmarks.gpu.towers import SMALL, TIMEOUT, Towers, batches, fit
from lightning_mm5d import Modality, MultimodalStrategy
from lightning_mm5d.engine.engine import Engine

TESTS = str(Path(__file__).parents[2] / "tests")
if TESTS not in sys.path:
    sys.path.append(TESTS)

from compare import State, tolerance  # noqa: E402
from parity.harness import Recorder  # noqa: E402
from parity.harness import fit as fit_recorded  # noqa: E402
from ranks import POOL, call_ranks, run_ranks  # noqa: E402
from tensor_parallel.layouts import OF_STRATEGY, Compared, batches_of, check_all, train  # noqa: E402

RANK_BYTES = 800 * 2**20
"""of a GPU that a rank takes: the context, libraries and a tiny model"""
LIMIT_S = 180
WARMUP = 3
"""Steps whose waits are not counted."""
WAIT = "synchronizing CUDA operation"
"""torch's words for it."""

LAYOUTS: list[tuple[int, str, Compared]] = [
    (2, "dp 2", Compared(name="llama_tied", fields={"language": {"dp_size": 2}}, replicas=2)),
    (
        2,
        "tp 2, sequence_parallel",
        Compared(name="llama_tied", fields={"language": {"tp_size": 2, "tensor": {"sequence_parallel": True}}}),
    ),
    (
        2,
        "cp 2, allgather",
        Compared(name="llama_tied", fields={"language": {"cp_size": 2, "context": {"cp_mode": "allgather"}}}),
    ),
    (2, "cp 2, ring", Compared(name="llama_tied", fields={"language": {"cp_size": 2, "context": {"cp_mode": "ring"}}})),
    (
        2,
        "cp 2, ulysses",
        Compared(name="llama_tied", fields={"language": {"cp_size": 2, "context": {"cp_mode": "ulysses"}}}),
    ),
    (3, "vision | language pp 2", Compared(name="llava", fields={"vision": {}, "language": {"pp_size": 2}})),
    (
        3,
        "the same, zero_bubble",
        Compared(
            name="qwen2_vl", fields={"vision": {}, "language": {"pp_size": 2}}, options={"schedule": "zero_bubble"}
        ),
    ),
    (
        4,
        "vision pp 2 | language pp 2",
        Compared(name="gemma3", fields={"vision": {"pp_size": 2}, "language": {"pp_size": 2}}),
    ),
    (
        4,
        "vision tp 2 | language tp 2",
        Compared(name="llava", fields={"vision": {"tp_size": 2}, "language": {"tp_size": 2}}),
    ),
    (
        4,
        "vision dp 2 | language dp 2",
        Compared(name="llava", fields={"vision": {"dp_size": 2}, "language": {"dp_size": 2}}, replicas=2),
    ),
    (
        4,
        "dp 2, pp 2",
        Compared(name="llama_tied", fields={"language": {"dp_size": 2, "pp_size": 2}}, replicas=2),
    ),
    (
        4,
        "cp 4, hybrid",
        Compared(
            name="llama_tied", fields={"language": {"cp_size": 4, "context": {"cp_mode": "hybrid", "ulysses_size": 2}}}
        ),
    ),
    (
        5,
        "vision | audio | language pp 3",
        Compared(name="handwritten_two", fields={"vision": {}, "audio": {}, "language": {"pp_size": 3}}, exact=True),
    ),
    (
        8,
        "vision tp 2 | language pp 3 tp 2",
        Compared(name="llava", fields={"vision": {"tp_size": 2}, "language": {"pp_size": 3, "tp_size": 2}}),
    ),
    (
        16,
        "vision dp 2 tp 2 | language dp 2 pp 3 tp 2",
        Compared(
            name="llava",
            fields={"vision": {"dp_size": 2, "tp_size": 2}, "language": {"dp_size": 2, "pp_size": 3, "tp_size": 2}},
            replicas=2,
        ),
    ),
    (
        32,
        "vision dp 4 tp 2 | language dp 4 pp 3 tp 2",
        Compared(
            name="llava",
            fields={"vision": {"dp_size": 4, "tp_size": 2}, "language": {"dp_size": 4, "pp_size": 3, "tp_size": 2}},
            replicas=4,
            options={"num_microbatches": 2, "in_order": True},
        ),
    ),
]
"""Ranks, what the report says, and the run."""
SHARED = Compared(name="gpt2", fields={"language": {"sharding": {"zero_stage": 3}}}, replicas=2)
"""Its gradients are rows that a rank owns, so that only parameters are compared."""
DRY = ("vision | language pp 2",)


def on_shared_gpu(run: Compared, machine: Machine) -> Compared:
    """Return a run whose ranks share the first GPU: over gloo, since a GPU would otherwise mean NCCL."""
    return replace(run, accelerator=machine.shared, options={**run.options, "process_group_backend": "gloo"})


def parity(machine: Machine) -> Iterator[Row]:
    """Yield for each layout whether it equals one process."""
    torch.set_default_dtype(torch.float64)
    for world, name, run in LAYOUTS:
        title = f"{world} ranks, {run.name}: {name}: differences from one process"
        if machine.is_dry and name not in DRY:
            continue
        if world * RANK_BYTES > machine.gpu_bytes and not machine.is_dry:
            yield Row(name=title, status="skipped", note=f"{world} contexts do not fit into the GPU's memory")
            continue
        yield compared(title, world, on_shared_gpu(run, machine))
    title = "2 ranks, gpt2: dp 2, zero 3: differences of parameters"
    yield compared_parameters(title, 2, on_shared_gpu(SHARED, machine))
    POOL.close()


def compared(title: str, world: int, run: Compared, trains: Callable[..., Any] = train) -> Row:
    """Run a layout, by `trains` on each rank; return the row of it."""
    return without_difference(
        title, lambda: check_all(world, run, limit=LIMIT_S, one_process=_one_process, trains=trains)
    )


def _one_process(run: Compared) -> tuple[Recorder, State]:
    """Return what one process records of a run on the first GPU, and its parameters at the end."""
    recorder = Recorder()
    recorder.losses, recorder.gradients, state = call_ranks(1, _train_plainly, run, limit=LIMIT_S)[0]
    return recorder, state


def _train_plainly(rank: int, run: Compared) -> tuple[list[float], list[State], State]:
    options = {key: value for key, value in run.options.items() if key not in OF_STRATEGY}
    module = run.build()
    recorder = fit_recorded(module, batches_of(run.name, run.steps), accelerator=run.accelerator, **options)
    return recorder.losses, recorder.gradients, module.state_dict()


def compared_parameters(title: str, world: int, run: Compared, trains: Callable[..., Any] = train) -> Row:
    """The same of a layout whose gradients are rows that ranks own: only parameters at the end are compared."""

    def check() -> None:
        parameters = _one_process(run)[1]
        (trained,) = call_ranks(world, trains, [run], world, limit=LIMIT_S)[0]
        torch.testing.assert_close(trained[2], parameters, **tolerance(run.exact))

    return without_difference(title, check)


def without_difference(title: str, check: Callable[[], None]) -> Row:
    """Return the row of a comparison that raises where something differs."""
    try:
        check()
    except (AssertionError, RuntimeError) as error:
        return Row(name=title, status="failed", note=str(error).strip()[-2000:])
    return Row(name=title, value=0, at_most=0)


# --- waits of the host ---

WATCHED: dict[str, tuple[int, dict[str, Modality]]] = {
    "both towers on one rank": (
        1,
        {"vision": Modality(module="encoder", boundary="encoder", colocate_with="language"), "language": Modality()},
    ),
    "vision | language pp 2": (
        3,
        {"vision": Modality(module="encoder", boundary="encoder"), "language": Modality(pp_size=2)},
    ),
}


def waits(machine: Machine) -> Iterator[Row]:
    """Yield how often the host waits for the GPU inside a schedule, after the first steps."""
    for name, (world, modalities) in WATCHED.items():
        backend = machine.backend if world == 1 else "gloo"
        strategy = MultimodalStrategy(
            modalities, batching={"num_microbatches": 4}, launch={"process_group_backend": backend, "timeout": TIMEOUT}
        )
        per_rank = run_ranks(world, _watched, machine, strategy, world, limit=LIMIT_S)
        of_gloo, others = Counter[str](), Counter[str]()
        for place, number in sum((Counter(each) for each in per_rank), Counter[str]()).items():
            (of_gloo if "transport" in place or "codec" in place else others)[place] += number
        title = f"{world} rank{'s' * (world > 1)} over {backend}, {name}: waits of the host in a step"
        yield Row(name=title, value=sum(others.values()), at_most=0, note=_places(others))
        if world > 1:
            note = f"gloo takes payloads through host memory. {_places(of_gloo)}"
            yield Row(name=f"{title}, in the transport", value=sum(of_gloo.values()), note=note)


def _places(counted: Counter[str]) -> str:
    return ", ".join(f"{number} at {place}" for place, number in counted.most_common(8))


def _watched(rank: int, machine: Machine, strategy: MultimodalStrategy, world: int) -> dict[str, int]:
    """Return the places where this rank's host waited in the last step, and how often."""
    steps: list[list[str]] = []
    execute = Engine.execute

    def watched(engine: Engine, step: Any, *arguments: Any, **options: Any) -> None:
        with machine.watched_syncs() as caught:
            execute(engine, step, *arguments, **options)
        if not step.trains:  # the comparison of the first batch
            return
        steps.append([f"{_short(each.filename)}:{each.lineno}" for each in caught if WAIT in str(each.message)])

    Engine.execute = watched  # type: ignore[method-assign]
    data = batches(SMALL, steps=WARMUP + 1, samples=4)
    fit(Towers(SMALL), data, strategy, machine.shared, devices=world)
    assert len(steps) == WARMUP + 1, "every step runs a schedule"
    return dict(Counter(steps[-1]))


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:])
