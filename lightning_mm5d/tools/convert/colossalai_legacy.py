"""ColossalAI's older configuration files: ``parallel = dict(pipeline=2, tensor=dict(size=4, mode="1d"))`` and the rest.

Names that ColossalAI itself does not read (``BATCH_SIZE``, ``SEQ_LENGTH``) are the user's own, and are listed as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.tools.convert.knobs import Conversion, Draft, Entry, Knob, always, costs, ruled, same

KNOBS: tuple[Knob, ...] = (
    same("parallel.pipeline.size", "modality.pp_size"),
    ruled("parallel.tensor.size", "modality.tp_size modality.cp_size", "`cp_size` with "
          "`mode=\"sequence\"`"),
    ruled("parallel.tensor.mode", "modality.tp_mode modality.cp_mode modality.cp_distribution", "`1d`: `tp_size` says "
          "it; `2d`, `2.5d`, `3d`: the same words; `sequence`: `cp_mode: ring` with `cp_distribution: uniform`"),
    ruled("parallel.tensor.depth", "modality.tp_depth", "Of `2.5d`"),
    always("parallel.data.size", "The number of ranks decides, here and there"),
    same("parallel.moe.size", "modality.ep_size"),
    ruled("NUM_MICRO_BATCHES", "strategy.num_microbatches", "With several stages"),
    ruled("model.num_chunks", "modality.pp_chunks strategy.schedule", "Above 1, with `interleaved`", neutral=(1,)),
    ruled("zero", "modality.zero_stage", "3", neutral=(None,)),
    ruled("fp16", "trainer.precision", "`16-mixed`; its scaler is the Trainer's", neutral=(None,)),
    same("clip_grad_norm", "trainer.gradient_clip_val", neutral=(0, 0.0)),
    same("gradient_accumulation", "trainer.accumulate_grad_batches"),
    same("cudnn_benchmark", "trainer.benchmark"),
    same("cudnn_deterministic", "trainer.deterministic"),
    always("gradient_handler", "Gradients are summed over all ranks that hold the same parameter"),
    costs("torch_ddp", "`bucket_bytes` sets the size of messages"),
    always("TENSOR_SHAPE", "Shapes are found by the first microbatch"),
)  # fmt: skip
_SECTIONS = ("pipeline", "tensor", "data", "moe")
_MODES = ("1d", "2d", "2.5d", "3d", "sequence")


def is_legacy(given: Mapping[str, Any]) -> bool:
    """Return whether a configuration has a `parallel` of this kind."""
    parallel = given.get("parallel")
    return isinstance(parallel, Mapping) and not parallel.keys().isdisjoint(_SECTIONS)


def convert_legacy(given: Mapping[str, Any]) -> Conversion:
    """Say an older configuration of ColossalAI in ours.

    Raises:
        ConfigError: a key of `parallel` does not exist, or has a value that ColossalAI refuses.
    """
    read = {knob.name.partition(".")[0] for knob in KNOBS}
    known: dict[str, Any] = {name: value for name, value in given.items() if name in read - {"model", "parallel"}}
    known["parallel"] = {
        key: {"size": one} if key in _SECTIONS and not isinstance(one, Mapping) else one
        for key, one in given["parallel"].items()
        if one is not None
    }
    model = given.get("model")
    if isinstance(model, Mapping) and "num_chunks" in model:
        known["model"] = {"num_chunks": model["num_chunks"]}
    draft = Draft(KNOBS, known)
    _convert_tensor(draft)
    if draft.count("parallel.pipeline.size") == 1:
        unsplit = "With one stage nothing is split, here or there"
        draft.leave_rest(["NUM_MICRO_BATCHES", "model.num_chunks"], "always", unsplit)
    elif "NUM_MICRO_BATCHES" in draft.given:
        draft.put("NUM_MICRO_BATCHES", "strategy.num_microbatches", draft.count("NUM_MICRO_BATCHES"))
    if draft.count("parallel.pipeline.size") > 1 and draft.get("model.num_chunks", 1) != 1:
        draft.put("model.num_chunks", "modality.pp_chunks", draft.count("model.num_chunks"))
        draft.put("model.num_chunks", "strategy.schedule", "interleaved")
    if draft.get("zero") is not None:
        draft.put("zero", "modality.zero_stage", 3)
    if (fp16 := draft.get("fp16")) is not None:
        if isinstance(fp16, Mapping) and fp16.get("mode") is None:
            draft.leave("fp16", "always", "It asks for nothing without a mode")
        else:
            draft.put("fp16", "trainer.precision", "16-mixed", "The scaler is the Trainer's")
    own = "A name of your own, which ColossalAI does not read itself"
    others = [name for name in given if name not in read or (name == "model" and "model" not in known)]
    entries = tuple(Entry(name, given[name], "elsewhere", {}, own) for name in others)
    strategy = {"modalities": {"model": draft.modality}, **draft.strategy}
    return Conversion("ColossalAI parallel = dict(...)", strategy, draft.trainer, (*draft.entries(), *entries))


def _convert_tensor(draft: Draft) -> None:
    size, name = draft.count("parallel.tensor.size"), "parallel.tensor.mode"
    mode = draft.choice(name, _MODES, "1d")
    if mode == "sequence" and size > 1:
        draft.put("parallel.tensor.size", "modality.cp_size", size)
        draft.put(name, "modality.cp_mode", "ring")
        draft.put(name, "modality.cp_distribution", "uniform")
        return
    if "parallel.tensor.size" in draft.given:
        draft.put("parallel.tensor.size", "modality.tp_size", size)
    if mode in ("1d", "sequence") or size == 1:
        draft.leave_rest([name], "always", "tp_size says it" if mode == "1d" else "One rank shares nothing")
    else:
        draft.put(name, "modality.tp_mode", mode)
    if mode == "2.5d" and size > 1:
        draft.put("parallel.tensor.depth", "modality.tp_depth", draft.count("parallel.tensor.depth"))
    draft.leave_rest(["parallel.tensor.depth"], "always", "Only 2.5d has a depth")


def missing_parallel(given: Mapping[str, Any], file: str) -> ConfigError:
    """Return the error for a file without `parallel`."""
    rule = "It assigns no `parallel = dict(pipeline=..., tensor=...)` and makes no plugin that is known"
    near = next((name for name in given if str(name).lower().startswith("par")), None)
    return ConfigError("FILE", file, rule, f"Did you mean {near!r} to be 'parallel'?" if near else "Add one there")
