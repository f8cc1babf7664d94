"""Decides which microbatches of a stage are computed side by side, and computes them so.

The first ones of each structure run one after another: skip inputs are traced in them, attributes that layers write are
watched, and so are shapes that a stage promises. Ranks that share layers make equal decisions: they see the same
microbatches, and agree on what they have watched. Ranks that share experts see others, and agree each time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.engine.step import Scope, Step
from lightning_mm5d.features.interleaving.copies import Copies
from lightning_mm5d.features.interleaving.fields import check_beside
from lightning_mm5d.partition.parts import holds_metrics
from lightning_mm5d.plan.plan import Plan
from lightning_mm5d.schedule import is_table
from lightning_mm5d.schedule.stage_key import StageKey
from lightning_mm5d.sharded.collectives import TensorGroup, warn_on_first_rank
from lightning_mm5d.sharded.remote_value import is_remote
from lightning_mm5d.stage import Runtime
from lightning_mm5d.stage.written import written
from lightning_mm5d.trainer.feature import Attached, Feature, Running

_OWN = frozenset(vars(nn.Module())) | {"forward"}


class InterleavedMicrobatches(Feature):
    """The field `Modality.pipeline.interleaved_microbatches`."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._schedule = fields["schedule"]

    def check(self, module: pl.LightningModule, plan: Plan, device: torch.device) -> None:
        """Refuse microbatches side by side where a schedule of one's own, or several replicas, order them.

        It also refuses stages that hold what they cannot wait for in turns.
        """
        for name, modality in plan.modalities.items():
            field, count = (
                f"modalities.{name}.pipeline.interleaved_microbatches",
                modality.pipeline.interleaved_microbatches,
            )
            if count == 1:
                continue
            if callable(self._schedule) or is_table(self._schedule):
                rule = "A schedule of your own orders single microbatches"
                raise ConfigError(field, count, rule, "Use a named schedule, or leave it unset")
            for other, axes in plan.layout.axes.items():
                if axes.dp > plan.layout.num_replicas:
                    rule = f"{other!r} has {axes.dp} replicas that take turns with the microbatches of one"
                    raise ConfigError(field, count, rule, f"Use dp_size={plan.layout.num_replicas} for {other!r}")
            beside = set[str]()  # what runs in its stages
            for members in plan.topology.members.values():
                held = {one.modality for one in members}
                beside |= held if name in held else set()
            for other in sorted(beside):
                check_beside(name, other, plan.modalities)
            for layer in plan.experts.values():
                paths = plan.partition.parts[layer.modality].paths
                if layer.modality in beside and not any(layer.path.startswith(f"{path}.") for path in paths):
                    rule = f"Microbatches take turns inside of layers, and the experts {layer.path!r} are in none"
                    raise ConfigError(field, count, rule, "Leave it unset here, or use ep_size=1")

    def attach(self, running: Running) -> Attached | None:
        """Compute microbatches of stages side by side."""
        if not any(on(running.plan, name) for name in running.plan.modalities):
            return None
        running.engine.beside = beside = Interleaving(running.plan, running.runtime, running.device)
        return beside


class Interleaving(Attached):
    """The stages of one rank whose microbatches run side by side.

    Args:
        plan: all stages.
        runtime: the patched module.
        device: where this rank computes.
    """

    def __init__(self, plan: Plan, runtime: Runtime, device: torch.device) -> None:
        views = {view.name: view for view in runtime.stages}
        self._runtime, self._device = runtime, device
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
        before = _contents(self._runtime.root)

        def leaves(*_: Any) -> None:  # since the step began: what it writes before its layers, it may read after them
            after = _contents(self._runtime.root)
            found.update(f"{path}.{name}".lstrip(".") for path, name, _ in written(before, after))

        with ExitStack() as stack:
            for layer in dict.fromkeys(self._layers[stage]):
                stack.callback(layer.register_forward_hook(leaves, always_call=True).remove)
            yield
        flag = torch.tensor(float(bool(found)), device=self._device)
        for group in self._sharing[stage]:
            flag = group.max(flag)
        self._known.add(key)
        if flag:
            self._writes.add(stage)
            what = f"write {min(found)!r}" if found else "write attributes on another rank"
            warn_on_first_rank(
                f"modalities.{stage.modality}.pipeline.interleaved_microbatches: microbatches of {stage} run one after "
                f"another, because its layers, or the step before them, {what}, which the other microbatches would read"
            )

    def run(self, stage: StageKey, functions: Sequence[Any], scopes: Sequence[Scope], *, backward: bool) -> list[Any]:
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
    return plan.modalities[modality].pipeline.interleaved_microbatches > 1


def _contents(root: nn.Module) -> dict[tuple[str, str], Any]:
    """What all modules hold beside parameters and submodules, so that `written` shows what has changed.

    Metrics are left out: nothing changes turns within their updates, and these add up in any order. So are remote
    values, which stand for what other stages have written, and which nothing may read.
    """
    found = {}
    for path, part in root.named_modules():
        if holds_metrics(part):
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


FEATURE = InterleavedMicrobatches
