"""Each public name is defined in one place."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import freetoken


def definitions(source: str) -> Iterator[str]:
    """Names of a module's public classes and of its types that are a list of literals."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["):
            name = ast.unparse(node.targets[0])
        else:
            continue
        if not name.startswith("_"):
            yield name


def test_definitions_are_found() -> None:
    source = 'class A: ...\nclass _B: ...\nC = Literal["x", "y"]\nd = 1\n'
    assert list(definitions(source)) == ["A", "C"]


def test_no_type_is_defined_twice() -> None:
    places = defaultdict(list)
    root = Path(freetoken.__file__).parent
    for path in root.rglob("*.py"):
        for name in definitions(path.read_text(encoding="utf-8")):
            places[name].append(str(path.relative_to(root)))
    assert len(places) > 50
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
