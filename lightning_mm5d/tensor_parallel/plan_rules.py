"""Recognises attentions and MLPs by the names of their linear layers, where that is safe.

A name says what a linear layer is for, not what is done with its output. So a rule holds only where everything in the
module is accounted for: each parameter, each number that its code reads, the sizes of all layers, and for a MLP
what happens between its layers. Anything else stays full, which is right and only slower.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Number
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D  # the projections of GPT-2 and its kin

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.nn import Linear
from lightning_mm5d.source.order import accesses
from lightning_mm5d.source.reads import HEAD_WIDTHS, HEADS, Reads, between, reads
from lightning_mm5d.tensor_parallel.family_plans import PLAIN_LINEARS, Part, TensorParallelPlan

_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("query_proj", "key_proj", "value_proj"),
    ("linear_q", "linear_k", "linear_v"),
)
_FUSED = ("qkv", "qkv_proj", "query_key_value", "Wqkv", "wqkv")
_OUTPUTS = (
    *("o_proj", "out_proj", "o", "dense", "projection_layer", "proj", "projection", "out_lin", "to_out", "to_out.0"),
    *("wo", "Wo", "c_proj", "linear_out"),
)
_SIBLING_OUTPUTS = ("output.dense", "output.out_proj")
_PERCEPTRONS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("lin1",), "lin2"),
    (("linear1",), "linear2"),
    (("c_fc",), "c_proj"),
    (("fc_in",), "fc_out"),
    (("wi",), "wo"),
    (("wi_0", "wi_1"), "wo"),
    (("Wi",), "Wo"),
    (("weights_in",), "weights_out"),
    (("w1", "w3"), "w2"),
    (("linear_fc1",), "linear_fc2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("ffn",), "ffn_output"),
    (("intermediate_dense",), "output_dense"),
)
# linear_1 and linear_2 are also what projectors are made of, which are too small to shard
_PERCEPTRONS_IN_LAYERS = ((("linear_1",), "linear_2"),)
_SIBLING_PERCEPTRONS = (("intermediate", "output"), ("intermediate_query", "output_query"))

_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "n_local_kv_heads")
_GROUP_SIZES = ("num_key_value_groups", "n_rep", "num_queries_per_kv")
_WIDTHS = ("all_head_size", "inner_dim", "q_dim", "qkv_dim", "attn_dim")  # of all heads, never of anything else
_COUNTS = (*HEADS, *_KEY_VALUE_HEADS, *_GROUP_SIZES, *_WIDTHS)
_OTHER_NUMBERS = frozenset(
    [
        *(*HEAD_WIDTHS, "layer_idx", "layer_id", "layer_index", "layer_number", "sliding_window", "window_size"),
        *("max_position_embeddings", "max_positions", "rotary_ndims", "rotary_dim", "rotary_emb_dim"),
        *("relative_attention_num_buckets", "relative_attention_max_distance"),
    ]
)
_OTHER_CONFIG = frozenset(("sliding_window", "max_position_embeddings", "num_hidden_layers", "head_dim"))
# names of real numbers, which may be written as integers (a rate of 0) and never count heads or widths
_REAL = re.compile(
    r"drop|softcap|soft_cap|logit_cap|clip|multiplier|theta|(^|_)(p|eps|epsilon|prob|scale|scaling|alpha|temperature)$"
)
_HEAD_NORM = re.compile(r"(q|k|query|key)_?(layer)?_?norm|(norm|ln|layernorm)_?(q|k|query|key)")
_HEAD_ARGUMENT = re.compile(r"bias|alibi|slope|rel_pos")
_ELEMENTWISE = re.compile(r"elu|silu|swish|mish|tanh|sigmoid|activation|dropout|identity", re.IGNORECASE)
_ELEMENTWISE_CALLS = frozenset(
    [
        *("dropout", "gelu", "relu", "silu", "tanh", "sigmoid", "softplus", "elu", "square", "pow", "clamp"),
        *("to", "type", "type_as", "float", "contiguous", "isinstance"),
    ]
)


def linear_of(module: Any) -> nn.Linear | Conv1D | None:
    """Return the linear layer that a module is, or that it adapts (PEFT's ``base_layer``); None where it is neither.

    Classes that derive from a linear layer and compute something else, such as those of quantised weights, are none.
    """
    module = getattr(module, "base_layer", module)
    if not isinstance(module, (nn.Linear, Conv1D)):
        return None
    cls = type(module)
    return module if cls.forward in (nn.Linear.forward, Conv1D.forward) or cls.__name__ in PLAIN_LINEARS else None


def sizes(linear: nn.Linear | Conv1D) -> tuple[int, int]:
    """Return the widths of what a linear layer takes and gives."""
    first, second = linear.weight.shape
    return (first, second) if isinstance(linear, Conv1D) else (second, first)


def rules(module: nn.Module, in_layers: bool) -> Iterator[TensorParallelPlan]:
    """Yield the plans that the names in a module give, relative to it.

    Args:
        module: any module of the model.
        in_layers: whether it is part of a list of layers.
    """
    attention = attention_rule(module)
    if attention is not None:
        yield attention
    names = (*_PERCEPTRONS, *_PERCEPTRONS_IN_LAYERS) if in_layers else _PERCEPTRONS
    for columns, row in names:
        plan = mlp_rule(module, columns, row)
        if plan is not None:
            yield plan
            break
    for first, last in _SIBLING_PERCEPTRONS:
        if _begins_with(module, first, "dense") and _begins_with(module, last, "dense"):
            plan = _mlp(module, (f"{first}.dense",), f"{last}.dense", packed=False)
            inner = module.get_submodule(first)
            others = {child for child, _ in inner.named_children()} - {"dense"}
            if plan is not None and all(_is_elementwise(inner.get_submodule(child)) for child in others):
                yield plan


# --- attention ---


def attention_rule(module: nn.Module) -> TensorParallelPlan | None:
    """Return the plan of an attention whose output layer is in `module`, its projections there or one level deeper."""
    projections = _projections(module)
    if projections:
        output = next((name for name in _OUTPUTS if _linear(module, name)), None)
        return _attention(module, "", projections, output) if output else None
    output = next((name for name in _SIBLING_OUTPUTS if _linear(module, name)), None)
    if output is None or not _begins_with(module, *output.split(".")):
        return None
    for name, child in module.named_children():
        projections = _projections(child)
        if projections and not any(_linear(child, other) for other in _OUTPUTS):
            return _attention(module, f"{name}.", projections, output)
    return None


def _projections(module: nn.Module) -> tuple[str, ...]:
    for names in (*_PROJECTIONS, *((name,) for name in _FUSED)):
        if all(_linear(module, name) for name in names):
            return names
    return ()


def _attention(module: nn.Module, prefix: str, names: tuple[str, ...], output: str) -> TensorParallelPlan | None:
    holder = module.get_submodule(prefix[:-1])
    code = _code_of_heads(holder)
    counts = None if code is None else _count_heads(holder, names, sizes(_linear(module, output))[0], code)
    if code is None or counts is None:
        return None
    heads, key_value_heads, _ = counts
    if len(names) == 3:
        grouped: Part = "heads" if key_value_heads == heads else "key_value_heads"
        columns: dict[str, tuple[Part, ...]] = dict.fromkeys([prefix + name for name in names], (grouped,))
        columns[prefix + names[0]] = ("heads",)
    else:
        columns = {prefix + names[0]: ("heads", "heads", "heads") if code.fused == "heads" else ("groups",)}
    return _plan_of_heads(holder, prefix, columns, output, counts, code)


def _code_of_heads(holder: nn.Module) -> Reads | None:
    """Return what the code of an attention reads, None where it is not known to be right on some of the heads."""
    code = reads(type(holder))
    if code is None or code.input_widths or any(map(_HEAD_ARGUMENT.search, code.arguments)):
        return None
    return None if code.calls & {"normalize", "rms_norm", "layer_norm", "group_norm"} else code


def _plan_of_heads(
    holder: nn.Module,
    prefix: str,
    columns: Mapping[str, tuple[Part, ...]],
    output: str,
    counts: tuple[int, int, int],
    code: Reads,
) -> TensorParallelPlan | None:
    """Return the plan of an attention with the layers `columns` and `output`, None where it is not safe."""
    heads, key_value_heads, width = counts
    numbers = code.numbers - ({3} if code.fused else set())  # of queries, keys and values in one projection
    if not numbers.isdisjoint((heads, heads * width, key_value_heads * width, *{key_value_heads} - {1})):
        return None  # it writes the number of all heads, or their width
    local = _local(holder, code, heads, key_value_heads)
    linears = {key.removeprefix(prefix) for key in columns} | (set() if prefix else {output})
    shared = _head_norms(holder, linears, width, heads)
    if local is None or shared is None:
        return None
    named = {prefix + key: part for key, part in local.items()}
    head_path = next((key for key, part in named.items() if part == "heads" and key.split(".")[-1] in HEADS), heads)
    key_value_path: str | int | None = None  # as many as query heads
    if key_value_heads != heads:
        key_value_path = next((key for key, part in named.items() if part == "key_value_heads"), key_value_heads)
    return TensorParallelPlan(
        column=columns,
        row={output: ("heads",)},
        heads=head_path,
        key_value_heads=key_value_path,
        local={key: part for key, part in named.items() if key not in (head_path, key_value_path)},
        shared=tuple(prefix + key for key in shared),
    )


def _count_heads(holder: nn.Module, names: tuple[str, ...], output: int, code: Reads) -> tuple[int, int, int] | None:
    """Return the numbers of query heads and of key and value heads, and the width of a head."""
    widths = [sizes(_linear(holder, name))[1] for name in names]
    if len(names) == 1:
        if code.fused is None or widths[0] != 3 * output:
            return None
        widths = [output] * 3
    query, key, value = widths
    heads, width = _number(holder, HEADS), _number(holder, HEAD_WIDTHS)
    if width is None:
        heads = heads or _number(getattr(holder, "config", None), HEADS)
        width = query // heads if heads else None
    if not width or query % width or key % width or key != value or output != query:
        return None
    if heads is not None and heads * width != query:
        return None
    heads, key_value_heads = query // width, key // width
    return None if heads % key_value_heads else (heads, key_value_heads, width)


def _local(holder: nn.Module, code: Reads, heads: int, key_value_heads: int) -> dict[str, Any] | None:
    """Return the attributes that hold numbers of heads, None where the code reads a number that is not known."""
    known: list[tuple[Sequence[str], Any, int | None]] = [
        (HEADS, "heads", heads),
        (_KEY_VALUE_HEADS, "key_value_heads", key_value_heads),
        (_GROUP_SIZES, "group_size", heads // key_value_heads),
        (_WIDTHS, "heads", None),
    ]
    local: dict[str, Any] = {}
    for names, part, number in known:
        for name in names:
            value = getattr(holder, name, None)
            if _is_number(value):
                if number is not None and value != number:
                    return None
                local[name] = part
            elif isinstance(value, (Number, Tensor)) and name in code.attributes:
                return None  # a float or a tensor that counts heads
            if name in code.config:
                local[f"config.{name}"] = part
    for name in code.attributes:
        value = getattr(holder, name, None)
        numbers = value if isinstance(value, (tuple, list)) else [value]
        is_known = name in local or name in _OTHER_NUMBERS or _REAL.search(name)
        if not is_known and any(map(_may_count, numbers)):
            return None
    config = getattr(holder, "config", None)
    for name in code.config - _OTHER_CONFIG:
        if _may_count(getattr(config, name, None)) and f"config.{name}" not in local and not _REAL.search(name):
            return None
    return local


def _head_norms(holder: nn.Module, names: set[str], width: int, heads: int) -> tuple[str, ...] | None:
    """Return the norms of single heads, None where something else in `holder` has parameters or counts heads."""
    touched = [name.partition(".")[0] for name in accesses(holder, "forward")]
    order = [name for name in touched if _has_parameters(holder._modules.get(name))]
    norms: list[str] = []
    if holder._parameters or any(heads in buffer.shape for buffer in holder.buffers()):
        return None
    for name, child in holder.named_children():
        if any(layer == name or layer.startswith(f"{name}.") for layer in names):
            continue
        shapes = {tuple(parameter.shape) for parameter in child.parameters()}
        is_norm = "norm" in type(child).__name__.lower()
        if not shapes and not is_norm:
            if any(_is_number(vars(part).get(attribute)) for part in child.modules() for attribute in _COUNTS):
                return None  # it computes with the number of all heads
            continue
        is_one = next(child.children(), None) is None  # not one norm for each head
        if shapes == {(width,)} and heads > 1 and is_norm and is_one and _HEAD_NORM.fullmatch(name):
            norms.append(name)
        elif not (is_norm and order[-1:] == [name] and order.count(name) == 1 and order[-2] in names):
            return None  # but for a norm of the full output, after the last layer
    return tuple(norms)


# --- MLPs ---


def mlp_rule(module: nn.Module, columns: tuple[str, ...], row: str) -> TensorParallelPlan | None:
    """Return the plan of a MLP with the layers `columns` and `row`, None where it is not one or not safe."""
    if not all(_linear(module, name) for name in (*columns, row)) or type(module).__module__.startswith("torch."):
        return None
    code = between(type(module), columns, row)
    if code is None or code.slices:
        return None
    others = [linear for name in module._modules if name not in (*columns, row) and (linear := _linear(module, name))]
    if any(sizes(linear)[1] == sizes(_linear(module, row))[0] for linear in others):
        return None  # what it gives may be multiplied with theirs
    packed = "chunk" in code.calls
    attributes = code.attributes - {*columns, row, "training"}
    for name in attributes:
        value = getattr(module, name, None)
        if isinstance(value, nn.Module) and not _is_elementwise(value):
            return None
        if name in module._parameters or name in module._buffers:
            return None
        if _may_count(value) and value != -1 and not _REAL.search(name):  # a number below zero is a dim
            return None
    allowed = _ELEMENTWISE_CALLS | attributes | {*columns, row} | ({"chunk"} if packed else frozenset())
    if code.calls - allowed or any(callable(getattr(type(module), name, None)) for name in attributes):
        return None
    return _mlp(module, columns, row, packed)


def _mlp(module: nn.Module, columns: tuple[str, ...], row: str, packed: bool) -> TensorParallelPlan | None:
    inner = sizes(_linear(module, row))[0]
    parts: tuple[Part, ...] = ("width", "width") if packed else ("width",)
    if any(sizes(_linear(module, name))[1] != inner * len(parts) for name in columns) or (packed and len(columns) > 1):
        return None
    return TensorParallelPlan(column=dict.fromkeys(columns, parts), row={row: ("width",)})


def _is_elementwise(module: nn.Module) -> bool:
    return not _has_parameters(module) and bool(_ELEMENTWISE.search(type(module).__name__))


# --- what layers say of themselves ---


def said_by_layers(path: str, module: nn.Module) -> TensorParallelPlan | None:
    """Return the plan that the direct children of a module say (`lightning_mm5d.nn`), None where they say none.

    Args:
        path: of the module, for errors.
        module: any module of the model.

    Raises:
        ConfigError: they do not fit together, or the code of the module is not known to be right on a part of them.
    """
    layers = {
        name: layer for name in module._modules if isinstance(layer := _linear(module, name), Linear) and layer.sharding
    }
    columns = {name: layer for name, layer in layers.items() if layer.sharding == "column"}
    rows = {name: layer for name, layer in layers.items() if layer.sharding == "row"}
    if not columns and not rows:
        return None
    register = f"register a plan for it: register_tensor_parallel_plan({type(module).__name__!r}, ...)"
    if not columns or len(rows) != 1:
        rule = "A module has column layers and one row layer, which takes what these give, as direct children"
        got = f"columns {', '.join(columns) or 'none'} and rows {', '.join(rows) or 'none'}"
        raise ConfigError(path, got, rule, f"Put them in a module of their own, or {register}")
    ((output, row),) = rows.items()
    plan = _said_of_heads(module, columns, output, row) if row.heads else _said_of_width(module, columns, output)
    if plan is None:
        what = "a part of its heads" if row.heads else "a part of its width"
        rule = (
            f"Nothing shows that the code of {type(module).__name__} is right on {what}: its layers' sizes must fit, "
            "and it reads no number or parameter that is not known"
        )
        fix = "Use lightning_mm5d.nn.attention there" if row.heads else "Compute by element between its layers"
        raise ConfigError(path, type(module).__name__, rule, f"{fix}, or {register}")
    return plan


def _said_of_heads(
    module: nn.Module, columns: Mapping[str, Linear], output: str, row: Linear
) -> TensorParallelPlan | None:
    heads, width = row.heads[0], row.in_features // row.heads[0]
    every = [count for layer in columns.values() for count in layer.heads]
    others = {count for count in every if count != heads}
    key_value_heads = others.pop() if others else heads
    parts = {
        name: tuple[Part, ...]("heads" if count == heads else "key_value_heads" for count in layer.heads)
        for name, layer in columns.items()
    }
    fits = all(layer.heads and layer.out_features == width * sum(layer.heads) for layer in columns.values())
    code = _code_of_heads(module)
    if others or not fits or len(every) != 3 or heads % key_value_heads or code is None:
        return None
    if len(columns) == 1 and code.fused == "groups":  # said to be in another order than the code takes apart
        return None
    return _plan_of_heads(module, "", parts, output, (heads, key_value_heads, width), code)


def _said_of_width(module: nn.Module, columns: Mapping[str, Linear], output: str) -> TensorParallelPlan | None:
    if any(layer.heads for layer in columns.values()):
        return None
    if type(module) is not nn.Sequential:
        return mlp_rule(module, tuple(columns), output)
    names, column = [*module._modules], next(iter(columns))
    between = names[names.index(column) + 1 : names.index(output)]
    is_plain = all(_is_elementwise(module.get_submodule(name)) for name in between)
    if len(columns) > 1 or names.index(column) > names.index(output) or not is_plain:
        return None
    return _mlp(module, (column,), output, packed=False)


# --- what a model says of itself ---

_COLUMN_STYLES = ("colwise", "packed_colwise", "colwise_gather_output", "colwise_rep")
_ROW_STYLES = ("rowwise", "rowwise_split_input", "rowwise_rep")


def metadata(root: nn.Module) -> dict[str, tuple[TensorParallelPlan, ...]]:
    """Return plans made of the ``tp_plan`` of the Hugging Face models in `root`, by path of the module they are for.

    Projections of attentions are checked as those found by name are; styles that have no place in a plan, and entries
    that match nothing, are left to other sources.
    """
    styles: dict[str, dict[str, str]] = {}
    for base, model in root.named_modules():
        plan = getattr(model, "tp_plan", None)
        if not isinstance(plan, Mapping) or not plan:
            continue
        for path, module in model.named_modules():
            for name in (path, *(f"{path}.{name}" for name in module._parameters)):
                style = plan.get(re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name))
                if style is not None:
                    parent, _, last = name.rpartition(".")
                    styles.setdefault(".".join(filter(None, (base, parent))), {})[last] = style
    by_path: dict[str, tuple[TensorParallelPlan, ...]] = {}
    for path, entries in styles.items():
        plans = tuple(_from_styles(root.get_submodule(path), entries, styles, path))
        if plans:
            by_path[path] = plans
    return by_path


def _from_styles(
    module: nn.Module, entries: Mapping[str, str], styles: Mapping[str, Mapping[str, str]], path: str
) -> Iterator[TensorParallelPlan]:
    columns = tuple(name for name, style in entries.items() if style in _COLUMN_STYLES and _linear(module, name))
    rows = tuple(name for name, style in entries.items() if style in _ROW_STYLES and _linear(module, name))
    if columns and len(rows) == 1:
        plan = attention_rule(module) if _projections(module) else mlp_rule(module, columns, rows[0])
        if plan is not None:
            yield plan
    for name, style in entries.items():
        experts = getattr(module, name)
        if style == "moe_tp_experts" and isinstance(experts, nn.Module):
            parameters = _experts(experts, styles.get(".".join(filter(None, (path, name))), {}))
            if parameters:
                yield TensorParallelPlan(
                    experts=(name,), parameters={f"{name}.{key}": parts for key, parts in parameters.items()}
                )


def _experts(experts: nn.Module, styles: Mapping[str, str]) -> dict[str, tuple[int | str, ...]]:
    """Return what is sharded in a module of experts, nothing where the styles of its tensors do not fit its code."""
    code = reads(type(experts))
    tensors = dict(experts.named_parameters())
    if code is None or any(tensor.dim() != 3 for tensor in tensors.values()) or set(tensors) != set(styles):
        return {}
    # either way around: a tensor may be [experts, out, in] or [experts, in, out]
    dims = {key: 1 if styles[key].endswith("colwise") else 2 for key in tensors}
    packed = {key for key in tensors if styles[key].startswith("packed_")}
    inner = {tensors[key].shape[dims[key]] // (2 if key in packed else 1) for key in tensors}
    known = {"colwise", "rowwise", "packed_colwise", "packed_rowwise"}
    if set(styles.values()) - known or len(inner) != 1 or bool(packed) != ("chunk" in code.calls):
        return {}
    return {key: (dims[key], *(("width", "width") if key in packed else ("width",))) for key in tensors}


# --- parts of modules ---


def _linear(module: nn.Module, path: str) -> Any:
    """The linear layer at `path`, None where there is none."""
    for name in path.split("."):
        if name not in module._modules or module._modules[name] is None:
            return None
        module = module._modules[name]  # type: ignore[assignment]
    return linear_of(module)


def _begins_with(module: nn.Module, name: str, first: str) -> bool:
    """Whether `module` has a child `name` that first of all calls its linear layer `first`."""
    child = module._modules.get(name)
    return child is not None and _linear(child, first) is not None and accesses(child, "forward")[:1] == [first]


def _has_parameters(module: nn.Module | None) -> bool:
    return module is not None and next(module.parameters(), None) is not None


def _number(holder: Any, names: Sequence[str]) -> int | None:
    return next((value for name in names if _is_number(value := getattr(holder, name, None))), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _may_count(value: Any) -> bool:
    """Whether a value may be a number of heads or a width: a whole number, of Python, numpy or a tensor."""
    is_tensor = isinstance(value, Tensor) and value.dim() == 0 and not value.is_floating_point()
    return _is_number(value) or (is_tensor and value.dtype is not torch.bool)
