"""ConfigError: one sentence pattern, and it survives the way back from a spawned process."""

from __future__ import annotations

import ast
import pickle

import pytest

from lightning_mm5d.config.errors import ConfigError, private

ERROR = ConfigError("modalities.vision.pp_size", 5, "There are 4 layers", "Use pp_size=4")


def test_message_says_where_what_rule_and_fix() -> None:
    assert str(ERROR) == "modalities.vision.pp_size: got 5. There are 4 layers. Use pp_size=4."


def test_is_a_value_error() -> None:
    assert isinstance(ERROR, ValueError)


def test_pickling_keeps_all_parts() -> None:
    copy = pickle.loads(pickle.dumps(ERROR))
    assert (copy.field, copy.got, copy.rule, copy.fix) == (ERROR.field, ERROR.got, ERROR.rule, ERROR.fix)
    assert str(copy) == str(ERROR)


def test_a_private_name_that_has_moved_is_told_with_its_package_and_version() -> None:
    assert private(ast.NodeVisitor, "visit") is ast.NodeVisitor.visit
    with pytest.raises(ImportError, match=r"pytest [\d.]+ has no pytest\._gone, a private name"):
        private(pytest, "_gone")
    with pytest.raises(ImportError, match=r"lightning_mm5d .* has no lightning_mm5d.config.errors.ConfigError._gone"):
        private(ConfigError("a", "b", "c", "d"), "_gone")
