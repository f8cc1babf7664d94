"""Checks of what travels between ranks in fewer bits, and what does not go with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.modality import Modality

KINDS = ("gradients", "parameters", "payloads", "tensor_parallel")
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_OPTION = "stochastic_rounding"

Kind = Literal["gradients", "parameters", "payloads", "tensor_parallel"]


@dataclass(frozen=True)
class Communication:
    """The dtype on the wire for each kind of traffic; None sends tensors as they are.

    Attributes:
        gradients: sums over replicas and shards.
        parameters: the gather of shared parameters.
        payloads: what passes between stages, and its gradients.
        tensor_parallel: sums, gathers and scatters of ranks that share layers.
        stochastic_rounding: whether gradients are rounded up or down at random, by how near either is.
    """

    gradients: str | None = None
    parameters: str | None = None
    payloads: str | None = None
    tensor_parallel: str | None = None
    stochastic_rounding: bool = False

    def of(self, kind: Kind) -> str | None:
        """Return the name of the dtype of one kind of traffic."""
        return getattr(self, kind)


def communication_of(modality: Modality) -> Communication:
    """Return what a modality says, whose `communication_dtype` has passed its check."""
    dtypes: Any = modality.communication.communication_dtype
    if dtypes is None or isinstance(dtypes, str):
        return Communication(**dict.fromkeys(KINDS, dtypes))
    return Communication(**dtypes)


def check(fields: Mapping[str, Any]) -> None:
    """Refuse unknown kinds and dtypes, and what other fields of a modality do not go with, whatever the model.

    Raises:
        ConfigError: at the first field that cannot work.
    """
    for name, modality in (fields.get("modalities") or {}).items():
        field, dtypes = f"modalities.{name}", modality.communication.communication_dtype
        if dtypes is not None:
            _check_dtypes(f"{field}.communication.communication_dtype", dtypes)
            _check_layers(field, modality)


def why_not_side_by_side(modality: Modality) -> tuple[str, str] | None:
    """Return why stages of `modality` cannot compute microbatches side by side, and what they could with."""
    if modality.communication.communication_dtype is None:
        return None
    rule = "communication_dtype messages of another type on the wire are not sent side by side"
    return rule, "leave communication_dtype unset"


def _check_layers(field: str, modality: Modality) -> None:
    dtype, mode = communication_of(modality).of("tensor_parallel"), modality.tensor.tp_mode
    if dtype is not None and modality.tensor.sequence_parallel == "ring":
        rule = f"Rows travel around the ring in the type that layers compute in, not in {dtype}"
        fix = "Name the other kinds of communication_dtype alone, or use sequence_parallel=True"
        raise ConfigError(f"{field}.tensor.sequence_parallel", modality.tensor.sequence_parallel, rule, fix)
    if dtype is not None and mode != "1d" and modality.tp_size * modality.tensor.tp_depth > 1:
        rule = f"Panels of a grid travel in the type that layers compute in, and tp_mode is {mode!r}"
        fix = "Leave out communication_dtype, or use tp_mode='1d'"
        raise ConfigError(f"{field}.communication.communication_dtype", dtype, rule, fix)


def _check_dtypes(field: str, dtypes: object) -> None:
    if not isinstance(dtypes, Mapping):
        _check_dtype(field, dtypes)
        return
    for kind, value in dtypes.items():
        if kind == _OPTION:
            if not isinstance(value, bool):
                raise ConfigError(f"{field}.{kind}", value, "It is true or false", f"Use {bool(value)}")
        elif kind not in KINDS:
            rule = f"Kinds of traffic are {', '.join(KINDS)}; {_OPTION} is an option of gradients"
            raise ConfigError(field, kind, rule, did_you_mean(kind, (*KINDS, _OPTION)))
        elif value is not None:
            _check_dtype(f"{field}.{kind}", value)
    if dtypes.get(_OPTION) and dtypes.get("gradients") in (None, "float32"):
        rule = "Gradients alone are rounded at random, and they travel as they are"
        raise ConfigError(f"{field}.{_OPTION}", True, rule, "Name a dtype for `gradients`, or leave it unset")


def _check_dtype(field: str, value: object) -> None:
    if value not in DTYPES:
        raise ConfigError(field, value, f"Numbers travel as {', '.join(DTYPES)}", did_you_mean(value, DTYPES))
