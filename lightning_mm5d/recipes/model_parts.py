"""The parts of a multimodal model by name: each encoder, its projector, and the language model.

A recipe says by these names what trains and at which learning rate. The parts of a `MultimodalModel` are its own; those
of a Hugging Face model are found as the strategy finds modalities.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.partition.find import discover

LANGUAGE = "language"
PROJECTOR = "_projector"


def part_names(model: nn.Module) -> dict[str, str]:
    """Return for each parameter of `model` the name of its part.

    ``{"encoders.vision.model.conv.weight": "vision", "encoders.vision.projector.fc1.weight": "vision_projector",
    "language_model.lm_head.weight": "language"}``. Adapters of PEFT belong to the part that they adapt.
    """
    owners: dict[str, str] = {}
    for name, encoder in discover(model).items():
        for path in encoder.owns:
            owners |= _halves(model, path, name)
    found = {}
    for parameter, _ in model.named_parameters():
        under = [path for path in owners if parameter == path or parameter.startswith(f"{path}.")]
        found[parameter] = owners[max(under, key=len)] if under else LANGUAGE
    return found


def _halves(model: nn.Module, path: str, name: str) -> dict[str, str]:
    """The paths of an encoder's tower and projector below `path`, which may be one of the two or hold both."""
    held = path.rpartition(".")[2]
    if "projector" in held or "connector" in held or held.startswith("embed_"):
        return {path: name + PROJECTOR}
    module = _module(model, path)
    inner = () if module is None else module.named_children()
    projectors = {
        f"{path}.{child}": name + PROJECTOR for child, _ in inner if "projector" in child or child == "merger"
    }
    return {path: name, **projectors}


def _module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:  # a parameter
        return None


def check_names(field: str, given: Mapping[str, object], names: Mapping[str, str]) -> None:
    """Refuse a name in `given` that is no part of the model.

    Args:
        field: path of the field, for the error.
        given: by name of the part.
        names: as `part_names` returns them.

    Raises:
        ConfigError: a part does not exist.
    """
    known = sorted(set(names.values()))
    for name in given:
        if name not in known:
            rule = f"The model has the parts {', '.join(known)}"
            raise ConfigError(f"{field}.{name}", given[name], rule, did_you_mean(name, known))
