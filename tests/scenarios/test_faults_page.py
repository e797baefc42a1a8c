"""The page of faults: every row is there, and every test that it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/faults.md").read_text()
ROWS = [
    *("A1", "A2", "A4", "A6", "A7", "A8", "A10", "A11", "A12", "A14"),
    *("B1", "B2", "B3", "B5", "B6", "B7", "B8", "B11", "B12", "B13", "B15", "B16", "B17", "B18"),
    *("C1", "C7", "C8", "C9", "C10", "C13", "C15", "C17", "C18"),
    *("D1", "D3", "D4", "D5", "D6", "D8", "D9", "D11"),
    *("E1", "E2", "E7", "F9", "F10", "F12"),
]


def rows() -> dict[str, str]:
    """Row id -> its line."""
    return {found[1]: found[0] for found in re.finditer(r"^\| ([A-Z]\d+) \|.*$", PAGE, re.MULTILINE)}


def test_every_fault_has_its_row() -> None:
    assert list(rows()) == ROWS


@pytest.mark.parametrize("row", ROWS)
def test_every_row_links_its_report_and_names_tests_that_exist(row: str) -> None:
    line = rows()[row]
    assert "](https://github.com/" in line
    named = re.findall(r"`(tests/[a-z_/0-9]+\.py)::(test_\w+)`", line)
    assert named
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
