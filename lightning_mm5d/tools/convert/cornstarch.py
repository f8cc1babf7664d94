"""Cornstarch's plugins: `MultimodalParallelPlugin` and its kind, with a `ModalParallelPlugin` for each modality.

The order of a table is that of the constructor, so that positional arguments have their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.tools.convert.colossalai import (
    PARALLEL_OUTPUT,
    PRECISION,
    SCALER,
    VOCABULARY,
    convert_microbatches,
    convert_precision,
    convert_vocabulary,
)
from lightning_mm5d.tools.convert.knobs import (
    KERNELS,
    Conversion,
    Draft,
    Entry,
    Knob,
    always,
    convert_kernels,
    costs,
    results,
    ruled,
    same,
)
from lightning_mm5d.tools.convert.python_source import ALL_MODULES

MODAL_KNOBS: tuple[Knob, ...] = (
    same("tp_size", "modality.tp_size"),
    ruled("sp_size", "modality.cp_size", "", neutral=(1,)),
    ruled("sequence_parallelism_mode", "modality.context.cp_mode",
          "`all_to_all`: `ulysses`; `ring_attn`, which gathers keys and values a head at a time: `allgather`"),
    ruled("pipeline_template.modules_per_stage", "modality.pipeline.pipeline_template modality.pp_size",
          "`{stages: [...]}` with numbers of layers; other modules stay with the first or last layer"),
    always("pipeline_template.model_name", "Layers are found in the model"),
    costs("pipeline_template.latency", "`cost`, for the search of a layout", neutral=(0, 0.0)),
    costs("pipeline_template.kstar_latency", "`mm5d plan` simulates schedules", neutral=(0, 0.0)),
    costs("pipeline_template.mem_required", "`mm5d plan` estimates memory", neutral=(0,)),
    results("cpu_offload", "Cornstarch refuses it, too; ours is `offload: optimizer`", neutral=(False,)),
    results("custom_policy", "A policy is code: write a TensorParallelPlan and register it with "
            "`register_tensor_parallel_plan`; most models need none"),
    ruled("context_parallel_distribution_mode", "modality.context.cp_distribution",
          "Of its `shard_config`: the same words in lower case"),
)  # fmt: skip

KNOBS: tuple[Knob, ...] = (
    ruled("encoder_plugins", "modality.*", "A modality for each, of the same name"),
    ruled("language_model_plugin", "modality.*", "The modality `language`"),
    *PRECISION,
    *KERNELS,
    ruled("num_microbatches", "strategy.batching.num_microbatches", "The dataloader's batches have `num_microbatches * "
          "microbatch_size` samples"),
    ruled("microbatch_size", "strategy.batching.microbatch_size", "Where `num_microbatches` is not said"),
    *SCALER,
    always("parallel_output", PARALLEL_OUTPUT),
    *VOCABULARY,
)  # fmt: skip

UNLIKE_KNOBS: tuple[Knob, ...] = (
    same("tp_size", "modality.tp_size"),
    ruled("microbatch_size", "strategy.batching.microbatch_size",
          "Without `pipelines`, which have numbers of microbatches"),
    *PRECISION,
    *KERNELS,
    *SCALER,
    ruled("pipelines", "modality.pipeline.pipelines modality.dp_size",
          "A template per replica, or its lists of modules alone; `dp_size` where each has one stage"),
    ruled("num_microbatches", "strategy.batching.num_microbatches modality.pipeline.speeds",
          "One number per replica: their mean, with the numbers as speeds"),
)  # fmt: skip


def convert_multimodal(given: Mapping[str, Any], *, colocated: bool = False) -> Conversion:
    """Say the arguments of a `MultimodalParallelPlugin` in ours.

    Args:
        given: the arguments; the plugins of modalities are mappings of theirs.
        colocated: whether encoders share ranks, as in `EncodersColocatedMultimodalParallelPlugin`.

    Raises:
        ConfigError: an argument does not exist, or has a value that a plugin refuses.
    """
    draft = Draft(KNOBS, given)
    convert_precision(draft, "fp32")
    convert_microbatches(draft)
    encoders = draft.get("encoder_plugins", {})
    if not isinstance(encoders, Mapping):
        raise draft.refused("encoder_plugins", "It maps names to plugins", "Write {vision: {tp_size: 1}}")
    if "language" in encoders:
        raise draft.refused("encoder_plugins", "`language` is the language model", "Give that encoder another name")
    plugins = {name: (f"encoder_plugins.{name}", plugin) for name, plugin in encoders.items()}
    if "language_model_plugin" in draft.given:
        plugins["language"] = ("language_model_plugin", draft.get("language_model_plugin", {}))
    switches = {knob.name: draft.given[knob.name] for knob in KERNELS if draft.get(knob.name, False)}
    vocabulary_knobs = [knob.name for knob in VOCABULARY if knob.name in draft.given]
    of_language = {name: draft.given[name] for name in vocabulary_knobs if "language" in plugins}
    modalities: dict[str, Any] = {}
    entries: list[Entry] = []
    for name, (path, plugin) in plugins.items():
        if not isinstance(plugin, Mapping):
            raise ConfigError(path, plugin, "It maps arguments of a ModalParallelPlugin", "Write {tp_size: 1}")
        modal = _modal(name, path, plugin)
        modalities[name] = modal.modality
        of_all = Draft((*KERNELS, *VOCABULARY), switches | (of_language if name == "language" else {}), modality=name)
        of_all.modality = modal.modality
        convert_kernels(of_all)
        convert_vocabulary(of_all)
        entries += [*modal.entries(), *of_all.entries()]
        if colocated and name != "language" and name != next(iter(encoders)):
            modal.modality["colocate_with"] = next(iter(encoders))
    if not modalities:
        raise draft.refused("language_model_plugin", "There is no plugin of a modality", "Write {tp_size: 1}")
    listed = ["encoder_plugins", "language_model_plugin", *switches, *of_language]
    draft.leave_rest(listed, "mapped", "Said for each modality")
    draft.leave_rest(vocabulary_knobs, "always", "There is no plugin of the language model")
    source = (
        "Cornstarch EncodersColocatedMultimodalParallelPlugin" if colocated else "Cornstarch MultimodalParallelPlugin"
    )
    unlisted = tuple(entry for entry in draft.entries() if entry.name not in listed)
    return Conversion(source, {"modalities": modalities, **draft.strategy}, draft.trainer, (*entries, *unlisted))


def convert_colocated(given: Mapping[str, Any]) -> Conversion:
    """Say an `EncodersColocatedMultimodalParallelPlugin` in ours; raise ConfigError like `convert_multimodal`."""
    return convert_multimodal(given, colocated=True)


def convert_modal(given: Mapping[str, Any]) -> Conversion:
    """Say one `ModalParallelPlugin` in ours, as that of a model with one modality."""
    return _modal("model", "", given).conversion("Cornstarch ModalParallelPlugin")


def convert_unlike(given: Mapping[str, Any]) -> Conversion:
    """Say a `HeterogeneousParallelPlugin` in ours; raise ConfigError like `convert_multimodal`."""
    draft = Draft(UNLIKE_KNOBS, given)
    convert_precision(draft)
    _convert_pipelines(draft)
    convert_kernels(draft)
    return draft.conversion("Cornstarch HeterogeneousParallelPlugin")


def _convert_pipelines(draft: Draft) -> None:
    templates = draft.get("pipelines")
    if templates is not None:
        if not isinstance(templates, list) or not templates:
            raise draft.refused("pipelines", "It lists a template for each replica", "Write [{modules_per_stage: ...}]")
        stages = [
            template.get("modules_per_stage") if isinstance(template, Mapping) else template for template in templates
        ]
        if all(_is_one_stage(pipeline) for pipeline in stages):
            draft.put("pipelines", "modality.dp_size", len(stages))
        else:
            layers = [{"stages": _layers(draft, "pipelines", pipeline)} for pipeline in stages]
            draft.put("pipelines", "modality.pipeline.pipelines", layers)
    if "num_microbatches" in draft.given:
        counts = draft.counts("num_microbatches")
        if templates is None or len(counts) != len(templates) or sum(counts) % len(counts) or 0 in counts:
            rule = "It has a number of at least 1 for each of `pipelines`, and their mean is a whole number"
            raise draft.refused("num_microbatches", rule, "Write for instance [8, 6]")
        draft.put("num_microbatches", "strategy.batching.num_microbatches", sum(counts) // len(counts))
        if len(set(counts)) > 1 or "pipeline" in draft.modality:
            draft.put("num_microbatches", "modality.pipeline.speeds", counts)
    if templates is None and draft.get("microbatch_size") is not None:
        draft.put("microbatch_size", "strategy.batching.microbatch_size", draft.count("microbatch_size"))
    draft.leave_rest(["microbatch_size"], "always", "A batch of the dataloader is split into num_microbatches")


def _modal(name: str, path: str, given: Mapping[str, Any]) -> Draft:
    template = given.get("pipeline_template")
    if isinstance(template, list):  # the lists of modules alone
        given = {**given, "pipeline_template": {"modules_per_stage": template}}
    draft = Draft(MODAL_KNOBS, given, prefix=f"{path}." if path else "", modality=name)
    mode_name, size = "sequence_parallelism_mode", draft.count("sp_size")
    mode = draft.choice(mode_name, ("all_to_all", "ring_attn"))
    if size == 1:
        draft.leave_rest([mode_name], "always", "One rank shares no sequence")
    elif mode is None:
        raise draft.refused(mode_name, "The plugin needs it for an sp_size above 1", "Use 'ring_attn' or 'all_to_all'")
    else:
        draft.put("sp_size", "modality.cp_size", size)
        draft.put(mode_name, "modality.context.cp_mode", "ulysses" if mode == "all_to_all" else "allgather")
    distribution = draft.get("context_parallel_distribution_mode")
    if distribution is not None:
        word = str(distribution).rpartition(".")[2].lower()
        draft.put("context_parallel_distribution_mode", "modality.context.cp_distribution", word)
    _convert_template(draft)
    return draft


def _convert_template(draft: Draft) -> None:
    name = "pipeline_template.modules_per_stage"
    stages = draft.get(name)
    if stages is None:
        return
    if _is_one_stage(stages):
        draft.put(name, "modality.pp_size", 1)
        return
    draft.put(name, "modality.pipeline.pipeline_template", {"stages": _layers(draft, name, stages)})


def _is_one_stage(stages: Any) -> bool:
    return isinstance(stages, list) and len(stages) == 1 and (isinstance(stages[0], list) or stages[0] == ALL_MODULES)


def _layers(draft: Draft, name: str, stages: Any) -> list[int]:
    """How many layers each stage has, whose modules are listed by name."""
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, list) for stage in stages):
        raise draft.refused(name, "It lists the names of modules for each stage", "Write [[layers.0], [layers.1]]")
    # as its own get_num_layers_per_stage: a layer's name has a number in it
    counts = [sum(bool(re.search(r"\.\d", str(module))) for module in stage) for stage in stages]
    if 0 in counts:
        rule = f"Stage {counts.index(0)} has modules and no layer, and stages are lists of layers"
        raise draft.refused(name, rule, "Give each stage a layer")
    return counts
