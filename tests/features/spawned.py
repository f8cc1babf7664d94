"""A script whose trainer starts the ranks itself: fits, and checks the module that it has afterwards.

Run by a test, because processes that are spawned import the main script again.
"""

from __future__ import annotations

import sys
import warnings

import torch

from features.toys import PAIR, Run, Toy, alone, assert_same, weights


def fit(run: Run) -> dict[str, torch.Tensor]:
    module = Toy()
    run.trainer(max_epochs=2).fit(module, run.training(), run.loader(8))
    return weights(module)


def main(start_method: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    module = Toy()
    run = Run(PAIR, {"start_method": start_method})
    trainer = run.trainer(max_epochs=2)
    trainer.fit(module, run.training(), run.loader(8))
    assert_same(weights(module), alone(fit))
    assert not torch.distributed.is_initialized()
    if start_method == "fork":  # in new processes again; spawned ones take long to start
        before = float(trainer.callback_metrics["val_loss"])
        results = trainer.validate(module, run.loader(8), verbose=False)
        assert_same(results[0]["val_loss"], before)
    print("the weights of all stages came back")


if __name__ == "__main__":
    main(sys.argv[1])
