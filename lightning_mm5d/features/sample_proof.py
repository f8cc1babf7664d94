"""Proves that all ranks of a replica have read the same samples, before a step computes with them.

A modality whose rank read other samples would be trained with the labels of those, and no number would look wrong. So
each rank keeps digests of a batch when Lightning takes it for a step, in host memory, and the ranks of each replica
compare: the first batches of a run and of each epoch, and then at growing intervals. Phases of a comparison:

1. note: each rank digests the fields of the batch that Lightning is about to move to the device;
2. compare: the ranks agree on the largest and the smallest digest of each replica, in evaluation in the round with
   which a batch begins anyway, in training in one before the step;
3. tell: where these differ, all ranks exchange the digests of the fields, and raise the same error.

What identifies the samples of a batch: a digest of each of its fields, equal in every process that read the same.

Values on a device are not read, which would wait for it: there shapes and dtypes tell. Of a large tensor some elements
do. Objects without a value that is the same in every process are left out; of these, tensors and arrays that their
attributes hold are not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_mm5d.config.errors import RankMismatchError
from lightning_mm5d.data.lazy import LazyTensor
from lightning_mm5d.data.loader import split_replicas
from lightning_mm5d.data.microbatch import leaves
from lightning_mm5d.engine.codec import broadcast_tree
from lightning_mm5d.engine.run_groups import Wish
from lightning_mm5d.monitor.verdict import named
from lightning_mm5d.trainer.feature import BEFORE_TRANSFER, Attached, Feature, Running

_WHOLE = 1 << 15  # elements of a tensor up to which all are read, and as many of a larger one
_STRIDE = 2654435761  # a prime, so that no row or column of a tensor is passed over (D. Knuth's multiplicative hash)
_DEPTH = 3  # of objects in objects
_PLAIN = str | bytes | bool | int | float | complex | None


def digests(batch: Any) -> dict[str, list[str]]:
    """Return by path, as ``"batch['images']"``, the digest of each field and what it is, as ``"float32[8, 3]"``."""
    by_path: dict[str, list[str]] = {}
    for path, value in _fields(batch):
        digest = hashlib.blake2b(digest_size=8)
        if (form := _add(value, digest)) is not None:
            by_path[path] = [digest.hexdigest(), form]
    return by_path


def _fields(node: Any, name: str = "batch", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for path, value in leaves(node):
        where = name + "".join(f"[{step!r}]" for step in path)
        if isinstance(value, Tensor | np.ndarray | np.generic | list | tuple | set | frozenset | _PLAIN):
            yield where, value
        elif depth < _DEPTH and hasattr(value, "__dict__") and not isinstance(value, type):
            for attribute, inner in vars(value).items():
                for inside, part in _fields(inner, f"{where}.{attribute}", depth + 1):
                    if isinstance(part, Tensor | np.ndarray):
                        yield inside, part


def _add(value: Any, digest: Any) -> str | None:
    """Add a value to a digest; return what it is, None where it has no stable value."""
    if isinstance(value, Tensor):
        form = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        digest.update(form.encode())
        if isinstance(value, LazyTensor):
            digest.update(value.key())
        elif value.device.type == "cpu" and value.layout == torch.strided and not value.is_quantized:
            digest.update(_bytes(value.detach()))
    elif isinstance(value, np.ndarray | np.generic):
        form = f"{value.dtype}{list(value.shape)}"
        digest.update(form.encode())
        if not value.dtype.hasobject:
            flat = np.asarray(value).reshape(-1)
            digest.update((flat if flat.size <= _WHOLE else flat[_some(flat.size).numpy()]).tobytes())
    elif isinstance(value, list | tuple | set | frozenset):
        form = f"{type(value).__name__} of {len(value)}"
        digest.update(form.encode())
        for element in sorted(value, key=repr) if isinstance(value, set | frozenset) else value:
            _add(element, digest)
    elif isinstance(value, _PLAIN):
        form = type(value).__name__
        digest.update(f"{form} {value!r};".encode())
    else:
        return None
    return form


def _bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor in host memory, of some elements where it is large."""
    with torch._C.DisableTorchFunctionSubclass():
        flat = tensor.resolve_conj().resolve_neg().reshape(-1)
        flat = (flat if flat.numel() <= _WHOLE else flat[_some(flat.numel())]).contiguous()
        return flat.view(torch.uint8).numpy().tobytes()


