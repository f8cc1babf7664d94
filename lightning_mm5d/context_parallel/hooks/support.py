"""Finds layers whose sequences cannot be sharded by their code, before a run.

Only the attention may mix tokens, and only through transformers' attention interface or torch's
``scaled_dot_product_attention``, where this library takes its place. What code does not show, the first step does
(probe.py).

It refuses (`ConfigError`) layers whose code mixes tokens otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.source.names import class_names, forward_names
from lightning_mm5d.source.trees import Source

_PRODUCT = "scaled_dot_product_attention"

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_BIASES = ("position_bias", "rel_pos", "relative_position", "alibi")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_MIXERS = (*_CONVOLUTIONS, *_BATCH_NORMS, nn.RNNBase, nn.MultiheadAttention)
_MIXES = ("baddbmm", "conv1d", "causal_conv1d_fn", "cumsum", "multi_head_attention_forward")
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout")


def check_layers(modalities: Mapping[str, Modality], root: nn.Module, layers: Mapping[str, str | None]) -> None:
    """Refuse to share sequences of layers in which tokens mix beside the attention interface.

    Args:
        modalities: the configuration.
        root: the LightningModule; the meta device will do.
        layers: path of each modality's list of layers.

    Raises:
        ConfigError: with the path of the module.
    """
    source = Source()
    for name, modality in modalities.items():
        if modality.cp_size == 1:
            continue
        path = layers.get(name)
        if path is None:
            rule = f"{name!r} has no list of layers, between which its sequences could be sharded"
            raise ConfigError(f"modalities.{name}.cp_size", modality.cp_size, rule, "Use 1")
        if modality.cp_mode == "items":
            continue
        classes = {type(module) for module in root.get_submodule(path).modules()}
        read = {cls: (class_names(source, cls), forward_names(source, cls) or frozenset()) for cls in classes}
        for index, layer in root.get_submodule(path).named_children():
            _check_layer(name, modality, f"{path}.{index}", layer, read)


def _check_layer(
    name: str,
    modality: Modality,
    path: str,
    layer: nn.Module,
    read: Mapping[type[nn.Module], tuple[frozenset[str] | None, frozenset[str]]],
) -> None:
    def refuse(module: str, why: str) -> ConfigError:
        where = f"{path}.{module}" if module else path
        return ConfigError(
            f"modalities.{name}.cp_size",
            modality.cp_size,
            f"{where} ({type(layer.get_submodule(module)).__name__}) {why}",
            "Use cp_size=1; tp_size, pp_size and dp_size have no such limit",
        )

    attends: list[str] = []
    for module, part in layer.named_modules():
        every, _ = read[type(part)]
        if every is None:
            raise refuse(module, "has code without source, which does not tell whether it mixes tokens")
        attends += [module] * bool(every & {_INTERFACE, _PRODUCT})
    for module, part in layer.named_modules():
        _, names = read[type(part)]
        bias = next((found for found in sorted(names) if found.startswith(_BIASES)), None)
        mixes = next((found for found in _MIXES if found in names), None)
        if module in attends and bias is not None:
            raise refuse(module, f"adds a bias by position to its scores ({bias}), which would have to be sharded")
        if module in attends and "arange" in names and _scales_by_position(part):
            how = " (with attn_temperature_tuning; set it to False)" if hasattr(part, "attn_temperature_tuning") else ""
            raise refuse(module, f"counts positions in what it is given, which are some of the tokens{how}")
        if isinstance(part, _MIXERS):
            raise refuse(module, "mixes tokens of which each rank has some")
        if module not in attends and mixes is not None:
            raise refuse(module, f"works on whole sequences ({mixes}), not through an attention that is known")
    if not attends:
        raise refuse("", f"has no attention through transformers' attention interface or torch's {_PRODUCT}")
    for module in attends:
        config = getattr(layer.get_submodule(module), "config", None)
        rates = {field: getattr(config, field, 0.0) for field in _DROPOUTS}
        dropped = next((field for field, rate in rates.items() if isinstance(rate, (int, float)) and rate > 0), None)
        if dropped is not None:
            raise ConfigError(
                f"modalities.{name}.cp_size",
                modality.cp_size,
                f"The config of {path}.{module} drops out attention weights ({dropped}={rates[dropped]}), which lie on "
                "several ranks",
                f"Set {dropped}=0.0 in the model's config, as most recipes do, or use cp_size=1",
            )


def _scales_by_position(module: nn.Module) -> bool:
    """Whether an attention that counts positions by itself uses them; Llama 4's does so without rotary tables."""
    return bool(getattr(module, "attn_temperature_tuning", True)) and not getattr(module, "use_rope", False)


def takes_products(modules: Iterable[nn.Module]) -> bool:
    """Whether code of `modules` calls torch's attention by itself."""
    source = Source()
    found = (class_names(source, cls) or frozenset() for cls in {type(module) for module in modules})
    return any(_PRODUCT in names and _INTERFACE not in names for names in found)
