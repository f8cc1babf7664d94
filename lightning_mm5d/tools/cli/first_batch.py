"""The first microbatch of the training data, on which layers are measured and whose activations are counted."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.batches import LoaderBatches
from lightning_mm5d.tools.cli.job import Job
from lightning_mm5d.trainer.batch_parts import BatchParts


def first_microbatch(job: Job, *, prepares: bool = True) -> Any:
    """Return the first microbatch of the training data, on the device that the module is on.

    Args:
        job: with a module.
        prepares: whether the data are prepared first, which may download them.
    """
    module, data = job.module, job.data
    assert module is not None
    if data is not None:
        if prepares:
            data.prepare_data()
        data.setup("fit")
    loader = (module if data is None else data).train_dataloader()
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
    part = parts[0].batch
    part = module.transfer_batch_to_device(module.on_before_batch_transfer(part, 0), module.device, 0)
    if module.dtype != torch.float32:  # as the precision plugins of Lightning do where the module is not 32-bit
        convert = partial(_to_dtype, dtype=module.dtype)
        part = apply_to_collection(part, torch.Tensor, convert)
    return module.on_after_batch_transfer(part, 0)


def _to_dtype(tensor: torch.Tensor, dtype: torch.dtype | str) -> torch.Tensor:
    assert isinstance(dtype, torch.dtype)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
