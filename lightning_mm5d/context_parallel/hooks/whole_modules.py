"""Modules of layers that mix tokens in a way of their own: found in their code before a run, run on whole sequences.

**Finding them.** An attention that goes through transformers' attention interface, or through torch's
``scaled_dot_product_attention``, is replaced by one of this library that knows the tokens of other ranks. Other modules
that mix tokens run on whole sequences. What code does not show, the first step does (layer_ways.py).

It refuses (`ConfigError`) attention weights that are dropped out while they lie on several ranks.

**Running them.** An attention with a bias by position, one that multiplies queries and keys by itself, a convolution
over tokens, a recurrence: each context parallel rank gathers what such a module is given, runs the module as it is, and
keeps its own tokens of the result. So it computes what one process computes, and only the rest of the layer is sharded.
Where the module calls torch's ``scaled_dot_product_attention``, a rank computes the rows of its own queries alone.

**Gradients.** A rank's loss depends on its own tokens of the result, so the gradients of gathered arguments are summed
over ranks, and those of parameters add up to what `ShardedSequence` promises. A result without a dim of tokens, such
as a bias that the next layers take, stays whole on every rank.

It refuses (`ConfigError`) a module that is called with other arguments than in its first call.

Torch's attention inside of such a module computes the queries of a rank's own tokens alone (`OwnRows`). Rows of other
ranks' queries are zero: the module's result of these tokens is thrown away. Scores take the memory of the own rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.partition.parts import is_in
from lightning_mm5d.sharded.collectives import with_length
from lightning_mm5d.sharded.removable import meanwhile
from lightning_mm5d.sharded.sequence import ShardedSequence
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.sharded.torch_internals import is_view
from lightning_mm5d.source.trees import class_names, forward_names

_PRODUCT = "scaled_dot_product_attention"

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_KNOWN = {_INTERFACE, _PRODUCT}
_NONE: frozenset[str] = frozenset()
_BIASES = ("position_bias", "rel_pos", "relative_position", "alibi")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_OF_TORCH = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_MIXERS = (*_CONVOLUTIONS, *BATCH_NORMS, *_OF_TORCH, nn.RNNBase, nn.MultiheadAttention)
_MIXES = ("baddbmm", "conv1d", "causal_conv1d_fn", "cumsum", "multi_head_attention_forward")
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout")


class Mixers(NamedTuple):
    """The modules of one layer that mix tokens, by their path in it.

    Attributes:
        whole: those that run on whole sequences, and why; the layer itself is "".
        attends: those whose attention is replaced.
        likely: those that may mix tokens, where running the layer shows that something does.
    """

    whole: dict[str, str]
    attends: list[str]
    likely: list[str]


def check_layers(modalities: Mapping[str, Modality], root: nn.Module, layers: Mapping[str, str | None]) -> None:
    """Refuse modalities whose sequences cannot be shared.

    Args:
        modalities: the configuration.
        root: the LightningModule; the meta device will do.
        layers: path of each modality's list of layers.

    Raises:
        ConfigError: with the path of the module.
    """
    read = Reader()
    for name, modality in modalities.items():
        if modality.cp_size == 1:
            continue
        path = layers.get(name)
        if path is None:
            rule = f"{name!r} has no list of layers, between which its sequences could be sharded"
            raise ConfigError(f"modalities.{name}.cp_size", modality.cp_size, rule, "Use 1")
        if modality.context.cp_mode == "items":
            continue
        for index, layer in root.get_submodule(path).named_children():
            _check_dropout(name, modality, f"{path}.{index}", layer, read.mixers(layer))


class Reader:
    """Reads the code of layers."""

    def __init__(self) -> None:
        self._read: dict[type[nn.Module], tuple[frozenset[str] | None, frozenset[str]]] = {}

    def mixers(self, layer: nn.Module) -> Mixers:
        """Return the modules of a layer that mix tokens, as far as code shows; none inside of one that is whole."""
        attends = [path for path, part in layer.named_modules() if (self._every(part) or _NONE) & _KNOWN]
        reasons = {path: self._why(part, path in attends) for path, part in layer.named_modules()}
        whole = _outermost({path: why for path, why in reasons.items() if why is not None})
        if not attends and not whole:
            products = [path for path, part in layer.named_modules() if self._multiplies(part)]
            whole = _outermost(dict.fromkeys(products, "multiplies queries and keys by itself"))
        if not attends and not whole:
            whole = {"": "has no attention that is known"}
        attends = [path for path in attends if not any(is_in(path, outer) for outer in whole)]
        likely = [path for path, part in layer.named_modules() if path in attends or self._multiplies(part)]
        return Mixers(whole, attends, likely)

    def _why(self, part: nn.Module, attends: bool) -> str | None:
        """Why a module runs on whole sequences, if it does."""
        names = self._of(type(part))[1]
        bias = next((name for name in sorted(names) if name.startswith(_BIASES)), None)
        mixes = next((name for name in _MIXES if name in names), None)
        if self._every(part) is None:
            return "has code without source"
        if attends and bias is not None:
            return f"adds a bias by position to its scores ({bias})"
        if attends and "arange" in names and _scales_by_position(part):
            return "counts positions in what it is given"
        if isinstance(part, _MIXERS):
            return "mixes tokens"
        return f"works on whole sequences ({mixes})" if not attends and mixes is not None else None

    def _multiplies(self, part: nn.Module) -> bool:
        every = self._every(part) or _NONE
        return "softmax" in every and not every.isdisjoint(_PRODUCTS)

    def _every(self, part: nn.Module) -> frozenset[str] | None:
        return self._of(type(part))[0]

    def _of(self, cls: type[nn.Module]) -> tuple[frozenset[str] | None, frozenset[str]]:
        if cls not in self._read:
            self._read[cls] = class_names(cls), forward_names(cls) or _NONE
        return self._read[cls]


def _outermost(whole: dict[str, str]) -> dict[str, str]:
    return {path: why for path, why in whole.items() if not any(base != path and is_in(path, base) for base in whole)}


def _check_dropout(name: str, modality: Modality, path: str, layer: nn.Module, mixers: Mixers) -> None:
    for module in mixers.attends:
        config = getattr(layer.get_submodule(module), "config", None)
        rates = {field: getattr(config, field, 0.0) for field in _DROPOUTS}
        dropped = next((field for field, rate in rates.items() if isinstance(rate, (int, float)) and rate > 0), None)
        if dropped is not None:
            rule = (
                f"The config of {path}.{module} drops out attention weights ({dropped}={rates[dropped]}), which lie on "
                "several ranks"
            )
            fix = f"Set {dropped}=0.0 in the model's config, as most recipes do, or use cp_size=1"
            raise ConfigError(f"modalities.{name}.cp_size", modality.cp_size, rule, fix)


def _scales_by_position(module: nn.Module) -> bool:
    """Whether an attention that counts positions by itself uses them; Llama 4's does so without rotary tables."""
    return bool(getattr(module, "attn_temperature_tuning", True)) and not getattr(module, "use_rope", False)


