"""Names say what they hold: a word that fits any value is no name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lightning_mm5d

ROOT = Path(lightning_mm5d.__file__).parent
SAY_NOTHING = {"one", "found", "own", "made", "said", "kept", "alone"}
EXCEPTIONS = {
    ("data/resumable.py", "own"): "a key of saved positions of loaders, which older checkpoints have too",
}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def bound_names(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The names that a module binds, with their lines: of variables, arguments, attributes, definitions and imports."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            yield part.lineno, part.id
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield part.lineno, part.attr
        elif isinstance(part, ast.arg):
            yield part.lineno, part.arg
        elif isinstance(part, DEFINITIONS):
            yield part.lineno, part.name
        elif isinstance(part, (ast.alias, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            name = part.asname if isinstance(part, ast.alias) else part.name
            if name is not None:
                yield part.lineno, name
        elif isinstance(part, ast.MatchMapping) and part.rest is not None:
            yield part.lineno, part.rest


def test_names_say_what_they_hold() -> None:
    say_nothing = []
    for path in sorted(ROOT.rglob("*.py")):
        file = str(path.relative_to(ROOT))
        for line, name in bound_names(ast.parse(path.read_text())):
            if name.strip("_").lower() in SAY_NOTHING and (file, name) not in EXCEPTIONS:
                say_nothing.append(f"{file}:{line} {name}")
    assert say_nothing == []


def test_each_exception_is_still_a_name() -> None:
    for file, name in EXCEPTIONS:
        assert name in {bound for _, bound in bound_names(ast.parse((ROOT / file).read_text()))}, file


def test_every_way_to_bind_a_name_is_seen() -> None:
    code = """
import a as b0, c0
class C1(d.e):
    f2: int = 0
def g3(h4, *i5, j6=0, **k7): self.m8 = [n9 for n9 in o if (p10 := lambda q11: r)]
for s12, (t13, *u14) in v: w14[x] = y
with z as a15: b16 += 1
try: pass
except E as c17:
    match d:
        case [e18, *f19] | {"g": h20, **i21} as j22: pass
"""
    expected = "b0 C1 f2 g3 h4 i5 j6 k7 m8 n9 p10 q11 s12 t13 u14 a15 b16 c17 e18 f19 h20 i21 j22"
    assert {name for _, name in bound_names(ast.parse(code))} == set(expected.split())
