"""What a run has to know of the module that it runs, on one rank.

Refuses what arrived in a stage and its step did not use: it would get no gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from torch import Tensor, nn

from lightning_mm5d.context_parallel.hooks.apply import ContextParallel
from lightning_mm5d.data.random_state import StepDraws
from lightning_mm5d.expert_parallel import Experts
from lightning_mm5d.partition import Partition
from lightning_mm5d.sharded.collectives import TensorGroup
from lightning_mm5d.sharded.remote_value import Guard
from lightning_mm5d.sharded.tensor import Group
from lightning_mm5d.stage.deferred import Deferred
from lightning_mm5d.stage.payload import with_sendable_fields
from lightning_mm5d.stage.remote import UserHooks
from lightning_mm5d.stage.taps import Tap, Trace, tap_points, watched_modules
from lightning_mm5d.stage.view import StageError, StageView, StandIn
from lightning_mm5d.tensor_parallel.apply import TensorParallel

Written = tuple[str, str, bool]  # path of the module, name of the attribute, and whether it is a list
SkipInput = tuple[str, int, tuple[str | int, ...]]  # modality, layer, path in (args, kwargs)
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Aside(Protocol):
    """What is put on modules for one run."""

    def lay_aside(self) -> None:
        """Put back what was there while another microbatch is computed."""

    def take_up(self) -> None:
        """Undo `lay_aside`."""


class ActiveRun(Protocol):
    """What patched callables ask of the run that is under way."""

    stage: StageView
    deferred: Deferred | None
    trains: bool
    is_traced: bool
    draws: StepDraws | None

    @property
    def writes(self) -> Aside:
        """What it has put on modules that it must not read."""

    def boundary(self, name: str, modality: str, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Stand in for a call of an encoder's boundary."""

    def turn(self, modality: str, layers: Sequence[int], args: tuple, kwargs: dict[str, Any]) -> int:
        """Return which of `layers`, the calls of one module, is being made."""

    def enters(self, modality: str, layer: int, args: tuple, kwargs: dict[str, Any]) -> Call:
        """Return the arguments of a local layer."""

    def leaves(self, modality: str, layer: int, result: Any) -> Any:
        """Note the result of a local layer, and return it."""

    def inside(
        self, layer: nn.Module, modality: str, index: int, hidden: Callable[[], Any]
    ) -> AbstractContextManager[None]:
        """Enter around the forward of a local layer with what `hidden` returns."""

    def passed(
        self, modality: str, layer: int, result: Any, known: StandIn, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a remote layer, of which `result` stands in for what was not received."""

    def computed(self, path: str, result: Any) -> Any:
        """Return the result of a module beside the layers."""

    def answered(self, names: Collection[str], args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Note that a remote module with parameters `names` gave a placeholder."""

    def skip(self, modality: str, layer: int, args: tuple, kwargs: dict[str, Any]) -> StandIn:
        """Stand in for a remote layer."""


class Runtime:
    """The module of one rank, and what its stages share with other ranks.

    Args:
        root: the LightningModule.
        partition: what is cut where.
        stages: the stages of this rank, with the parameters that each of them holds.
        guard: of the values that other ranks have.
        tensor: the layers that this rank shares with others.
        sharing: the ranks that it shares them with, by modality.
        context: the sequences that this rank shares with others, by modality.

    Attributes:
        active: the run that patched callables obey; None outside of runs.
        experts: that this rank shares; None without any.
        ends: called at the end of each step that a run executes.
        in_lock_step: whether all ranks of a replica run the same code at the moment, with remote modules answered.
        skip_inputs: the inputs of later layers that travel beside the hidden state, by structure of the batch.
        passes: how often a step calls the boundaries of this rank, and passes its layers, by structure of the batch.
        taps: results of this stage and earlier ones that code of later stages uses again, by structure of the batch.
        watched: the modules beside layers whose results may be among these, by path.
        points: for each stage, which modules and parameters it has and later ones have not.
        written: the attributes of modules that a call wrote here, and NaN in the form of those that hold one number, by
            structure of the batch and the boundary or layer.
        groups: all groups of ranks that share layers or sequences with this one.
        lists: the layers of each modality, or the parts that stand for them.
        wanted: for each boundary, the fields of its result that callers read; None for all.
        user_hooks: those inside of each encoder.
        call_buffers: by modality, where a rank runs several stages, the stage in which calls of an encoder write to its
            buffers that are beside no parameter, and these; the rest of a step writes to them in the rank's last stage.
        modality_of: the modality that each boundary belongs to.
        path_of: the path of the module that each boundary belongs to.
        handed: gets ids of the tensors that a training step gives to boundaries which other ranks compute; None unless
            somebody asks.
    """

    def __init__(
        self,
        root: nn.Module,
        partition: Partition,
        stages: Mapping[StageView, frozenset[str]],
        guard: Guard,
        *,
        tensor: TensorParallel | None = None,
        sharing: Mapping[str, TensorGroup] | None = None,
        context: Mapping[str, ContextParallel] | None = None,
    ) -> None:
        self.active: ActiveRun | None = None
        self.experts: Experts | None = None
        self.ends: list[Callable[[], None]] = []
        self.in_lock_step = False
        self.guard = guard
        self.skip_inputs: dict[Any, frozenset[SkipInput]] = {}
        self.passes: dict[Any, Counter[str]] = {}
        self.taps: dict[Any, frozenset[Tap]] = {}
        self.watched = watched_modules(root, partition)
        self.points = {
            stage: tap_points(root, partition, [cut.name for cut in stage.cuts.values()], self.watched)
            for stage in stages
        }
        self.written: dict[Any, list[tuple[Written, Tensor | None]]] = {}
        self.loss_modality = partition.loss_modality
        self.root, self.partition, self.stages, self.tensor = root, partition, stages, tensor
        self._sharing, self._context = sharing or {}, context or {}
        self.groups = [*self._sharing.values(), *(group for cp in self._context.values() for group in cp.groups)]
        if tensor is not None:
            self.groups += [*tensor.groups.values(), *tensor.lines]
        self.modality_of = {
            cut.name: name for name, encoder in partition.encoders.items() for cut in encoder.boundaries
        }
        self.path_of = {cut.name: cut.path for encoder in partition.encoders.values() for cut in encoder.boundaries}
        self.wanted: dict[str, frozenset[str] | None] = {}
        self.user_hooks: dict[str, UserHooks] = {}
        self.call_buffers: dict[str, tuple[Any, list[tuple[nn.Module, str]]]] = {}
        self.handed: set[int] | None = None
        self.lists: dict[str, list[nn.Module]] = {
            name: [root.get_submodule(path) for path in parts.paths] for name, parts in partition.parts.items()
        }

    @property
    def scopes(self) -> list[Any]:
        """What is of one microbatch at a time."""
        scopes: list[Any] = [] if self.tensor is None else [*self.tensor.scopes]
        scopes += [] if self.experts is None else [self.experts]
        return [self, *scopes, *(scope for cp in self._context.values() for scope in cp.scopes)]

    def take(self) -> Any:
        """Return what belongs to the microbatch that is computed."""
        if self.active is not None:
            self.active.writes.lay_aside()
        return self.active, self.guard.ends_here, self.guard.received

    def put(self, state: Any) -> None:
        """Go on with the microbatch that `take` returned `state` of."""
        self.active, self.guard.ends_here, self.guard.received = state
        if self.active is not None:
            self.active.writes.take_up()

    def trace(self, stage: StageView) -> Trace:
        """Return what finds the values that travel from `stage` to later ones."""
        points, parameters = self.points[stage], dict(self.root.named_parameters(remove_duplicate=False))
        taps: dict[int, Tap] = {}
        for name, parameter in parameters.items():
            if name in points.parameters:
                taps.setdefault(id(parameter), ("parameter", name, -1, 0, None))
        return Trace(taps, {id(parameters[name]) for name in points.later})

    def has_parts(self, modality: str) -> bool:
        """Whether this rank has a part of each sequence of a modality."""
        return modality in self._context

    def sharing(self, modality: str) -> TensorGroup | None:
        """Return the ranks that share a modality's layers with this one."""
        return self._sharing.get(modality)

    def holders(self, modality: str, description: Any) -> Group:
        """Return the group that holds a sharded tensor of a modality, from a peer's description of it."""
        if description is not None:
            return self._context[modality].sequence(description)
        assert self.tensor is not None
        return self.tensor.groups[modality]

    def replaying(self) -> AbstractContextManager[Any]:
        """Enter around a backward, in which layers may be computed again."""
        stack = ExitStack()
        for shared in self._context.values():
            stack.enter_context(shared.replaying())
        return stack

    def read_fields(self, path: str, result: Any) -> Any:
        """Return the result of a call without what cannot be sent; of a boundary also without what no caller reads."""
        fields = self.wanted.get(path)
        if not isinstance(result, Mapping):
            return result
        if fields is not None and fields.issubset(result):
            result = type(result)(**{name: value for name, value in result.items() if name in fields})
        return with_sendable_fields(path, result)


def check_used(
    stage: StageView,
    runtime: Runtime,
    boundaries: Mapping[str, Sequence[Any]],
    consumed: Mapping[str, int],
    calls: Mapping[str, Sequence[Any]],
    entered: Mapping[str, int],
) -> None:
    """Refuse results of an encoder in its last consumer, and hidden states, that a step left unused.

    Args:
        stage: that ran.
        runtime: the patched module.
        boundaries: the results that arrived, by boundary.
        consumed: how many of them were used.
        calls: the hidden states that arrived, by modality.
        entered: how many of them a layer was entered with.

    Raises:
        StageError: something was left.
    """
    for name, results in boundaries.items():
        used, modality = consumed.get(name, 0), runtime.modality_of[name]
        if modality in stage.must_use and used < len(results):
            raise StageError(
                f"{len(results)} results of {name} arrived in stage {stage.name}, and the step used {used} of "
                f"them there: set modalities.{modality}.feeds to the stages whose layers follow its use, or "
                f"modalities.{modality}.boundary to the callable whose result the step uses"
            )
    for modality, arrived in calls.items():
        if entered.get(modality, 0) < len(arrived):
            raise StageError(
                f"{len(arrived)} hidden states arrived in stage {stage.name}, and the step entered its first "
                f"layer {entered.get(modality, 0)} times: a layer that a stage begins with must run in every "
                f"step. Choose another cut with modalities.{modality}.pipeline.pipeline_template, or set pp_size to 1"
            )
