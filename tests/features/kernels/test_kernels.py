"""Chosen kernels change no number beyond rounding, with stages, shards and recomputation, and are refused by name."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from compare import assert_equal_to_one_process, tolerance
from lightning_mm5d import Modality
from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.features.kernels.feature import epsilon_of_rms_norm, is_gated_unit
from parity.harness import fit, strategy
from ranks import call_ranks
from zoo import CASES

STEPS, SAMPLES = 3, 4
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "pp 2, recomputed": ({"pp_size": 2, "activation_checkpointing": "full"}, 2),
    "tp 2, sequence parallel": ({"tp_size": 2, "sequence_parallel": True}, 2),
    "cp 2": ({"cp_size": 2}, 2),
    "tp 2": ({"tp_size": 2}, 2),
}
PRODUCT = """
import torch
calls = 0
def liger_swiglu(a, b):
    global calls
    calls += 1
    return torch.nn.functional.silu(a) * b
"""


def train(rank: int, which: str | None, folder: str = "") -> Any:
    """A Llama whose attention is eager until it is told otherwise; also which attention and norms it used.

    `folder` has a package with the name of Liger's, because its kernels need a GPU.
    """
    case = CASES["llama_tied"]
    module = case.build()
    model: Any = module.model
    model.set_attn_implementation("eager")
    batches = [case.batch(SAMPLES, seed=step) for step in range(STEPS)]
    if which is None:
        return fit(module, batches), module.state_dict()
    fields, world = LAYOUTS[which]
    calls: list[str] = []
    functional = nn.functional.rms_norm

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append("rms_norm")
        return functional(*args, **kwargs)

    nn.functional.rms_norm = counted
    try:
        kernels = ["rms_norm"] if "cp_size" in fields else ["sdpa", "rms_norm"]
        if "cp_size" not in fields and "sequence_parallel" not in fields:
            sys.path.insert(0, folder)
            os.environ["TRITON_INTERPRET"] = "1"
            kernels.append("liger")
        chosen = strategy({"language": Modality(compute={"kernels": kernels}, **fields)}, num_microbatches=2)
        recorder = fit(module, batches, chosen, world)
    finally:
        nn.functional.rms_norm = functional
    assert all("forward" not in vars(part) for part in module.modules())
    if "liger" in kernels:
        calls += ["liger"] * importlib.import_module("liger_kernel.transformers.functional").calls
    return recorder.losses, recorder.gradients, module.state_dict(), model.config._attn_implementation, {*calls}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("which", LAYOUTS)
def test_kernels_equal_one_process_without_them(which: str, tmp_path: Path) -> None:
    package = tmp_path / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "functional.py").write_text(PRODUCT)
    recorder, parameters = train(0, None)
    ranks = call_ranks(LAYOUTS[which][1], train, which, str(tmp_path))
    # of sharded layers the parameters at the end tell
    step = ranks[0][1][0]
    sharded = {name for name, one in recorder.gradients[0].items() if name in step and step[name].shape != one.shape}
    for gradients in (recorder.gradients, *(rank[1] for rank in ranks)):
        gradients[:] = [{name: one for name, one in found.items() if name not in sharded} for found in gradients]
    found = [rank[:3] for rank in ranks]
    assert_equal_to_one_process(found, recorder, parameters, where=which, **tolerance(False))
    for *_, attention, calls in ranks:
        assert attention == ("eager" if which == "cp 2" else "sdpa")
        plain = which in ("cp 2", "tp 2, sequence parallel")
        assert calls == ({"rms_norm"} if plain else {"rms_norm", "liger"})


def test_a_module_is_known_by_its_code() -> None:
    assert [epsilon_of_rms_norm(cls) for cls in (LlamaRMSNorm, Qwen3RMSNorm)] == ["variance_epsilon"] * 2
    assert [epsilon_of_rms_norm(cls) for cls in (Gemma2RMSNorm, T5LayerNorm, nn.LayerNorm, LlamaMLP)] == [None] * 4
    assert is_gated_unit(LlamaMLP)
    assert not is_gated_unit(LlamaRMSNorm)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kernels": "spda"}, r"got 'spda'.*Did you mean 'sdpa'"),
        ({"kernels": 3}, r"got 3"),
        ({"kernels": ["sdpa", "eager"]}, r"sdpa and eager both compute the attention"),
        ({"kernels": "sdpa", "cp_size": 2}, r"kernels of its own, with cp_size above 1"),
        ({"kernels": "liger", "tp_size": 2, "sequence_parallel": True}, r"Liger's kernels take plain tensors"),
    ],
)
def test_kernels_that_do_not_go_together_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"modalities.language.compute.kernels: .*{message}"):
        strategy({"language": Modality(**fields)})


@pytest.mark.parametrize(
    ("name", "kernels", "message"),
    [
        ("llama_tied", "liger", r"liger-kernel is not installed|compiles for GPUs, and the trainer has CPUs"),
        ("llama_tied", "flash_attention_2", r"[Ff]lash"),
        ("gpt2", "rms_norm", r"No norm of language computes what Llama's RMSNorm computes"),
        ("handwritten_flat", "sdpa", r"has no such model"),
    ],
)
def test_kernels_that_a_model_or_machine_lacks_are_refused_before_the_run(
    name: str, kernels: str, message: str
) -> None:
    case = CASES[name]
    *encoders, last = case.modalities
    fields = {key: dict(case.modality_paths.get(key, {})) for key in case.modalities}
    fields[last]["kernels"] = kernels
    for encoder in encoders:
        fields[encoder]["colocate_with"] = last
    chosen = strategy({key: Modality(**value) for key, value in fields.items()})
    with pytest.raises(ConfigError, match=rf"modalities.{last}.compute.kernels: .*{message}"):
        fit(case.build(), [case.batch(2, seed=0)], chosen, 1)
