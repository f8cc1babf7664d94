"""Compiled modules: which of them a run can keep.

A stage swaps what enters its layers, so compilation may not reach over the point where that happens. Layers that are
compiled one by one work over stages, and so does an encoder of one stage that is compiled as a whole. It refuses
everything else that is compiled and holds parameters, where a modality is split. What TorchScript has compiled keeps
its weights and takes no hooks, so that it must lie whole on one rank, inside of an encoder.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from torch import nn
from torch._dynamo import OptimizedModule
from torch.jit import ScriptModule

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.partition.parts import is_in
from lightning_mm5d.partition.split import Partition
from lightning_mm5d.source.order import accesses

IN_PLACE = "_compiled_call_impl"
"""The attribute of a module in which ``module.compile()`` leaves what calls of the module run."""
_DECORATED = "_torchdynamo_orig_callable"


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called."""
    return private(module, IN_PLACE) is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether the module is compiled, by any of torch's three ways: a wrapper, in place, or a decorated method."""
    return isinstance(module, OptimizedModule) or is_compiled_in_place(module) or _decorated(module) is not None


def check_scripted(root: nn.Module, modalities: Mapping[str, Modality], *, has_parts: bool) -> None:
    """Refuse modules of TorchScript of which ranks would hold parts, before anything looks into them.

    Args:
        root: the LightningModule.
        modalities: the configuration.
        has_parts: whether layers, sequences or parameters of any modality are shared out over ranks.

    Raises:
        ConfigError: a modality is such a module, or `has_parts`.
    """
    for path, module in root.named_modules():
        if isinstance(module, ScriptModule) and (
            has_parts or any(modality.module == path for modality in modalities.values())
        ):
            rule = "TorchScript keeps its weights and takes no hooks, so that ranks cannot have parts of it"
            fix = "Use the module that it was made of, or replicas of all modalities without zero_stage"
            raise ConfigError(path, type(module).__name__, rule, fix)


def check_compiled(
    root: nn.Module, partition: Partition, modalities: Mapping[str, Modality], *, is_split: bool
) -> None:
    """Refuse compiled modules that a split cannot keep.

    Args:
        root: the LightningModule.
        partition: what is cut where.
        modalities: the configuration.
        is_split: whether there is more than one stage.

    Raises:
        ConfigError: a compiled module holds more than layers, or layers that are sharded.
    """
    for path, what in compiled_parts(root):
        owners = [stages for full, stages in partition.owners.items() if is_in(full, path)]
        users = {stage.modality: None for stages in owners for stage in stages}
        for name in users:
            for size in ("tp_size", "cp_size"):
                if getattr(modalities[name], size) > 1:
                    rule = f"{size} replaces what layers compute while they run, and {path or 'the module'} is compiled"
                    fix = f"Leave out torch.compile, or set modalities.{name}.{size} to 1"
                    raise ConfigError(path or "model", what, rule, fix)
        if is_split and users and not _may_stay(path, partition):
            paths = next((parts.paths for parts in partition.parts.values() if parts.paths), ("its layers",))
            some = paths[0].replace("._orig_mod", "")
            rule = "The model is split over stages, and what is compiled there is not inside of one layer"
            fix = f"Compile the layers instead, for instance {some!r}, or let every rank hold the full model"
            raise ConfigError(path or "model", what, rule, fix)


def _may_stay(path: str, partition: Partition) -> bool:
    """Whether the module is inside of one layer, or of an encoder that is one stage."""
    if any(is_in(path, part) for parts in partition.parts.values() for part in parts.paths):
        return True
    return any(
        is_in(path, cut.path) and cut.method == "forward" and cut.path != ""
        for name, encoder in partition.encoders.items()
        if len(partition.stages[name]) == 1
        for cut in encoder.boundaries
    )


def compiled_parts(root: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the paths of compiled modules, and how they are compiled."""
    for path, module in root.named_modules():
        method = _decorated(module)
        if isinstance(module, OptimizedModule):
            yield path, "torch.compile(module)"
        elif is_compiled_in_place(module):
            yield path, "module.compile()"
        elif method is not None:
            yield path, f"@torch.compile on {method}"


def _decorated(module: nn.Module) -> str | None:
    """The name of a method that is compiled and uses submodules or parameters."""
    for cls in type(module).__mro__:
        for name, value in vars(cls).items() if not cls.__module__.startswith(("torch.", "lightning.")) else ():
            if hasattr(value, _DECORATED) and accesses(module, name):
                return name
    for name, value in vars(module).items():
        if inspect.isfunction(value) and isinstance(
            getattr(getattr(value, _DECORATED, None), "__self__", None), nn.Module
        ):
            return name
    return None
