"""The fields of a composed model's configuration as a file has them, read without transformers."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any


def without_own_code(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of a configuration without callbacks; None where it names classes outside of transformers."""
    own = copy.deepcopy(dict(fields))
    classes = [own.get("language_model_class")]
    for entry in own.get("encoders", {}).values():
        entry |= {"before": None, "after": None, "after_projector": None}
        classes += [entry.get("model_class"), entry.get("projector", {}).get("class")]
    of_transformers = [path is None or re.fullmatch(r"transformers\.models\.[\w.]+:\w+", path) for path in classes]
    return own if all(of_transformers) else None