def takes_products(modules: Iterable[nn.Module]) -> bool:
    """Whether code of `modules` calls torch's attention by itself."""
    by_class = (class_names(cls) or frozenset() for cls in {type(module) for module in modules})
    return any(_PRODUCT in names and _INTERFACE not in names for names in by_class)


Dims = tuple[int | None, ...]  # for each argument, the dim that counts tokens
Key = tuple[int, int]  # id of a module, and how often it ran before in one call of a layer
# rounding differs by how many rows are computed at a time; computing all rows instead is right, too
_OFF = {torch.float64: 1e-5, torch.float32: 1e-4}
_OFF_16 = 3e-2


class Known(NamedTuple):
    """What a probe knows of a module that runs on whole sequences.

    Attributes:
        dims: which dims of its arguments count tokens.
        result: of a whole sequence.
        like: the argument that counts tokens, of that sequence.
    """

    dims: Dims
    result: Any
    like: Tensor


@dataclass(eq=False)
class WholeCall:
    """The modules that run on whole sequences in one call of a layer.

    Attributes:
        modules: ids of them.
        sequence: the tokens of all context parallel ranks.
        dims: for each module and how often it ran, which dims of its arguments count tokens.
        known: arguments of the layer by the id of the local one: that and the whole one.
        survey: what the probe that runs the layer knows; None where the layer runs for its result.
        results: those that count no tokens.
        ran: how often each module ran.
    """

    modules: frozenset[int]
    sequence: ShardedSequence
    dims: dict[Key, Dims] = field(default_factory=dict)
    known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    survey: dict[Key, Known] | None = None
    results: list[Tensor] = field(default_factory=list)
    ran: dict[int, int] = field(default_factory=dict)

    def is_whole(self, x: Tensor) -> bool:
        """Whether `x` is a result that counts no tokens, and is the same on all ranks."""
        return any(x is result for result in self.results)

    def note(self, given: Any, local: Any) -> None:
        """Remember the whole arguments `given` of the layer of which `local` are this rank's."""
        for whole, shard in zip(tree_flatten(given)[0], tree_flatten(local)[0], strict=True):
            is_sharded = isinstance(whole, Tensor) and isinstance(shard, Tensor) and shard is not whole
            if is_sharded and not whole.requires_grad and not isinstance(whole, Sharded):
                self.known[id(shard)] = shard, whole


