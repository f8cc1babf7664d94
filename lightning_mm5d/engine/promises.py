"""What ranks know of shapes before payloads arrive: where a stage can promise that equal batches give equal payloads.

A receiver must have memory before a payload comes. Where the shapes of a payload follow from those of the microbatch,
both ends know them from the microbatch alone. They do not where a stage makes shapes of values: it counts image tokens,
takes masked rows, or reads lengths into Python. So the first run of a stage on a microbatch of new shapes is watched,
and payloads of later runs are promised if nothing of that kind was seen, here and in the stages before. Neither does a
stage promise anything that draws random numbers in Python or numpy, reads the number of the step, or sends plain values
beside tensors: they may be others the next time. Gradients depend on later stages in the same way. Promises end with
their epoch, because a module may read which it is.

Both ends must derive one key from a microbatch, or one would send a header that the other does not expect. So the ranks
of a replica compare the keys of a step before it, in host memory. Where plain values of a batch differ over ranks (a
clock, an unseeded choice), nothing is promised in that step.

Branches of transformers on a bool are not counted, such as "is any token masked", which choose among ways to the same
shapes. Where one decides on shapes after all, the transport raises an error.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mm5d.engine.step import Step
from lightning_mm5d.engine.transport import VARIES, Shapes
from lightning_mm5d.schedule.graph import StageKey
from lightning_mm5d.sharded.removable import meanwhile
from lightning_mm5d.stage import Payload

_MOST = 4096  # microbatch shapes of a stage that can be promised, so that ever new ones do not fill the memory
_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})
_SPLITS = frozenset({torch.tensor_split, Tensor.tensor_split})
_PACKS = torch.ops.aten._pack_padded_sequence.default
_TEXTS = frozenset({Tensor.__format__, Tensor.__repr__})


class Promises:
    """What the stages of one rank promise of their payloads in training steps; evaluation steps promise nothing.

    Args:
        hosts: of each replica, a group of its ranks that carries host memory; replicas of one rank may lack theirs.
    """

    def __init__(self, hosts: Mapping[int, dist.ProcessGroup | None] | None = None) -> None:
        self._hosts, self._epoch = hosts or {}, -1
        self._fixed: dict[tuple[StageKey, Hashable], bool] = {}
        self._promised: set[tuple[StageKey, Hashable]] = set()
        self._made_back: set[tuple[StageKey, Hashable]] = set()
        self._keys: dict[tuple[int, int], Hashable] = {}

    def begin(self, step: Step, trainable: frozenset[str]) -> None:
        """Begin a step, before its microbatches may change; collective of the ranks of each replica in training.

        Args:
            step: to be run.
            trainable: names of the parameters that require a gradient.
        """
        self._keys = {}
        if step.trains and step.epoch != self._epoch:
            self._epoch = step.epoch
            self._fixed.clear()
            self._promised.clear()
            self._made_back.clear()
        for replica, parts in step.microbatches.items():
            batches = [_described_or_none(part.batch) if step.trains else None for part in parts]
            agree = not step.trains or self._agree(replica, batches)
            for index, batch in enumerate(batches):
                known = agree and batch is not None
                self._keys[replica, index] = (batch, trainable, self._epoch) if known else None

    def _agree(self, replica: int, batches: Sequence[Hashable]) -> bool:
        """Return whether all ranks of a replica describe its microbatches in the same way."""
        group = self._hosts.get(replica)
        if group is None:
            return True
        number = int.from_bytes(hashlib.blake2b(repr(batches).encode(), digest_size=7).digest(), "big")
        bounds = torch.tensor([number, -number])
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
        most, least = bounds.tolist()
        return bool(most == -least)

    def key(self, place: tuple[int, int]) -> Hashable:
        """Return the key of a microbatch, by its replica and index; None where nothing can be promised."""
        return self._keys[place]

    def watches(self, stage: StageKey, place: tuple[int, int]) -> bool:
        """Whether `watching` sees what a run of a stage on a microbatch does."""
        key = self._keys[place]
        return key is not None and (stage, key) not in self._fixed and len(self._fixed) < _MOST

    def shapes(self, stage: StageKey, place: tuple[int, int]) -> Shapes:
        """Return what is known by now of the shapes of a stage's payloads.

        A promise holds from then on, whatever the order of microbatches is, and also for those of a sender that has
        yet to run its first microbatch of these shapes: the receiver cannot tell them apart.

        Args:
            stage: that sends.
            place: replica and index of the microbatch.
        """
        key = self._keys[place]
        return Shapes(key, promised=(stage, key) in self._promised)

    def shapes_back(self, stage: StageKey, place: tuple[int, int], received: Sequence[Any]) -> Shapes:
        """Return what is known of the shapes of a stage's gradients, which depend on later stages too.

        Args:
            stage: that sends.
            place: replica and index of the microbatch.
            received: `meta` of the gradients that it has received.
        """
        key, promised = self.shapes(stage, place)
        if promised and not any(VARIES in meta for meta in received):
            self._made_back.add((stage, key))
        return Shapes(key, promised=(stage, key) in self._made_back)

    @contextmanager
    def watching(
        self, step: Step, stage: StageKey, place: tuple[int, int], received: Sequence[Payload]
    ) -> Iterator[Shapes]:
        """Enter around a run of a stage; gives what is known of the shapes of its payloads.

        Args:
            step: that runs.
            stage: that runs.
            place: replica and index of the microbatch.
            received: payloads that it has received.
        """
        key = self._keys[place]
        fixed = self._fixed.get((stage, key))
        if not self.watches(stage, place):
            if fixed and not any(payload.meta.get(VARIES) for payload in received):
                self._promised.add((stage, key))
            yield self.shapes(stage, place)
            return
        shapes, before = _ShapesOfValues(), _numbers()
        reads = _Reads(shapes)
        with step.reads() as asked, reads, shapes:
            yield self.shapes(stage, place)
        self._fixed[stage, key] = not (reads.seen or shapes.seen or asked) and before == _numbers()


def _numbers() -> tuple[Any, ...]:
    """The states of the random generators of Python and numpy."""
    name, state, *rest = np.random.get_state()
    return random.getstate(), name, bytes(memoryview(state)), *rest  # type: ignore[arg-type]


def _described_or_none(batch: Any) -> Hashable:
    try:
        return _described(batch)
    except (TypeError, RuntimeError):  # also of nested tensors, which have no shape
        return None


def _described(batch: Any) -> Hashable:
    """Return shapes and plain values of a batch.

    Raises:
        TypeError: it holds something else, of which equal shapes say nothing.
    """
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, _described(value)) for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return tuple(map(_described, batch))
    if batch is None or isinstance(batch, (bool, int, float)):
        return repr(batch)  # NaN equals itself, and 1 is not True
    raise TypeError(type(batch))


class _ShapesOfValues(TorchDispatchMode):
    """Notes whether a number for Python, or a tensor whose shape depends on values, was made and used.

    Counting masked elements by ``x[mask].numel()``, as checks of transformers do, is no use of the tensor.
    """

    supports_higher_order_operators = True  # such as flex attention, which would refuse to run under this mode

    def __init__(self) -> None:
        super().__init__()
        self.seen = False
        self.ignores = False
        self._selected: dict[int, Tensor] = {}  # which stay alive, or another tensor would get the id

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile under this mode; else it would skip a function from its first call on, for good."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = (*args, *(kwargs or {}).values())
        result = func(*args, **(kwargs or {}))
        if self.ignores:
            return result
        if func is torch.ops.aten._local_scalar_dense.default:
            self.seen = self.seen or args[0].dtype is not torch.bool or not _is_branch_of_transformers()
        elif func is torch.ops.aten.index.Tensor:
            if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
                self._selected[id(result)] = result
                self.seen = self.seen or not _is_branch_of_transformers()
        elif torch.Tag.dynamic_output_shape in getattr(func, "tags", ()) or func is _PACKS:
            self.seen = True
        self.seen = self.seen or any(id(argument) in self._selected for argument in arguments)
        return result


def _is_branch_of_transformers() -> bool:
    """Whether the innermost caller that is neither torch nor this package belongs to transformers."""
    frame = inspect.currentframe()
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "lightning_mm5d", "contextlib"):
            return bool(package == "transformers")
        frame = frame.f_back
    return False


class _Reads(TorchFunctionMode):
    """Notes whether all values of a tensor went to Python, which no operation shows; texts do not count."""

    def __init__(self, shapes: _ShapesOfValues) -> None:
        super().__init__()
        self.seen = False
        self._shapes = shapes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TEXTS:
            with meanwhile(self._shapes, ignores=True):
                return func(*args, **(kwargs or {}))
        reads = func in _READS or (func in _SPLITS and any(isinstance(argument, Tensor) for argument in args[1:]))
        self.seen = self.seen or (reads and not self._shapes.ignores)
        return func(*args, **(kwargs or {}))
