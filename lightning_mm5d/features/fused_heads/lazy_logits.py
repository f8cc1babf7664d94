"""Logits that are computed when something needs them, and never as a whole where only their cross entropy does.

A `LazyLogits` is what a model's head returns: it knows the hidden states and the head. Code that shifts, flattens,
scales or casts it gets another one. ``torch.nn.functional.cross_entropy`` computes its loss in chunks of rows
(`chunked_cross_entropy`). Any other function gets the logits themselves, a plain tensor or a `Sharded`, which are then
computed, once for each `LazyLogits`. So a model's own loss function runs unchanged, and so does everything else that
uses logits.

It refuses (`ConfigError`) an autograd function that takes it, hooks on it after its loss, and its use after what it is
computed of was written to.

Cross entropy of a linear layer's result, computed for a few rows at a time.

The logits of a language model are often the largest tensor of its step: in float32 they and their gradient take 8 bytes
for each token and class. Here only the logits of one chunk of rows exist at a time. The backward computes them again
from the hidden states, which costs one more matrix product: the head computes four where it computed three. A chunk has
as many rows as make its logits about as large as all hidden states, as in Liger Kernel (Hsu et al. 2024,
arXiv:2410.10989).

N rows, D width, C classes, of which this rank has C_r (all without tensor parallelism).
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_mm5d.config.errors import ConfigError, private
from lightning_mm5d.sharded.class_operations import (
    Columns,
    check_targets,
    cross_entropy,
    padded_rows,
    without_padding,
)
from lightning_mm5d.sharded.collectives import exchange
from lightning_mm5d.sharded.sequence import is_tokens, reduced_losses
from lightning_mm5d.sharded.tensor import NotYetComputed, Sharded, as_sharded, from_local, functions_named, written_by
from lightning_mm5d.sharded.torch_internals import as_plain_tensors, ends_graph, version_of

Pointwise = Callable[[Tensor], Tensor]


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, multiple: int) -> Tensor:
    """Return ``x @ weight.T + bias``: ``[..., C]``, a view of a product with padded rows where C is no multiple.

    Args:
        x: ``[..., D]``.
        weight: ``[C, D]``.
        bias: ``[C]``.
        multiple: of which the number of rows in the product is one.
    """
    product = F.linear(x, padded_rows(weight, multiple), None if bias is None else padded_rows(bias, multiple))
    return without_padding(product, -1, weight.shape[0])


@dataclass(frozen=True, kw_only=True)
class RowLosses:
    """What is computed of a chunk of rows.

    Attributes:
        columns: the classes of each rank; None where this rank has all.
        pointwise: functions between the linear layer and the loss, in order.
        options: ``ignore_index`` and ``label_smoothing`` of ``torch.nn.functional.cross_entropy``.
    """

    columns: Columns | None = None
    pointwise: tuple[Pointwise, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def multiple(self) -> int:
        """Of `columns`."""
        return 1 if self.columns is None else self.columns.multiple

    def of(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each row, at least float32.

        Args:
            logits: ``[n, C_r]``, and padding after them.
            target: ``[n]``.
        """
        if self.columns is not None:
            logits = without_padding(logits, 1, self.columns.lengths[self.columns.group.index])
        for function in self.pointwise:
            logits = function(logits)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.columns is None:
            return F.cross_entropy(logits, target, reduction="none", **self.options)
        lengths, group = self.columns.lengths, self.columns.group
        start, classes = sum(lengths[: group.index]), sum(lengths)
        return cross_entropy(
            logits, target, start=start, classes=classes, group=group, reduction="none", **self.options
        )


