"""Rules for functions of sharded tensors that need no full tensor.

A rule takes the function and its arguments and returns a `Sharded`, what the function returns of a full tensor, or
NotImplemented where these arguments do not fit; then the full tensors are gathered. There are rules for pointwise
functions, for those along other dims than the sharded one, for views and indices that keep it, for the cross entropy
and other functions over sharded classes, and for what is told of a tensor without computing.

Importing this module registers them.

How sharded tensors pass through what torch does with gradients: hooks, `autograd.grad`, `backward`, `retain_grad`.

A user sees gradients of the full tensor. Those of local tensors may be a multiple of it (`Group.factor`), which is
divided out here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_mm5d.data.random_state import drawn_seed
from lightning_mm5d.sharded.class_operations import RULES, along_classes, cross_entropy
from lightning_mm5d.sharded.collectives import TensorGroup, with_length
from lightning_mm5d.sharded.sequence import (
    cross_entropy_of_tokens,
    is_tokens,
    narrowed_sequence,
    reshaped_sequences,
)
from lightning_mm5d.sharded.tensor import (
    WRITING,
    Sharded,
    Sharding,
    as_sharded,
    functions_named,
    on_full,
    without_graph,
)
from lightning_mm5d.sharded.torch_internals import as_plain_tensors, in_backward


def beside_local(x: Tensor, sharding: Sharding) -> Tensor | None:
    """Return what the full `x` is for an operation with local tensors, by the rules of broadcasting.

    Args:
        x: replicated.
        sharding: of the other operand.

    Returns:
        `x` itself where it broadcasts along the sharded dim, this rank's shard of it where it has the full length
        there, None where it has another.
    """
    dim, lengths, size, group = sharding
    needed = x.requires_grad and torch.is_grad_enabled()
    if x.dim() < -dim or x.shape[dim] == 1:
        return group.copied(x) if needed else x
    if x.shape[dim] == size:
        return group.scattered(x, dim, lengths) if needed else group.local_of(x, dim, lengths)
    return None


def on_local(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `func` with local tensors: the rule of functions that tell the same of them as of the full tensor."""
    return func(*_locals(args), **{name: x.local if type(x) is Sharded else x for name, x in kwargs.items()})


