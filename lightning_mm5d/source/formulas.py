"""Which modules compute a known formula, by their code: RMS norms as Llama's, gated units as Llama's.

A class is known by the text of its ``forward`` alone, whatever its name, so that a norm that differs in one operation
(Gemma's, which adds 1 to its weight, say) is not taken for one.
"""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

from torch import nn

from lightning_mm5d.source.trees import Source, method_of

_RMS_NORM = r"""(?P<dtype>\w+) = (?P<x>\w+)\.dtype
(?P=x) = (?P=x)\.to\(torch\.float32\)
(?P<variance>\w+) = (?P=x)\.pow\(2\)\.mean\(-1, keepdim=True\)
(?P=x) = (?P=x) \* torch\.rsqrt\((?P=variance) \+ self\.(?P<eps>\w+)\)
return self\.weight \* (?P=x)\.to\((?P=dtype)\)"""
_GATED = r"self\.down_proj\(self\.act_fn\(self\.gate_proj\((?P<x>\w+)\)\) \* self\.up_proj\((?P=x)\)\)"
_GATED_UNIT = rf"return {_GATED}|(?P<y>\w+) = {_GATED.replace('P<x>', 'P<z>').replace('P=x', 'P=z')}\nreturn (?P=y)"


class RMSNorm(NamedTuple):
    """The norm ``weight * (x / sqrt(mean(x * x) + eps)).to(x.dtype)``, whose inner part is computed in float32.

    Attributes:
        eps: name of the attribute that is added under the root.
    """

    eps: str


def rms_norm(source: Source, cls: type[nn.Module]) -> RMSNorm | None:
    """Return how a class computes Llama's RMS norm, None where it computes anything else."""
    found = _matched(source, cls, _RMS_NORM)
    return None if found is None else RMSNorm(found["eps"])


def is_gated_unit(source: Source, cls: type[nn.Module]) -> bool:
    """Whether a class computes ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``."""
    return _matched(source, cls, _GATED_UNIT) is not None


def _matched(source: Source, cls: type[nn.Module], pattern: str) -> re.Match[str] | None:
    function = method_of(cls, "forward")
    tree = None if function is None else source.tree(function)
    if tree is None or len(tree.args.args) != 2 or tree.args.vararg or tree.args.kwarg or tree.args.kwonlyargs:
        return None
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    found = re.fullmatch(pattern, "\n".join(map(ast.unparse, body)))
    return found if found and tree.args.args[1].arg in found.groupdict().values() else None