class WholeModules:
    """Runs chosen modules of one modality's layers on whole sequences.

    Args:
        name: the modality, for errors.
        plainly: makes a context in which attention is what it is without context parallelism.
        active: gives the run of a stage on a microbatch that is under way, forward or backward, if any.
        replays: whether a backward is under way, in which modules may be computed again.
        drops: whether layers may drop values out.
    """

    def __init__(
        self,
        name: str,
        plainly: Callable[[], AbstractContextManager[None]],
        active: Callable[[], Any],
        replays: Callable[[], bool],
        *,
        drops: bool,
    ) -> None:
        self._name, self._plainly, self._active, self._drops = name, plainly, active, drops
        self._replays = replays
        self._call: WholeCall | None = None
        self._is_inside = False
        self._noted: weakref.WeakKeyDictionary[Any, dict[int, list[WholeCall]]] = weakref.WeakKeyDictionary()
        self._patched: dict[int, nn.Module] = {}
        self._without_rows: set[int] = set()  # modules whose attention works on tokens in another order

    def take(self) -> Any:
        """Return what belongs to the microbatch that is computed."""
        return self._call, self._is_inside

    def put(self, state: Any) -> None:
        """Go on with the microbatch that `take` returned `state` of."""
        self._call, self._is_inside = state

    def during(self, call: WholeCall | None) -> AbstractContextManager[None]:
        """Run modules as `call` says meanwhile."""
        return meanwhile(self, _call=call)

    def forward_of(self, module: nn.Module) -> Callable[..., Any] | None:
        """Return the forward that runs `module` on whole sequences where a call asks for it; None once it has it."""
        if id(module) in self._patched:
            return None
        self._patched[id(module)] = module
        instance_forward = vars(module).get("forward")

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inner = partial(type(module).forward, module) if instance_forward is None else instance_forward
            call = None if self._is_inside else self._call or self._earlier(module)
            if call is None or id(module) not in call.modules:
                return inner(*args, **kwargs)
            return self._run(module, inner, call, (args, kwargs))

        return forward

    def _earlier(self, module: nn.Module) -> WholeCall | None:
        """The call of a module that a backward computes again, without its layer."""
        run = self._active() if self._replays() else None
        calls = self._noted.get(run, {}).get(id(module), []) if run is not None else []
        if len({id(call.sequence) for call in calls}) > 1 or (calls and self._drops and module.training):
            raise ConfigError(
                f"modalities.{self._name}.cp_size",
                f"activation checkpointing inside of a layer, around {type(module).__name__}",
                "It runs on whole sequences, and is computed again alone where it draws no random numbers and where "
                "all its calls split tokens equally",
                "Put the checkpoint around the layer, or use cp_size=1",
            )
        return calls[0] if calls else None

    @torch.compiler.disable
    def _run(self, module: nn.Module, inner: Callable[..., Any], call: WholeCall, given: Any) -> Any:
        key = id(module), call.ran.get(id(module), 0) if call is self._call else 0
        call.ran[id(module)] = key[1] + 1
        leaves, form = tree_flatten(given)
        if call.survey is not None:
            return self._surveyed(inner, call, key, leaves, form)
        dims = call.dims.get(key)
        if dims is None or len(dims) != len(leaves):
            got = f"a call of {type(module).__name__} with {len(leaves)} arguments"
            rule = "It runs on whole sequences, and is called with the arguments of its first call"
            raise ConfigError(f"modalities.{self._name}.cp_size", got, rule, "Use cp_size=1, or call it in one way")
        run = self._active()
        if run is not None and call is self._call:
            self._noted.setdefault(run, {}).setdefault(id(module), []).append(call)
        sequence = call.sequence
        whole = [x if dim is None else _gathered(x, dim, call) for x, dim in zip(leaves, dims, strict=True)]
        args, kwargs = tree_unflatten(whole, form)
        rows = nullcontext() if id(module) in self._without_rows else OwnRows(sequence)
        with self.inside(), rows:
            result = inner(*args, **kwargs)
        place, dim = _place(dims)
        return self._local_result(result, call, whole[place], dim)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run everything as without context parallelism meanwhile."""
        with meanwhile(self, _is_inside=True), self._plainly():
            yield

    def _local_result(self, result: Any, call: WholeCall, like: Tensor, dim: int) -> Any:
        """This rank's tokens of a result."""
        sequence = call.sequence

        def local_leaf(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if not _counts_tokens(x, like, dim):
                call.results.append(x)
                return x
            local = sequence.local_of(x, dim, sequence.lengths)
            return local.clone() if is_view(local) else local

        return tree_map(local_leaf, result)

    # --- in a probe ---

    def _surveyed(self, inner: Callable[..., Any], call: WholeCall, key: Key, leaves: Any, form: Any) -> Any:
        """Something of each token alone, of the form of the module's result."""
        assert call.survey is not None
        if key not in call.survey:
            raise _UnknownError(inner, key, leaves, form)
        dims, result, like = call.survey[key]
        place, dim = _place(dims)
        few = leaves[place]
        axes = [axis for axis in range(few.dim()) if axis not in (0, dim)]
        token_values = (few.double().mean(axes, keepdim=True) if axes else few.double()).tanh()

        def small(x: Any) -> Any:
            if not isinstance(x, Tensor) or not _counts_tokens(x, like, dim):
                return x
            return token_values.to(x.dtype).expand(with_length(x.shape, dim, few.shape[dim])).contiguous()

        return tree_map(small, result)

    def learn(self, sequence: ShardedSequence, few: _UnknownError, single: _UnknownError) -> Known:
        """Run a module on a sequence that repeats some tokens.

        Args:
            sequence: the tokens of all ranks.
            few: a call with some tokens.
            single: a call with one.

        Raises:
            ValueError: its arguments or results do not show which dim counts tokens.
        """
        leaves = few.leaves
        dims = tuple(_dim_of(leaf, single_leaf) for leaf, single_leaf in zip(leaves, single.leaves, strict=True))
        if all(dim is None for dim in dims):
            raise ValueError("a module that mixes tokens is given something that does not count them")
        place, dim = _place(dims)
        numbers = torch.arange(sequence.split.size) % leaves[place].shape[dim]
        longer = [x if dim is None else _longer(x, dim, numbers) for x, dim in zip(leaves, dims, strict=True)]
        args, kwargs = tree_unflatten(longer, few.form)
        with self.inside():
            result = few.inner(*args, **kwargs)
            with OwnRows(sequence):
                again = few.inner(*args, **kwargs)
        first = next((x for x in tree_flatten(result)[0] if isinstance(x, Tensor)), None)
        if first is None or not _counts_tokens(first, longer[place], dim):
            raise ValueError("a module that mixes tokens returns something else than tokens")
        pairs = zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True)
        if not all(_is_close(a, b, sequence, longer[place], dim) for a, b in pairs):
            self._without_rows.add(few.key[0])
        return Known(dims, result, longer[place])


