"""What divided parameters cannot do is refused, before a process group where it can be known, and never goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch.nn.utils import parametrizations

from features.refusals.test_own_norms import REFUSALS
from lightning_mm5d import ConfigError, Modality
from lightning_mm5d.layout.layout import Layout
from parity.harness import fit, strategy
from ranks import run_ranks
from tensor_parallel.layouts import batches_of, build
from zoo.case import TinyModule

DIVIDED = {"language": Modality(tp_size=2)}


def plan_of(module: L.LightningModule) -> Any:
    chosen = strategy(dict(DIVIDED))
    chosen.__dict__["layout"] = Layout.build(DIVIDED, world_size=2, loss_modality="language")
    return chosen.plan(module)


def test_a_callback_that_needs_whole_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="full parameters"):
        REFUSALS.check_callbacks([ModelPruning("l1_unstructured")], plan_of(build("llama_tied")))


@pytest.mark.parametrize("parametrized", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_weight_that_a_parametrization_computes_is_refused_by_name(parametrized: Any) -> None:
    module = build("llama_tied")
    parametrized(module.model.get_submodule("model.layers.0.mlp.up_proj"))
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.up_proj\.weight: got .*no parameter.*tp_size=1"):
        plan_of(module)


def test_a_wrong_type_of_sequence_parallel_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"modalities\.language\.tensor\.sequence_parallel: got 'yes'"):
        strategy({"language": Modality(tp_size=2, tensor={"sequence_parallel": "yes"})})


@pytest.mark.parametrize("dtype", ["bfloat16", {"tensor_parallel": "float8_e4m3fn"}])
def test_compressed_rows_are_refused_in_a_ring(dtype: Any) -> None:
    language = Modality(tp_size=2, tensor={"sequence_parallel": "ring"}, communication={"communication_dtype": dtype})
    with pytest.raises(ConfigError, match=r"sequence_parallel: got 'ring'.*sequence_parallel=True"):
        strategy({"language": language})


class Penalized(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + sum(p.pow(2).sum() for p in self.parameters())


class PenalizedLate(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx == 0 else loss + 0.01 * sum(p.norm() for p in self.parameters())


class LogsALocalNormLate(TinyModule):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        norm = sum(p.norm() for p in self.parameters()).detach() if batch_idx else 0.0
        self.log("norm", norm)
        return super().training_step(batch, batch_idx)


def penalize(rank: int, penalized: type[TinyModule]) -> str:
    """language: ranks 0-1."""
    module = penalized(build("llama_tied").model, use_cache=False)
    try:
        fit(module, batches_of("llama_tied"), strategy(DIVIDED, num_microbatches=2), 2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return "no error"


@pytest.mark.usefixtures("float64")
def test_a_penalty_over_shards_is_refused_in_the_first_step() -> None:
    found = run_ranks(2, penalize, Penalized)
    assert all("sharded over tensor parallel ranks" in message and "weight_decay" in message for message in found)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("penalized", "what"), [(PenalizedLate, "loss"), (LogsALocalNormLate, "log 'norm'")])
def test_unlike_losses_and_logs_of_any_step_stop_the_run(penalized: type[TinyModule], what: str) -> None:
    found = run_ranks(2, penalize, penalized)
    assert f"unequal values of the {what}" in found[1], found
    assert found[0] != "no error"


class Saves(L.Callback):
    """Saves the model in the middle of training: as on one process, and from the state of all ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            pl_module.model.save_pretrained(self.folder / "alone")
        state = trainer.strategy.full_state_dict()
        if trainer.is_global_zero:
            own = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
            pl_module.model.save_pretrained(self.folder / "all", state_dict=own)


def save_while_training(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    saves, module = Saves(folder), build("llama_tied")
    fields = {"language": Modality(tp_size=2, pp_size=2)}
    fit(module, batches_of("llama_tied"), strategy(fields, num_microbatches=2), 4, callbacks=[saves])
    return {name: value.clone() for name, value in module.model.state_dict().items()}


@pytest.mark.usefixtures("float64")
def test_a_model_is_saved_while_it_trains(tmp_path: Path) -> None:
    """language: ranks 0-1 and 2-3 as stages of two tensor parallel ranks."""
    found = run_ranks(4, save_while_training, tmp_path)
    for folder in ("alone", "all"):
        loaded = type(build("llama_tied").model).from_pretrained(tmp_path / folder, dtype=torch.float64)
        for name, value in loaded.state_dict().items():
            torch.testing.assert_close(value, found[0][name], rtol=1e-9, atol=1e-9)


def test_an_embedding_is_full_where_that_is_said_and_the_head_stays_sharded() -> None:
    modalities = {"language": Modality(tp_size=2, tensor={"shard_embedding": False})}

    def planned(name: str) -> Any:
        chosen = strategy(dict(modalities))
        chosen.__dict__["layout"] = Layout.build(modalities, world_size=2, loss_modality="language")
        return chosen.plan(build(name))

    shards = planned("llama").division.shards
    assert "model.lm_head.weight" in shards
    assert not any("embed_tokens" in name for name in shards)
    with pytest.raises(
        ConfigError, match=r"language\.tensor\.shard_embedding: got False\. .*embed_tokens.* is tied to .*lm_head"
    ):
        planned("llama_tied")
