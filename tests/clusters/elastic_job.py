"""A script of one's own that torchrun starts with any number of ranks. Arguments: a folder, and the last step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from clusters.elastic_parts import Losses, Parts
from features.toys import Toy
from lightning_mm5d import ElasticStrategy, Modality

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
L.seed_everything(1)
trainer = L.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy=ElasticStrategy(
        {"vision": Modality(module="encoder"), "language": Modality(pp_size=3)},
        batching={"num_microbatches": 4},
        checkpoint="sharded",
    ),
    max_steps=steps,
    logger=False,
    use_distributed_sampler=False,
    callbacks=[
        ModelCheckpoint(folder / "saved", every_n_train_steps=4, save_last=True),
        Losses(str(folder / "losses.jsonl")),
    ],
)
trainer.fit(Toy(), datamodule=Parts(), ckpt_path="last")