class _UnknownError(BaseException):
    """Stops the run of a layer at a module that the probe does not know."""

    def __init__(self, inner: Callable[..., Any], key: Key, leaves: list[Any], form: Any) -> None:
        super().__init__()
        self.inner, self.key, self.leaves, self.form = inner, key, leaves, form


class Surveying:
    """Lets a probe see modules that run on whole sequences, in place of running them.

    Args:
        owner: of the modules.
        modules: ids of them.
        sequence: the tokens of all ranks.
    """

    def __init__(self, owner: WholeModules, modules: frozenset[int], sequence: ShardedSequence) -> None:
        self._owner, self._modules, self._sequence = owner, modules, sequence
        self._known: dict[Key, Known] = {}

    def learn(self, run: Callable[[int], Any], count: int) -> None:
        """Get to know the modules that a layer calls.

        Args:
            run: runs the layer on so many tokens.
            count: tokens, at least 2.

        Raises:
            ValueError: a module is called in a way that does not show which dims count tokens.
        """
        while (few := self._stop(run, count)) is not None:
            single = self._stop(run, 1)
            if single is None or single.key != few.key or len(single.leaves) != len(few.leaves):
                raise ValueError("it calls other modules for one token than for several")
            self._known[few.key] = self._owner.learn(self._sequence, few, single)

    def during(self) -> AbstractContextManager[None]:
        """Around a run of the layer."""
        return self._owner.during(WholeCall(self._modules, self._sequence, survey=self._known))

    @property
    def dims(self) -> dict[Key, Dims]:
        """For each module, which dims of its arguments count tokens."""
        return {key: known.dims for key, known in self._known.items()}

    @staticmethod
    def _stop(run: Callable[[int], Any], count: int) -> _UnknownError | None:
        try:
            run(count)
        except _UnknownError as stop:
            return stop
        return None


