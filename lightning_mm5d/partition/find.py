"""Finds the modalities of a module: what each owns, where it is cut off, and its list of layers.

Hugging Face multimodal models name their encoders by method (``get_image_features``, ``get_video_features``,
``get_audio_features``), encoder-decoder models by ``encoder``, models with an ``nn.ModuleDict`` named ``encoders`` by
its keys; anything else says ``module`` and, where the result that leaves is not that of the module's own call,
``boundary``. The loss modality owns whatever no other modality does. With modalities that run after the language model
(``talker``, ``generation_head``, or ``feeds_from``) the language model is cut off, too (`language_cut`).

It refuses names that it cannot find, paths that are not in the model, and modules that nothing uses.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import (
    Modality,
    canonical_name,
    consumers_of,
    decoders_of,
    loss_modality_of,
    main_modality_of,
)
from lightning_mm5d.partition.parts import (
    Parts,
    has_module,
    has_no_forward,
    holds_tensor,
    is_in,
    is_mentioned,
    is_metric,
    joined,
    of_code,
    of_list,
    repeated,
    resolve,
)
from lightning_mm5d.partition.step_uses import (
    EMBEDDINGS,
    Boundary,
    Encoder,
    StepUses,
    Structure,
    cut_language,
    named_decoders,
)
from lightning_mm5d.source.order import accessed_between, accesses, touched
from lightning_mm5d.source.trees import method_of

_GETTERS = {"get_image_features": "vision", "get_video_features": "vision", "get_audio_features": "audio"}
# Towers of models that have no such method; the tower's own call is then the boundary.
_TOWERS = {
    "vision": ("vision_tower", "vision_model", "vision_encoder", "image_encoder", "visual"),
    "audio": ("audio_tower", "audio_model", "audio_encoder", "speech_encoder"),
}
_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "forward")
_MAIN_INPUT = {"input_features": "audio", "input_values": "audio", "pixel_values": "vision"}


def find(root: nn.Module, modalities: Mapping[str, Modality]) -> Structure:
    """Find the `modalities` in `root`.

    Args:
        root: the LightningModule.
        modalities: the configuration.

    Raises:
        ConfigError: a modality is not found, a path is not in the model, or nothing uses the module that it names.
    """
    loss_modality, main, decoders = loss_modality_of(modalities), main_modality_of(modalities), decoders_of(modalities)
    candidates = discover(root)
    encoders: dict[str, Encoder] = {}
    for name, modality in modalities.items():
        if name == main:
            for path in _listed(modality.module):
                resolve(root, path, f"modalities.{name}.module", or_parameter=True)
                if has_module(root, path) and is_metric(root.get_submodule(path)):
                    rule = "It is a metric"
                    raise ConfigError(f"modalities.{name}.module", path, rule, "Name the model, or leave it unset")
        elif modality.module is None and modality.boundary is None:
            encoders[name] = _by_name(root, name, named_decoders(root) if name in decoders else candidates)
        else:
            encoders[name] = _by_path(root, name, modality)
            if modality.boundary is not None and name not in decoders:
                _check_ends(root, name, encoders[name])
    owned = [path for encoder in encoders.values() for path in encoder.owns]
    others = [path for encoder in candidates.values() for path in encoder.owns]
    step, reused = None, list[str]()
    if decoders:
        step = StepUses(root)
        if _rest_lists(root, [*owned, *(unused := step.unused(owned))], others):
            owned += unused  # else its code cannot be read
        rest = _rest_lists(root, owned, others)
        is_set = modalities[main].module is not None or modalities[main].boundary is not None
        configured = _by_path(root, main, modalities[main]) if is_set else None
        encoders[main] = cut_language(step, main, configured, rest[0] if rest else None, encoders, decoders)
        reused = [path for cut in encoders[main].boundaries for path in step.after(cut.path, rest[0] if rest else None)]
        owned += encoders[main].owns
    ends, layers, parts = encoders.get(loss_modality), dict[str, str | None](), dict[str, Parts]()
    for name, modality in modalities.items():
        encoder, wanted = encoders.get(name), modality.num_cuts
        if encoder is None:
            lists = _rest_lists(root, owned, others)
        elif name == main:
            lists = _rest_lists(root, [path for path in owned if path not in encoder.owns], others)
        else:
            lists = _longest_lists(root, encoder.owns)
        by_code = None
        within, without = (("",), (*owned, *others)) if encoder is None else (encoder.owns, ())
        again_and_again = repeated(root, lists, wanted, within, without) if wanted > 1 else None
        if again_and_again is not None:
            layers[name], parts[name] = again_and_again
            continue
        # of several nn.Sequential none is the list of layers
        if wanted > 1 and (not lists or (len(lists) > 1 and isinstance(root.get_submodule(lists[0]), nn.Sequential))):
            if encoder is None:
                by_code = of_code(root, ("", "training_step"), wanted, without=owned)
            elif len(encoder.boundaries) == 1:
                cut = encoder.boundaries[0]
                by_code = of_code(root, (cut.path, cut.method), wanted, within=encoder.owns)
        layers[name] = lists[0] if lists and by_code is None else None
        if wanted > 1 and layers[name] is not None:
            _check_between(root, name, lists[0], wanted)
        parts[name] = by_code or (of_list(root, lists[0], wanted) if lists else Parts())
    encoders.pop(loss_modality, None)
    consumers = consumers_of(modalities)
    passes = [step.paths.count(cut.path) for cut in encoders[main].boundaries] if step else [1]
    for name, encoder in encoders.items():
        fed = [_placed(root, encoder, parts[consumer], layers[consumer], step) for consumer in consumers[name]]
        with_parts = [placed for placed, consumer in zip(fed, consumers[name], strict=True) if parts[consumer].paths]
        is_encoder = name not in (main, *decoders)
        again = is_encoder and (len(fed) > 1 or max(passes) > 1)
        precedes = bool(with_parts) and all(placed.precedes for placed in with_parts) and not again
        late = is_encoder and fed[0].used_late
        encoders[name] = Encoder(encoder.owns, encoder.boundaries, precedes, late, not is_encoder)
    return Structure(
        loss_modality=loss_modality,
        encoders=encoders,
        layers=layers,
        parts=parts,
        ends=ends,
        main=main if decoders else None,
        used_again=tuple(reused),
        step=step,
    )


def _rest_lists(root: nn.Module, owned: list[str], others: list[str]) -> list[str]:
    """The lists of layers of the modality that owns what no other one does."""
    return _longest_lists(root, ("",), without=(*owned, *others)) or _longest_lists(root, ("",), without=owned)


def discover(root: nn.Module) -> dict[str, Encoder]:
    """Return the encoders that `root` declares in the customary ways, by canonical name; `source` as for `find`."""
    if encoders := _in_dict(root):
        return encoders
    encoders = _with_getters(root)
    for name, towers in _TOWERS.items():
        if name not in encoders and (tower := _tower(root, towers)):
            encoders[name] = tower
    encoders = encoders or _encoder_of_decoder(root)
    return {name: encoder for name, encoder in encoders.items() if encoder.boundaries}


def _in_dict(root: nn.Module) -> dict[str, Encoder]:
    """The members of the outermost ``nn.ModuleDict`` named ``encoders`` that the module around it calls, by key."""
    for path, module in root.named_modules():
        held = getattr(module, "encoders", None)
        if isinstance(held, nn.ModuleDict) and len(held) and "encoders" in accesses(module, *_STEPS):
            paths = {key: joined(path, "encoders", key) for key in held}
            return {key: Encoder((inner,), (Boundary(inner),)) for key, inner in paths.items()}
    return {}


def _with_getters(root: nn.Module) -> dict[str, Encoder]:
    """The encoders that have a method for their result, such as ``get_image_features``; some have no boundary."""
    by_name: dict[str, tuple[list[str], list[Boundary]]] = {}
    for path, module in root.named_modules():
        for getter, name in _GETTERS.items():
            if method_of(type(module), getter) is None:
                continue
            touched = accesses(module, getter)
            if any(item.rpartition(".")[2] == getter for item in touched):
                continue  # it hands the call on to an inner module, which is the one that forward calls
            owns = [joined(path, item) for item in _submodules(module, touched)]
            if not owns:
                continue
            if getter in accesses(module, "forward"):
                cuts = [Boundary(path, getter)]
            else:
                owns = [item for item in owns if _longest_lists(root, (item,))]
                cuts = [Boundary(item) for item in owns]
            held, boundaries = by_name.setdefault(name, ([], []))
            held.extend(item for item in owns if item not in held)
            boundaries.extend(cuts)
    return {name: Encoder(tuple(owns), tuple(cuts)) for name, (owns, cuts) in by_name.items()}


def _tower(root: nn.Module, names: tuple[str, ...]) -> Encoder | None:
    """The first submodule with one of `names` that the module around it uses.

    Where that module goes on with parts of the tower, as with its last norm, the next module is the boundary.
    """
    for path, module in root.named_modules():
        held = next((name for name in names if isinstance(getattr(module, name, None), nn.Module)), None)
        touched = [] if held is None else accesses(module, *_STEPS)
        if held is None or held not in touched:
            continue
        tower = joined(path, held)
        after = touched[touched.index(held) + 1 :]
        inside = [index for index, item in enumerate(after) if _under(item.rpartition(".")[0], [held])]
        others = _submodules(module, after[inside[-1] + 1 :]) if inside else []
        if len(others) > 1 and "." not in others[0]:
            following = joined(path, others[0])
            return Encoder((tower, following), (Boundary(following),))
        return Encoder((tower,), (Boundary(tower),))
    return None


def _encoder_of_decoder(root: nn.Module) -> dict[str, Encoder]:
    """The ``encoder`` of an encoder-decoder model, named after its main input."""
    encoders: dict[str, Encoder] = {}
    for path, module in root.named_modules():
        inner = getattr(module, "encoder", None)
        if not getattr(getattr(module, "config", None), "is_encoder_decoder", False):
            continue
        if isinstance(inner, nn.Module) and "encoder" in accesses(module, "forward"):
            name = _MAIN_INPUT.get(getattr(inner, "main_input_name", ""), "encoder")
            owned = joined(path, "encoder")
            encoders[name] = Encoder((owned,), (Boundary(owned),))
    return encoders


def _by_name(root: nn.Module, name: str, candidates: Mapping[str, Encoder]) -> Encoder:
    canonical = canonical_name(name) or name
    if canonical == "encoder" and len(candidates) == 1:
        return next(iter(candidates.values()))
    synonyms = [key for key in candidates if (canonical_name(key) or key) == canonical]
    if name in candidates or len(synonyms) == 1:
        return candidates[name if name in candidates else synonyms[0]]
    if "." not in name and has_module(root, name) and next(root.get_submodule(name).parameters(), None) is not None:
        return _by_path(root, name, Modality(module=name))  # self.vision = ..., and a modality of that name
    seen = ", ".join(f"{key} ({', '.join(cut.name for cut in value.boundaries)})" for key, value in candidates.items())
    near = difflib.get_close_matches(name, candidates, n=1)
    fix = f"Did you mean {near[0]!r}? Otherwise set" if near else "Set"
    fix += f" modalities.{name}.module to the path of its module"
    if modules := list(_branches(root)):
        fix += f", for instance {', '.join(map(repr, modules[:8]))}"
    rule = f"No such modality was found in the model, which has {seen or 'none'}"
    raise ConfigError(f"modalities.{name}", name, rule, fix)


def _branches(module: nn.Module, path: str = "") -> Iterator[str]:
    """Paths of the modules that could be a modality: the outermost ones that hold their lists of layers together."""
    for key, child in module.named_children():
        name = joined(path, key)
        lists = [
            p
            for p, m in child.named_modules()
            if isinstance(m, nn.ModuleList | nn.Sequential) and any(True for layer in m for _ in layer.children())
        ]
        outermost = [p for p in lists if not any(p != other and _under(p, (other,)) for other in lists)]
        if "" not in lists and len({p.rpartition(".")[0] for p in outermost}) > 1:
            yield from _branches(child, name)
        elif next(child.children(), None) is not None and next(child.parameters(), None) is not None:
            yield name


def _by_path(root: nn.Module, name: str, modality: Modality) -> Encoder:
    owns = _listed(modality.module)
    for path in owns:
        resolve(root, path, f"modalities.{name}.module", or_parameter=len(owns) > 1 or modality.boundary is not None)
    modules = [path for path in owns if has_module(root, path)]
    boundaries = []
    for path in _listed(modality.boundary) or modules[-1:]:
        field = f"modalities.{name}.{'boundary' if modality.boundary else 'module'}"
        owner, method = path, "forward"
        if not has_module(root, path):
            owner, _, method = path.rpartition(".")
            if not has_module(root, owner) or not callable(getattr(root.get_submodule(owner), method, None)):
                resolve(root, path, field)
        elif is_metric(root.get_submodule(path)):
            rule = "It is a metric, which modules do not consume; each rank keeps its own"
            raise ConfigError(field, path, rule, "Name the encoder whose result the model uses")
        elif has_no_forward(root.get_submodule(path)):
            rule = "It is a container whose members are used one by one, so no call of it gives a result"
            members = [joined(path, name) for name, _ in root.get_submodule(path).named_children()]
            fix = f"Name the module that calls them, {path.rpartition('.')[0]!r}; pp_size splits the list"
            if "." not in path:
                fix = "Move the code that uses them into the forward of a module, and name that"
                fix += f", or name all its members, {members}, where the last one's result leaves" if members else ""
            raise ConfigError(field, path, rule, fix)
        if owns and not any(_under(owner, [path]) or _under(path, [owner]) for path in owns):
            rule = f"It lies outside of what the modality owns, {', '.join(owns)}"
            raise ConfigError(field, path, rule, f"Name a callable in {owns[-1]!r}, or leave it unset")
        boundaries.append(Boundary(owner, method))
    if not owns:
        for cut in boundaries:
            module = root.get_submodule(cut.path)
            touched = [""] if cut.method == "forward" else _submodules(module, accesses(module, cut.method))
            owns += [joined(cut.path, item) for item in touched]
    for cut in boundaries:
        if not is_mentioned(root, cut.path, cut.method):
            rule = "Nothing in the model's code uses it, so no modality would consume its result"
            fix = "Name the module that the model's `forward` calls"
            raise ConfigError(f"modalities.{name}.module", cut.name, rule, fix)
    return Encoder(tuple(owns), tuple(boundaries))


def _check_ends(root: nn.Module, name: str, encoder: Encoder) -> None:
    """Refuse a boundary inside of a module that the step calls, where other weights of the module run after it."""
    used = StepUses(root).paths
    for cut in encoder.boundaries:
        around = [path for path in encoder.owns if path in used and path != cut.path and _under(cut.path, (path,))]
        if cut.method != "forward" or cut.path in used or not around:
            continue
        items = [joined(around[0], item) for item in accesses(root.get_submodule(around[0]), "forward")]
        at = next((index for index, item in enumerate(items) if _under(cut.path, (item,))), len(items))
        after = [item for item in items[at + 1 :] if has_module(root, item) and not _under(cut.path, (item,))]
        after = [item for item in after if next(root.get_submodule(item).parameters(), None) is not None]
        if after:
            rule = f"{around[0]!r} computes with its result in {', '.join(map(repr, dict.fromkeys(after)))}, and other "
            rule += "modalities get the result of a boundary"
            raise ConfigError(f"modalities.{name}.boundary", cut.path, rule, f"Use {around[0]!r}, or leave it unset")


def _placed(root: nn.Module, encoder: Encoder, parts: Parts, layers: str | None, step: StepUses | None) -> Encoder:
    """Find out whether `encoder` runs before the `parts`, and whether its result is used only after them."""
    precedes, late = bool(parts.paths), False
    for cut in encoder.boundaries if parts.paths else ():
        if layers is None:
            gaps = parts.gaps(cut.name) or [0, len(parts.paths)]
            before, after = gaps[0] < len(parts.paths), gaps[-1] > 0
        else:
            in_step = None if step is None else step.around(cut.name, layers)
            before, after = in_step or position(root, cut.name, layers)
        precedes = precedes and before and not after
        late = late or (after and not before)
        owner = root.get_submodule(cut.path)
        late = late or callable(getattr(type(owner), "get_text_features", None))
    return Encoder(encoder.owns, encoder.boundaries, precedes, late)


def position(root: nn.Module, path: str, layers: str) -> tuple[bool, bool]:
    """Tell whether the module's code uses `path` before and after the list of layers at `layers`.

    Args:
        root: the LightningModule.
        path: dotted path of a module, parameter or method.
        layers: dotted path of the list.

    Returns:
        ``(before, after)``; by registration order where the code does not say.
    """
    ancestor, mine, (its, *deeper), methods = _parting(root, path, layers)
    if mine == its:
        return True, False
    for method in methods:
        uses = touched(ancestor, method)
        of_path = [item.split(".")[0] == mine for item, _ in uses]
        run = [hit and (use[1] or not has_module(ancestor, use[0])) for hit, use in zip(of_path, uses, strict=True)]
        of_path = run if True in run else of_path  # not those that only look at a configuration
        theirs = [_runs(ancestor, *use, ".".join([its, *deeper])) for use in uses]
        theirs = theirs if True in theirs else [item.split(".")[0] == its for item, _ in uses]
        if True not in theirs:
            continue
        before, after = any(of_path[: theirs.index(True)]), any(of_path[len(theirs) - theirs[::-1].index(True) :])
        if before or after:
            return before, after
    registered = [*ancestor._parameters, *ancestor._modules]
    if mine not in registered or its not in registered:
        return True, False
    # direct parameters come first in a state dict but may be used anywhere: before the layers is the usual place
    before = registered.index(mine) < registered.index(its)
    return before, not before


def _runs(ancestor: nn.Module, item: str, is_called: bool, layers: str) -> bool:
    """Whether a use in the code of `ancestor` is one of the list of layers, or a call by which they run."""
    owner, _, method = item.rpartition(".")
    if has_module(ancestor, item) or not is_called:
        return is_in(item, layers) or (is_called and is_in(layers, item))
    return owner != "" and is_in(layers, owner) and method not in EMBEDDINGS


def runs_between(root: nn.Module, path: str, layers: str) -> bool:
    """Return whether a loop over the list of layers uses `path` to make what it calls layers with.

    Args:
        root: the LightningModule.
        path: dotted path of a module or parameter.
        layers: dotted path of the list.
    """
    ancestor, mine, its, methods = _parting(root, path, layers)
    touched = (item for method in methods for item in accessed_between(ancestor, method, ".".join(its)))
    return mine != its[0] and any(is_in(item, mine) for item in touched)


def _parting(root: nn.Module, path: str, layers: str) -> tuple[nn.Module, str, list[str], tuple[str, ...]]:
    """The module where two paths part, its name for what leads to `path`, its names down to `layers`, its methods."""
    names, layer_names = path.split("."), layers.split(".")
    depth = 0
    while depth < min(len(names), len(layer_names)) - 1 and names[depth] == layer_names[depth]:
        depth += 1
    while depth and not has_module(root, ".".join(names[:depth])):
        depth -= 1
    methods = _STEPS if depth == 0 else (*_GETTERS, "forward")
    return root.get_submodule(".".join(names[:depth])), names[depth], layer_names[depth:], methods


def _longest_lists(root: nn.Module, within: tuple[str, ...], without: tuple[str, ...] | list[str] = ()) -> list[str]:
    """The lists in `within` of modules that have parts, longest first; more parameters first where equally long."""
    for kind in (nn.ModuleList, nn.Sequential):
        lists: dict[str, tuple[int, int]] = {}
        for start in (start for start in within if has_module(root, start)):
            for path, module in root.get_submodule(start).named_modules(prefix=start):
                # lists inside lists are parts of layers (experts), lists of leaves are heads or projections
                holder = path.rpartition(".")[0]
                if not isinstance(module, kind) or _under(path, without) or _under(holder, list(lists)):
                    continue
                if any(next(layer.children(), None) is not None for layer in module):
                    lists[path] = (len(module), sum(parameter.numel() for parameter in module.parameters()))
        lists = {path: size for path, size in lists.items() if size[1]}
        if lists:
            return sorted(lists, key=lambda path: lists[path], reverse=True)
    return []


def _check_between(root: nn.Module, name: str, path: str, wanted: int) -> None:
    """Refuse a list of lists of layers between which the modules of another list run: SegFormer's, PoolFormer's."""
    layers, holder = root.get_submodule(path), root.get_submodule(path.rpartition(".")[0])
    if not all(isinstance(child, nn.ModuleList) for child in layers.children()):
        return
    for key, other in holder.named_children():
        same = isinstance(other, nn.ModuleList) and other is not layers and len(other) == len(layers)  # type: ignore[arg-type]
        if same and next(other.parameters(), None) is not None:
            rule = (
                f"'{path}' holds lists of layers, between which modules of {key!r} run, and stages are cut between "
                "layers that follow each other"
            )
            fix = "Use pp_size=1 for it, and tp_size to shard its layers"
            raise ConfigError(f"modalities.{name}.pp_size", wanted, rule, fix)


def _submodules(module: nn.Module, touched: list[str]) -> list[str]:
    """The distinct submodules and parameters with parameters among `touched`, without those inside others."""
    paths: list[str] = []
    for item in touched:
        if item in paths:
            continue
        if has_module(module, item):
            if next(module.get_submodule(item).parameters(), None) is None:
                continue
        elif not holds_tensor(module, item, "parameter"):
            continue
        paths.append(item)
    return [item for item in paths if not _under(item.rpartition(".")[0], paths)]


def _listed(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _under(path: str, roots: tuple[str, ...] | list[str]) -> bool:
    return any(path == item or path.startswith(f"{item}.") for item in roots)
