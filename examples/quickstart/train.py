"""Run the captioner of `module.py` on 1, 2, 4 or 8 ranks: only the strategy differs.

python examples/quickstart/train.py --devices 4
"""

import argparse

import lightning as L
from module import Captioner, bars

from lightning_mm5d import Modality, MultimodalStrategy

LAYOUTS = {
    2: {"vision": Modality(module="encoder"), "language": Modality()},
    4: {"vision": Modality(module="encoder"), "language": Modality(pp_size=3)},
    8: {"vision": Modality(module="encoder", pp_size=2), "language": Modality(pp_size=6)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a captioner on 1, 2, 4 or 8 ranks.")
    parser.add_argument("--devices", type=int, choices=(1, *LAYOUTS), default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeline", help="draw the last step into this file (not on one rank)")
    options = parser.parse_args()

    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy="auto"
        if options.devices == 1
        else MultimodalStrategy(
            modalities=LAYOUTS[options.devices],
            schedule="1f1b",
            batching={"num_microbatches": 4},
            timeline=options.timeline,
        ),
        max_steps=options.steps,
        use_distributed_sampler=False,  # one replica: every rank loads the same batches
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Captioner(), bars(samples=32 * options.steps, batch_size=32))
    if trainer.is_global_zero:
        loss = float(trainer.callback_metrics["loss"])
        print(f"ranks {trainer.world_size}: loss {loss:.6f} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
