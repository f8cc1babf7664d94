"""Values that only other ranks have: placeholders of their parameters, and everything computed from them.

A rank runs the user's own step with most of the model remote, and throws away what it computes of remote parts. So a
remote parameter may be used, and its results too, as long as no result is kept. A `RemoteValue` is such a result: a
tensor full of NaN that marks every result of every torch function that takes it, comparisons and ``nan_to_num`` too.
Whatever would turn it into something unmarked raises `RemoteParameterError`: a Python number or bool, a NumPy array, a
pickled or saved tensor, a backward, and a write into a tensor that is kept. `settled` is for what leaves a step.

Logits of a large vocabulary would take gigabytes of NaN. A large result of a linear layer of other ranks has zero
strides in place of memory, and what a step that is thrown away computes of it is found on torch's "meta" device.

A result is `exact` while NaN stands exactly where a value is remote. Parts without NaN that are cut out of such a
tensor, after a ``torch.stack`` of states of which some are remote, say, are plain tensors again.

Torch's functions are told apart by what they do with the values of tensors.

A set of functions holds the objects that torch passes to ``__torch_function__``. A set of names covers methods of
tensors and functions of torch at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lightning_mm5d.config.errors import RemoteParameterError, private
from lightning_mm5d.sharded.removable import meanwhile
from lightning_mm5d.sharded.tensor import functions_named, is_in_place


def _methods(*names: str) -> set[Any]:
    """The functions of these names, of tensors and of torch; attributes by the function that reads them."""
    return set(functions_named(" ".join(names), Tensor, torch))


# They tell nothing of values. The functions that set `requires_grad` and views in place are among them.
TELLING = _methods(
    *("shape", "dtype", "device", "layout", "ndim", "names", "name", "requires_grad", "is_leaf", "grad_fn", "grad"),
    *("output_nr", "_version", "retains_grad", "itemsize", "nbytes", "_backward_hooks", "_post_accumulate_grad_hooks"),
    *("is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn"),
    *("is_nested", "is_xla", "is_ipu", "is_hpu", "is_vulkan", "is_maia", "is_mtia"),
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "dim_order"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_pinned", "is_shared"),
    *("is_conj", "is_neg", "is_same_size", "get_device", "dense_dim", "sparse_dim", "has_names", "is_distributed"),
    *("_is_view", "can_cast", "result_type", "promote_types", "_has_compatible_shallow_copy_type", "is_coalesced"),
    *("__len__", "__hash__", "__dir__", "requires_grad_", "register_hook", "retain_grad", "share_memory_"),
    *("register_post_accumulate_grad_hook", "rename_", "detach_", "unsqueeze_", "squeeze_", "t_", "transpose_"),
    *("swapaxes_", "swapdims_", "as_subclass"),
) | {Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
# They take the shape, dtype and device of all their tensors alone.
LIKE = _methods(
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided"),
)
# They take these from their second tensor.
AS = _methods("expand_as", "view_as", "reshape_as", "type_as", "to", "resize_as_")
CASTING = ("to", "cpu", "cuda", "double", "float", "half", "bfloat16", "type")
LEAVING = {
    *("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__"),
    *("__contains__", "equal", "allclose", "is_nonzero", "__reduce_ex__", "__reduce__", "__setstate__", "data_ptr"),
    *("storage", "_typed_storage", "untyped_storage", "__dlpack__", "backward", "save"),
}
# They move values without changing them, so that NaN stays where it stands for a remote value.
MOVING = {
    *("view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "flatten", "unflatten"),
    *("contiguous", "clone", "detach", "to", "movedim", "double", "float", "half", "bfloat16", "cpu", "cuda", "repeat"),
    *("type", "flip", "roll", "expand_as", "view_as", "reshape_as", "type_as"),
}
CUTTING = {
    *("__getitem__", "select", "narrow", "split", "split_with_sizes", "tensor_split", "chunk", "unbind", "diagonal"),
    *("index_select", "gather", "masked_select", "take_along_dim"),
}
JOINING = {
    *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "where", "masked_fill", "masked_fill_"),
    *("masked_scatter", "masked_scatter_", "__setitem__", "index_put", "index_put_", "index_copy", "index_copy_"),
    *("scatter", "scatter_", "copy_"),
}


class Guard:
    """Says of remote values who holds them, and when they may be used.

    Args:
        where: returns the ranks that hold the parameters of a dotted path, in words.
        parameters: returns those of the module, which no step writes remote values into.

    Attributes:
        ends_here: whether the step that is under way runs to its end on this rank; None outside of steps.
        is_dry: whether nothing but shapes is kept of what runs.
        received: parameters of other ranks that the step under way has received, by name.
        shows_full: whether every rank sees full parameters: in a hook, and ever where no rank has parts of them.
        suspended: entered, with a place in words, around what works on local tensors within such a hook.
        entered: entered, with a place in words and what is gathered at once, to see full parameters; None where nothing
            shows them.
    """

    def __init__(self, where: Callable[[str], str], parameters: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._where, self._parameters = where, parameters
        self.ends_here: bool | None = None
        self.is_dry = False
        self.received: Mapping[str, Tensor] = {}
        self.shows_full = False
        self.suspended: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()
        self.entered: Callable[..., AbstractContextManager[None]] | None = None

    def close(self) -> None:
        """Let go of the module and its run, which placeholders would keep alive through this."""
        self._parameters, self.suspended, self.entered = tuple, lambda _: nullcontext(), None

    def dry_run(self) -> AbstractContextManager[None]:
        """Let remote values be NaN meanwhile, for a run of which nothing but shapes is kept."""
        return meanwhile(self, is_dry=True)

    def keeps(self, tensor: Tensor) -> bool:
        """Whether `tensor` has the memory of a parameter, as ``parameter.data`` and ``parameter.detach()`` have."""
        with plain():
            memory = tensor.untyped_storage().data_ptr()
            return any(memory == p.untyped_storage().data_ptr() for p in self._parameters() if not is_remote(p))

    def error(self, name: str, use: str) -> RemoteParameterError:
        """Return the error of `use`, for instance ``"item()"``, of a value that depends on the parameter `name`."""
        wanted = f"{use} needs a value that depends on `{name}`, which is on {self._where(name)}. "
        if self.ends_here is None:
            return RemoteParameterError(
                f"{wanted}Hooks of modules and callbacks see all weights. Elsewhere, read them within `with "
                "trainer.strategy.full_parameters():` on all ranks, or call trainer.strategy.full_state_dict() on all "
                "ranks: rank 0 gets full tensors. To save them, call trainer.save_checkpoint(...) on all ranks"
            )
        return RemoteParameterError(
            f"{wanted}Call the module that computes with it where its result passes through a boundary. Set "
            "`boundary`, or `feeds` to the stages that use the result, or pp_size to 1 where states from between "
            "layers are used. In place of a penalty on weights, use the optimizer's weight_decay, or add the penalty's "
            "gradient in on_after_backward, which sees all weights"
        )


@dataclass(frozen=True, eq=False)
class Origin:
    """What a remote value comes from: the dotted path of a parameter or module, and the guard of the rank's module."""

    name: str
    guard: Guard


