"""The head and its loss in chunks: the losses, gradients and logits of one process, with the head in any layout.

"one process" has the strategy too, with microbatches; the others are named by their ranks. Layouts that others contain
are `exhaustive`.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from context_parallel.runs import same_steps, steps, text
from features.toys import LANGUAGE, PAIR, Layout, Run, Toy, assert_same, outcomes
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.features.fused_heads import lazy_logits
from lightning_mm5d.features.fused_heads.feature import FEATURE
from lightning_mm5d.layout import Layout as Ranks
from lightning_mm5d.plan.plan import Plan
from parity.harness import Batches
from sweeps import swept
from zoo import CASES
from zoo.case import VOCABULARY, Batch, TinyModule


def fused(world: int, **fields: Any) -> Layout:
    return Layout({"language": Modality(compute={"fused_linear_cross_entropy": True}, **fields)}, world)


LAYOUTS = {
    "one process": fused(1),
    "pp 2": fused(2, pp_size=2),
    "tp 2": fused(2, tp_size=2),
    "tp 2 with sequence shards": fused(2, tp_size=2, sequence_parallel=True),
    "cp 2": fused(2, cp_size=2),
    "cp 2 x tp 2": fused(4, cp_size=2, tp_size=2, sequence_parallel=True),
    "zero 3": fused(2, zero_stage=3, cp_size=2),
}


class Uses(TinyModule):
    """The model's own loss, and in every other step more of the logits; it keeps those of the last step."""

    kept: Any = None
    spared = 0
    """how often the loss was computed without the logits"""

    def __init__(self, name: str = "llama", *, bias: bool = False) -> None:
        super().__init__(CASES[name].build().model, use_cache=False)
        if bias:
            head: Any = self.model.lm_head
            with torch.no_grad():
                head.bias = nn.Parameter(torch.linspace(-1, 1, VOCABULARY, dtype=head.weight.dtype))

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        output = self.model(**batch, **self.fixed)
        self.log("train_loss", output.loss)
        if batch_idx % 2 == 0:
            logits = output.logits
            self.spared += isinstance(logits, lazy_logits.LazyLogits) and logits._logits is None
            return output.loss
        logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
        self.kept = output.logits
        smoothed = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        return {"loss": output.loss + smoothed + logits.logsumexp(-1).mean(), "largest": logits.amax((1, 2))}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.kept is not None and self.trainer.is_last_batch:
            self.sums = self.kept.detach().sum()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        output = self.model(**batch, **self.fixed)
        self.log("val_loss", output.loss)
        self.log("val_certainty", output.logits.softmax(-1).amax(-1).mean())

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(**batch, **self.fixed).logits  # type: ignore[no-any-return]


def _fit(run: Run, module: Uses) -> Any:
    found = steps(run, module, text(2))
    trainer = run.trainer(limit_val_batches=1)
    loader = torch.utils.data.DataLoader(Batches(text(1)), batch_size=None)
    found["val"] = {name: float(value) for name, value in trainer.validate(module, loader, verbose=False)[0].items()}
    found["spared"] = module.spared
    return found


def tied(run: Run) -> Any:
    return _fit(run, Uses("llama_tied"))


def biased(run: Run) -> Any:
    return _fit(run, Uses(bias=True))


@pytest.mark.parametrize("name", swept(LAYOUTS, "tp 2", "cp 2"))
def test_losses_gradients_and_logits_equal_one_process(name: str) -> None:
    scenarios = (biased,) if "x" in name else (tied, biased)
    torch.set_default_dtype(torch.float64)
    try:
        for which, found in outcomes(LAYOUTS[name], *scenarios).items():
            assert found.one["spared"] == 0
            assert max(rank["spared"] for rank in found.ranks) == 2, "once for each microbatch"
            assert {tuple(rank["val"]) for rank in found.ranks} == {tuple(found.one["val"])}, which
            for rank in found.ranks:
                assert rank["val"] == pytest.approx(found.one["val"], rel=1e-6)
            if "tp" in name or "zero" in name:  # ranks hold shards of the gradients
                assert_same([rank["losses"] for rank in found.ranks], [found.one["losses"]] * len(found.ranks), 1e-6)
                assert_same(found.ranks[0]["weights"], found.one["weights"], 1e-6, which)
            else:
                same_steps(found)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_model_without_a_named_head_and_an_encoder_are_refused_before_the_run() -> None:
    modalities = dict(PAIR.modalities)
    modalities["language"] = Modality(compute={"fused_linear_cross_entropy": True}, **LANGUAGE)
    plan = Plan.of(Toy(), Ranks.build(modalities, world_size=2, loss_modality="language"), modalities)
    with pytest.raises(ConfigError, match="get_output_embeddings") as caught:
        FEATURE({}).check(Toy(), plan, torch.device("cpu"))
    assert caught.value.field == "modalities.language.compute.fused_linear_cross_entropy"
    gc.collect()
