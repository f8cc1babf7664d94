"""Modalities as a user may write them: a `Modality`, a mapping of its fields, or its number of stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, overload

from lightning_mm5d.config.errors import ConfigError, did_you_mean
from lightning_mm5d.config.modality import Modality, PipelineTemplate


@overload
def as_modalities(said: Mapping[str, Any]) -> dict[str, Modality]: ...


@overload
def as_modalities(said: object) -> Any: ...


def as_modalities(said: object) -> Any:
    """Return the same modalities, each as a `Modality`: ``2`` is ``Modality(pp_size=2)``.

    What is neither stays as it is, for the check of modalities to refuse.

    Raises:
        ConfigError: a mapping names a field that does not exist.
    """
    if not isinstance(said, Mapping):
        return said
    return {name: _modality(name, one) for name, one in said.items()}


def _modality(name: object, said: object) -> Any:
    owner, dot, field = str(name).partition(".")
    if dot and isinstance(said, int):  # an option names a field of a modality that no file has
        known = _names(Modality)
        fix = f"Write modalities={{{owner}: {{{field}: {said}}}}}" if field in known else did_you_mean(field, known)
        raise ConfigError(f"modalities.{name}", said, f"There is no modality {owner!r} with such a field", fix)
    if isinstance(said, Mapping):
        return _made(f"modalities.{name}", Modality, said)
    if isinstance(said, Modality):
        made = _with_templates(f"modalities.{name}", {one: getattr(said, one) for one in _TEMPLATES})
        return replace(said, **made)
    return Modality(pp_size=said) if isinstance(said, int) and not isinstance(said, bool) else said


def _names(kind: type) -> list[str]:
    return [each.name for each in fields(kind)]


def _made(field: str, kind: type, said: Mapping[str, Any]) -> Any:
    """The object whose fields are said, which may have values of any type."""
    for key in said:
        if key not in _names(kind):
            raise ConfigError(f"{field}.{key}", said[key], "There is no such field", did_you_mean(key, _names(kind)))
    return kind(**_with_templates(field, said))


_TEMPLATES = ("pipeline_template", "pipelines")


def _with_templates(field: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """The values of fields, with a `PipelineTemplate` in place of each mapping of its fields."""
    values = dict(said)
    if isinstance(template := values.get("pipeline_template"), Mapping):
        values["pipeline_template"] = _made(f"{field}.pipeline_template", PipelineTemplate, template)
    if isinstance(listed := values.get("pipelines"), list | tuple):
        values["pipelines"] = [
            _made(f"{field}.pipelines[{index}]", PipelineTemplate, one) if isinstance(one, Mapping) else one
            for index, one in enumerate(listed)
        ]
    return values