class RemoteValue(Tensor):
    """A tensor that depends on values of other ranks.

    Attributes:
        origin: one of the parameters or modules that it depends on.
        exact: whether NaN stands exactly where a value is remote.
        mixed: whether other values may stand beside it.
    """

    origin: Origin
    exact: bool
    mixed: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _KINDS.issuperset(types):
            return NotImplemented  # another subclass knows better
        if func in _VALUELESS:
            with plain():
                return func(*args, **(kwargs or {}))
        return _call(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = marked(_nan(self.shape, self.dtype, self.device), self.origin)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.origin.guard.error(self.origin.name, "A copy or a file of it")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.origin.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        if spec:
            raise self.origin.guard.error(self.origin.name, f"format(..., {spec!r})")
        return repr(self)


class Placeholder(nn.Parameter):
    """A parameter of other ranks: NaN of its shape without memory. Writes to it are dropped."""

    origin: Origin
    exact: bool
    mixed: bool

    __torch_function__ = RemoteValue.__torch_function__
    __reduce_ex__ = RemoteValue.__reduce_ex__
    __repr__ = RemoteValue.__repr__  # type: ignore[assignment]
    __format__ = RemoteValue.__format__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = placeholder(self, self.origin)
        return memo[id(self)]


_KINDS = frozenset((Tensor, nn.Parameter, RemoteValue, Placeholder))


def is_remote(value: Any) -> TypeGuard[RemoteValue | Placeholder]:
    """Whether `value` is a tensor that depends on values of other ranks."""
    return isinstance(value, (RemoteValue, Placeholder))


def placeholder(parameter: Tensor, origin: Origin, device: torch.device | None = None) -> Placeholder:
    """Return a parameter without memory in the shape, dtype and device of `parameter`, or on `device`."""
    empty = _nan(parameter.shape, parameter.dtype, device or parameter.device)
    result = Placeholder(empty, requires_grad=parameter.requires_grad)
    return _marked(result, origin, exact=result.is_floating_point(), mixed=False)


def make_placeholder(
    parameter: nn.Parameter, shape: Sequence[int], origin: Origin, device: torch.device | None = None
) -> None:
    """Turn a parameter into a placeholder of `shape`, in place, on its device or on `device`."""
    parameter.data = _nan(shape, parameter.dtype, device or parameter.device)
    parameter.__class__ = Placeholder
    _marked(parameter, origin, exact=parameter.is_floating_point(), mixed=False)


def make_parameter(parameter: Placeholder, value: Tensor) -> None:
    """Turn a placeholder into a parameter with `value`, in place."""
    _unmark(parameter)
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    parameter.data = value
    parameter.grad = None


@contextmanager
def in_memory(parameters: Iterable[Tensor], fill: float = math.nan) -> Iterator[None]:
    """Give placeholders NaN, or `fill`, in memory meanwhile: kernels may read weights without regard to strides."""
    with plain():
        before = [(parameter, parameter.data) for parameter in parameters if isinstance(parameter, Placeholder)]
        for parameter, data in before:
            parameter.data = data.contiguous() if math.isnan(fill) else torch.full_like(data, fill).contiguous()
    try:
        yield
    finally:
        with plain():
            for parameter, data in before:
                parameter.data = data


def make_plain(value: RemoteValue) -> None:
    """Turn a remote value into an ordinary tensor, in place; NaN stays in it until it is written."""
    _unmark(value)
    value.__class__ = Tensor  # type: ignore[assignment]


def marked(tensor: Tensor, origin: Origin, *, exact: bool | None = None) -> RemoteValue:
    """Return `tensor` as a remote value: one full of NaN where its dtype has one, or else `exact` or not."""
    result = tensor.as_subclass(RemoteValue)
    return _marked(
        result, origin, exact=tensor.is_floating_point() if exact is None else exact, mixed=exact is not None
    )


def remote_value(
    shape: Iterable[int], dtype: torch.dtype, device: torch.device, origin: Origin, *, requires_grad: bool
) -> RemoteValue:
    """Return a remote value full of NaN, with memory, because models write features into embeddings in place."""
    values = _nan(tuple(shape), dtype, device, requires_grad=requires_grad)
    # no leaf, because a leaf that carries a gradient cannot be written to in place
    return marked(values.clone(memory_format=torch.contiguous_format), origin)


def without_memory(
    shape: Iterable[int], dtype: torch.dtype, device: torch.device, origin: Origin, *, requires_grad: bool
) -> RemoteValue:
    """Return what `remote_value` returns; without memory, where it is large. Writes to it are then dropped."""
    size = torch.Size(shape)
    if size.numel() < _LARGE:
        return remote_value(size, dtype, device, origin, requires_grad=requires_grad)
    return marked(_nan(size, dtype, device, requires_grad=requires_grad), origin)


def same_origin(result: Tensor, source: Tensor) -> Tensor:
    """Return `result`, computed from `source` where torch functions do not see it, as remote if `source` is."""
    if not isinstance(source, (RemoteValue, Placeholder)) or is_remote(result):
        return result
    return marked(result, source.origin, exact=False)


def settled(value: Any, use: str) -> Any:
    """Return `value`, which `use` is about to keep, as a plain tensor where it is one of the step that is thrown away.

    Raises:
        RemoteParameterError: it depends on values of other ranks.
    """
    if not is_remote(value) or value.origin.guard.ends_here is False:
        return value
    with plain():
        if value.exact and not bool(value.isnan().any()):
            return value.as_subclass(Tensor)
    raise value.origin.guard.error(value.origin.name, use)


def _nan(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, requires_grad: bool = False) -> Tensor:
    filler = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), filler, dtype=dtype, device=device, requires_grad=requires_grad and filler != 0).expand(shape)


