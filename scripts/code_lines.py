"""Count the lines of Python files that hold code: no blank lines, comments or docstrings.

usage: python scripts/code_lines.py [FOLDER]

Prints the code lines of each folder below FOLDER (lightning_mm5d), of the package, of its core and of its largest file.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

OUTSIDE_THE_CORE = frozenset({"features", "models", "recipes", "export", "tools"})
_NO_CODE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)


def code_lines(source: str) -> int:
    """Return the number of lines of a Python `source` that hold code; a statement over three lines counts three."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert first.end_lineno is not None
            docstrings.update(range(first.lineno, first.end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "lightning_mm5d")
    counts = {path.relative_to(root): code_lines(path.read_text()) for path in sorted(root.rglob("*.py"))}
    rooms: Counter[str] = Counter()
    for path, count in counts.items():
        rooms[path.parts[0] if len(path.parts) > 1 else "(top)"] += count
    for room, count in rooms.most_common():
        print(f"{count:7,} {room}{' (outside the core)' if room in OUTSIDE_THE_CORE else ''}")
    core = sum(count for room, count in rooms.items() if room not in OUTSIDE_THE_CORE)
    largest = max(counts, key=counts.__getitem__)
    print(f"{rooms.total():,} code lines in {len(counts)} files; core {core:,}; largest {largest} {counts[largest]}")


if __name__ == "__main__":
    main()
