"""Finds the modalities of a module: what each owns, where it is cut off, and its list of layers.

Hugging Face multimodal models name their encoders by method (``get_image_features``, ``get_video_features``,
``get_audio_features``), encoder-decoder models by ``encoder``; anything else says ``module`` and, where the result
that leaves is not that of the module's own call, ``boundary``. The loss modality owns whatever no
other modality does.

It refuses names that it cannot find, paths that are not in the model, and modules that nothing uses.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_mm5d.config.errors import ConfigError
from lightning_mm5d.config.modality import Modality, canonical_name, loss_modality_of
from lightning_mm5d.partition.parts import Parts, has_module, of_code, of_list
from lightning_mm5d.source.names import mentions
from lightning_mm5d.source.order import accesses
from lightning_mm5d.source.trees import Source, method_of

_GETTERS = {
    "get_image_features": "vision",
    "get_video_features": "vision",
    "get_audio_features": "audio",
}
# Towers of models that have no such method; the tower's own call is then the boundary.
_TOWERS = {
    "vision": ("vision_tower", "vision_model", "vision_encoder", "image_encoder", "visual"),
    "audio": ("audio_tower", "audio_model", "audio_encoder", "speech_encoder"),
}
_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "forward")
_MAIN_INPUT = {"input_features": "audio", "input_values": "audio", "pixel_values": "vision"}


@dataclass(frozen=True)
class Boundary:
    """A callable whose result is all that other modalities need: `method` of the module at `path`."""

    path: str
    method: str = "forward"

    @property
    def name(self) -> str:
        return self.path if self.method == "forward" else _join(self.path, self.method)


@dataclass(frozen=True)
class Encoder:
    """A modality that another one consumes.

    Attributes:
        owns: paths of the modules and parameters that belong to it.
        boundaries: where its result leaves it.
        precedes: whether its result is made before the loss modality's first layer runs.
        used_late: whether its result is used after the loss modality's last layer.
    """

    owns: tuple[str, ...]
    boundaries: tuple[Boundary, ...]
    precedes: bool = True
    used_late: bool = False


@dataclass(frozen=True)
class Found:
    """The modalities of a module: the `loss_modality` one, and the `encoders`.

    Attributes:
        layers: the list of layers of each, if any.
        parts: what each can be cut between.
    """

    loss_modality: str
    encoders: dict[str, Encoder]
    layers: dict[str, str | None]
    parts: dict[str, Parts]


def find(root: nn.Module, modalities: Mapping[str, Modality], source: Source | None = None) -> Found:
    """Find the `modalities` in `root`.

    Args:
        root: the LightningModule.
        modalities: the configuration.
        source: reads the code; shared with others that read the same.

    Raises:
        ConfigError: a modality is not found, a path is not in the model, or nothing uses the module that it names.
    """
    loss_modality = loss_modality_of(modalities)
    source = source or Source()
    candidates = discover(root, source)
    encoders: dict[str, Encoder] = {}
    for name, modality in modalities.items():
        if name == loss_modality:
            for path in _listed(modality.module):
                _resolve(root, path, f"modalities.{name}.module")
        elif modality.module is None and modality.boundary is None:
            encoders[name] = _by_name(root, name, candidates)
        else:
            encoders[name] = _by_path(source, root, name, modality)
    owned = [path for encoder in encoders.values() for path in encoder.owns]
    others = [path for encoder in candidates.values() for path in encoder.owns]
    layers: dict[str, str | None] = {}
    parts: dict[str, Parts] = {}
    for name, modality in modalities.items():
        encoder, wanted = encoders.get(name), modality.num_cuts
        if encoder is not None:
            lists = _longest_lists(root, encoder.owns)
        else:
            lists = _longest_lists(root, ("",), without=(*owned, *others)) or _longest_lists(root, ("",), without=owned)
        by_code = None
        # of several nn.Sequential none is the list of layers
        if wanted > 1 and (not lists or (len(lists) > 1 and isinstance(root.get_submodule(lists[0]), nn.Sequential))):
            if encoder is None:
                by_code = of_code(source, root, ("", "training_step"), wanted, without=owned)
            elif len(encoder.boundaries) == 1:
                cut = encoder.boundaries[0]
                by_code = of_code(source, root, (cut.path, cut.method), wanted, within=encoder.owns)
        layers[name] = lists[0] if lists and by_code is None else None
        parts[name] = by_code or (of_list(root, lists[0], wanted) if lists else Parts())
    for name, encoder in encoders.items():
        encoders[name] = _placed(source, root, encoder, parts[loss_modality], layers[loss_modality])
    return Found(loss_modality, encoders, layers, parts)


def discover(root: nn.Module, source: Source | None = None) -> dict[str, Encoder]:
    """Return the encoders that `root` declares in the customary ways, by canonical name; `source` as for `find`."""
    source = source or Source()
    found = _with_getters(source, root)
    for name, towers in _TOWERS.items():
        if name not in found and (tower := _tower(source, root, towers)):
            found[name] = Encoder((tower,), (Boundary(tower),))
    found = found or _encoder_of_decoder(source, root)
    return {name: encoder for name, encoder in found.items() if encoder.boundaries}


def _with_getters(source: Source, root: nn.Module) -> dict[str, Encoder]:
    """The encoders that have a method for their result, such as ``get_image_features``; some have no boundary."""
    found: dict[str, tuple[list[str], list[Boundary]]] = {}
    for path, module in root.named_modules():
        for getter, name in _GETTERS.items():
            if method_of(type(module), getter) is None:
                continue
            touched = accesses(source, module, getter)
            if any(item.rpartition(".")[2] == getter for item in touched):
                continue  # it hands the call on to an inner module, which is the one that forward calls
            owns = [_join(path, item) for item in _submodules(module, touched)]
            if not owns:
                continue
            if getter in accesses(source, module, "forward"):
                cuts = [Boundary(path, getter)]
            else:
                owns = [item for item in owns if _longest_lists(root, (item,))]
                cuts = [Boundary(item) for item in owns]
            held, boundaries = found.setdefault(name, ([], []))
            held.extend(item for item in owns if item not in held)
            boundaries.extend(cuts)
    return {name: Encoder(tuple(owns), tuple(cuts)) for name, (owns, cuts) in found.items()}


def _tower(source: Source, root: nn.Module, names: tuple[str, ...]) -> str | None:
    """The path of the first submodule with one of `names` that the module around it uses."""
    for path, module in root.named_modules():
        held = next((name for name in names if isinstance(getattr(module, name, None), nn.Module)), None)
        if held is not None and held in accesses(source, module, *_STEPS):
            return _join(path, held)
    return None


def _encoder_of_decoder(source: Source, root: nn.Module) -> dict[str, Encoder]:
    """The ``encoder`` of an encoder-decoder model, named after its main input."""
    found: dict[str, Encoder] = {}
    for path, module in root.named_modules():
        inner = getattr(module, "encoder", None)
        if not getattr(getattr(module, "config", None), "is_encoder_decoder", False):
            continue
        if isinstance(inner, nn.Module) and "encoder" in accesses(source, module, "forward"):
            name = _MAIN_INPUT.get(getattr(inner, "main_input_name", ""), "encoder")
            owned = _join(path, "encoder")
            found[name] = Encoder((owned,), (Boundary(owned),))
    return found


def _by_name(root: nn.Module, name: str, candidates: Mapping[str, Encoder]) -> Encoder:
    canonical = canonical_name(name) or name
    if canonical == "encoder" and len(candidates) == 1:
        return next(iter(candidates.values()))
    if canonical in candidates:
        return candidates[canonical]
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
        name = _join(path, key)
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


def _by_path(source: Source, root: nn.Module, name: str, modality: Modality) -> Encoder:
    owns = _listed(modality.module)
    for path in owns:
        _resolve(root, path, f"modalities.{name}.module")
    boundaries = []
    for path in _listed(modality.boundary) or owns[-1:]:
        field = f"modalities.{name}.{'boundary' if modality.boundary else 'module'}"
        owner, method = path, "forward"
        if not has_module(root, path):
            owner, _, method = path.rpartition(".")
            if not has_module(root, owner) or not callable(getattr(root.get_submodule(owner), method, None)):
                _resolve(root, path, field)
        elif _has_no_forward(root.get_submodule(path)):
            rule = "it is a container whose members are used one by one, so no call of it gives a result"
            members = [_join(path, name) for name, _ in root.get_submodule(path).named_children()]
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
            touched = [""] if cut.method == "forward" else _submodules(module, accesses(source, module, cut.method))
            owns += [_join(cut.path, item) for item in touched]
    for cut in boundaries:
        if not _mentioned(source, root, cut):
            raise ConfigError(
                f"modalities.{name}.module",
                cut.name,
                "nothing in the model's code uses it, so no modality would consume its result",
                "Name the module that the model's `forward` calls",
            )
    return Encoder(tuple(owns), tuple(boundaries))


def _placed(source: Source, root: nn.Module, encoder: Encoder, parts: Parts, layers: str | None) -> Encoder:
    """Find out whether `encoder` runs before the `parts`, and whether its result is used only after them."""
    precedes, late = bool(parts.paths), False
    for cut in encoder.boundaries if parts.paths else ():
        if layers is None:
            gaps = parts.gaps(cut.name) or [0, len(parts.paths)]
            before, after = gaps[0] < len(parts.paths), gaps[-1] > 0
        else:
            before, after = position(source, root, cut.name, layers)
        precedes = precedes and before and not after
        late = late or (after and not before)
        owner = root.get_submodule(cut.path)
        late = late or callable(getattr(type(owner), "get_text_features", None))
    return Encoder(encoder.owns, encoder.boundaries, precedes, late)


def position(source: Source, root: nn.Module, path: str, layers: str) -> tuple[bool, bool]:
    """Tell whether the module's code uses `path` before and after the list of layers at `layers`.

    Args:
        source: reads the code.
        root: the LightningModule.
        path: dotted path of a module, parameter or method.
        layers: dotted path of the list.

    Returns:
        ``(before, after)``; by registration order where the code does not say.
    """
    one, other = path.split("."), layers.split(".")
    depth = 0
    while depth < min(len(one), len(other)) - 1 and one[depth] == other[depth]:
        depth += 1
    while depth and not has_module(root, ".".join(one[:depth])):
        depth -= 1
    if one[depth] == other[depth]:
        return True, False
    ancestor = root.get_submodule(".".join(one[:depth]))
    methods = _STEPS if depth == 0 else (*_GETTERS, "forward")
    for method in methods:
        heads = [item.split(".")[0] for item in accesses(source, ancestor, method)]
        if one[depth] not in heads or other[depth] not in heads:
            continue
        first = heads.index(other[depth])
        last = len(heads) - 1 - heads[::-1].index(other[depth])
        before, after = one[depth] in heads[:first], one[depth] in heads[last + 1 :]
        if before or after:
            return before, after
    registered = [*ancestor._parameters, *ancestor._modules]
    if one[depth] not in registered or other[depth] not in registered:
        return True, False
    # direct parameters come first in a state dict but may be used anywhere: before the layers is the usual place
    before = registered.index(one[depth]) < registered.index(other[depth])
    return before, not before


def _longest_lists(root: nn.Module, within: tuple[str, ...], without: tuple[str, ...] | list[str] = ()) -> list[str]:
    """The lists in `within` of modules that have parts, longest first; more parameters first where equally long."""
    for kind in (nn.ModuleList, nn.Sequential):
        lists: dict[str, tuple[int, int]] = {}
        for start in within:
            for path, module in (
                root.get_submodule(start).named_modules(prefix=start) if has_module(root, start) else ()
            ):
                # lists inside lists are parts of layers (experts), lists of leaves are heads or projections
                if (
                    not isinstance(module, kind)
                    or _under(path, without)
                    or _under(path.rpartition(".")[0], list(lists))
                ):
                    continue
                if any(next(layer.children(), None) is not None for layer in module):
                    lists[path] = (len(module), sum(parameter.numel() for parameter in module.parameters()))
        lists = {path: size for path, size in lists.items() if size[1]}
        if lists:
            return sorted(lists, key=lambda path: lists[path], reverse=True)
    return []


def _has_no_forward(module: nn.Module) -> bool:
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


def _submodules(module: nn.Module, touched: list[str]) -> list[str]:
    """The distinct submodules and parameters with parameters among `touched`, without those inside others."""
    kept: list[str] = []
    for item in touched:
        if item in kept:
            continue
        if has_module(module, item):
            if next(module.get_submodule(item).parameters(), None) is None:
                continue
        elif item.rpartition(".")[2] not in _owner(module, item)._parameters:
            continue
        kept.append(item)
    return [item for item in kept if not _under(item.rpartition(".")[0], kept)]


def _owner(module: nn.Module, path: str) -> nn.Module:
    parent = path.rpartition(".")[0]
    return module.get_submodule(parent) if has_module(module, parent) else module


def _mentioned(source: Source, root: nn.Module, cut: Boundary) -> bool:
    """Whether any ancestor's class mentions the callable outside of its constructor."""
    parts = cut.path.split(".") if cut.path else []
    word = parts[-1] if cut.method == "forward" and parts else cut.method
    words = [word, "getattr", "named_children", "children", "_modules"]
    classes = [cls for at in range(len(parts) + 1) for cls in type(root.get_submodule(".".join(parts[:at]))).__mro__]
    own = [cls for cls in classes if not cls.__module__.startswith(("torch.", "lightning.")) and cls is not object]
    return any(mentions(source, cls, words) for cls in own) or (parts[-1:] != [] and parts[-1].isdigit())


def _resolve(root: nn.Module, path: str, field: str) -> None:
    if not has_module(root, path):
        names = [name for name, _ in root.named_modules() if name]
        near = difflib.get_close_matches(path, names, n=1, cutoff=0.3) or names[:1]
        fix = f"The nearest is {near[0]!r}" if near else "Build the model in configure_model or __init__"
        raise ConfigError(field, path, "there is no such module in the model", fix)


def _listed(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _under(path: str, roots: tuple[str, ...] | list[str]) -> bool:
    return any(path == item or path.startswith(f"{item}.") for item in roots)
