"""Where the language model is cut off from what runs after it.

A modality that feeds from the language model (a speech talker, an image head) runs after it. So the language model has
a boundary as encoders have one: the innermost module that the step calls and that holds its layers, without the other
modality. What the step uses before that call belongs to the language model, what it uses after it to the loss modality.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_mm5d.partition.found import Boundary, Encoder
from lightning_mm5d.partition.step_uses import StepUses

# What runs after the language model; the module's own call is the boundary.
_DECODERS = {"talker": "talker", "image_head": "generation_head"}


def cut_language(
    step: StepUses,
    name: str,
    given: Encoder | None,
    layers: str | None,
    encoders: Mapping[str, Encoder],
    decoders: Mapping[str, tuple[str, ...]],
) -> Encoder:
    """Return the language model as what other modalities feed from.

    Args:
        step: what the step uses.
        name: of the language model's modality.
        given: where the user said that it is cut, if at all.
        layers: path of its list of layers.
        encoders: what was found of the other modalities.
        decoders: those that feed from others, with the names of these.

    Raises:
        ConfigError: the step calls nothing that it could be cut at, or calls a modality before what that feeds from.
    """
    found = given
    if found is None:
        others = [path for one in decoders for path in encoders[one].owns]
        path = step.boundary(f"modalities.{name}.boundary", layers, others)
        found = Encoder((path,), (Boundary(path),))
    paths = {one: encoders[one].boundaries[-1].path for one in decoders} | {name: found.boundaries[-1].path}
    for decoder, sources in decoders.items():
        for source in (one for one in sources if one in paths):
            step.check_order(decoder, paths[decoder], source, paths[source])
    return found


def named_decoders(root: nn.Module) -> dict[str, Encoder]:
    """Return what `root` has under the customary names of modalities that run after the language model."""
    found: dict[str, Encoder] = {}
    for path, module in root.named_modules():
        for name, attribute in _DECODERS.items():
            if isinstance(getattr(module, attribute, None), nn.Module) and name not in found:
                inner = f"{path}.{attribute}" if path else attribute
                found[name] = Encoder((inner,), (Boundary(inner),))
    return found
