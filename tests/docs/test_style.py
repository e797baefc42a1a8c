"""The fences of the house style: what is checked rather than asked for."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
VAGUE = {"utils", "helpers", "common", "base", "manager", "misc", "types"}


def test_no_module_is_longer_than_can_be_held() -> None:
    assert [path.name for path in SOURCES if len(path.read_text().splitlines()) > 600] == []


def test_no_function_is_longer_than_a_page() -> None:
    long = [
        f"{path.name}:{node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > 80
    ]
    assert long == []


def test_every_module_says_what_it_owns() -> None:
    silent = [
        path for path in SOURCES if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [path for path in SOURCES if path.stem in VAGUE] == []


def test_a_rooms_face_is_small_enough_to_know() -> None:
    wide = {}
    for path in sorted((ROOT / "src/shoal").glob("*/__init__.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                names = ast.literal_eval(node.value)
                if len(names) > 15:
                    wide[path.parent.name] = len(names)
    assert wide == {}
