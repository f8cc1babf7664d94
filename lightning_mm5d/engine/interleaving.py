"""Decides which microbatches of a stage are computed side by side, and computes them so.

The first ones of each structure run one after another: skip inputs are traced in them, attributes that layers write are
watched, and so are shapes that a stage promises. Ranks that share layers make equal decisions: they see the same
microbatches, and agree on what they have watched. Ranks that share experts see others, and agree each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_mm5d.engine.copies import Copies, Scope
from lightning_mm5d.engine.step import Step
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.stage import Runtime, StageView
from lightning_mm5d.stage.written import written

_OWN = frozenset(vars(nn.Module())) | {"forward"}


class Interleaving:
    """The stages of one rank whose microbatches run side by side.

    Args:
        plan: all stages.
        runtime: the patched module.
        views: this rank's stages.
        device: where this rank computes.
    """

    def __init__(
        self,
        plan: Plan,
        runtime: Runtime,
        views: Mapping[StageKey, StageView],
        device: torch.device,
    ) -> None:
        self._runtime, self._views, self._device = runtime, views, device
        self._ran: set[tuple[StageKey, Hashable]] = set()
        self._known: set[tuple[StageKey, Hashable]] = set()
        self._writes: set[StageKey] = set()
        self._sharing = {
            key: [group for name in view.cuts if on(plan, name) and (group := runtime.sharing(name)) is not None]
            for key, view in views.items()
        }
        self._layers = {
            key: [
                layer
                for name, cut in view.cuts.items()
                if on(plan, name)
                for layer in runtime.lists[name][cut.first : cut.last]
            ]
            for key, view in views.items()
        }
        layers = [layer for held in self._layers.values() for layer in held]
        experts = runtime.experts
        self._tokens = {key: experts.token_groups(key) for key in views if self._layers[key]} if experts else {}
        self._turning = _turning(plan, runtime)
        self._copies = Copies(runtime.scopes, layers, device) if layers else None

    def remove(self) -> None:
        """Take what it put on layers away again."""
        if self._copies is not None:
            self._copies.remove()

    @property
    def thread(self) -> int | None:
        """Identifier of the thread that computes while microbatches run side by side; None while they do not."""
        return None if self._copies is None else self._copies.thread

    def is_on(self, stage: StageKey) -> bool:
        """Whether microbatches of a stage may run side by side."""
        return bool(self._sharing[stage] or self._tokens.get(stage)) and stage not in self._writes

    def applies(self, step: Step, stage: StageKey, batches: Sequence[Any], *, known: bool) -> bool:
        """Whether forwards of microbatches with `batches` run side by side; collective where ranks share experts.

        Args:
            step: that runs.
            stage: of the forwards.
            batches: of the microbatches.
            known: whether it is known of them what their stage promises.
        """
        wish = known and step.random_key is not None and self.is_on(stage)
        wish = wish and all((stage, step.structure(batch)) in self._known for batch in batches)
        if not self._tokens.get(stage):
            return wish
        experts = self._runtime.experts
        assert experts is not None
        return experts.are_apart and experts.agree(stage, wish)  # elsewhere nothing travels in layers

    @contextmanager
    def watching(self, step: Step, stage: StageKey, batch: Any) -> Iterator[None]:
        """Enter around a forward that runs by itself; notes what is written on modules up to the end of its layers.

        It watches the second forward of a structure, because the first one may write what stays, such as a flag that
        hooks are installed. Collective then.
        """
        key = stage, step.structure(batch)
        is_watched = step.trains and self.is_on(stage) and key not in self._known
        if not is_watched or key not in self._ran:
            if is_watched:
                self._ran.add(key)
            yield
            return
        found: set[str] = set()
        handles, before = [], _contents(self._runtime.root)

        def leaves(*_: Any) -> None:  # since the step began: what it writes before its layers, it may read after them
            after = _contents(self._runtime.root)
            found.update(f"{path}.{name}".lstrip(".") for path, name, _ in written(before, after))

        for layer in dict.fromkeys(self._layers[stage]):
            handles.append(layer.register_forward_hook(leaves, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        flag = torch.tensor(float(bool(found)), device=self._device)
        for group in self._sharing[stage]:
            flag = group.max(flag)
        self._known.add(key)
        if flag:
            self._writes.add(stage)
            what = f"write {min(found)!r}" if found else "write attributes on another rank"
            rank_zero_warn(
                f"modalities.{stage.modality}.interleaved_microbatches: microbatches of {stage} run one after another, "
                f"because its layers, or the step before them, {what}, which the other microbatches would read"
            )

    def run(
        self,
        stage: StageKey,
        functions: Sequence[Callable[[], Any]],
        scopes: Sequence[Scope] = (),
        *,
        backward: bool = False,
    ) -> list[Any]:
        """Call functions of a stage side by side; see `Copies.run`."""
        assert self._copies is not None
        tokens = self._tokens.get(stage)
        return self._copies.run(functions, tokens or self._turning, scopes, anywhere=backward or bool(tokens))


def _turning(plan: Plan, runtime: Runtime) -> list[TensorGroup]:
    """Return the groups at whose collectives turns change: in one order on all ranks that share any collective.

    Ranks that share a sequence hold other tokens and may communicate with their tensor parallel ranks unlike numbers of
    times (a loop over the experts that got any). So turns change where all of them communicate.
    """
    tensor = {} if runtime.tensor is None else runtime.tensor.groups
    left_out = {id(tensor[name]) for name, one in plan.modalities.items() if one.cp_size > 1 and name in tensor}
    return [group for group in dict.fromkeys(runtime.groups) if id(group) not in left_out]


def on(plan: Plan, modality: str) -> bool:
    """Whether a modality interleaves microbatches."""
    return plan.modalities[modality].interleaved_microbatches > 1


def _contents(root: nn.Module) -> dict[tuple[str, str], Any]:
    """What all modules hold beside parameters and submodules, so that `written` shows what has changed.

    Metrics are left out: nothing changes turns within their updates, and these add up in any order. So are remote
    values, which stand for what other stages have written, and which nothing may read.
    """
    found = {}
    for path, part in root.named_modules():
        if isinstance(part, (Metric, MetricCollection)):
            continue
        for name, value in vars(part).items():
            one = value[0] if isinstance(value, list) and len(value) == 1 else value
            if name not in _OWN and not is_remote(one):
                found[path, name] = _state(value)
        for name, value in part._buffers.items():
            found[path, name] = _state(value)
    return found


def _state(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return (type(value), *map(_state, value))
    if isinstance(value, dict):
        return (dict, *value, *map(_state, value.values()))
    if isinstance(value, Tensor) and not value.is_inference():
        return value, value._version
    return value
