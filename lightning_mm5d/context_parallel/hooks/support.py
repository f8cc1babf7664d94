"""Finds layers whose sequences cannot be shared: before a run by their code, and at the first step by running them.

Only the attention may mix tokens, and only through transformers' attention interface or torch's
``scaled_dot_product_attention``, where this library takes its place. `check_layers` looks for that in the classes of a
layer's modules. `probe` runs a layer on some tokens, with an attention that leaves each token alone, and again on
single ones of them: what differs is neither.

It refuses (`ConfigError`) layers that fail either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality
from lightning_mm5d.context_parallel.hooks.arguments import Arguments, item_dim, replaced, token_dim
from lightning_mm5d.context_parallel.hooks.attention import Attention, Call
from lightning_mm5d.partition.hidden_state import at, hidden_place
from lightning_mm5d.sharded.tensor import Sharded
from lightning_mm5d.source.names import class_names, forward_names
from lightning_mm5d.source.trees import Source

_PRODUCT = "scaled_dot_product_attention"

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_BIASES = ("position_bias", "rel_pos", "relative_position", "alibi")
_MIXERS = (nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention, nn.modules.batchnorm._BatchNorm)
_MIXES = ("baddbmm", "conv1d", "causal_conv1d_fn", "cumsum", "multi_head_attention_forward")
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout")
_TOKENS = 8  # that a probe looks at
_OFF = {torch.float64: 1e-4, torch.float32: 1e-3}  # rounding differs by how many tokens there are, mixing by much more
_OFF_16 = 3e-2


def check_layers(modalities: Mapping[str, Modality], root: nn.Module, layers: Mapping[str, str | None]) -> None:
    """Refuse to share sequences of layers in which tokens mix beside the attention interface.

    Args:
        modalities: the configuration.
        root: the LightningModule; the meta device will do.
        layers: path of each modality's list of layers.

    Raises:
        ConfigError: with the path of the module.
    """
    source = Source()
    for name, modality in modalities.items():
        if modality.cp_size == 1:
            continue
        path = layers.get(name)
        if path is None:
            rule = f"{name!r} has no list of layers, between which its sequences could be divided"
            raise ConfigError(f"modalities.{name}.cp_size", modality.cp_size, rule, "Use 1")
        if modality.cp_mode == "items":
            continue
        classes = {type(module) for module in root.get_submodule(path).modules()}
        read = {cls: (class_names(source, cls), forward_names(source, cls) or frozenset()) for cls in classes}
        for index, layer in root.get_submodule(path).named_children():
            _check_layer(name, modality, f"{path}.{index}", layer, read)


def _check_layer(
    name: str,
    modality: Modality,
    path: str,
    layer: nn.Module,
    read: Mapping[type[nn.Module], tuple[frozenset[str] | None, frozenset[str]]],
) -> None:
    def refuse(module: str, why: str) -> ConfigError:
        where = f"{path}.{module}" if module else path
        return ConfigError(
            f"modalities.{name}.cp_size",
            modality.cp_size,
            f"{where} ({type(layer.get_submodule(module)).__name__}) {why}",
            "Use cp_size=1; tp_size, pp_size and dp_size have no such limit",
        )

    attends: list[str] = []
    for module, part in layer.named_modules():
        every, _ = read[type(part)]
        if every is None:
            raise refuse(module, "has code without source, which does not tell whether it mixes tokens")
        attends += [module] * bool(every & {_INTERFACE, _PRODUCT})
    for module, part in layer.named_modules():
        _, names = read[type(part)]
        bias = next((found for found in sorted(names) if found.startswith(_BIASES)), None)
        mixes = next((found for found in _MIXES if found in names), None)
        if module in attends and bias is not None:
            raise refuse(module, f"adds a bias by position to its scores ({bias}), which would have to be divided")
        if module in attends and "arange" in names and _scales_by_position(part):
            how = " (with attn_temperature_tuning; set it to False)" if hasattr(part, "attn_temperature_tuning") else ""
            raise refuse(module, f"counts positions in what it is given, which are some of the tokens{how}")
        if isinstance(part, _MIXERS):
            raise refuse(module, "mixes tokens of which each rank has some")
        if module not in attends and mixes is not None:
            raise refuse(module, f"works on whole sequences ({mixes}), not through an attention that is known")
    if not attends:
        raise refuse("", f"has no attention through transformers' attention interface or torch's {_PRODUCT}")
    for module in attends:
        config = getattr(layer.get_submodule(module), "config", None)
        rates = {field: getattr(config, field, 0.0) for field in _DROPOUTS}
        dropped = next((field for field, rate in rates.items() if isinstance(rate, (int, float)) and rate > 0), None)
        if dropped is not None:
            raise ConfigError(
                f"modalities.{name}.cp_size",
                modality.cp_size,
                f"The config of {path}.{module} drops out attention weights ({dropped}={rates[dropped]}), which lie on "
                "several ranks",
                f"Set {dropped}=0.0 in the model's config, as most recipes do, or use cp_size=1",
            )


def _scales_by_position(module: nn.Module) -> bool:
    """Whether an attention that counts positions by itself uses them; Llama 4's does so without rotary tables."""
    return bool(getattr(module, "attn_temperature_tuning", True)) and not getattr(module, "use_rope", False)


