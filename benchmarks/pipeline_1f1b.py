"""Vision on one rank, language on another, 1F1B: the strategy, against the same two stages written by hand.

The hand-written side is what torch offers: two `PipelineStage` and a `Schedule1F1B` of torch.distributed.pipelining in
a bare loop, with the same model, data, microbatches and optimizer.
"""

import torch.distributed as dist
from model import LANGUAGE, VISION, VisionLanguage, loader, make_optimizer, next_token_loss
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from turns import WARMUP, Side, Turns, fit, median_ratio, milliseconds, race, row

from lightning_mm5d import MultimodalStrategy

STEPS, BATCH, MICROBATCHES = 40 + WARMUP, 8, 4
VISION_LAYERS, LANGUAGE_LAYERS = 9, 3  # about as long a step on both ranks


def train_with_strategy(turns: Turns, rank: int) -> list[float]:
    """Returns the losses."""
    module = VisionLanguage(VISION_LAYERS, LANGUAGE_LAYERS)
    strategy = MultimodalStrategy({"vision": VISION, "language": LANGUAGE}, batching={"num_microbatches": MICROBATCHES})
    fit(module, loader(STEPS, BATCH), strategy, 2, turns)
    return module.losses


def train_by_hand(turns: Turns, rank: int) -> list[float]:
    """Returns the losses on the last rank, nothing on the first."""
    dist.init_process_group("gloo")
    whole = VisionLanguage(VISION_LAYERS, LANGUAGE_LAYERS)
    part = whole.encoder if rank == 0 else whole.decoder
    optimizer = make_optimizer(part.parameters())
    stage = PipelineStage(part, rank, 2, whole.device)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=next_token_loss)
    means = []
    for batch in loader(STEPS, BATCH):
        turns()
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch["images"])
        else:
            losses: list = []
            schedule.step(tokens=batch["tokens"], target=batch["tokens"], losses=losses)
            means.append(float(sum(loss.detach() for loss in losses)) / MICROBATCHES)
        optimizer.step()
    turns.end()
    return means


def main() -> None:
    ours, theirs = race(Side(2, train_with_strategy), Side(2, train_by_hand), STEPS)
    pairs = zip(ours.results[1], theirs.results[1], strict=True)
    assert all(abs(a - b) < 1e-3 for a, b in pairs), "both sides compute the same"
    times = f"{milliseconds(ours)} / {milliseconds(theirs)}"
    row("vision, language under 1F1B: time of a step, strategy / torch.distributed.pipelining by hand",
        median_ratio(ours, theirs), "1.00", times)  # fmt: skip


if __name__ == "__main__":
    main()