def _gathered(x: Tensor, dim: int, call: WholeCall) -> Tensor:
    known = call.known.get(id(x))
    if known is not None and known[0] is x:
        return known[1]
    x = x.full() if isinstance(x, Sharded) else x
    return call.sequence.mixed(x, dim)


def _longer(x: Tensor, dim: int, numbers: Tensor) -> Tensor:
    """Tokens `numbers` of `x`, which differ a little where they are repeated."""
    tokens = x.index_select(dim, numbers.to(x.device))
    if not tokens.is_floating_point():
        return tokens
    factor = 1 + 0.3 * torch.arange(len(numbers), device=x.device, dtype=torch.float32).sin()
    return tokens * factor.to(x.dtype).view(with_length([1] * x.dim(), dim, -1))


def _is_close(a: Any, b: Any, sequence: ShardedSequence, like: Tensor, dim: int) -> bool:
    """Whether this rank's tokens of two results are equal but for rounding."""
    if not isinstance(a, Tensor) or not _counts_tokens(a, like, dim):
        return True
    allowed = _OFF.get(a.dtype, _OFF_16)
    a, b = (sequence.local_of(x, dim, sequence.lengths).double() for x in (a, b))
    return bool((a - b).abs().max() <= allowed * a.abs().max())


def _place(dims: Dims) -> tuple[int, int]:
    """The first argument that counts tokens, and its dim of them."""
    return next((index, dim) for index, dim in enumerate(dims) if dim is not None)


def _counts_tokens(x: Tensor, like: Tensor, dim: int) -> bool:
    """Whether a result `x` counts tokens as the argument `like` does, along `dim`."""
    return x.dim() == like.dim() and x.shape[dim] == like.shape[dim] and (dim == 0 or x.shape[0] == like.shape[0])


def _dim_of(few: Any, single: Any) -> int | None:
    """The dim of an argument that counts tokens, given it of some tokens and of one; None where it has none."""
    if not isinstance(few, Tensor) or not isinstance(single, Tensor) or few.dim() != single.dim():
        return None
    dims = [dim for dim, size in enumerate(few.shape) if size != single.shape[dim]]
    if len(dims) > 1:
        raise ValueError("an argument of a module has several dims of tokens")
    return dims[0] if dims else None


class OwnRows(TorchFunctionMode):
    """Computes ``scaled_dot_product_attention`` for the queries of this rank's tokens; other rows are zero.

    Args:
        sequence: the tokens of all ranks.
    """

    def __init__(self, sequence: ShardedSequence) -> None:
        super().__init__()
        self._sequence = sequence

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        of_rows = func is F.scaled_dot_product_attention
        return (self._of_rows if of_rows else func)(*args, **(kwargs or {}))

    def _of_rows(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        split = self._sequence.split
        has_rows = attn_mask is None or attn_mask.dim() < 2 or attn_mask.shape[-2] in (1, query.shape[-2])
        # ranks draw equally many numbers for equal dropout, which rows of their own would not
        if query.shape[-2] != split.size or not has_rows or dropout_p:
            return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        tokens = split.indices(self._sequence.index, query.device)
        if is_causal:
            attn_mask = tokens[:, None] >= torch.arange(key.shape[-2], device=query.device)
        elif attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[-2] > 1:
            attn_mask = attn_mask.index_select(-2, tokens)
        rows = F.scaled_dot_product_attention(query.index_select(-2, tokens), key, value, attn_mask, **options)
        return rows.new_zeros(*rows.shape[:-2], split.size, rows.shape[-1]).index_copy(-2, tokens, rows)