def _unmark(tensor: Tensor) -> None:
    for name in ("origin", "exact", "mixed"):
        vars(tensor).pop(name, None)


def _marked(tensor: Any, origin: Origin, *, exact: bool, mixed: bool) -> Any:
    tensor.origin, tensor.exact, tensor.mixed = origin, exact, mixed
    return tensor


# --- torch functions of remote values ---

_LARGE = 2**24
"""elements of a remote value from which on it has no memory"""

plain = private(torch._C, "DisableTorchFunctionSubclass")
"""Enter to read attributes of many placeholders as fast as those of other parameters."""
_VALUELESS = TELLING | LIKE
_EXACT = MOVING | CUTTING | JOINING | {"__get__"}  # of attributes, `data` and transposed views are left


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    used = tensors_of(args[:1] if func in AS else (args, kwargs))
    remote = [tensor for tensor in used if is_remote(tensor)]
    if not remote:  # another tensor is shown in the shape of a remote one
        with plain():
            return func(*args, **kwargs)
    if name == "equal" and all(isinstance(tensor, nn.Parameter) for tensor in used):
        return used[0] is used[-1]  # Lightning asks so whether an optimizer has a parameter
    origin = remote[0].origin
    guard = origin.guard
    if guard.received and not guard.is_dry:
        first = args[:1] if is_in_place(name) else ()
        if any(_arrived(tensor) is not None for tensor in tensors_of((args[len(first) :], kwargs))):
            return func(*first, *replaced(args[len(first) :], _arrived), **replaced(kwargs, _arrived))
    if name in LEAVING and not guard.is_dry:
        raise guard.error(origin.name, f"{name}()")
    if kwargs.get("out") is not None or is_in_place(name):
        return _write(func, name, args, kwargs, origin)
    if name in CASTING and isinstance(args[0], Placeholder):
        return _cast(func, args, kwargs)
    with plain():
        is_thrown_away = guard.ends_here is False and not guard.is_dry
        is_large = is_thrown_away and any(tensor.numel() >= _LARGE and _has_no_memory(tensor) for tensor in remote)
        shaped = _shaped(func, args, kwargs, used, remote[0].device) if is_large else None
        result = func(*args, **kwargs) if shaped is None else shaped
    exact = name in _EXACT and all(tensor.exact for tensor in remote)
    mixed = any(tensor.mixed for tensor in remote) or (name in JOINING and len(remote) < len(used))
    return _result(result, name, used, origin, exact=exact, mixed=mixed)


