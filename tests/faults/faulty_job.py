"""A training script that fails where it is told to: ``faulty_job.py FOLDER CASE``, the case as JSON.

Right before its fault a rank writes ``fired-<rank>`` with the time of day, so that a run in which the fault never
fired does not count. Every rank writes ``started-<rank>`` with its process id, and ``done-<rank>`` with its losses
after `fit` returned.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from faults.fault import Fault
from features.toys import LANGUAGE, VISION, Samples, Toy
from lightning_mm5d import Modality, MultimodalStrategy, PipelineTemplate
from lightning_mm5d.trainer import statements

BATCHES, BATCH, MICROBATCHES = 3, 4, 2  # per replica

LAYOUTS: dict[str, tuple[dict[str, Modality], int]] = {
    # vision: rank 0; language: ranks 1-3 as stages
    "pipe": (
        {
            "vision": Modality(**VISION),
            "language": Modality(pipeline={"pipeline_template": PipelineTemplate(stages=[2, 1, 1])}, **LANGUAGE),
        },
        1,
    ),
    # vision: ranks 0-1; language: ranks 2-3, two replicas of both
    "twins": ({"vision": Modality(**VISION), "language": Modality(dp_size=2, **LANGUAGE)}, 2),
    # language: two replicas of two stages, ranks 0-3; vision: four replicas on the same ranks
    "mesh": (
        {"vision": Modality(colocate_with="language", **VISION), "language": Modality(pp_size=2, **LANGUAGE)},
        2,
    ),
    # four replicas of everything, in one piece
    "copies": ({"model": Modality()}, 4),
}
# a layer that runs on each rank
LAYERS = {
    "pipe": ("encoder.layers.0", "decoder.layers.0", "decoder.layers.2", "decoder.layers.3"),
    "twins": ("encoder.layers.0", "encoder.layers.0", "decoder.layers.0", "decoder.layers.0"),
    "mesh": ("decoder.layers.0", "decoder.layers.0", "decoder.layers.3", "decoder.layers.3"),
    "copies": ("decoder.layers.0",) * 4,
}


class Data(Dataset):
    """The toy's samples, with a fault in one of them."""

    def __init__(self, samples: Dataset, fault: Fault) -> None:
        self.samples, self.fault, self.taken = samples, fault, 0

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        self.taken += 1
        if self.taken == BATCH + 1:
            self.fault.at("worker" if get_worker_info() is not None else "loader")
        return self.samples[index]


class Faulty(Toy):
    """The toy with a fault in one of its hooks."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault, self.losses = fault, list[float]()
        self._ignore_hyperparameters()
        layer = self.get_submodule(LAYERS[fault.case.get("layout", "pipe")][fault.rank])
        layer.register_forward_pre_hook(self._before_layer)
        layer.register_forward_hook(self._after_layer)
        self.batch_idx = -1

    def _ignore_hyperparameters(self) -> None:
        self.hparams.clear()
        self.hparams["lr"] = 0.1

    def _before_layer(self, *_: Any) -> None:
        if self.trainer.training:
            self.fault.at("forward", self.batch_idx)

    def _after_layer(self, _: nn.Module, __: Any, output: Tensor) -> None:
        if self.trainer.training and isinstance(output, Tensor) and output.requires_grad:
            batch_idx = self.batch_idx
            output.register_hook(lambda gradient: self.fault.at("backward", batch_idx))

    def setup(self, stage: str) -> None:
        self.fault.at("setup")

    def configure_optimizers(self) -> Any:
        self.fault.at("optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch_idx = batch_idx
        self.fault.at("first step" if batch_idx == 0 else "step", None if batch_idx == 0 else batch_idx)
        loss = super().training_step(batch, batch_idx)
        return self._changed(loss, batch_idx)

    def _changed(self, loss: Tensor, batch_idx: int) -> Any:
        what = self.fault.case.get("loss")
        if what is None or batch_idx != 1 or not self.fault.mine:
            return loss
        self.fault.mark()
        if what == "none":
            return None
        if what == "no gradient":
            return loss.detach()
        return loss * float(what)

    def on_after_backward(self) -> None:
        self.fault.at("after backward", self.batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fault.at("sum", self.batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.fault.at("validation")
        return super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.fault.at("checkpoint")


class Callback(L.Callback):
    """The same in callbacks, and what a user should not do on some ranks only."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.fault.at("fit start")

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.fault.at("train start")

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        module.losses.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))
        self.fault.at("batch end", batch_idx)
        alone = self.fault.case.get("alone")
        if batch_idx != 1 or alone is None or not self.fault.mine:
            return
        self.fault.mark()
        if alone == "save":
            trainer.save_checkpoint(self.fault.folder / "alone.ckpt")
        elif alone == "gather":
            module.all_gather(torch.ones(1))
        elif alone == "barrier":
            trainer.strategy.barrier("alone")
        elif alone == "log":
            module.log("alone", 1.0, sync_dist=True)
        elif alone == "reduce":
            trainer.strategy.reduce(torch.ones(1))
        elif alone == "broadcast":
            trainer.strategy.broadcast("alone")
        elif alone == "stop":
            trainer.should_stop = True

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.fault.at("validation start")

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.fault.at("epoch end")
        trainer.save_checkpoint(self.fault.folder / "saved.ckpt")


