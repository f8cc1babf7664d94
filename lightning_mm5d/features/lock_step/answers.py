"""Calls that one stage answers for all ranks of a replica: what they do beside their result, and their backwards.

A layer updates a cache of keys and values, puts states into a dict that layers share, draws random numbers, or writes
to its arguments. `Effects` records this around the call and describes it as a pytree; on other ranks it repeats the
description. A cache gets stand-ins there: ``[B, 1, S, 1]`` for keys ``[B, H, S, D]``, so that lengths, masks and the
order of beams are right without the memory.

All ranks run the same code on equal values, so that their graphs have the same nodes in the same order. A call that its
owner answers is one node of it:

1. *Forward*: the owner computes the call on leaves in the places of its inputs, and keeps that graph to itself.
2. *Backward*: the owner goes on through its own graph, which adds to the gradients of its parameters, and broadcasts
   the gradients of the inputs. The other ranks return these.

So every rank goes through the whole backward, and each gradient arises where its parameter is. It refuses gradients of
gradients, inputs in dicts, and other objects that a call changes, because ranks that do not compute it would go on with
the old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.data.random_state import set_torch_states, torch_states
from lightning_mm5d.sharded.own_backwards import torchs_own
from lightning_mm5d.sharded.removable import put
from lightning_mm5d.sharded.torch_internals import ends_graph, version_of
from lightning_mm5d.stage import StageError
from lightning_mm5d.stage.payload import Packer, rebuild, tensors_in

_PLAIN = (Tensor, nn.Module, type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


class Effects:
    """The effects of one call.

    Args:
        args: of the call.
        kwargs: of the call.
        device: whose random generator may be drawn from.

    Attributes:
        args: of the call.
        kwargs: of the call.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> None:
        self.args, self.kwargs, self._device = args, kwargs, device
        self._calls: list[Any] = []
        self._entries: list[Any] = []
        self._written: list[Any] = []
        self._states: list[Tensor] | None = None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what happens to the arguments and to the random generators meanwhile.

        Raises:
            StageError: an argument changes that is neither a tensor, a dict nor a cache of transformers.
        """
        values = [*self.args, *self.kwargs.values()]
        dicts = [dict(value) if isinstance(value, MutableMapping) else None for value in values]
        others = [_state(value) for value in values]
        tensors = [tensor for _, tensor in tensors_in(values)]
        versions = [version_of(tensor) for tensor in tensors]
        states = torch_states(self._device)
        with ExitStack() as stack:
            for number, cache in enumerate(self._caches()):
                for name in _updates(cache):
                    self._record(stack, number, cache, name)
            yield
        for place, (value, before) in enumerate(zip(values, dicts, strict=True)):
            if before is not None:
                new = {key: entry for key, entry in value.items() if entry is not before.get(key, _NOTHING)}
                self._entries += [[place, new]] if new else []
        for value, other in zip(values, others, strict=True):
            if _state(value) != other:
                raise StageError(
                    f"a layer or module changes its argument of type {type(value).__name__}, which other ranks cannot "
                    "follow while a step passes several times through layers of several ranks: return the new state, "
                    "pass a dict or a cache of transformers, or call the model without a cache"
                )
        for place, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
            self._written += [[place, tensor]] if version_of(tensor) != version else []
        after = torch_states(self._device)
        if not all(map(torch.equal, states, after)):
            self._states = after

    def description(self) -> Any:
        """Return what was recorded as a pytree."""
        return [self._calls, self._entries, self._written, self._states]

    def repeat(self, description: Any) -> None:
        """Do to this rank's arguments and generators what was recorded on another rank."""
        calls, entries, written, states = description
        values = [*self.args, *self.kwargs.values()]
        tensors = [tensor for _, tensor in tensors_in(values)]
        for place, value in written:
            tensors[place].copy_(value)
        for place, new in entries:
            values[place].update(new)
        caches = list(self._caches()) if calls else []
        for number, name, args, kwargs in calls:
            named = {key: self._stand_in(value) for key, value in kwargs.items()}
            getattr(caches[number], name)(*map(self._stand_in, args), **named)
        if states is not None:
            set_torch_states([state.cpu() for state in states], self._device)

    # --- caches ---

    def _caches(self) -> Iterator[Any]:
        """Yield the caches among the arguments, and those inside of caches, in an order equal on all ranks."""
        for value in (*self.args, *self.kwargs.values()):
            if _is_cache(value):
                yield value
                yield from (inner for _, inner in sorted(vars(value).items()) if _is_cache(inner))

    def _record(self, stack: ExitStack, number: int, cache: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(cache, name)

        def update(*args: Any, **kwargs: Any) -> Any:
            named = {key: _description(value, name) for key, value in kwargs.items()}
            self._calls.append([number, name, [_description(value, name) for value in args], named])
            return original(*args, **kwargs)

        stack.callback(put(cache, name, update))

    def _stand_in(self, described: Any) -> Any:
        if not isinstance(described, Mapping) or set(described) != {"dtype", "shape"}:
            return described
        return torch.zeros((), dtype=described["dtype"], device=self._device).expand(described["shape"])


_NOTHING = object()


def _is_cache(value: Any) -> bool:
    return callable(getattr(value, "update", None)) and callable(getattr(value, "get_seq_length", None))


def _updates(cache: Any) -> list[str]:
    """The methods by which layers write to a cache: ``update``, and those of other states."""
    return [name for name in dir(type(cache)) if name == "update" or name.startswith("update_")]


def _description(value: Any, name: str) -> Any:
    """Describe an argument of a cache's update: of a tensor its dtype, and the shape of its stand-in."""
    if not isinstance(value, Tensor):
        return value
    shape = [value.shape[0], 1, value.shape[-2], 1] if name == "update" and value.dim() == 4 else list(value.shape)
    return {"dtype": value.dtype, "shape": shape}


def _state(value: Any) -> Any:
    """Something that changes with `value` where that is neither a tensor, a module, a dict nor a cache."""
    if isinstance(value, (list, tuple)):
        return len(value), [_state(element) for element in value]
    if isinstance(value, (*_PLAIN, Mapping)) or _is_cache(value) or not hasattr(value, "__dict__"):
        return None
    return {
        name: (
            id(attribute),
            version_of(attribute) if isinstance(attribute, Tensor) else None,
            len(attribute) if hasattr(attribute, "__len__") else 0,
        )
        for name, attribute in vars(value).items()
        if not callable(attribute)
    }


class Differentiable:
    """One call with gradients.

    Args:
        path: of what is called, for messages.
        args: of the call.
        kwargs: of the call.
        share: returns on all ranks the tree that the owner's first rank has; each passes its own, if any.
        owns: whether this rank computes it.
        accumulates: says in a backward whether parameters get gradients, as they do not by ``torch.autograd.grad``.
        computing: entered around the owner's backward, in which layers may run again.

    Attributes:
        args: for the owner's computation, with leaves in the places of inputs that carry gradients.
        kwargs: likewise.
    """

    def __init__(
        self,
        path: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        share: Callable[[Any], Any],
        *,
        owns: bool,
        accumulates: Callable[[], bool],
        computing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._share, self._owns, self._accumulates, self._computing = share, owns, accumulates, computing
        if any(tensor.requires_grad for tensor in _in_dicts((*args, *kwargs.values()))):
            raise StageError(
                f"{path} is called with a dict of tensors that carry gradients, which do not cross to other ranks in "
                "manual optimization: pass the tensors themselves, or give its modality the ranks of the others"
            )
        self._inputs = {id(t): t for _, t in tensors_in([*args, *kwargs.values()]) if t.requires_grad}
        self._leaves = {key: tensor.detach().requires_grad_() for key, tensor in self._inputs.items()} if owns else {}
        self.args = tuple(map(self._with_leaves, args))
        self.kwargs = {name: self._with_leaves(value) for name, value in kwargs.items()}
        self.outputs: list[Tensor] = []
        self.flags: list[bool] = []

    def flags_of(self, result: Any) -> list[bool]:
        """Return which tensors of the owner's result carry a gradient."""
        packer = Packer()
        packer.describe(result)
        return [tensor.requires_grad for tensor in packer.tensors]

    def joined(self, result: Any, flags: list[bool]) -> Any:
        """Return the result as a node of this rank's graph.

        Args:
            result: as it was computed or received.
            flags: as the owner's `flags_of` returned them.
        """
        if not any(flags):
            return result
        packer = Packer()
        description = packer.describe(result)
        self.outputs, self.flags = packer.tensors, flags
        anchor = torch.zeros((), requires_grad=True)  # parameters alone may carry the gradient
        return rebuild(description, list(_Answered.apply(self, anchor, *self._inputs.values())))

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs; collective over the replica."""
        leaf_gradients: list[Tensor | None] | None = None
        if self._owns:
            given = [
                (output, gradient)
                for output, gradient, flag in zip(self.outputs, gradients, self.flags, strict=True)
                if flag and gradient is not None
            ]
            leaves = list(self._leaves.values())
            for leaf in leaves:
                leaf.grad = None
            inputs = None if self._accumulates() else leaves
            if inputs is None or inputs:
                with torch.enable_grad(), self._computing():
                    torchs_own()(  # also inside of steps, whose own backwards are others' business
                        [output for output, _ in given], [grad for _, grad in given], retain_graph=True, inputs=inputs
                    )
            leaf_gradients = [leaf.grad for leaf in leaves]
        pairs = zip(self._share(leaf_gradients), self._inputs.values(), strict=True)
        return [None if gradient is None else gradient.to(tensor.device) for gradient, tensor in pairs]

    def _with_leaves(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._leaves.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(map(self._with_leaves, value))
        return value


class _Answered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Differentiable, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = tuple(output.detach().clone() for output in call.outputs)
        ctx.mark_non_differentiable(*(output for output, flag in zip(outputs, call.flags, strict=True) if not flag))
        return outputs

    @staticmethod
    @ends_graph
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return (None, None, *ctx.call.backward(gradients))


def _in_dicts(tree: Any, inside: bool = False) -> Iterator[Tensor]:
    """Yield the tensors in dicts, and in what these hold."""
    if isinstance(tree, Tensor):
        if inside:
            yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _in_dicts(value, True)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _in_dicts(value, inside)
