"""Low-rank adapters (LoRA, by PEFT) on divided layers train as on one process; adapters that cannot are refused.

The default run holds each kind of adapter, model and layout once or twice; `exhaustive` holds more of their pairs.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from features.toys import Layout, Run, assert_same, outcomes
from lightning_mm5d import ConfigError, Modality
from parity.harness import Batches, fit, strategy
from tensor_parallel.layouts import Compared, Fields, check_all
from zoo import CASES

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Could not find a config file"),  # of a base model that has no file
]

EXHAUSTIVE = pytest.mark.exhaustive
SHARDS: dict[str, Any] = {"tp_size": 2, "sequence_parallel": True}
RING: dict[str, Any] = {"tp_size": 2, "sequence_parallel": "ring"}
SQUARE: dict[str, Any] = {"tp_size": 4, "tp_mode": "2d"}
DEEP: dict[str, Any] = {"tp_size": 8, "tp_mode": "2.5d", "tp_depth": 2}
CUBE: dict[str, Any] = {"tp_size": 8, "tp_mode": "3d"}
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "down_proj", "fc1", "fc2"),
    *("c_attn", "c_proj", "c_fc", "query", "key", "value", "dense"),
)
BOTH_ENDS = (*PROJECTIONS, "embed_tokens", "lm_head")


def adapt(module: Any, targets: Any = PROJECTIONS, **options: Any) -> None:
    """Freeze the model and put adapters on its projections, with both matrices away from zero."""
    convolutions = any(type(part).__name__ == "Conv1D" for part in module.modules())
    named = {name.rpartition(".")[2] for name, _ in module.named_modules()}
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=[name for name in targets if name in named],
        fan_in_fan_out=convolutions,
        **options,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT has something to say of biases, and of tied tables
        torch.manual_seed(1)
        module.model = peft.get_peft_model(module.model, config, autocast_adapter_dtype=False)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.1)


def merge(module: Any) -> None:
    """Adapters that have become part of the weights again."""
    adapt(module)
    module.model = module.model.merge_and_unload()
    module.requires_grad_(True)


with_biases = partial(adapt, lora_bias=True, use_rslora=True)
at_both_ends = partial(adapt, targets=BOTH_ENDS)
beside_a_trained_norm = partial(adapt, modules_to_save=["norm", "lm_head"])


def lora(name: str, fields: Fields, **options: Any) -> Compared:
    known = {key: options.pop(key) for key in ("prepare", "exact", "steps") if key in options}
    return Compared(name=name, fields=fields, options=options, **{"prepare": adapt, **known})


@pytest.mark.usefixtures("float64")
def test_adapters_of_one_modality_train_as_on_one_process() -> None:
    """language: ranks 0-1, tensor parallel."""
    check_all(
        2,
        lora("llama", {"language": SHARDS}, prepare=with_biases),
        lora("gpt2", {"language": RING}),
        lora("llama", {"language": RING}, prepare=beside_a_trained_norm),
        lora("llama_tied", {"language": {"tp_size": 2}}, prepare=at_both_ends),
        lora("llama", {"language": {"tp_size": 2}}, prepare=merge),
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_more_adapters_of_one_modality_train_as_on_one_process() -> None:
    """language: ranks 0-1, tensor parallel."""
    check_all(
        2,
        lora("llama", {"language": {"tp_size": 2}}, steps=3),
        lora("bert", {"language": {"tp_size": 2}}, exact=True),
        lora("bert", {"language": SHARDS}, exact=True),
        lora("llama", {"language": {"tp_size": 2}}, prepare=at_both_ends),
    )


@pytest.mark.usefixtures("float64")
def test_adapters_beside_an_encoder_train_as_on_one_process() -> None:
    """vision: ranks 0-1; language: ranks 2-3."""
    check_all(4, lora("llava", {"vision": {"tp_size": 2}, "language": SHARDS}))


@pytest.mark.exhaustive  # without shards: parity/test_split_backward.py
@pytest.mark.usefixtures("float64")
def test_adapters_in_a_pipeline_train_as_on_one_process() -> None:
    """language: ranks 0-1 and 2-3 as stages."""
    check_all(4, lora("llama", {"language": {"pp_size": 2, **RING}}, schedule="zero_bubble"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_adapters_beside_three_shards_train_as_on_one_process() -> None:
    """vision: rank 0; language: ranks 1-3, tensor parallel."""
    check_all(4, lora("llava", {"vision": {}, "language": {"tp_size": 3}}, schedule="zero_bubble"))


@pytest.mark.usefixtures("float64")
def test_adapters_on_a_square_of_ranks_train_as_on_one_process() -> None:
    """language: ranks 0-3, with weights and hidden states in blocks."""
    check_all(4, lora("llama", {"language": SQUARE}, prepare=with_biases, num_microbatches=2))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_more_adapters_on_a_square_of_ranks_train_as_on_one_process() -> None:
    """language: ranks 0-3, with weights and hidden states in blocks."""
    again = SQUARE | {"activation_checkpointing": "full"}
    check_all(
        4,
        lora("llama", {"language": SQUARE}, prepare=with_biases, steps=3),
        lora("gpt2", {"language": again}, num_microbatches=2),
        lora("gpt2", {"language": SQUARE}, num_microbatches=8),  # one sample in each
        lora("bert", {"language": again}, exact=True),
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_adapters_on_all_grids_train_as_on_one_process() -> None:
    """language: ranks 0-7; or ranks 0-3 and 4-7, as stages or replicas."""
    check_all(
        8,
        lora("llama", {"language": CUBE}, prepare=with_biases),
        lora("gpt2", {"language": CUBE}, num_microbatches=8),
        lora("bert", {"language": DEEP}, exact=True, prepare=with_biases),
        lora("llama", {"language": CUBE}, prepare=at_both_ends),
        lora("llama", {"language": SQUARE | {"pp_size": 2}}, schedule="zero_bubble", prepare=beside_a_trained_norm),
        lora("llava", {"vision": SQUARE, "language": SQUARE}),
        lora("llama", {"language": CUBE}, prepare=merge),
        limit=600,
    )


# --- files ---


def saved(run: Run) -> Any:
    """The adapters' weights as PEFT has them, whole ones on rank 0, and the file of a checkpoint."""
    module = CASES["llama"].build()
    adapt(module)
    trainer = run.trainer(use_distributed_sampler=False)
    trainer.fit(module, DataLoader(Batches([CASES["llama"].batch(4, seed=0)]), batch_size=None))
    trainer.save_checkpoint(run.folder / "whole.ckpt")
    if trainer.is_global_zero:
        module.model.save_pretrained(run.folder / "adapters")
    return {key: value.clone() for key, value in peft.get_peft_model_state_dict(module.model).items()}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "fields",
    [pytest.param({"tp_size": 2, "pp_size": 2}, id="stages"), pytest.param(SQUARE, id="square", marks=[EXHAUSTIVE])],
)
def test_saved_adapters_are_those_of_one_process(fields: dict[str, Any], tmp_path: Path) -> None:
    """language: ranks 0-1 and 2-3 as stages of two tensor parallel ranks, or ranks 0-3 as a square."""
    layout = Layout({"language": Modality(**fields)}, 4)
    for name in ("one", "ranks"):
        (tmp_path / name).mkdir()
    found = outcomes(layout, saved, folder=tmp_path)["saved"]
    assert list(found.ranks[0]) == list(found.one)
    assert all("lora_" in key for key in found.one)
    assert_same(found.ranks[0], found.one, 1e-6)
    whole = [torch.load(tmp_path / name / "whole.ckpt", weights_only=True)["state_dict"] for name in ("one", "ranks")]
    assert list(whole[1]) == list(whole[0])
    assert_same(whole[1], whole[0], 1e-6)
    loaded = peft.PeftModel.from_pretrained(CASES["llama"].build().model, tmp_path / "ranks" / "adapters")
    assert_same(peft.get_peft_model_state_dict(loaded), found.one, 1e-6)