class FaultyStrategy(MultimodalStrategy):
    """The strategy with a fault before it connects, and before it ends."""

    fault: Fault

    def setup_environment(self) -> None:
        self.fault.at("group")
        super().setup_environment()

    def teardown(self) -> None:
        self.fault.at("teardown")
        super().teardown()


def batch_of(samples: list[dict[str, Any]], fault: Fault, number: int) -> Any:
    """The collated batch, or what the case makes of it."""
    batch = torch.utils.data.default_collate(samples)
    what = fault.case.get("batch_is")
    if what is None or number != fault.case.get("batch", 1) or not fault.mine:
        return batch
    fault.mark()
    changed = {
        "none": lambda: None,
        "empty": lambda: {key: value[:0] for key, value in batch.items()},
        "string": lambda: "a string",
        "number": lambda: 3,
        "empty dict": lambda: {},
        "unequal": lambda: {**batch, "label": batch["label"][:-1]},
        "one sample": lambda: {key: value[:1] for key, value in batch.items()},
        "three samples": lambda: {key: value[:3] for key, value in batch.items()},
        "extra string": lambda: {**batch, "note": "kept"},
        "extra strings": lambda: {**batch, "note": ["kept"] * len(batch["label"])},
        "extra object": lambda: {**batch, "note": Fault},
        "extra none": lambda: {**batch, "note": None},
        "extra scalar": lambda: {**batch, "note": torch.tensor(3)},
        "meta device": lambda: {key: value.to("meta") for key, value in batch.items()},
        "without images": lambda: {key: value for key, value in batch.items() if key != "images"},
        "images none": lambda: {**batch, "images": None},
        "float32": lambda: {**batch, "images": batch["images"].float()},
        "wider": lambda: {**batch, "images": torch.cat([batch["images"], batch["images"]], dim=1)},
        "bad label": lambda: {**batch, "label": batch["label"] + 100},
        "list": lambda: [batch],
        "nan": lambda: {**batch, "images": batch["images"] * float("nan")},
    }
    return changed[what]()


class Collate:
    """Counts batches."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.number = fault, -1

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        self.number += 1
        return batch_of(samples, self.fault, self.number)


def unequal(case: dict[str, Any], fault: Fault, model: Faulty, options: dict[str, Any]) -> int:
    """What one rank does otherwise, by the case's ``differs``; returns its number of samples."""
    replicas = LAYOUTS[case.get("layout", "pipe")][1]
    count = BATCHES * BATCH * replicas
    differs = case.get("differs")
    if differs is None or not fault.mine:
        return count
    fault.mark()
    if differs == "fewer batches":
        return count - BATCH * replicas
    if differs == "more batches":
        return count + BATCH * replicas
    if differs == "no batches":
        return 0
    if differs == "seed":
        L.seed_everything(99, verbose=False)
    elif differs == "microbatches":
        options["num_microbatches"] = 4
    elif differs == "schedule":
        options["schedule"] = "gpipe"
    elif differs == "loss weight":
        options["loss_weight"] = "tokens"
    elif differs == "layout":
        options["modalities"] = {"vision": Modality(**VISION), "language": Modality(pp_size=3, **LANGUAGE)}
    elif differs == "shape":
        model.decoder.head = nn.Linear(8, 5).double()
    elif differs == "frozen":
        model.decoder.head.requires_grad_(False)
    elif differs == "name":
        model.decoder.header = model.decoder.head
    elif differs == "extra layer":
        model.decoder.layers.append(type(model.decoder.layers[0])().double())
    elif differs == "dtype":
        model.decoder.head.float()
    elif differs == "code":
        Faulty.configure_optimizers = Toy.configure_optimizers  # type: ignore[method-assign]
    elif differs == "version":
        statements.version = lambda package: "0.0.1"  # type: ignore[attr-defined]
    return count


def main(arguments: list[str]) -> None:
    folder, case = Path(arguments[0]), json.loads(arguments[1])
    fault = Fault(folder, case)
    (folder / f"started-{fault.rank}").write_text(str(os.getpid()))
    fault.at("script")
    L.seed_everything(7, verbose=False)
    modalities, replicas = LAYOUTS[case.get("layout", "pipe")]
    options: dict[str, Any] = {"modalities": modalities, "num_microbatches": MICROBATCHES, **case.get("options", {})}
    if "watchdog" in options:
        options["watchdog"] = timedelta(seconds=options["watchdog"])
    model = Faulty(fault)
    count = unequal(case, fault, model, options)
    FaultyStrategy.fault = fault
    is_alone = case.get("one process", False)
    workers = 1 if case.get("phase") == "worker" or case.get("workers") else 0
    data = Data(Samples(count), fault)

    def loader(dataset: Any, batch_size: int, collate: Any = None) -> DataLoader:
        return DataLoader(dataset, batch_size=batch_size, num_workers=workers, collate_fn=collate)

    size = BATCH * replicas if is_alone else BATCH
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if is_alone else 4,
        strategy="auto" if is_alone else FaultyStrategy(**options),
        max_epochs=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=replicas > 1 and not is_alone,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Callback(fault)],
        **case.get("trainer", {}),
    )
    trainer.fit(model, loader(data, size, Collate(fault)), loader(Samples(BATCH * replicas), size))
    (folder / f"done-{fault.rank}").write_text(json.dumps(model.losses))


if __name__ == "__main__":
    main(sys.argv[1:])