def register_hook(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, hook = args

    def of_local(gradient: Tensor) -> Tensor | None:
        changed = hook(_sharded_gradient(gradient, x.sharding))
        if changed is None:
            return None
        local = changed.local if type(changed) is Sharded else beside_local(changed, x.sharding)
        return local if x.group.factor == 1 or local is None else local * x.group.factor

    return func(x.local, of_local, **kwargs)


def gradients_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``torch.autograd.grad``: of inputs that are sharded, the gradients are."""
    outputs, inputs = args[:2]
    inputs = [inputs] if isinstance(inputs, Tensor) else inputs
    pairs = zip(inputs, on_full(func, (outputs, tuple(_locals(inputs))), kwargs), strict=True)
    return tuple(g if g is None or type(x) is not Sharded else _sharded_gradient(g, x.sharding) for x, g in pairs)


def backward(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``torch.autograd.backward`` from local tensors.

    A user gives gradients of the full tensors; a checkpoint passes on those of local tensors.
    """
    options = dict(zip(("tensors", "grad_tensors"), args, strict=False)) | dict(kwargs)
    tensors, gradients = options.pop("tensors"), options.pop("grad_tensors", None)
    tensors = [tensors] if isinstance(tensors, Tensor) else [*tensors]
    gradients = [gradients] if isinstance(gradients, Tensor) else gradients
    if gradients is not None:
        pairs = zip(tensors, gradients, strict=True)
        gradients = [_local_gradient(x, gradient) if type(x) is Sharded else gradient for x, gradient in pairs]
    inputs = options.pop("inputs", None)
    inputs = [inputs] if isinstance(inputs, Tensor) else inputs
    return func(_locals(tensors), gradients, inputs=inputs and _locals(inputs), **options)


def requires_grad(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Also of what an autograd function returned or saved, whose graph is its own and not that of its values."""
    x = args[0]
    if x._local is not None:
        return func(x._local)
    with as_plain_tensors():
        return func(x) or func(x._raw)


def kept_gradient(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``x.grad``, sharded as `x` is."""
    gradient = func(args[0].local)
    if gradient is None or in_backward():
        return gradient  # inside a backward: a checkpoint hands it to autograd, which knows the local tensor alone
    return _sharded_gradient(gradient, args[0].sharding)


def _sharded_gradient(local: Tensor, sharding: Sharding) -> Sharded:
    factor = sharding.group.factor
    return as_sharded(local if factor == 1 else local / factor, sharding)


def _local_gradient(x: Sharded, gradient: Tensor | None) -> Tensor | None:
    if type(gradient) is Sharded:
        return gradient.local
    if gradient is None or gradient.shape != x.shape:
        return gradient
    local = x.group.local_of(gradient, x.sharded_dim, x.lengths)
    return local if x.group.factor == 1 else local * x.group.factor


def _locals(values: Iterable[Any]) -> list[Any]:
    return [x.local if type(x) is Sharded else x for x in values]


def _pointwise(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    values = (*args, *kwargs.values())
    first = next((x for x in values if type(x) is Sharded), None)
    if first is None or kwargs.get("out") is not None:
        return NotImplemented
    sharding = first.sharding
    local: list[Any] = []
    for x in values:
        if type(x) is Sharded:
            if x.sharding is not sharding and x.sharding != sharding:
                return NotImplemented
            x = x.local
        elif isinstance(x, Tensor):
            x = beside_local(x, sharding)
            if x is None:
                return NotImplemented
        local.append(x)
    result = func(*local[: len(args)], **dict(zip(kwargs, local[len(args) :], strict=True)))
    if result is first.local:
        return first
    return as_sharded(result, sharding) if isinstance(result, Tensor) else NotImplemented


def _pointwise_in_place(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _pointwise(func, args, kwargs) if type(args[0]) is Sharded else NotImplemented


def _same(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first argument in another dtype or graph; the others are examples."""
    x = args[0]
    result = on_local(func, args, kwargs)
    if type(x) is not Sharded or not isinstance(result, Tensor):
        return result
    if result is x.local:
        return x
    # On another device the group may not be able to gather.
    return as_sharded(result, x.sharding) if result.device == x.local.device else NotImplemented


def _like(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x = args[0]
    return func(x.local.detach().new_empty(()).expand(x.shape), *args[1:], **kwargs)


def _along(position: int, empty: bool = True) -> Callable[..., Any]:
    """Rule of functions along the dims that are argument `position`; `empty`: also of local tensors without entries."""

    def rule(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        x = args[0]
        dims = kwargs.get("dim", args[position] if len(args) > position else None)
        dims = [dims] if type(dims) is int else dims
        others = (*args[1:], *kwargs.values())
        if type(x) is not Sharded or not isinstance(dims, list | tuple) or not dims:
            return NotImplemented
        if any(type(dim) is not int for dim in dims) or any(isinstance(other, Tensor) for other in others):
            return NotImplemented
        local, sharding = x.local, x.sharding
        dims = {dim if dim < 0 else dim - local.dim() for dim in dims}
        if sharding.dim in dims or (0 in sharding.lengths and not empty):
            return NotImplemented
        result = func(local, *args[1:], **kwargs)
        if not isinstance(result, Tensor):
            return NotImplemented
        removed = sum(dim > sharding.dim for dim in dims) if result.dim() < local.dim() else 0
        return as_sharded(result, sharding._replace(dim=sharding.dim + removed))

    return rule


def _weighted(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Rule of norms and products along dims after the sharded one; their other arguments are replicated."""
    x = args[0]
    if type(x) is not Sharded or len(args) < 2:
        return NotImplemented
    dim, _, _, group = x.sharding
    fits = args[1].dim() == 2 and dim < -1 if isinstance(args[1], Tensor) else len(args[1]) < -dim
    local: list[Any] = [x.local]
    for other in (*args[1:], *kwargs.values()):
        if type(other) is Sharded or not fits:
            return NotImplemented
        needed = isinstance(other, Tensor) and other.requires_grad and torch.is_grad_enabled()
        local.append(group.copied(other) if needed else other)
    result = func(*local[: len(args)], **dict(zip(kwargs, local[len(args) :], strict=True)))
    return as_sharded(result, x.sharding)


def _dropout(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Each rank draws for its local tensor; the default generators stay equal on all ranks."""
    options = dict(zip(("p", "training", "inplace"), args[1:], strict=False)) | dict(kwargs)
    x, p = args[0], options.get("p", 0.5)
    if not options.get("training", True) or not 0 < p <= 1:
        return NotImplemented if not 0 <= p <= 1 else x
    local, group = x.local, x.sharding.group
    generator = torch.Generator(local.device)
    generator.manual_seed(drawn_seed(group.index))
    mask = torch.empty(local.shape, dtype=torch.bool, device=local.device).bernoulli_(1 - p, generator=generator)
    scale = 1 / (1 - p) if p < 1 else 0.0
    if options.get("inplace"):
        local.mul_(mask).mul_(scale)
        return x
    return as_sharded(local * mask * scale, x.sharding)


def _reshaped(x: Sharded, sizes: Sequence[Any]) -> Any:
    if not all(type(size) is int for size in sizes):
        return NotImplemented
    sharding, shape, sizes = x.sharding, x.shape, [*sizes]
    if -1 in sizes:
        known = -math.prod(sizes)
        sizes[sizes.index(-1)] = shape.numel() // known if known else 0
    before = math.prod(shape[: sharding.dim])
    for place, size in enumerate(sizes):
        if size == sharding.size and math.prod(sizes[:place]) == before and math.prod(sizes) == shape.numel():
            local_sizes = with_length(sizes, place, x.local.shape[sharding.dim])
            return as_sharded(x.local.reshape(local_sizes), sharding._replace(dim=place - len(sizes)))
    return reshaped_sequences(x, sizes) if math.prod(sizes) == shape.numel() else NotImplemented


def _reshape(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if kwargs or type(args[0]) is not Sharded:
        return NotImplemented
    return _reshaped(args[0], args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:])


def _view_as(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, other = args
    if x is other and not torch.is_grad_enabled():  # so autograd functions return an argument
        return without_graph(x._raw.detach(), x.sharding)
    return _reshaped(x, other.shape) if type(x) is Sharded else NotImplemented


def _flatten(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    options = dict(zip(("start_dim", "end_dim"), args[1:], strict=False)) | dict(kwargs)
    shape = args[0].shape
    start, end = (options.get(name, other) % len(shape) for name, other in (("start_dim", 0), ("end_dim", -1)))
    return _reshaped(args[0], [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


def _moved(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Rule of functions that add, remove or reorder dims; an example shows where the sharded one goes."""
    x = args[0]
    sharding = x.sharding
    sizes = with_length([1 if size == 1 else 3 for size in x.shape], sharding.dim, 2)
    example = func(torch.empty(1).expand(sizes), *args[1:], **kwargs)
    result = func(x.local, *args[1:], **kwargs)
    if sharding.size == 1 or result.dim() != example.dim():
        return NotImplemented
    return as_sharded(result, sharding._replace(dim=example.shape.index(2) - example.dim()))


def _getitem(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, index = args
    if type(x) is not Sharded:
        return NotImplemented
    local, sharding = x.local, x.sharding
    entries: list[Any] = [*index] if isinstance(index, tuple) else [index]
    for entry in entries:
        picks = isinstance(entry, Tensor) and type(entry) is not Sharded and entry.dtype != torch.uint8
        if not (picks or entry is None or type(entry) in (int, slice, EllipsisType)):
            return NotImplemented
    takes = [_dims_taken(entry) for entry in entries]
    place, at, dim = local.dim() + sharding.dim, 0, sharding.dim
    for i, (entry, taken) in enumerate(zip(entries, takes, strict=True)):
        if entry is Ellipsis:
            taken = local.dim() - sum(takes)
        elif at > place:  # dims after the sharded one
            if isinstance(entry, Tensor):
                return NotImplemented
            dim += (type(entry) is int) - (entry is None)
        elif at <= place < at + taken:
            narrowed = narrowed_sequence(sharding, entry)
            if narrowed is None:
                return NotImplemented
            sharding, entries[i] = narrowed
        at += taken
    return as_sharded(func(local, tuple(entries)), sharding._replace(dim=dim))


def _setitem(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``x[index] = number``, as ``logits[..., banned] = -inf``: each rank writes what it holds of these entries."""
    x, index, value = args
    entries = index if isinstance(index, tuple) else (index,)
    if type(x) is not Sharded or isinstance(value, Tensor) or any(type(entry) is Sharded for entry in entries):
        return NotImplemented
    takes = [_dims_taken(entry) for entry in entries]
    sizes, at = [1] * len(x.shape), 0  # of a dim that is written as a whole, one entry stands for all
    for entry, taken in zip(entries, takes, strict=True):
        if not (isinstance(entry, slice) and entry == slice(None)):
            sizes[at : at + taken] = x.shape[at : at + taken]
        at += len(sizes) - sum(takes) if entry is Ellipsis else taken
    written = torch.zeros(sizes, dtype=torch.bool, device=x.local.device)
    written[index] = True
    dim, lengths, size, group = x.sharding
    written_here = group.local_of(written, dim, lengths) if sizes[dim] == size else written
    x.local.masked_fill_(written_here, value)
    return None


def _dims_taken(entry: Any) -> int:
    """How many dims an entry of an index takes."""
    if entry is None or entry is Ellipsis:
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype in (torch.bool, torch.uint8) else 1


def _cross_entropy(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    options = dict(zip(names, args[2:], strict=False)) | dict(kwargs)
    logits, target = args[0], args[1]
    if type(logits) is not Sharded or type(target) is Sharded or logits.dim() != 2:
        return NotImplemented
    if logits.sharding.dim == -2:
        return cross_entropy_of_tokens(logits, target, options)
    if is_tokens(logits.group) or target.dim() != 1 or target.dtype != torch.int64:
        return NotImplemented
    if any(options.pop(name, None) is not None for name in ("weight", "size_average", "reduce")):
        return NotImplemented
    _, lengths, size, _ = logits.sharding
    group: TensorGroup = logits.group
    start = sum(lengths[: group.index])
    return cross_entropy(logits.local, target, start=start, classes=size, group=group, **options)


def size_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``Tensor.size`` of a tensor that acts as the full one."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return args[0].shape if dim is None else args[0].shape[dim]


def _deepcopy(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    full = args[0].full()
    return full.detach().requires_grad_(full.requires_grad) if args[0].local.is_leaf else func(full, *args[1:])


def _repr(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    dim, lengths, _, group = args[0].sharding
    return f"Sharded(dim={dim}, lengths={lengths}, local of rank {group.index}: {args[0].local!r})"


_POINTWISE = """
    add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power neg negative
    positive abs absolute sign square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tanh atan erf reciprocal
    round floor ceil trunc clamp clip clamp_min clamp_max maximum minimum where lerp addcmul addcdiv nan_to_num
    masked_fill zero fill logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or bitwise_xor
    eq ne lt le gt ge isnan isinf isfinite sigmoid relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh
    hardsigmoid hardswish softplus softsign logsigmoid tanhshrink threshold
"""
_OPERATORS = """
    add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv div rdiv idiv floordiv rfloordiv mod rmod
    pow rpow ipow neg pos abs invert and rand or ror xor rxor eq ne lt le gt ge
"""
_SAME = "float half bfloat16 double long int bool to type type_as contiguous detach requires_grad_ data"
_ON_LOCAL = """
    dtype device layout requires_grad grad_fn is_leaf is_cuda is_cpu is_meta is_sparse is_nested is_quantized
    is_mps is_xpu names itemsize element_size is_floating_point is_complex is_signed is_inference get_device
    is_contiguous _version retain_grad retains_grad new_tensor new_empty new_zeros new_ones new_full
"""


def _fill(rules: dict[Any, Callable[..., Any]]) -> None:

    def add(rule: Callable[..., Any], names: str) -> None:
        rules.update(dict.fromkeys(functions_named(names, torch, Tensor, F, torch.linalg), rule))

    add(_pointwise, _POINTWISE)
    add(_pointwise, " ".join(f"__{name}__" for name in _OPERATORS.split()))
    add(_pointwise_in_place, " ".join(f"{name}_" for name in _POINTWISE.split()))
    add(_pointwise_in_place, " ".join(f"__{name}__" for name in _OPERATORS.split() if f"__{name}__" in WRITING))
    add(_same, _SAME)
    add(on_local, _ON_LOCAL)
    rules[Tensor.requires_grad.__get__] = requires_grad  # type: ignore[attr-defined]
    rules[Tensor.requires_grad.__set__] = on_local  # type: ignore[attr-defined]
    add(_like, "empty_like zeros_like ones_like full_like rand_like randn_like")
    add(_along(1), "mean sum prod amax amin logsumexp argmax argmin all any softmax log_softmax cumsum")
    for name in RULES:
        add(along_classes(name, None if name == "gather" else _along(1)), name)
    add(_along(1, empty=False), "var std")  # they warn of tensors without entries
    add(_along(2), "norm vector_norm normalize")
    add(_weighted, "layer_norm rms_norm linear matmul __matmul__")
    add(_dropout, "dropout")
    rules.pop(torch.dropout)  # takes its arguments otherwise
    add(_reshape, "view reshape")
    add(_view_as, "view_as")
    add(_flatten, "flatten")
    add(_moved, "transpose swapaxes permute movedim unsqueeze squeeze mT")
    add(_getitem, "__getitem__")
    add(_setitem, "__setitem__")
    add(_cross_entropy, "cross_entropy")
    add(register_hook, "register_hook")
    add(kept_gradient, "grad")
    # made for the caller alone; a clone is often made to write to it
    add(lambda func, args, kwargs: args[0].full(), "clone")
    add(_deepcopy, "__deepcopy__")
    add(_repr, "__repr__ __format__")
    rules[torch.autograd.grad] = gradients_of
    rules[torch.autograd.backward] = backward
    add(lambda func, args, kwargs: args[0].shape, "shape")
    add(size_of, "size")
    add(lambda func, args, kwargs: args[0].local.dim(), "dim ndim ndimension")
    add(lambda func, args, kwargs: args[0].shape.numel(), "numel nelement")
    add(lambda func, args, kwargs: args[0].shape[0], "__len__")


_fill(Sharded.rules)