def takes_products(modules: Iterable[nn.Module]) -> bool:
    """Whether code of `modules` calls torch's attention by itself."""
    source = Source()
    found = (class_names(source, cls) or frozenset() for cls in {type(module) for module in modules})
    return any(_PRODUCT in names and _INTERFACE not in names for names in found)


def probe(
    name: str,
    layer: nn.Module,
    inner: Callable[..., Any],
    local: Arguments,
    attention: Attention,
    names: tuple[str, ...],
    dim: int,
    size: int,
) -> tuple[bool, ...]:
    """Run a layer on a few of this rank's tokens, and on some of these alone; refuse it where results differ.

    A token that is alone is the first and the last, so special treatment of an end shows as well. Where ranks have
    whole items of a batch, it is run on a few of these, with its own attention.

    Returns:
        For each attention in turn whether its keys are those of another sequence.

    Args:
        name: of the modality.
        layer: whose class is looked at.
        inner: its forward.
        local: what it is about to work on, the tokens of this rank.
        attention: of the modality; leaves each token alone meanwhile.
        names: of its positional arguments.
        dim: of the hidden state that is divided, from the last: -2 for tokens, less for items.
        size: tokens or items of this rank, at least 2.

    Raises:
        ConfigError: tokens mix, or what is given with them does not follow them.
    """
    where = hidden_place(*local)
    assert where is not None
    state = at(where, *local)
    if isinstance(state, Sharded):
        state = state.full()

    def run(tokens: Tensor) -> tuple[Tensor, list[tuple[int, int]]]:
        def only(argument: str, value: Any) -> Any:
            if isinstance(value, MutableMapping):  # states that layers share, of this rank's tokens
                return {key: only_of_states(entry) for key, entry in value.items()}
            if hasattr(value, "get_seq_length"):  # a cache, which would keep these
                return None
            if not isinstance(value, Tensor):
                return value
            along = token_dim(argument, value, size) if dim == -2 else item_dim(argument, value, size, -dim)
            return value if along is None else value.index_select(along, tokens)

        def only_of_states(entry: Any) -> Any:
            if isinstance(entry, (list, tuple)):
                return type(entry)(only_of_states(one) for one in entry)
            fits = isinstance(entry, Tensor) and entry.dim() > 2 and entry.shape[-2] == size
            return entry.index_select(-2, tokens) if fits else entry

        args, kwargs = replaced(local, names, only, where, state.index_select(dim, tokens))
        with attention.during(Call(None, is_probe=dim == -2)) as call:
            result = inner(*args, **kwargs)
        found: Tensor = result[0] if isinstance(result, (tuple, list)) else result
        return found.full() if isinstance(found, Sharded) else found, call.seen

    training = {part: part.training for part in layer.modules()}
    layer.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for count in range(min(size, _TOKENS), 1, -1):
                few = torch.arange(count, device=state.device)
                places = range(count) if count <= 3 else (1, count // 2, count - 2)
                every, seen = run(few)
                alone = [run(few[place : place + 1]) for place in places]
                follows = [[keys == queries for queries, keys in calls] for calls in (seen, *(c for _, c in alone))]
                if all(one == follows[0] for one in follows):  # else another sequence happens to be of this length
                    break
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise mixed(name, layer, f"fails on some of its tokens: {error}") from error
    finally:
        for part, value in training.items():
            part.training = value
    half = torch.cat([result for result, _ in alone], dim)
    if every.shape[dim] != len(few) or half.shape[dim] != len(places):
        raise mixed(name, layer, f"returns {every.shape[dim]} tokens for {len(few)}")
    same = every.index_select(dim, few[list(places)])
    rounds = torch.is_autocast_enabled(half.device.type) or any(p.dtype.itemsize < 4 for p in layer.parameters())
    allowed = _OFF_16 if rounds else _OFF.get(half.dtype, _OFF_16)
    off = (same - half).abs().amax(-1) > allowed * half.abs().amax(-1).clamp_min(1e-6)
    # a router may send a token elsewhere for a rounding; where tokens mix, all of them differ
    if off.float().mean() >= 0.5:
        raise mixed(name, layer, "computes something else of a token when other tokens are elsewhere")
    return tuple(not follow for follow in follows[0])


def mixed(name: str, layer: nn.Module, why: str) -> ConfigError:
    """The refusal of a layer that mixes what is on several ranks."""
    return ConfigError(
        f"modalities.{name}.cp_size",
        type(layer).__name__,
        f"This layer {why}, beside its attention",
        "Use cp_size=1; tp_size, pp_size and dp_size have no such limit",
    )