def _some(count: int) -> Tensor:
    """Return the indices of the elements that are read of so many, spread evenly."""
    return torch.arange(_WHOLE) * _STRIDE % count


_FIRST = 8  # batches of a run that are compared, one after the other
_EVERY = 64
_NAMED = 4  # fields in one message
_NONE = torch.iinfo(torch.int64).min
_CPU = torch.device("cpu")


class SampleProof(Feature):
    """Digests batches, and compares them among the ranks of each replica."""

    def attach(self, running: Running) -> Attached:
        """Note each batch before the user's hook gets it."""
        return _Digested(running)


class _Digested(Attached):
    """Digests of the batch that is about to be computed."""

    def __init__(self, running: Running) -> None:
        self._trainer, self._rank = running.trainer, running.rank
        layout = self._layout = running.plan.layout
        self._shared = [n for n in range(layout.num_replicas) if len(layout.replica_ranks(n)) > 1]
        self._served = layout.replicas_of_rank(self._rank)
        # of predictions of several replicas, which do not wait for each other
        self._replica_groups = _replica_groups(running)
        self._compared = dict[str, int]()
        # of the batch that was taken last; None where it is not to be compared, equal on all ranks
        self._fields: dict[int, dict[str, list[str]]] | None = None
        self._where = ""
        running.turns.proofs.append(self)
        self.changes.callback(running.turns.proofs.remove, self)
        before_transfer = getattr(running.module, BEFORE_TRANSFER)

        def prepared(batch: Any, dataloader_idx: int = 0) -> Any:
            self.note(batch)
            return before_transfer(batch, dataloader_idx)

        self.put_attribute(running.module, BEFORE_TRANSFER, prepared)

    # --- phase 1 ---

    def note(self, batch: Any) -> None:
        """Digest a batch as the dataloader gave it, where it is one of those that are compared."""
        trainer = self._trainer
        progress = self._loop().batch_progress.current
        if not self._shared or progress.ready != progress.completed:  # not Lightning, which has none under way
            return
        stage = trainer.state.stage.value if trainer.state.stage is not None else ""
        index, count = progress.ready, self._compared.get(stage, 0)
        self._compared[stage] = count + 1
        self._fields = None
        if count < _FIRST or index & (index - 1) == 0 or index % _EVERY == 0:
            parts = split_replicas(batch, len(self._served))
            self._where = f"{stage} batch {index} of epoch {trainer.current_epoch}"
            self._fields = {
                number: {} if part is None else digests(part) for number, part in zip(self._served, parts, strict=True)
            }

    def _loop(self) -> Any:
        trainer: Any = self._trainer
        if trainer.training:
            return trainer.fit_loop.epoch_loop
        if trainer.state.fn == TrainerFn.FITTING:
            return trainer.fit_loop.epoch_loop.val_loop
        if trainer.predicting:
            return trainer.predict_loop
        return trainer.test_loop if trainer.testing else trainer.validate_loop

    # --- phase 2 ---

    def slots(self) -> list[int]:
        """Return what ranks take the largest of: each replica's digest and its negative."""
        fields = self._fields or {}
        return [slot for number in self._shared for slot in _slots(fields.get(number) if self._fields else None)]

    def check(self, agreed: list[int], group: dist.ProcessGroup) -> None:
        """Raise on all ranks of `group` where ranks of a replica differ; collective there only.

        Args:
            agreed: the largest of the `slots` of all ranks.
            group: all ranks.

        Raises:
            RankMismatchError: names the replica, its ranks and the fields.
        """
        differ = [
            number
            for number, largest, smallest in zip(self._shared, agreed[::2], agreed[1::2], strict=True)
            if largest != -smallest and largest != _NONE
        ]
        if differ:
            self._raise(differ[0], group)
        self._fields = None

    @property
    def is_due(self) -> bool:
        """Whether the batch that was taken last is one of those that are compared."""
        return self._fields is not None

    def compare_alone(self) -> None:
        """Compare among the ranks of each replica, before a prediction that other replicas may not have.

        Raises:
            RankMismatchError: on all ranks of the replica.
        """
        for number, fields in (self._fields or {}).items():
            group = self._replica_groups.get(number)
            if group is None or not fields:
                continue
            agreed = torch.tensor(_slots(fields))
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
            largest, smallest = agreed.tolist()
            if largest != -smallest:
                self._raise(number, group)

    # --- phase 3 ---

    def _raise(self, replica: int, group: dist.ProcessGroup) -> None:
        fields = (self._fields or {}).get(replica)
        read = {}
        for rank in dist.get_process_group_ranks(group):
            text = broadcast_tree(json.dumps(fields) if rank == self._rank else None, rank, _CPU, group)
            if rank in self._layout.replica_ranks(replica):
                read[rank] = json.loads(text) or {}
        raise RankMismatchError(
            f"the ranks of replica {replica} have read different samples for {self._where}: {_differences(read)}. All "
            "ranks of a replica read the same samples, or a modality would be trained with the labels of others. Shard "
            "data by strategy.replica_rank of strategy.num_replicas, not by a rank among all processes (one that a "
            "script or `setup` has read), and streams when they are iterated, as a rank may read them for several "
            "replicas; sort lists of files; give random generators of a data set a seed that is equal on all ranks"
        )


