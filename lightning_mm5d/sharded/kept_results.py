"""Keeps results of operations of a forward, for the same forward when it runs again in the backward.

An operation is known again by the names of all operations up to it and by the shapes that they take. Where these
differ, or something has written to the result, it is computed again: the result is right in any case.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _python_dispatch, checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_mm5d.config.errors import private

# before torch 2.13 under another name, with an argument that says whether views are detached as well
_detached = (
    private(checkpoint, "_detach_helper")
    if hasattr(checkpoint, "_detach_helper")
    else partial(private(checkpoint, "_maybe_detach"), any_ret_has_alias_info=True)
)
_disabled = private(_python_dispatch, "_disable_current_modes")
_modes = private(_python_dispatch, "_get_current_dispatch_mode_stack")
_IGNORED = private(checkpoint, "SAC_IGNORED_OPS")  # of which checkpointing itself calls some

_Key = tuple[str, int]


class _Result:
    """What an operation returned, and whether it is still that."""

    def __init__(self, out: Any) -> None:
        leaves, self._spec = tree_flatten(out)
        self.leaves = [_detached(leaf) for leaf in leaves]
        self._versions = self._versions_now()

    def value(self) -> Any:
        return tree_unflatten([_detached(leaf) for leaf in self.leaves], self._spec)

    def is_unchanged(self) -> bool:
        return self._versions == self._versions_now()

    def _versions_now(self) -> list[int]:
        return [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in self.leaves]


class _Operations(TorchDispatchMode):
    """Sees all operations, and folds the names and shapes of those so far into one number."""

    def __init__(self, operations: Collection[str], results: dict[_Key, _Result]) -> None:
        super().__init__()
        self._operations, self._results = operations, results
        self._names: dict[Any, str] = {}
        self._trails: dict[str, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code runs as it is compiled."""
        return True

    def __enter__(self) -> _Operations:
        self._trails.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _IGNORED:
            return func(*args, **kwargs)
        name = self._names.get(func)
        if name is None:
            namespace = getattr(func, "namespace", "higher_order")
            name = func.name().rpartition("::")[2].partition(".")[0]
            name = self._names[func] = f"{namespace}.{name}"
        if name.startswith("c10d."):  # they write to tensors and do not say so
            self._forget({x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)})
        key = self._key("", name, args)
        if name not in self._operations:
            return func(*args, **kwargs)
        return self._result(key, lambda: func(*args, **kwargs))

    def as_one_operation(self, name: str, args: tuple[Tensor, ...], compute: Callable[[], Any]) -> Any:
        """Return ``compute()``, whose operations are none of their own; it is counted among those of its name alone."""
        if name not in self._operations:
            return compute()
        return self._result(self._key(name, name, args), compute)

    def _key(self, counter: str, name: str, args: tuple) -> _Key:
        self._trails[counter] = hash(
            (self._trails.get(counter), name, *(x.shape for x in args if isinstance(x, Tensor)))
        )
        return counter, self._trails[counter]

    def _forget(self, written: set[int]) -> None:
        pass

    @abstractmethod
    def _result(self, key: _Key, compute: Callable[[], Any]) -> Any:
        """Return what an operation gives: computed, or kept."""


class _Keeps(_Operations):
    def _result(self, key: _Key, compute: Callable[[], Any]) -> Any:
        out = compute()
        self._results[key] = _Result(out)
        return out

    def _forget(self, written: set[int]) -> None:
        for key, result in list(self._results.items()):
            if any(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in written for x in result.leaves):
                del self._results[key]


class _Takes(_Operations):
    def _result(self, key: _Key, compute: Callable[[], Any]) -> Any:
        result = self._results.pop(key, None)
        return compute() if result is None or not result.is_unchanged() else result.value()


def kept_results(operations: Collection[str]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return what to enter around a forward, and around the same one when it runs again; that may be several times.

    Args:
        operations: whose results the first keeps, as ``aten.mm``.
    """
    results: dict[_Key, _Result] = {}
    return _Keeps(operations, results), _Takes(operations, results)


def as_one(name: str, args: tuple[Tensor, ...], compute: Callable[[], Any]) -> Any:
    """Return ``compute()``, one operation for `kept_results`.

    Args:
        name: of the operation.
        args: that it takes.
        compute: returns tensors.
    """
    around = _around()
    if around is None:
        return compute()
    with _disabled():
        return around.as_one_operation(name, args, compute)


def unseen() -> AbstractContextManager[Any]:
    """Enter around operations that run in a forward and not when it runs again, such as those that fill a cache."""
    return nullcontext() if _around() is None else _disabled()


def _around() -> _Operations | None:
    return next((mode for mode in reversed(_modes()) if isinstance(mode, _Operations)), None)


def operations_named(names: Collection[str]) -> frozenset[str]:
    """Return the operations that torch runs for those of these names: ``aten.linear`` runs as aten.mm or aten.addmm."""
    return frozenset(names).union(*(_RUNS_AS.get(name, ()) for name in names))


_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.mv", "aten.dot", "aten.addmv")
_RUNS_AS = {
    "aten.linear": ("aten.mm", "aten.addmm", "aten._addmm_activation", "aten.mkldnn_linear"),
    "aten.matmul": _PRODUCTS,
    "aten.einsum": _PRODUCTS,
    "aten.scaled_dot_product_attention": (
        *(f"aten._scaled_dot_product_{way}_attention" for way in ("flash", "efficient", "cudnn")),
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_fused_attention_overrideable",
        "aten._flash_attention_forward",
        "aten._efficient_attention_forward",
    ),
    **{f"aten.conv{dims}d": ("aten.convolution",) for dims in (1, 2, 3)},
}
