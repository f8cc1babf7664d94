"""What small tensors of a device hold, known in host memory without a wait for the device.

`HostCopies` is entered where a batch moves to the device, where it is split, and around a user's step. It sees which
tensors are made of integers and bools whose values the host knows, or of plain numbers. It can compute them a second
time on the host when somebody asks. So masks are digested without a wait, and so are a model's own questions
(``.tolist()``, ``bool(x)``, a number in an f-string).

Only functions without random numbers are followed (`_FOLLOWED`). A tensor that was written to in place is not known any
more, neither is what was made of it before it is asked for. Torch counts such writes, but not those of collectives, nor
those to tensors of inference mode, nor those through ``x.data``: the first are seen at process groups, the others where
a `HostCopies` is entered. So nothing that was made in inference mode is known longer than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_mm5d.config.errors import private
from lightning_mm5d.sharded.own_backwards import ORIGINALS, torchs_own
from lightning_mm5d.sharded.tensor import written_by
from lightning_mm5d.sharded.torch_internals import version_of

_is_wrapped = private(torch._C._functorch, "is_functorch_wrapped_tensor")
_FEW = 4096  # numbers of a tensor that is made a second time on the host
_LARGE = 1 << 20  # numbers of a tensor of the host that is not copied there
_MANY = 1 << 16  # places in memory whose writes are counted
_COLLECTIVES = ("all", "_all", "broadcast", "gather", "recv", "reduce", "_reduce", "scatter")
"""how methods of process groups that write to tensors begin, in any version of torch"""


class _Known(NamedTuple):
    version: tuple[int, ...]  # of the tensor of the device
    value: Callable[[], Tensor | None]  # on the host; None where it can no longer be told


class HostCopies(TorchFunctionMode):
    """What the host knows of tensors of a device.

    Attributes:
        waits: how often the host had to wait for the device, because it did not know a tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self._known = WeakTensorKeyDictionary()
        self._writes = Counter[int]()  # that torch does not count, by address

    def clear(self) -> None:
        """Forget all tensors."""
        self._known, self._writes = WeakTensorKeyDictionary(), Counter()

    def watch_collectives(self) -> Callable[[], None]:
        """Take note of what collectives write to, until the returned function is called."""
        stack = ExitStack()
        for name in [name for name in vars(dist.ProcessGroup) if name.startswith(_COLLECTIVES)]:
            stack.callback(setattr, dist.ProcessGroup, name, vars(dist.ProcessGroup)[name])
            setattr(dist.ProcessGroup, name, _noting(self._write, getattr(dist.ProcessGroup, name)))
        return stack.close

    def of(self, x: Tensor) -> Tensor:
        """Return what `x` holds, on the host; not to be written to. Waits for the device where that is not known."""
        host_copy = self.find(x)
        if host_copy is None:
            self.waits += 1
            host_copy = x.detach().cpu()
            self.note(x, host_copy)
        return host_copy

    def find(self, x: Tensor) -> Tensor | None:
        """Return what `x` holds, on the host, if that is known."""
        if self.is_here(x):
            return x
        known: _Known | None = self._known.get(x)
        return known.value() if known is not None and known.version == self._version(x) else None

    def is_here(self, x: Tensor) -> bool:
        """Whether `x` is in host memory."""
        return x.device.type == "cpu"

    def note(self, x: Tensor, copy: Tensor) -> None:
        """Let the values of `x` be those of `copy`, which is on the host."""
        version = self._version(copy)
        self._known[x] = _Known(self._version(x), lambda: copy if self._version(copy) == version else None)

    def _version(self, x: Tensor) -> tuple[int, ...]:
        """What changes with the values of `x`."""
        if not _is_plain(x):
            return (version_of(x),)
        address = x.untyped_storage().data_ptr()
        return version_of(x), address, self._writes.get(address, 0)

    def _write(self, written: Any) -> None:
        """Count writes to tensors that may decide about a mask."""
        for x in tree_leaves(written):
            if isinstance(x, Tensor) and _is_plain(x) and _is_small(x) and x.device.type != "meta":
                self._writes[x.untyped_storage().data_ptr()] += 1
        if len(self._writes) > _MANY:
            self.clear()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if torch.is_inference_mode_enabled():
            for x in [x for x in self._known if x.is_inference()]:
                del self._known[x]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _QUESTIONS and args and isinstance(args[0], Tensor) and not self.is_here(args[0]):
            known = self.find(args[0])
            return func(args[0] if known is None else known, *args[1:], **kwargs)
        # torch's own backward would show to tensors of ranks what stands in its place while a step runs
        result = (torchs_own(name) if ORIGINALS.get(name) is func else func)(*args, **kwargs)
        if written := written_by(func, args, kwargs):
            self._write(written)
        if name in _FOLLOWED:
            results = result if isinstance(result, tuple) else (result,)
            if any(isinstance(output, Tensor) and not self.is_here(output) and _is_small(output) for output in results):
                self._follow(name, func, args, kwargs, results)
        elif name in _FACTORIES and isinstance(result, Tensor) and not self.is_here(result):
            self._follow_made(func, args, kwargs, result)
        return result

    def _follow_made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        """Note a tensor that was made of plain numbers, which callers may change later on."""
        if result.is_floating_point() or result.numel() > _FEW or any(isinstance(x, Tensor) for x in tree_leaves(args)):
            return
        self.note(result, func(*args, **{key: value for key, value in kwargs.items() if key != "device"}))

    def _follow(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Any, ...]
    ) -> None:
        if name in _MOVES and self.is_here(args[0]) and args[0].numel() <= _LARGE:
            self.note(results[0], args[0].to(results[0].dtype, copy=True))  # a loader may use its memory again
            return
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not inputs or any(x is output for x in inputs for output in results):
            return
        sources = {id(x): self._source(x) for x in inputs}
        if any(source is None for source in sources.values()):
            return
        dtype, computed = results[0].dtype, list[Any]()

        # leaves of the arguments are tensors of the device no longer, which would be kept alive
        tree = tree_map(lambda x: _Place(id(x)) if isinstance(x, Tensor) else x, (args, kwargs))

        def compute(place: int) -> Tensor | None:
            if not computed:
                values = {key: source() if source is not None else None for key, source in sources.items()}
                if any(value is None for value in values.values()):
                    return None
                new_args, new_kwargs = tree_map(lambda x: values[x.key] if isinstance(x, _Place) else x, tree)
                if name in _MOVES:
                    computed.append(new_args[0].to(dtype))
                else:
                    new_kwargs.pop("device", None)
                    computed.append(func(*new_args, **new_kwargs))
                sources.clear()
            return computed[0][place] if isinstance(computed[0], tuple) else computed[0]

        for place, output in enumerate(results):
            self._known[output] = _Known(self._version(output), partial(compute, place))

    def _source(self, x: Tensor) -> Callable[[], Tensor | None] | None:
        """What computes `x` on the host, now or later; None where nothing does."""
        version = self._version(x)
        if self.is_here(x):
            return lambda: x if self._version(x) == version else None
        known: _Known | None = self._known.get(x)
        return known.value if known is not None and known.version == version else None


