"""The user's step as the engine runs it: once for each stage and microbatch of this rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.data.microbatch import Microbatch, copied
from lightning_mm5d.engine.copies import Scope
from lightning_mm5d.sharded.remote_value import is_remote, settled
from lightning_mm5d.stage.payload import Packer, map_tensors, unsharded
from lightning_mm5d.trainer.logs import LogCapture
from lightning_mm5d.trainer.metrics import MetricSync
from lightning_mm5d.trainer.row_indices import RowIndices
from lightning_mm5d.trainer.step_result import Weights

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

Context = Callable[[], AbstractContextManager[Any]]


class UserStep:
    """A `Step` that evaluates: ``validation_step``, ``test_step`` or ``predict_step``.

    Args:
        module: the user's module.
        name: of its method.
        arguments: of the method, after the batch.
        microbatches: by replica that this rank serves.
        weights: of this replica's microbatches.
        context: precision of the forward.
        capture: records what the step logs.
        metrics: the module's metrics.
        random_key: what random state depends on; None leaves generators alone.
        watches: whether it refuses fields that hold positions of samples, see `RowIndices`.

    Attributes:
        epoch: of the run.
        results: of the last stage, by index of the microbatch.
        scopes: what belongs to one microbatch at a time.
    """

    trains = False
    fails = False

    def __init__(
        self,
        module: LightningModule,
        name: str,
        arguments: Sequence[Any],
        microbatches: Mapping[int, list[Microbatch]],
        weights: Weights,
        *,
        context: Context,
        capture: LogCapture,
        metrics: MetricSync,
        random_key: tuple[int, ...] | None,
        watches: bool = False,
    ) -> None:
        self.microbatches, self.random_key, self.context = microbatches, random_key, context
        self.weights, self.results, self.epoch = weights, dict[int, Any](), module.current_epoch
        self._module, self._name, self._arguments = module, name, arguments
        self._capture, self._metrics, self._watches = capture, metrics, watches
        self._unchanged: dict[int, Any] = {}
        self.scopes: Sequence[Scope] = [capture]

    def structure(self, batch: Any) -> Hashable:
        """Return a key that is equal for batches of equal nesting, dtypes and numbers of dims, whatever their sizes."""
        key: Hashable = (self._name, self._module.training, _structure(batch))
        return key

    @contextmanager
    def reads(self) -> Iterator[list[str]]:
        """Enter around `run`; gives a list, empty unless the user's step reads `global_step`."""
        found: list[str] = []
        original = Trainer.global_step

        def read(trainer: Trainer) -> int:
            found.append("global_step")
            return original.__get__(trainer)

        Trainer.global_step = property(read)  # type: ignore[method-assign,assignment]
        try:
            yield found
        finally:
            Trainer.global_step = original  # type: ignore[method-assign]

    def run(self, microbatch: Microbatch, index: int) -> Any:
        """Call the user's method; return its result, with full tensors in place of sharded ones.

        Raises:
            RemoteParameterError: in the last stage, the result depends on values that only other ranks have.
        """
        own = self.weights.own
        weight = own[index] if index < len(own) else microbatch.samples  # of another replica
        self._capture.begin_microbatch(index, weight)
        try:
            with RowIndices(self._module, microbatch) if self._watches else nullcontext():
                result = unsharded(getattr(self._module, self._name)(self._batch(microbatch), *self._arguments))
        except StopIteration as error:  # Lightning would take it for the end of the data, on this rank only
            raise RuntimeError(f"{self._name} raised StopIteration") from error
        return _settled(result, f"what {self._name} returns")

    def _batch(self, microbatch: Microbatch) -> Any:
        """The batch of a microbatch as it was before an earlier stage of this rank took something out of it."""
        if id(microbatch) not in self._unchanged:
            self._unchanged[id(microbatch)] = copied(microbatch.batch)
            return microbatch.batch
        return copied(self._unchanged[id(microbatch)])

    def finish(self, result: Any, index: int) -> Tensor | None:
        """Keep `result`."""
        self.results[index] = detached(result)
        return None

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Enter around a run whose metric updates and logs are dropped."""
        with self._metrics.discarded(), self._capture.discarded():
            yield


class TrainingStep(UserStep):
    """A `Step` that runs ``training_step``.

    Args:
        scale: multiplies a loss as the precision plugin does before backward.
        args: as for `UserStep`.
        kwargs: as for `UserStep`.

    Attributes:
        losses: of the last stage, by index of the microbatch, without a graph.
        has_graph: whether any of them had one.
    """

    trains = True

    def __init__(self, *args: Any, scale: Callable[[Tensor], Tensor], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: dict[int, Tensor] = {}
        self.has_graph = False
        self._scale = scale

    def finish(self, result: Any, index: int) -> Tensor:
        """Keep the loss and the other outputs; return the loss, scaled and weighted, for the backward.

        Raises:
            ConfigError: `result` holds no loss.
        """
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            raise ConfigError(
                "training_step",
                type(loss).__name__,
                "every rank needs a loss to run the same number of steps",
                "Return a tensor, or a dict with a tensor under 'loss'; multiply the loss by zero to skip a batch",
            )
        self.losses[index] = loss.detach()
        kept = {k: detached(v) for k, v in result.items() if k != "loss"} if isinstance(result, Mapping) else None
        self.results[index] = kept
        self.has_graph |= loss.requires_grad
        share = self.weights.share(index)
        # a mean over no tokens is NaN, and so would be its gradients, which no weight of 0 takes away
        return self._scale(loss * share) if share else loss.new_zeros(loss.shape)


def _settled(tree: Any, use: str) -> Any:
    packer = Packer()
    try:
        packer.describe(tree)
    except ValueError:  # objects of the user's own
        return tree
    if not any(is_remote(tensor) for tensor in packer.tensors):
        return tree
    return map_tensors(tree, lambda tensor: settled(tensor, use))


def detached(tree: Any) -> Any:
    """Return `tree` with its tensors detached; a tree with objects of the user's own stays as it is."""
    try:
        return map_tensors(tree, Tensor.detach)
    except ValueError:
        return tree


def _structure(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.dim(), batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, _structure(value)) for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return tuple(_structure(value) for value in batch)
    return type(batch)