def _shaped(func: Any, args: Any, kwargs: Any, used: Sequence[Tensor], device: torch.device) -> Any:
    """Return values without memory in the shapes that a function returns; None where shapes depend on values."""

    def on_meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().as_subclass(Tensor).to("meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    try:
        meta = func(*replaced(args, on_meta), **replaced(kwargs, on_meta))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    carries = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in used)
    if isinstance(meta, Tensor):
        return _nan(meta.shape, meta.dtype, device, requires_grad=carries)
    if type(meta) in (tuple, list) and all(isinstance(tensor, Tensor) for tensor in meta):
        return type(meta)(_nan(tensor.shape, tensor.dtype, device, requires_grad=carries) for tensor in meta)
    return None


def _arrived(value: Any) -> Tensor | None:
    """What was received in the place of a parameter."""
    return value.origin.guard.received.get(value.origin.name) if isinstance(value, Placeholder) else None


def _result(result: Any, name: str, used: Sequence[Tensor], origin: Origin, *, exact: bool, mixed: bool) -> Any:
    """Mark what a function returned of remote values."""
    if isinstance(result, Tensor):
        if is_remote(result) or any(result is tensor for tensor in used):
            return result
        floats = result.is_floating_point()
        with torch.no_grad(), plain():
            if exact and mixed and floats and name in CUTTING and not bool(result.isnan().any()):
                return result
            if floats and not exact and not result.requires_grad and result._base is None:
                result.data.fill_(float("nan"))  # comparisons have made numbers of it; no write of the user's
        return _marked(result.as_subclass(RemoteValue), origin, exact=exact and floats, mixed=mixed)
    if result is None:
        return None
    if isinstance(result, (tuple, list)) and all(
        isinstance(part, (Tensor, tuple, list, type(None))) for part in result
    ):
        values = [_result(part, name, used, origin, exact=exact, mixed=mixed) for part in result]
        return type(result)(*values) if hasattr(result, "_fields") else type(result)(values)
    if origin.guard.is_dry:
        return result
    raise origin.guard.error(origin.name, f"{name}()")