def chunk_rows(rows: int, width: int, classes: int) -> int:
    """Return how many rows a chunk has: a power of two, with logits about as large as ``[rows, width]``.

    >>> chunk_rows(8192, 4096, 131072)
    256
    """
    chunks = max(-(-classes // max(width, 1)), 1)
    return 1 << (max(-(-rows // chunks), 1) - 1).bit_length()


def linear_row_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, compute: RowLosses
) -> Tensor:
    """Return the loss of each row of ``hidden @ weight.T + bias``: ``[N]``, at least float32, 0 where it is ignored.

    Args:
        hidden: ``[N, D]``.
        weight: ``[C_r, D]``, of the dtype of `hidden`.
        bias: ``[C_r]``.
        target: classes ``[N]``, counted over all ranks.
        compute: what is computed of the product. Of this rank's classes, the gradient of `hidden` is partial.
    """
    return _RowLosses.apply(hidden, weight, bias, target, compute)


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, compute: RowLosses
    ) -> Tensor:
        classes = weight.shape[0] if compute.columns is None else sum(compute.columns.lengths)
        ctx.rows, ctx.compute = chunk_rows(hidden.shape[0], hidden.shape[1], classes), compute
        ctx.save_for_backward(hidden, weight, bias, target)
        with _plain(hidden):
            weight = padded_rows(weight, compute.multiple)
            bias = None if bias is None else padded_rows(bias, compute.multiple)
            losses = [
                compute.of(F.linear(part, weight, bias), goal)
                for part, goal in zip(hidden.split(ctx.rows), target.split(ctx.rows), strict=True)
            ]
            return torch.cat(losses)

    @staticmethod
    @ends_graph
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target = ctx.saved_tensors
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
        local_classes = weight.shape[0]
        weight = padded_rows(weight, ctx.compute.multiple)
        if bias is not None:
            bias = padded_rows(bias, ctx.compute.multiple)
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        # sums over chunks of a narrow dtype would round once a chunk
        wide = torch.promote_types(weight.dtype, torch.float32)
        of_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        of_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        with _plain(hidden):
            for start in range(0, len(hidden), ctx.rows):
                rows = slice(start, start + ctx.rows)
                part = hidden[rows]
                with torch.enable_grad():  # by which flops that are computed again are told from others
                    logits = F.linear(part, weight, bias).requires_grad_()
                    losses = ctx.compute.of(logits, target[rows])
                (gradient,) = torch.autograd.grad(losses, logits, gradients[0][rows])
                del logits, losses
                if of_hidden is not None:
                    torch.mm(gradient, weight, out=of_hidden[rows])
                if of_weight is not None:
                    if wide == weight.dtype:
                        of_weight.addmm_(gradient.t(), part)
                    else:
                        of_weight += gradient.t() @ part
                if of_bias is not None:
                    of_bias += gradient.sum(0)
        return (
            of_hidden,
            None if of_weight is None else without_padding(of_weight, 0, local_classes).to(weight.dtype),
            None if of_bias is None else without_padding(of_bias, 0, local_classes).to(bias.dtype),
            None,
            None,
        )


def _plain(x: Tensor) -> Any:
    """Enter around work in the dtypes of its tensors."""
    return torch.autocast(x.device.type, enabled=False)


_make_wrapper = private(Tensor, "_make_wrapper_subclass")
_FIELD = "fused_linear_cross_entropy"


@dataclass(frozen=True, kw_only=True)
class Head:
    """A linear layer whose result is a model's logits.

    Attributes:
        module: it has this rank's weight and bias.
        dtype: of the product.
        columns: the classes of each tensor parallel rank; None where this rank has all.
    """

    module: nn.Linear
    dtype: torch.dtype
    columns: Columns | None = None

    @property
    def classes(self) -> int:
        """Number of classes of all ranks."""
        return self.module.weight.shape[0] if self.columns is None else sum(self.columns.lengths)

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return hidden states, weight and bias as the product takes them: plain, local, of one dtype."""
        parts = [_local(hidden), self.module.weight, self.module.bias]
        if isinstance(hidden, Sharded) and self.columns is None:
            parts[1:] = [None if tensor is None else hidden.group.copied(tensor) for tensor in parts[1:]]
        x, weight, bias = (None if tensor is None else tensor.to(self.dtype) for tensor in parts)
        assert x is not None
        assert weight is not None
        return x, weight, bias

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[..., C]`` of hidden states ``[..., D]``, plain or sharded as the layer returns them."""
        with torch.autocast(hidden.device.type, enabled=False):
            local = padded_linear(*self.operands(hidden), 1 if self.columns is None else self.columns.multiple)
        if isinstance(hidden, Sharded):
            if self.columns is None:
                return as_sharded(local, hidden.sharding)
            # of a context parallel rank's tokens, each tensor parallel rank gets some, with all classes
            tokens, dim = hidden.group.finer, hidden.sharded_dim
            local = exchange(local, -1, self.columns.lengths, dim, tokens.own_lengths, self.columns.group)
            return tokens.wrapped(local, dim)
        return local if self.columns is None else from_local(local, -1, self.columns.lengths, self.columns.group)


class _Family:
    """What the lazy logits of one call of a head share.

    Attributes:
        head: whose call it was.
        writes: how often one of them was written to.
        has_loss: whether a loss was computed without them.
        members: all of them.
    """

    def __init__(self, head: Head) -> None:
        self.head, self.writes, self.has_loss = head, 0, False
        self.members: list[weakref.ref[LazyLogits]] = []
        self.version = _version(head.module.weight)

    def settle(self) -> None:
        """Compute those that somebody holds on to, before weights change; ranks that share them do so together."""
        if any(member() is not None for member in self.members):
            gc.collect()  # what cycles of references keep, Python frees at another time on each rank
        for member in self.members:
            if (lazy := member()) is not None:
                lazy.computed()
        self.members.clear()


class LazyLogits(NotYetComputed):
    """Logits that are not computed yet; see the module. Made by `lazy_logits`."""

    _family: _Family
    _hidden: Tensor
    _pointwise: tuple[Pointwise, ...]
    _logits: Tensor | None
    _known: tuple[int, int]

    def computed(self) -> Tensor:
        """Return the logits, which are computed at the first call."""
        wants = torch.is_grad_enabled() and _requires_grad(self)
        if self._logits is None or (wants and not self._logits.requires_grad):
            logits = self._family.head.logits(self._source())
            for function in self._pointwise:
                logits = function(logits)
            self._logits = logits
        return self._logits

    def _source(self) -> Tensor:
        """The hidden states, which nothing has written to."""
        family = self._family
        if self._known != (family.writes, _version(self._hidden)) or family.version != _version(
            family.head.module.weight
        ):
            raise _refused("The hidden states, the head or the logits were written to before their use")
        return self._hidden

    def _is_lazy(self) -> bool:
        # without gradients it may be in the forward of an autograd function, whose backward must not be passed by
        return self._logits is None and (torch.is_grad_enabled() or not _requires_grad(self))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _TOLD:
            with as_plain_tensors():
                return func(*args, **kwargs)
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        rule = _RULES.get(func)
        x = args[0] if args else None
        if rule is not None and type(x) is cls and (x._is_lazy() or rule is _hook):
            others = tree_leaves((args[1:], kwargs))
            if not any(type(other) is cls for other in others):
                result = rule(func, x, args[1:], kwargs)
                if result is not NotImplemented:
                    return result
        written = [tensor for tensor in written_by(func, args, kwargs) if isinstance(tensor, LazyLogits)]
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.computed, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        for lazy in written:
            lazy._family.writes += 1
            lazy._known = (lazy._family.writes, lazy._known[1])
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # only what bypasses torch functions comes here; its gradient goes to `_Unseen`
        def values(lazy: LazyLogits) -> Tensor:
            logits = lazy.computed()
            return (logits.full() if isinstance(logits, Sharded) else logits).detach()

        args, kwargs = tree_map_only(LazyLogits, values, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Unseen(torch.autograd.Function):
    """Makes the tensor, and puts it into the graph so that a gradient that reaches it is not lost without an error."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return _make_wrapper(LazyLogits, shape, dtype=dtype, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise _refused("An autograd function took logits that were not computed")


def lazy_logits(head: Head, hidden: Tensor) -> LazyLogits:
    """Return the logits of hidden states, to be computed when they are needed.

    Args:
        head: the layer.
        hidden: ``[..., D]``, at least two dims, plain or sharded by tokens.
    """
    return _not_computed(_Family(head), hidden, (), head.dtype)


def settle(lazy: LazyLogits) -> Callable[[], None]:
    """Return what computes all logits of the same call that somebody still holds on to when it is called."""
    return lazy._family.settle


def _not_computed(family: _Family, hidden: Tensor, pointwise: tuple[Pointwise, ...], dtype: torch.dtype) -> LazyLogits:
    weight = family.head.module.weight
    shape = torch.Size([*hidden.shape[:-1], family.head.classes])
    lazy: LazyLogits = _Unseen.apply(_local(hidden), weight, shape, dtype)
    lazy._family, lazy._hidden, lazy._pointwise, lazy._logits = family, hidden, pointwise, None
    lazy._known = family.writes, _version(hidden)
    family.members.append(weakref.ref(lazy))
    return lazy


# --- functions that need no logits: rule(func, lazy, other arguments, keyword arguments) ---

Rule = Callable[[Callable[..., Any], LazyLogits, Sequence[Any], Mapping[str, Any]], Any]


def _then(func: Callable[..., Any], x: LazyLogits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A pointwise function of the logits and of plain numbers."""
    if any(isinstance(other, Tensor) for other in tree_leaves((args, kwargs))):
        return NotImplemented
    example = func(torch.empty(0, dtype=_dtype(x), device=x._hidden.device), *args, **kwargs)
    if example.device != x._hidden.device or example.dim() != 1:
        return NotImplemented
    is_cast = func in _CASTS
    if is_cast and example.dtype == _dtype(x) and not (kwargs.get("copy") or True in args):
        return x

    def function(logits: Tensor) -> Tensor:
        return func(logits, *args, **kwargs)

    return _not_computed(x._family, x._source(), (*x._pointwise, function), example.dtype)


def _same(func: Callable[..., Any], x: LazyLogits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return NotImplemented if args or kwargs else x


def _rows(func: Callable[..., Any], x: LazyLogits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A view that keeps the classes as its last dim."""
    sizes = [*(args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args)]
    if kwargs or not all(type(size) is int for size in sizes) or len(sizes) < 2:
        return NotImplemented
    shape = _shape(x)
    if sizes.count(-1) == 1:
        known = -math.prod(sizes)
        sizes[sizes.index(-1)] = shape.numel() // known if known else 0
    if sizes[-1] != shape[-1] or math.prod(sizes) != shape.numel() or -1 in sizes:
        return NotImplemented
    hidden = x._source()
    return _viewed(x, hidden.reshape(*sizes[:-1], hidden.shape[-1]))


def _flatten(func: Callable[..., Any], x: LazyLogits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    options = dict(zip(("start_dim", "end_dim"), args, strict=False)) | dict(kwargs)
    shape = _shape(x)
    start, end = (options.get(name, other) % len(shape) for name, other in (("start_dim", 0), ("end_dim", -1)))
    if end == len(shape) - 1 and start != end:
        return NotImplemented
    return _rows(func, x, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]], {})


def _getitem(func: Callable[..., Any], x: LazyLogits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Some rows, with all their classes."""
    dims = len(_shape(x))
    entries = [*args[0]] if isinstance(args[0], tuple) else [args[0]]
    takes = []  # how many dims each entry takes
    for entry in entries:
        if type(entry) is int or isinstance(entry, slice):
            takes.append(1)
        elif entry is Ellipsis:
            takes.append(0)
        elif type(entry) is Tensor and entry.dtype in (torch.bool, torch.int64):
            takes.append(entry.dim() if entry.dtype == torch.bool else 1)
        else:
            return NotImplemented
    if sum(entry is Ellipsis for entry in entries) > 1 or sum(takes) > dims:
        return NotImplemented
    reaches = any(entry is Ellipsis for entry in entries) or sum(takes) == dims  # the last entry is for the classes
    keeps = entries[-1] is Ellipsis or (isinstance(entries[-1], slice) and entries[-1] == slice(None))
    if reaches and not keeps:
        return NotImplemented
    hidden = func(x._source(), tuple(entries))
    return _viewed(x, hidden) if hidden.dim() > 1 else NotImplemented


def _viewed(x: LazyLogits, hidden: Tensor) -> Any:
    if isinstance(hidden, Sharded) and (hidden.sharded_dim == -1 or not is_tokens(hidden.group)):
        return NotImplemented
    return _not_computed(x._family, hidden, x._pointwise, _dtype(x))


def _hook(func: Callable[..., Any], x: LazyLogits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if x._family.has_loss:
        raise _refused("The loss was computed without the logits, so that no gradient reaches them")
    return NotImplemented


def _cross_entropy(func: Callable[..., Any], x: LazyLogits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    options = dict(zip(names, args, strict=False)) | dict(kwargs)
    target, reduction = options.pop("target", None), options.pop("reduction", "mean")
    shape, is_plain = _shape(x), type(target) is Tensor and target.dtype == torch.int64
    if not is_plain or len(shape) != 2 or target.shape != shape[:1] or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    if any(options.pop(name, None) is not None for name in ("weight", "size_average", "reduce")):
        return NotImplemented
    if not 0.0 <= options.get("label_smoothing", 0.0) <= 1.0 or not shape[0] or target.device != x._hidden.device:
        return NotImplemented
    hidden, family, dtype = x._source(), x._family, _dtype(x)
    if torch.is_autocast_enabled(hidden.device.type) and dtype != torch.float64:
        dtype = torch.float32
    compute = RowLosses(columns=family.head.columns, pointwise=x._pointwise, options=options)
    # all of them, or one rank would fail while the others wait for it
    check_targets(target, target != options.get("ignore_index", -100), shape[1])
    goal = target
    if isinstance(hidden, Sharded):
        goal = hidden.group.local_of(target, 0, hidden.group.lengths)
    with torch.autocast(hidden.device.type, enabled=False, cache_enabled=False):  # its cast weight serves no other call
        losses = linear_row_losses(*family.head.operands(hidden), goal, compute)
    family.has_loss = True
    group = hidden.group if isinstance(hidden, Sharded) else None
    return reduced_losses(losses, target, group, reduction, options.get("ignore_index", -100)).to(dtype)


def _local(x: Tensor) -> Tensor:
    return x.local if isinstance(x, Sharded) else x


def _version(x: Tensor) -> int:
    return version_of(_local(x))


def _shape(x: Tensor) -> torch.Size:
    with as_plain_tensors():
        return x.shape


def _dtype(x: Tensor) -> torch.dtype:
    with as_plain_tensors():
        return x.dtype


def _requires_grad(x: Tensor) -> bool:
    with as_plain_tensors():
        return x.requires_grad


def _refused(what: str) -> ConfigError:
    return ConfigError(_FIELD, True, what, f"Set {_FIELD} to false, so that the head computes all logits at once")


_CASTS = frozenset(functions_named("float double half bfloat16 to"))
_TOLD = frozenset(
    functions_named(
        "shape size dim ndim ndimension numel nelement dtype device layout requires_grad is_leaf grad_fn is_cuda "
        "is_cpu is_meta is_sparse is_nested is_quantized is_mps is_xpu is_floating_point is_complex get_device "
        "element_size itemsize is_inference __len__ __hash__ names"
    )
)
_RULES: dict[Any, Rule] = {
    **dict.fromkeys(_CASTS, _then),
    **dict.fromkeys(
        functions_named("mul multiply div divide true_divide neg negative tanh __mul__ __rmul__ __truediv__ __neg__"),
        _then,
    ),
    **dict.fromkeys(functions_named("contiguous"), _same),
    **dict.fromkeys(functions_named("view reshape"), _rows),
    **dict.fromkeys(functions_named("flatten"), _flatten),
    **dict.fromkeys(functions_named("__getitem__"), _getitem),
    **dict.fromkeys(functions_named("register_hook retain_grad"), _hook),
    **dict.fromkeys(functions_named("cross_entropy"), _cross_entropy),
}