def _noting(note: Callable[[Any], None], collective: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(collective)
    def noted(*args: Any, **kwargs: Any) -> Any:  # looks of the monitor pass over calls of this file
        note((args[1:], kwargs))
        return collective(*args, **kwargs)

    return noted


class _Place:
    """A tensor among arguments."""

    def __init__(self, key: int) -> None:
        self.key = key


def _is_plain(x: Tensor) -> bool:
    """Whether `x` is in memory of its own, and stands neither for what other ranks hold nor for samples of vmap."""
    return type(x) in (Tensor, torch.nn.Parameter) and x.layout == torch.strided and not _is_wrapped(x)


def _is_small(x: Tensor) -> bool:
    """Whether `x` may decide about a mask: integers, bools, and masks that are added to scores ``[B, 1, Sq, Sk]``."""
    return not x.is_floating_point() or (x.dim() == 4 and x.shape[1] == 1)


_NAMES = {  # of functions and methods: questions about values, moves to another dtype or device, and the rest
    "asked": "__bool__ __float__ __format__ __index__ __int__ item tolist",
    "moved": "bfloat16 bool byte cuda double float half int long short to type type_as",
    "followed": """
__add__ __and__ __eq__ __floordiv__ __ge__ __getitem__ __gt__ __invert__ __le__ __lt__ __mod__ __mul__ __ne__ __neg__
__or__ __radd__ __rand__ __rmul__ __ror__ __rsub__ __sub__ __xor__ _is_all_true _is_any_true abs add all amax amin
any argmax argmin bitwise_and bitwise_not bitwise_or bitwise_xor bucketize cat chunk clamp clone contiguous cumsum
detach diff eq expand expand_as flatten flip floor_divide full_like gather ge gt index_select isin le logical_and
logical_not logical_or logical_xor lt masked_fill max maximum min minimum movedim mul narrow ne neg new_full new_ones
new_zeros ones_like pad permute prod remainder repeat_interleave reshape roll searchsorted select split squeeze stack
sub sum t tensor_split transpose tril triu unbind unflatten unsqueeze view where zeros_like""",
}
_FACTORIES = frozenset(("arange", "full", "ones", "tensor", "zeros"))
_QUESTIONS, _MOVES, _OTHERS = (frozenset(names.split()) for names in _NAMES.values())
_FOLLOWED = _MOVES | _OTHERS