def _write(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], origin: Origin) -> Any:
    """Write in place; writes to placeholders are dropped, because callbacks copy averages into modules."""
    targets = kwargs["out"] if kwargs.get("out") is not None else args[0] if args else kwargs["tensor"]  # of nn.init
    if isinstance(targets, (tuple, list)):
        return _write_each(func, name, args, kwargs, targets)
    value = args[-1] if len(args) > 1 else None
    others = [tensor for tensor in tensors_of((args[1:], kwargs)) if is_remote(tensor)]
    exact = name in JOINING and all(tensor.exact for tensor in others)
    if is_remote(targets):
        if name == "__set__":  # of `data`, when the module moves, and of `grad`
            if is_remote(value) or value is None:
                with plain():
                    func(*args)
        elif isinstance(targets, Placeholder) or _has_no_memory(targets):
            increment_version(targets)  # all that tells of it
        else:
            with plain():
                func(*args, **kwargs)
            targets.exact, targets.mixed = targets.exact and exact, True
        return targets
    guard = origin.guard
    if guard.is_dry:
        with plain():
            return func(*args, **kwargs)
    if name == "__set__" or isinstance(targets, nn.Parameter) or guard.ends_here is None or guard.keeps(targets):
        raise guard.error(origin.name, f"{name}() on another tensor")
    with plain():
        func(*args, **kwargs)
        base = targets._base
    for tensor in (targets, base):
        if tensor is not None and not is_remote(tensor):
            tensor.__class__ = RemoteValue
            _marked(tensor, origin, exact=exact and tensor.is_floating_point(), mixed=True)
    return targets


def _write_each(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Sequence[Any]) -> Any:
    """Write to several tensors, each on its own."""
    for index in range(len(targets)):

        def at_index(value: Any, index: int = index) -> Any:
            is_list = isinstance(value, (tuple, list)) and len(value) == len(targets)
            return type(value)([value[index]]) if is_list else value

        positional, options = tuple(map(at_index, args)), {key: at_index(value) for key, value in kwargs.items()}
        remote = [tensor for tensor in tensors_of((positional, options)) if is_remote(tensor)]
        target = targets[index]
        if is_remote(target) and (isinstance(target, Placeholder) or _has_no_memory(target)):
            increment_version(target)
            continue
        guard = remote[0].origin.guard if remote else None
        if guard is not None and not is_remote(target) and not guard.is_dry:
            raise guard.error(remote[0].origin.name, f"{name}() on another tensor")
        with plain():
            func(*positional, **options)
    return targets


def _cast(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Move a placeholder, or change its dtype, without giving it memory."""
    parameter = args[0]
    with torch.no_grad(), plain():
        scalar = parameter.as_strided((), ())
        moved = func(scalar, *args[1:], **{key: value for key, value in kwargs.items() if key != "memory_format"})
        if not isinstance(moved, Tensor):  # the name of its type
            return moved
        if moved.dtype == parameter.dtype and moved.device == parameter.device:
            return parameter
        return marked(moved.expand(parameter.shape), parameter.origin)


def _has_no_memory(tensor: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in `tree`, in their order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return []
    return [tensor for value in tree for tensor in tensors_of(value)]


def replaced(tree: Any, replace: Callable[[Any], Any]) -> Any:
    """Return `tree` with what `replace` gives for a leaf in its place; None leaves it."""
    if isinstance(tree, dict):
        return {key: replaced(value, replace) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        values = [replaced(value, replace) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    value = replace(tree)
    return tree if value is None else value