def _replica_groups(running: Running) -> dict[int, dist.ProcessGroup | None]:
    """Return by number a group of the ranks of each replica that predicts without the others; collective."""
    layout = running.plan.layout
    if not running.trainer.predicting or running.is_plain or layout.num_replicas == 1:
        return {}
    wishes = {
        number: Wish(ranks, f"samples of replica {number}", "gloo")
        for number in range(layout.num_replicas)
        if len(ranks := layout.replica_ranks(number)) > 1
    }
    if wishes:
        running.more_groups.make(wishes.values())  # in one agreement of all ranks
    return {number: running.more_groups.get(wish.ranks, wish.tag) for number, wish in wishes.items()}


def _slots(fields: dict[str, list[str]] | None) -> tuple[int, int]:
    """Return a number of what was read, and its negative; what does not count for a rank that reads nothing of it."""
    if fields is None:
        return _NONE, _NONE
    text = json.dumps(sorted((path, digest) for path, (digest, _) in fields.items()))
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
    return number, -number


def _differences(by_rank: Mapping[int, dict[str, list[str]]]) -> str:
    """Return which ranks have what, for each field that differs: ``"batch['a'] on rank 0 is not that on rank 1"``."""
    told = []
    for path in dict.fromkeys(path for fields in by_rank.values() for path in fields):
        kinds: dict[tuple[str, ...], list[int]] = {}
        for rank, fields in by_rank.items():
            kinds.setdefault(tuple(fields.get(path, ("", "nothing"))), []).append(rank)
        if len(kinds) > 1:
            forms = {form for _, form in kinds}
            told.append(
                f"{path} differs between "
                + " and ".join(named(ranks) for ranks in kinds.values())
                + (f" ({', '.join(form for _, form in kinds)})" if len(forms) > 1 else "")
            )
    more = [f"{len(told) - _NAMED} more fields differ"] if len(told) > _NAMED else []
    return "; ".join([*told[:_NAMED], *more])


FEATURE = SampleProof