# --- what is refused ---


def refused(module: L.LightningModule) -> str:
    batches = [CASES["llama"].batch(4, seed=0)]
    with pytest.raises(ConfigError) as caught:
        fit(module, batches, strategy({"language": Modality(tp_size=2)}, start_method="fork"), 2)
    assert not torch.distributed.is_initialized()
    return str(caught.value)


@pytest.mark.parametrize("field", ["pp_size", "tp_size", "cp_size"])
def test_prefix_tuning_is_refused_before_any_process_starts(field: str) -> None:
    module: Any = CASES["llama"].build()
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    module.model = peft.get_peft_model(module.model, config)
    with pytest.raises(ConfigError, match=rf"modalities\.language\.{field}: got 2.*Prefix tuning.*LoraConfig"):
        fit(module, [CASES["llama"].batch(4, seed=0)], strategy({"language": Modality(**{field: 2})}), 2)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), "lora_magnitude_vector"),
        (
            lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], alora_invocation_tokens=[1], task_type="CAUSAL_LM"),
            "ALoraLinearVariant",
        ),
        (lambda: peft.IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"]), "ia3_l"),
        (lambda: peft.LoHaConfig(r=2, target_modules=["up_proj"]), "hada_w1_a"),
    ],
    ids=["DoRA", "activated LoRA", "IA3", "LoHa"],
)
def test_other_adapters_are_refused_before_any_process_starts(config: Any, said: str) -> None:
    module: Any = CASES["llama"].build()
    module.model = peft.get_peft_model(module.model, config())
    message = refused(module)
    assert said in message
    assert "leave these layers out of target_modules" in message
    assert "self_attn.q_proj" in message or "mlp" in message
