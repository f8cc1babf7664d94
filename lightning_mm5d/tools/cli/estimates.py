"""What the commands know of a job's training step, for estimates of its memory.

One microbatch of the first batch of the training data, on which layers are measured and whose activations are counted.
Samples have unlike numbers of images: for times it is the microbatch nearest to the mean, for memory the fullest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.loader import LoaderBatches
from lightning_mm5d.data.microbatch import Microbatch, copied, leaves
from lightning_mm5d.data.packed_images import Path
from lightning_mm5d.features.refusals.feature import dependence, remade
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.tools.cli.job import Job
from lightning_mm5d.tools.cli.terminal import reason
from lightning_mm5d.tools.planner.activation_trace import Trace, trace
from lightning_mm5d.tools.planner.hollow_tensors import TRAINER, OptimizerStates
from lightning_mm5d.tools.planner.rank_memory import Step
from lightning_mm5d.trainer.batch_parts import BatchParts


def first_microbatch(job: Job, *, prepares: bool = True, fullest: bool = False) -> Any:
    """Return a microbatch of the first batch of the training data, on the device that the module is on.

    Args:
        job: with a module.
        prepares: whether the data are prepared first, which may download them.
        fullest: whether it is the one with the most elements, and not the one nearest to the mean.
    """
    module, parts = job.module, _first_parts(job, prepares=prepares)
    assert module is not None
    dtype: Any = module.dtype
    part = (max(parts, key=lambda microbatch: sum(_elements(microbatch).values())) if fullest else _usual(parts)).batch
    part = module.transfer_batch_to_device(module.on_before_batch_transfer(part, 0), module.device, 0)
    if dtype != torch.float32:  # as the precision plugins of Lightning do where the module is not 32-bit
        part = apply_to_collection(part, torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t)
    return module.on_after_batch_transfer(part, 0)


def first_samples(job: Job) -> tuple[int, int]:
    """Return how many samples the first batch of the training data has, and its microbatch nearest to the mean.

    Raises:
        ConfigError: there are no training data, or their first batch fails.
    """
    try:
        parts = _first_parts(job, prepares=False)
    except Exception as error:  # a user's code
        rule = f"Tokens and images are counted in the first batch of the training data, which fails: {error}"
        raise ConfigError("data", None, rule, "Add data: with samples of the usual sizes") from error
    return sum(part.samples for part in parts), _usual(parts).samples


def _elements(part: Microbatch) -> Counter[Path]:
    """How many elements the tensors of a microbatch have, by field."""
    return Counter({path: tensor.numel() for path, tensor in leaves(part.batch) if isinstance(tensor, torch.Tensor)})


def _usual(parts: Sequence[Microbatch]) -> Microbatch:
    """The microbatch nearest to the mean, the first of equal ones; before those that lack what others have."""
    sizes = [_elements(part) for part in parts]
    mean = {path: total / len(parts) for path, total in sum(sizes, Counter[Path]()).items()}

    def distance(number: int) -> tuple[int, float]:
        elements = sizes[number]
        return sum(not elements[path] for path in mean), sum(abs(elements[path] / mean[path] - 1) for path in mean)

    return parts[min(range(len(parts)), key=distance)]


def _first_parts(job: Job, *, prepares: bool) -> Any:
    """The microbatches of the first batch of the training data."""
    module, data = job.module, job.data
    assert module is not None
    source: Any = module if data is None else data
    with ExitStack() as stack:
        if vars(source).get("trainer") is None:  # a property of modules, which raises
            trainer: Any = SimpleNamespace(**vars(TRAINER), lightning_module=module, datamodule=data)
            stack.callback(setattr, source, "trainer", None)
            source.trainer = trainer
        if data is not None:
            if prepares:
                data.prepare_data()
            data.setup("fit")
        loader = source.train_dataloader()
    if isinstance(loader, (dict, list, tuple)) or loader is None:
        rule = "Layers are measured on the batches of one training dataloader"
        raise ConfigError("data", type(loader).__name__, rule, "Say --cost instead of --measure")
    batch = next(iter(loader), None)
    if batch is None:
        raise ConfigError("data", "nothing", "The training dataloader is empty", "Say --cost instead of --measure")
    if job.strategy.microbatching == "loader":
        batch = LoaderBatches([batch])
    parts = BatchParts(module, job.strategy).split(batch)
    job.strategy.expect_batch(sum(part.samples for part in parts))
    return parts


_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def step_of(job: Job, plan: Plan, traced: Callable[[Plan], Trace] | None = None) -> tuple[Step, list[str]]:
    """Return what is known of the training step of a job, and a sentence for each part that is not.

    Args:
        job: with a module.
        plan: of its configured layout.
        traced: as `tracer` returns it, where it is used again.
    """
    strategy, module, notes = job.strategy, job.module, list[str]()
    assert module is not None
    states: OptimizerStates | None = None
    try:
        states = OptimizerStates(module, remade)
    except Exception as error:  # a user's code
        notes.append(f"The states of optimizers are not counted: configure_optimizers fails here ({reason(error)})")
    activations: Trace | None = None
    try:
        activations = (traced or tracer(job, fullest=True))(plan)
    except Exception as error:  # a user's code
        notes.append(f"Activations are not counted: a step without memory fails here ({reason(error)})")
    step = Step(
        module,
        strategy.schedule,
        strategy.usual_microbatches(),
        states,
        activations,
        bucket_bytes=strategy.bucket_bytes,
        accumulates=job.accumulates,
    )
    return step, notes


def may_share(step: Step) -> bool:
    """Whether the optimizers may work on a part of each parameter: they look at one element at a time."""
    optimizers = [] if step.states is None else step.states.optimizers
    return bool(optimizers) and all(dependence(optimizer) == (False, False) for optimizer in optimizers)


def tracer(job: Job, *, fullest: bool = False) -> Callable[[Plan], Trace]:
    """Return what traces the step of a job on the ranks of a plan; its microbatch is loaded once."""
    module, dtype = job.module, _AUTOCAST.get(job.precision)
    context: Any = nullcontext if dtype is None else partial(torch.autocast, "cpu", dtype=dtype)
    batch = cache(partial(first_microbatch, job, prepares=False, fullest=fullest))

    def traced(plan: Plan) -> Trace:
        assert module is not None
        microbatch = copied(batch())  # a step may take something out of it
        return trace(module, microbatch, plan.partition, plan.modalities, plan.division, context, plan.experts)

    return traced
