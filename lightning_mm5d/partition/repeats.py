"""Modalities that run the same modules several times: their parts are the calls, of which each stage runs some.

A stage holds all modules that it calls, so a module may live on several stages, and its gradients are summed. Found are
loops over a range (`lightning_mm5d.source.loops`), with a module of its own or a list of modules that is shorter.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_mm5d.partition.parts import Parts, is_in
from lightning_mm5d.source.loops import looped_calls
from lightning_mm5d.source.trees import Source


def repeated(
    source: Source, root: nn.Module, lists: Sequence[str], wanted: int, within: Sequence[str], without: Sequence[str]
) -> tuple[str, Parts] | None:
    """Return the path of what is called again and again, and its calls as parts; None where a list does.

    Args:
        source: reads the code.
        root: the LightningModule.
        lists: paths of the modality's lists of layers, the longest one first.
        wanted: how many parts there should be.
        within: paths of the modules that belong to the modality.
        without: paths of modules that belong to others.
    """
    count = len(root.get_submodule(lists[0])) if lists else 0  # type: ignore[arg-type]
    best: list[str] = []
    for path, module in root.named_modules():
        mine = any(is_in(path, one) or is_in(one, path) for one in within)
        if not mine or any(is_in(path, one) for one in without) or isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        if count >= wanted and path != lists[0].rpartition(".")[0]:
            continue
        if path and any(is_in(path, one) and path != one for one in lists):
            continue  # inside of a layer
        for calls in looped_calls(source, module):
            full = [f"{path}.{call}".lstrip(".") for call in calls]
            full = [one for one in full if next(root.get_submodule(one).parameters(), None) is not None]
            allowed = all(any(is_in(one, name) for name in within) for one in full)
            if allowed and len(full) > max(len(best), count) and len(set(full)) < len(full):
                best = full
    if len(best) < wanted:
        return None
    holder = best[0].rpartition(".")[0] if best[0].rpartition(".")[2].isdigit() else best[0]
    if not all(is_in(one, holder) for one in best):
        return None
    return holder, Parts(tuple(best))
