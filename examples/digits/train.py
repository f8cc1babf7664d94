"""The example's command: LightningCLI around `model.py` and `data.py`, and a report of the answers.

    python examples/digits/train.py fit --config examples/digits/config.yaml

All settings are in the YAML file, the strategy among them; this script does not import it. `Report` writes into
the trainer's `default_root_dir`: `losses.csv`, `answers.png`, and, where the strategy can simulate its schedule,
`timeline.png`. It reads what was logged and what `validation_step` returned, so it works wherever the weights are.
"""

import csv
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from model import Digits
from torch import Tensor

from data import ANSWER_LENGTH, DigitsData, decode


class Report(L.Callback):
    """Collects the loss of every step and the answers of the last validation; rank zero writes them at the end."""

    def __init__(self, pictures: int = 40) -> None:
        self.pictures = pictures
        self.losses: list[tuple[int, float]] = []
        self.shown: list[tuple[Tensor, int, str, bool]] = []  # scan (8, 8), digit heard, answer, is it right

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the logged loss of this step."""
        self.losses.append((batch_idx, float(trainer.callback_metrics["train_loss"])))

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Forget the answers of the validation before."""
        self.shown.clear()

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: dict[str, Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the first `pictures` samples, each with the model's answer."""
        scans, heard, labels = batch["pixel_values"][:, 0].cpu(), batch["heard"].tolist(), batch["labels"].cpu()
        for i, answer in enumerate(outputs["answers"].cpu()[: self.pictures - len(self.shown)]):
            self.shown.append((scans[i], heard[i], *judged(decode(answer), decode(labels[i, -ANSWER_LENGTH:]))))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the files and say where they are."""
        folder = Path(trainer.default_root_dir)
        simulate = getattr(trainer.strategy, "simulate", None)
        simulation = simulate() if simulate is not None and self.losses else None
        if not trainer.is_global_zero or not self.shown:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if self.losses:
            with (folder / "losses.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(["step", "loss"])
                writer.writerows((step, f"{loss:.9g}") for step, loss in self.losses)
        draw_answers(self.shown, folder / "answers.png")
        if simulation is not None:
            from lightning_mm5d.features.timeline.drawing import WORK, draw

            draw(simulation, folder / "timeline.png", unit=WORK)
        if "val_accuracy" not in trainer.callback_metrics:  # a short run has only checked that validation works
            return
        accuracy = float(trainer.callback_metrics["val_accuracy"])
        print(f"\nheld-out accuracy {accuracy:.1%} (by chance about 1%); see {folder}")


def judged(answer: str, right: str) -> tuple[str, bool]:
    """The answer and whether it is right; a wrong one ends at its first wrong character.

    Later characters were predicted after the right one, not after the model's own, so they are left out.
    """
    for i, (got, wanted) in enumerate(zip(answer, right, strict=True)):
        if got != wanted:
            return answer[: i + 1] + ("…" if i + 1 < len(answer) else ""), False
    return answer, True


def draw_answers(shown: list[tuple[Tensor, int, str, bool]], path: Path, columns: int = 8) -> None:
    """Draw a grid of scans, each with the digit heard and the answer, green where it is right, else red."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(1.5 * columns, 1.9 * rows + 0.6), layout="constrained")
    figure.suptitle("Held-out scans and voices: what was heard, and what the model answered")
    for axes, (scan, heard, answer, right) in zip(
        figure.subplots(rows, columns, squeeze=False).flat, shown, strict=False
    ):
        axes.imshow(scan.numpy(), cmap="gray_r")
        axes.set_title(f"heard {heard}", fontsize=9)
        axes.set_xlabel(answer, color="green" if right else "red", fontsize=12, weight="bold")
    for axes in figure.axes:
        axes.set_xticks([])
        axes.set_yticks([])
    FigureCanvasAgg(figure).print_png(str(path))


class DigitsCLI(LightningCLI):
    """LightningCLI with the report, whose settings stand under `report`."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the callback that is always there."""
        parser.add_lightning_class_args(Report, "report")


if __name__ == "__main__":
    DigitsCLI(Digits, DigitsData, save_config_callback=None)
