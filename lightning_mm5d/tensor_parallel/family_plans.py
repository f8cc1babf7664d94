"""How one class of modules is sharded, as a user, a table or a rule says it: plain data, without torch.

A plan speaks of the modules inside one module (an attention, a multilayer MLP), by paths relative to it. The
scheme is that of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): *column* projections compute some of their
outputs on each rank, what follows works on these, and *row* projections compute a partial sum of their output, which
the ranks add up. `resolve` checks a plan against its modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from lightning_mm5d.config.features import parts

Part = Literal["heads", "key_value_heads", "groups", "width"]


@dataclass(frozen=True, kw_only=True)
class TensorParallelPlan:
    """How a module is sharded over tensor parallel ranks. All paths are relative to that module.

    Args:
        column: linear layers whose outputs are sharded, each with what its outputs are made of, one after the other:
            ``"heads"`` (query heads), ``"key_value_heads"``, ``"groups"`` (for each key and value head its query heads
            and then its key and its value, as one unit) or ``"width"`` (anything that may be sharded anywhere).
            ``("heads", "heads", "heads")`` is a fused projection of all queries, then keys, then values; ``("width",
            "width")`` a fused gate and up projection. A part is as wide as its number of units times a width that
            follows from the size of the layer.
        row: linear layers whose inputs are sharded, by the parts of their inputs; their outputs are summed.
        experts: modules that hold experts as tensors ``[experts, out, in]``: their inputs are copied to the ranks and
            their output is summed, and `parameters` says what is sharded in them.
        heads: path of the attribute with the number of query heads, or the number; needed where a part counts heads.
        key_value_heads: the same for key and value heads. Unset: as many as query heads.
        local: paths of attributes that hold numbers of heads or widths and must hold this rank's on each rank, with
            the part that they count, or ``"group_size"`` for the query heads of one key and value head; the attributes
            of `heads` and `key_value_heads` are among them without being named. A path through something that is no
            module, such as ``"config.num_attention_heads"``, is set on a copy of it that this module alone sees.
        whole_width: whether the module divides the width of its input, which is full, by the attribute `heads` to get
            the width of a head: ``width // heads`` must be the same with this rank's number as with that of all.
        parameters: parameters and buffers beside the linear layers' that are sharded: path to ``(dim, part, ...)``.
        shared: paths of parameters, or of modules with parameters, that are full on every rank but work on sharded
            values, such as norms of single heads; their gradients are summed.
        arguments: arguments of the module that have an entry for each head: name to the dim of the heads; where heads
            and samples are one dim, heads running fastest, its negative minus 1 (``-1`` is dim 0).
        results: positions in the result of the module (a tuple) with an entry for each head, to the dim of the heads.
            Unset: dim 1 of position 1, where Hugging Face's attentions return their weights.
    """

    column: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    row: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    heads: str | int | None = None
    key_value_heads: str | int | None = None
    local: Mapping[str, Part | Literal["group_size"]] = field(default_factory=dict)
    whole_width: bool = False
    parameters: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    arguments: Mapping[str, int] = field(default_factory=dict)
    results: Mapping[int, int] = field(default_factory=dict)


# linear layers with a forward of their own, which computes what that of nn.Linear does
PLAIN_LINEARS = frozenset({"FalconLinear"})

_HOMES = ("transformers.", "transformers_modules.", "torch.nn.modules.")
Entry = TensorParallelPlan | Callable[[Any], TensorParallelPlan | None]
Families = Mapping[str, Entry]


def known_families() -> Families:
    """Return the plans of families that features know, by the name of a class."""
    return {name: entry for known in parts("sharding_plans") for name, entry in known.FAMILIES.items()}


def family_plan(module: nn.Module, families: Families) -> TensorParallelPlan | None:
    """Return the plan of a table for a module, relative to it, None where there is none or it does not fit.

    A class counts with all that derive from it, if it and its forward come from transformers or from the code that
    a model on the Hub brings along. What an instance lacks (a table that only the first layer has, an attribute of
    another version) is left out.
    """
    if not f"{getattr(type(module).forward, '__module__', '')}.".startswith(_HOMES):
        return None  # somebody's own forward, which may read anything
    for cls in type(module).__mro__:
        if cls.__name__ not in families or not f"{cls.__module__}.".startswith(_HOMES):
            continue
        entry = families[cls.__name__]
        plan = entry if isinstance(entry, TensorParallelPlan) else entry(module)
        if plan is None or not all(_has(module, path) for path in (*plan.column, *plan.row)):
            return None
        return replace(
            plan,
            local={path: part for path, part in plan.local.items() if _has(module, path)},
            parameters={path: parts for path, parts in plan.parameters.items() if _has(module, path)},
            shared=tuple(path for path in plan.shared if _has(module, path)),
        )
    return None


def _has(module: Any, path: str) -> bool:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module is not None
