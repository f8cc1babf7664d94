"""Flags of the trainer."""

from __future__ import annotations

from typing import Any

from ordinary.uses import Ordinary, Run, fitted, flags, observed, row

SECTION = "Flags of the trainer"

flags(SECTION, max_epochs=2)
flags(SECTION, max_epochs=1, min_epochs=1)
flags(SECTION, max_steps=3)
flags(SECTION, max_epochs=3, max_steps=6)
flags(SECTION, max_epochs=2, min_steps=6)
flags(SECTION, max_time="00:01:00:00")
flags(SECTION, limit_train_batches=2)
flags(SECTION, limit_train_batches=0.5)
flags(SECTION, limit_train_batches=0)
flags(SECTION, limit_val_batches=1)
flags(SECTION, limit_val_batches=0.5)
flags(SECTION, limit_val_batches=0)
flags(SECTION, overfit_batches=1, max_epochs=2)
flags(SECTION, overfit_batches=0.5, max_epochs=2)
flags(SECTION, fast_dev_run=True)
flags(SECTION, fast_dev_run=2)
flags(SECTION, accumulate_grad_batches=2)
flags(SECTION, accumulate_grad_batches=3)
flags(SECTION, gradient_clip_val=0.3)
flags(SECTION, gradient_clip_val=0.01, gradient_clip_algorithm="value")
flags(SECTION, val_check_interval=2)
flags(SECTION, val_check_interval=0.5)
flags(SECTION, max_epochs=2, val_check_interval=3, check_val_every_n_epoch=None)
flags(SECTION, max_epochs=4, check_val_every_n_epoch=2)
flags(SECTION, num_sanity_val_steps=0)
flags(SECTION, num_sanity_val_steps=-1)
flags(SECTION, log_every_n_steps=3)
flags(SECTION, reload_dataloaders_every_n_epochs=1, max_epochs=2)
flags(SECTION, detect_anomaly=True)
flags(SECTION, deterministic=True)
flags(SECTION, deterministic="warn")
flags(SECTION, benchmark=True)
flags(SECTION, inference_mode=False)
flags(SECTION, profiler="simple")
flags(SECTION, profiler="advanced")
flags(SECTION, enable_model_summary=True)
flags(SECTION, sync_batchnorm=True)
flags(SECTION, precision="64-true")
flags(SECTION, precision=64)


@row(SECTION, "`Trainer(barebones=True)`")
def barebones(run: Run) -> dict[str, Any]:
    module = Ordinary()
    unset = {"logger": None, "enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None}
    trainer = run.trainer(barebones=True, log_every_n_steps=None, **unset)
    trainer.fit(module, run.training())
    return observed(trainer, module)


@row(SECTION, "`Trainer(enable_checkpointing=True)` with nothing else")
def default_checkpoint(run: Run) -> dict[str, Any]:
    found = fitted(run, Ordinary(), enable_checkpointing=True)
    return found | {"files": sorted(path.name for path in run.folder.rglob("*.ckpt"))}


@row(SECTION, "`Trainer(default_root_dir=...)` with a `CSVLogger`")
def root(run: Run) -> dict[str, Any]:
    module, trainer = Ordinary(), run.trainer(logger=True)
    trainer.fit(module, run.training())
    return observed(trainer, module) | {"files": sorted(path.name for path in run.folder.rglob("metrics.csv"))}
