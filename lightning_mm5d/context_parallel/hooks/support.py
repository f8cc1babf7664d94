"""Finds the modules of layers that mix tokens in a way of their own, by their code, before a run.

An attention that goes through transformers' attention interface, or through torch's ``scaled_dot_product_attention``,
is replaced by one of this library that knows the tokens of other ranks. Other modules that mix tokens run on whole
sequences (whole_modules.py). What code does not show, the first step does (layer_ways.py).

It refuses (`ConfigError`) attention weights that are dropped out while they lie on several ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.source.names import class_names, forward_names

_PRODUCT = "scaled_dot_product_attention"

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_KNOWN = {_INTERFACE, _PRODUCT}
_NONE: frozenset[str] = frozenset()
_BIASES = ("position_bias", "rel_pos", "relative_position", "alibi")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_OF_TORCH = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_MIXERS = (*_CONVOLUTIONS, *BATCH_NORMS, *_OF_TORCH, nn.RNNBase, nn.MultiheadAttention)
_MIXES = ("baddbmm", "conv1d", "causal_conv1d_fn", "cumsum", "multi_head_attention_forward")
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout")


class Mixers(NamedTuple):
    """The modules of one layer that mix tokens, by their path in it.

    Attributes:
        whole: those that run on whole sequences, and why; the layer itself is "".
        attends: those whose attention is replaced.
        likely: those that may mix tokens, where running the layer shows that something does.
    """

    whole: dict[str, str]
    attends: list[str]
    likely: list[str]


def check_layers(modalities: Mapping[str, Modality], root: nn.Module, layers: Mapping[str, str | None]) -> None:
    """Refuse modalities whose sequences cannot be shared.

    Args:
        modalities: the configuration.
        root: the LightningModule; the meta device will do.
        layers: path of each modality's list of layers.

    Raises:
        ConfigError: with the path of the module.
    """
    read = Reader()
    for name, modality in modalities.items():
        if modality.cp_size == 1:
            continue
        path = layers.get(name)
        if path is None:
            rule = f"{name!r} has no list of layers, between which its sequences could be sharded"
            raise ConfigError(f"modalities.{name}.cp_size", modality.cp_size, rule, "Use 1")
        if modality.context.cp_mode == "items":
            continue
        for index, layer in root.get_submodule(path).named_children():
            _check_dropout(name, modality, f"{path}.{index}", layer, read.mixers(layer))


class Reader:
    """Reads the code of layers."""

    def __init__(self) -> None:
        self._read: dict[type[nn.Module], tuple[frozenset[str] | None, frozenset[str]]] = {}

    def mixers(self, layer: nn.Module) -> Mixers:
        """Return the modules of a layer that mix tokens, as far as code shows; none inside of one that is whole."""
        attends = [path for path, part in layer.named_modules() if (self._every(part) or _NONE) & _KNOWN]
        found = {path: self._why(part, path in attends) for path, part in layer.named_modules()}
        whole = _outermost({path: why for path, why in found.items() if why is not None})
        if not attends and not whole:
            products = [path for path, part in layer.named_modules() if self._multiplies(part)]
            whole = _outermost(dict.fromkeys(products, "multiplies queries and keys by itself"))
        if not attends and not whole:
            whole = {"": "has no attention that is known"}
        attends = [path for path in attends if not any(_is_in(path, one) for one in whole)]
        likely = [path for path, part in layer.named_modules() if path in attends or self._multiplies(part)]
        return Mixers(whole, attends, likely)

    def _why(self, part: nn.Module, attends: bool) -> str | None:
        """Why a module runs on whole sequences, if it does."""
        names = self._of(type(part))[1]
        bias = next((found for found in sorted(names) if found.startswith(_BIASES)), None)
        mixes = next((found for found in _MIXES if found in names), None)
        if self._every(part) is None:
            return "has code without source"
        if attends and bias is not None:
            return f"adds a bias by position to its scores ({bias})"
        if attends and "arange" in names and _scales_by_position(part):
            return "counts positions in what it is given"
        if isinstance(part, _MIXERS):
            return "mixes tokens"
        return f"works on whole sequences ({mixes})" if not attends and mixes is not None else None

    def _multiplies(self, part: nn.Module) -> bool:
        every = self._every(part) or _NONE
        return "softmax" in every and not every.isdisjoint(_PRODUCTS)

    def _every(self, part: nn.Module) -> frozenset[str] | None:
        return self._of(type(part))[0]

    def _of(self, cls: type[nn.Module]) -> tuple[frozenset[str] | None, frozenset[str]]:
        if cls not in self._read:
            self._read[cls] = class_names(cls), forward_names(cls) or _NONE
        return self._read[cls]


def _outermost(found: dict[str, str]) -> dict[str, str]:
    return {path: why for path, why in found.items() if not any(one != path and _is_in(path, one) for one in found)}


def _is_in(path: str, other: str) -> bool:
    """Whether the module at `path` is the one at `other` or inside of it."""
    return path == other or not other or path.startswith(f"{other}.")


def _check_dropout(name: str, modality: Modality, path: str, layer: nn.Module, mixers: Mixers) -> None:
    for module in mixers.attends:
        config = getattr(layer.get_submodule(module), "config", None)
        rates = {field: getattr(config, field, 0.0) for field in _DROPOUTS}
        dropped = next((field for field, rate in rates.items() if isinstance(rate, (int, float)) and rate > 0), None)
        if dropped is not None:
            rule = (
                f"The config of {path}.{module} drops out attention weights ({dropped}={rates[dropped]}), which lie on "
                "several ranks"
            )
            fix = f"Set {dropped}=0.0 in the model's config, as most recipes do, or use cp_size=1"
            raise ConfigError(f"modalities.{name}.cp_size", modality.cp_size, rule, fix)


def _scales_by_position(module: nn.Module) -> bool:
    """Whether an attention that counts positions by itself uses them; Llama 4's does so without rotary tables."""
    return bool(getattr(module, "attn_temperature_tuning", True)) and not getattr(module, "use_rope", False)


def takes_products(modules: Iterable[nn.Module]) -> bool:
    """Whether code of `modules` calls torch's attention by itself."""
    found = (class_names(cls) or frozenset() for cls in {type(module) for module in modules})
    return any(_PRODUCT in names and _INTERFACE not in names for names in found)
