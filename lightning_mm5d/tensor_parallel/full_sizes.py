"""Tells what is behind an error of torch about sizes in a module whose linear layers tensor parallel ranks share.

Its code computes on a rank's part of their outputs. Where it writes the full width or number of heads into a view
(``x.reshape(batch, length, width)``), torch says that the numbers do not fit, and not why. Nor does it say why there is
no gradient of a gradient.
"""

from __future__ import annotations

import re

from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.tensor_parallel.resolve import Division

_ABOUT_SIZES = re.compile(
    "invalid for input of size|must match the size|cannot be multiplied|same number of dimensions|don't multiply|"
    "must match the existing size|Sizes of tensors must match|Given normalized_shape|cannot be broadcast"
)


def explained(error: RuntimeError, root: nn.Module, division: Division) -> ConfigError | None:
    """Return the error for a module whose code takes full sizes, None where `error` is about something else.

    Args:
        error: that a step has raised.
        root: the LightningModule.
        division: what ranks share of it.
    """
    if type(error) is RuntimeError and "@once_differentiable" in str(error):
        rule = "It goes back through layers that ranks share, whose backward has no gradient of its own"
        fix = "Set tp_size and cp_size to 1, or leave out create_graph"
        return ConfigError("training_step", "a gradient of a gradient (create_graph=True)", rule, fix)
    if type(error) is not RuntimeError or not _ABOUT_SIZES.search(str(error)):
        return None
    shared: dict[int, tuple[str, list[str]]] = {}
    for path, kind in division.roles.items():
        if kind == "column":
            owner, _, name = path.rpartition(".")
            shared.setdefault(id(root.get_submodule(owner)), (owner, []))[1].append(name)
    found, traceback = None, error.__traceback__
    while traceback is not None:  # the innermost one comes last
        found = shared.get(id(traceback.tb_frame.f_locals.get("self")), found)
        traceback = traceback.tb_next
    if found is None:
        return None
    owner, names = found
    modality = division.groups[f"{owner}.{names[0]}" if owner else names[0]]
    return ConfigError(
        owner or "self",
        str(error),
        f"Tensor parallel ranks share the outputs of {', '.join(names)}, so that sizes in its code are those of a rank",
        "Take sizes from tensors, as view(batch, length, -1) does, name the attributes with numbers of heads or widths "
        f"as `heads` or `local` of its TensorParallelPlan, or set modalities.{modality}.tp_size to 1",
    )
