"""Grids of tensor parallel ranks, composed with all else, give what one process gives.

"2d" is "language: ranks 0-3", "3d" and "2.5d" are "language: ranks 0-7". "2d, pp 2" has stage 0 on ranks 0-3 and stage
1 on ranks 4-7, "2d, dp 2" one replica on each of these. Replicas on grids are in tests/data_parallel too, and here
`exhaustive`.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError
from parity.harness import Batches, fit, strategy
from ranks import call_ranks
from tensor_parallel.layouts import Compared, check_all
from zoo import CASES

SQUARE: dict[str, Any] = {"tp_size": 4, "tp_mode": "2d"}
DEEP: dict[str, Any] = {"tp_size": 8, "tp_mode": "2.5d", "tp_depth": 2}
CUBE: dict[str, Any] = {"tp_size": 8, "tp_mode": "3d"}


def case(name: str, language: dict[str, Any], vision: dict[str, Any] | None = None, **options: Any) -> Compared:
    fields = {"language": language} if vision is None else {"vision": vision, "language": language}
    named = {key: options.pop(key) for key in ("replicas", "variant", "prepare", "steps") if key in options}
    return Compared(name=name, fields=fields, exact=name == "bert", options=options, **named)


@pytest.mark.usefixtures("float64")
def test_a_square_of_ranks_equals_one_process() -> None:
    check_all(
        4,
        case("llama_tied", SQUARE, num_microbatches=2, steps=3),
        case("llama", SQUARE | {"fused_linear_cross_entropy": True}, num_microbatches=8),  # one sample in each
    )


@pytest.mark.usefixtures("float64")
def test_grids_on_stages_and_encoders_equal_one_process() -> None:
    check_all(
        8,
        case("llama", SQUARE | {"pp_size": 2}, schedule="zero_bubble", num_microbatches=2),
        case("llava", SQUARE, SQUARE, variant="encoder", num_microbatches=2),
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_grids_with_everything_equal_one_process() -> None:
    check_all(
        8,
        case("gpt2", SQUARE | {"activation_checkpointing": "full"}, replicas=2, num_microbatches=2),
        case("bert", DEEP, num_microbatches=2),
        case("llama", CUBE, num_microbatches=2),
        case("llama", CUBE, num_microbatches=4, steps=3),
        case("gpt2", SQUARE, replicas=2, num_microbatches=2, variant="lower"),
        case("gpt2", CUBE | {"activation_checkpointing": "selective"}),
        case("llava", CUBE, {"colocate_with": "language"}),
        case("llama", SQUARE | {"offload": "activations"}, replicas=2, accumulate_grad_batches=2, steps=4),
        case("llava", SQUARE, SQUARE, gradient_clip_val=0.1),
        case("llava", SQUARE | {"pp_size": 2}, {"colocate_with": "language.0", "tp_size": 4}),
        limit=600,
    )


def hooked(module: Any) -> None:
    """Halve the gradient of the hidden state between two layers, and keep that of another one."""

    def halve(_: Any, args: Any, hidden: Any) -> None:
        hidden.register_hook(lambda gradient: gradient * 0.5)
        hidden.register_hook(lambda gradient: None)
        hidden.retain_grad()
        module.model.between = hidden  # of the root, ranks would be given a copy without a graph

    def look(_: Any, args: Any) -> None:
        args[0].register_hook(lambda gradient: module.model.seen.append(float(gradient.norm())))

    module.model.seen = []
    module.model.model.layers[1].register_forward_hook(halve)
    module.model.model.layers[3].register_forward_pre_hook(look)
    step = type(module).training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:  # the step before has run its backward
            module.model.seen.append(float(module.model.between.grad.norm()))
        return step(module, batch, batch_idx)

    module.training_step = training_step


def watched(rank: int | None, fields: dict[str, Any]) -> list[float]:
    module: Any = CASES["llama"].build()
    hooked(module)
    chosen: Any = "auto" if rank is None else strategy({"language": Modality(**fields)}, num_microbatches=1)
    fit(module, [CASES["llama"].batch(5, seed=step) for step in range(2)], chosen, 1 if rank is None else 4)
    return module.model.seen


@pytest.mark.usefixtures("float64")
def test_hooks_on_hidden_states_see_and_change_full_gradients() -> None:
    expected = watched(None, {})
    assert len(expected) == 3
    for found in call_ranks(4, watched, SQUARE):
        assert found == pytest.approx(expected, rel=1e-6)
    check_all(4, case("llama", SQUARE, prepare=hooked, num_microbatches=1, steps=3))


def refused(rank: int, name: str) -> str:
    module: Any = CASES[name].build()
    fields = {key: Modality(**SQUARE) for key in CASES[name].modalities[-1:]}
    others = {key: Modality(colocate_with="language") for key in CASES[name].modalities[:-1]}
    try:
        fit(module, [CASES[name].batch(4, seed=0)], strategy(others | fields), 4)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("float64")
def test_cross_attention_is_refused_on_every_rank() -> None:
    """language: ranks 0-3, whose decoder attends to what its encoder gives."""
    for found in call_ranks(4, refused, "whisper"):
        assert "a layer on a grid takes no trained values" in found
        assert "tp_mode='1d'" in found


class Speaker(L.LightningModule):
    """Generates in its predictions."""

    def __init__(self, model: torch.nn.Module, beams: int) -> None:
        super().__init__()
        self.model, self.beams = model, beams

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        options = {"do_sample": False, "max_new_tokens": 4, "num_beams": self.beams, "pad_token_id": 0}
        return self.model.generate(**inputs, **options)  # type: ignore[operator]


def spoken(rank: int | None, samples: int, beams: int, fields: dict[str, Any]) -> Any:
    batch = CASES["llama"].batch(samples, seed=0)
    module = Speaker(CASES["llama"].build().model, beams)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1 if rank is None else 4,
            strategy="auto" if rank is None else strategy({"language": Modality(**fields)}),
            **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False),
            use_distributed_sampler=False,
        )
        try:
            return trainer.predict(module, DataLoader(Batches([batch]), batch_size=None))[0]
        except ConfigError as error:
            return str(error)


@pytest.mark.usefixtures("float64")
def test_a_grid_generates_what_one_process_does_and_refuses_beams() -> None:
    for samples in (1, 3):
        expected = spoken(None, samples, 1, {})
        for found in call_ranks(4, spoken, samples, 1, SQUARE):
            assert torch.equal(found, expected)
    for found in call_ranks(4, spoken, 3, 2, SQUARE):
        assert "beam search" in found
