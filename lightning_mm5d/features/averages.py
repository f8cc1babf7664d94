"""The copies of the module that callbacks average weights into, on one rank.

`WeightAveraging` and `StochasticWeightAveraging` copy the module in their own setup, before it is cut. Here a copy
becomes what the module is between steps: placeholders for what other ranks hold, shards, and own rows with
``zero_stage=3``. So updates, swaps for a validation and the last copy into the module run on local tensors, by
Lightning's own code. The state dict of a copy is collected as that of the module is.

It refuses averages that are not computed element by element where ranks hold parts of parameters, and copies that were
made before the module was built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_mm5d.checkpoint.module_state import equalize, restore_full
from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.data.random_state import CPU, kept_random_state
from lightning_mm5d.data_parallel.main_parameters import computing_dtypes, widen
from lightning_mm5d.partition.parts import tensors_of
from lightning_mm5d.plan.holdings import DataShards, Holdings
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.sharded.collectives import message_device
from lightning_mm5d.sharded.remote_value import Guard, is_remote, marked
from lightning_mm5d.stage import drop_parameters, is_placeholder
from lightning_mm5d.trainer.feature import Attached, Feature, Running
from lightning_mm5d.trainer.kept_shards import keep_shards, release_shards


class CutAverages(Feature):
    """Cuts the averages of callbacks as the module is cut."""

    def check_callbacks(self, callbacks: Sequence[pl.Callback], plan: Plan) -> None:
        """Refuse averages of an element that depend on others, where ranks hold parts of parameters.

        Raises:
            ConfigError: an averaging function is of that kind.
        """
        of_parts = bool(plan.division.shards) or DataShards(plan).exist
        for callback in callbacks:
            for name, function in _functions(callback).items():
                sees_parts = of_parts or (plan.topology.edges and name == "multi_avg_fn")
                if sees_parts and not _is_elementwise(name, function):
                    raise ConfigError(
                        f"callbacks.{type(callback).__name__}.{name}",
                        getattr(function, "__qualname__", type(function).__name__),
                        "Its average of an element depends on other elements, and ranks hold parts of the parameters",
                        "Average element by element, such as get_ema_avg_fn(decay), or use one stage, tp_size=1 and "
                        "zero_stage=0",
                    )

    def attach(self, running: Running) -> Attached:
        """Cut the copies; collective."""
        return _Averages(running)


class _Averages(Attached):
    """The averages of one run."""

    def __init__(self, running: Running) -> None:
        self._module, self._plan, self._rank = running.module, running.plan, running.rank
        self._buffers, self._wire = running.buffers, message_device(running.device)
        strategy: Any = running.trainer.strategy
        holders = [holder for holder in map(_average, vars(running.trainer)["callbacks"]) if holder is not None]
        self._holders = {str(number): holder for number, holder in enumerate(holders)}
        strategy.copies = self._roots = {name: _root(holder) for name, holder in self._holders.items()}
        for name, holder in self._holders.items():
            root = self._roots[name]
            _check_built(self._module, root)
            if not release_shards(root):
                equalize(root, self._wire)
                self._cut(root)
            vars(holder)["state_dict"] = partial(_state_dict, holder, partial(strategy.state_of_copy, name))
            if isinstance(holder, AveragedModel):
                vars(holder)["update_parameters"] = partial(_update, holder, self._module)

    def leave(self, targets: Sequence[int], *, failed: bool) -> None:
        """Leave the copies as the module is left: full on the ranks `targets`, or as they are; collective."""
        for name, holder in self._holders.items():
            root = self._roots[name]
            vars(holder).pop("update_parameters", None)
            if not targets and not failed:
                keep_shards(root, self._plan)
                continue
            vars(holder).pop("state_dict", None)
            if not failed:
                restore_full(root, self._plan, self._rank, targets, wire=self._wire, buffers=self._buffers)

    def _cut(self, root: nn.Module) -> None:
        """Give a full copy the form that the module has."""
        tensors, mains = dict(tensors_of(self._module)), computing_dtypes(self._module)
        remote = [name for name, tensor in tensors.items() if is_placeholder(tensor)]
        holdings = Holdings(self._plan, self._module)
        device = next((parameter.device for parameter in root.parameters()), torch.device("cpu"))
        drop_parameters(root, remote, device, Guard(self._plan.ownership.holders))
        for name, tensor in tensors_of(root):
            if name in mains and isinstance(tensor, nn.Parameter):
                widen(tensor, tensors[name].dtype)
            if name not in tensors or is_remote(tensor) or is_remote(tensors[name]):
                continue
            if tensor.is_meta:
                _set(root, name, tensors[name].detach().clone())
            elif tensor.shape != tensors[name].shape:
                shape = tensors[name].shape
                tensor.data = holdings.of(name, self._rank, shape).cut(tensor.detach(), tensor.new_empty(shape))


def _functions(callback: pl.Callback) -> dict[str, Callable[..., Any]]:
    if isinstance(callback, StochasticWeightAveraging):
        return {"avg_fn": private(callback, "_avg_fn")}
    if isinstance(callback, WeightAveraging):
        given = private(callback, "_kwargs")
        return {name: given[name] for name in ("avg_fn", "multi_avg_fn") if given.get(name) is not None}
    return {}


def _is_elementwise(name: str, function: Callable[..., Any]) -> bool:
    """Whether a function averages each element by itself, as tried on two small matrices; True if it cannot be."""

    def averaged(averages: list[Tensor], models: list[Tensor]) -> list[Tensor]:
        averages = [average.clone() for average in averages]
        if name == "multi_avg_fn":
            function(averages, models, torch.tensor(2))
            return averages
        return [function(average, model, torch.tensor(2)) for average, model in zip(averages, models, strict=True)]

    generator = torch.Generator().manual_seed(0)
    averages, models = (
        [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2)] for _ in range(2)
    )
    try:
        with kept_random_state(CPU):
            whole = averaged(averages, models)
            for row in range(4):
                part = averaged([averages[1][row : row + 1]], [models[1][row : row + 1]])
                if not torch.allclose(part[0], whole[1][row : row + 1], rtol=1e-9, atol=1e-12):
                    return False
    except Exception:  # a function that wants the real model
        return True
    return True


def _average(callback: pl.Callback) -> nn.Module | None:
    if not isinstance(callback, StochasticWeightAveraging | WeightAveraging):
        return None
    return private(callback, "_average_model")


def _root(holder: nn.Module) -> nn.Module:
    """Return the copy of the LightningModule in an average."""
    return holder.module if isinstance(holder, AveragedModel) else holder


def _check_built(module: nn.Module, root: nn.Module) -> None:
    """Refuse a copy that lacks parameters of the module.

    Raises:
        ConfigError: the module was built after it was copied.
    """
    if [name for name, _ in module.named_parameters()] != [name for name, _ in root.named_parameters()]:
        rule = "It copies the module before configure_model builds it, and would average nothing"
        raise ConfigError("callbacks", "StochasticWeightAveraging", rule, "Use WeightAveraging, or build in __init__")


def _state_dict(
    holder: nn.Module, of_root: Callable[[], Mapping[str, Any]], *arguments: Any, **options: Any
) -> dict[str, Any]:
    if options.get("keep_vars"):
        return type(holder).state_dict(holder, *arguments, **options)
    if not isinstance(holder, AveragedModel):
        return dict(of_root())
    buffers = {name: value.detach() for name, value in holder.named_buffers(recurse=False)}
    return buffers | {f"module.{name}": value for name, value in of_root().items()}


def _update(holder: AveragedModel, module: nn.Module, *arguments: Any, **options: Any) -> None:
    """Update an average, after its buffers know which of the module's have no value on this rank."""
    buffers = dict(module.named_buffers())
    for name, buffer in list(holder.module.named_buffers()):
        value = buffers.get(name)
        if is_remote(value) and not is_remote(buffer):
            _set(holder.module, name, marked(buffer.detach().clone(), value.origin))
    AveragedModel.update_parameters(holder, *arguments, **options)


def _set(root: nn.Module, name: str, value: Tensor) -> None:
    """Give a parameter or buffer of `root` another value."""
    path, _, leaf = name.rpartition(".")
    owner = root.get_submodule(path)
    known = getattr(owner, leaf)
    setattr(owner, leaf, nn.Parameter(value, known.requires_grad) if isinstance(known, nn.Parameter) else value)


FEATURE = CutAverages
