"""A running pool for the verbs to ask."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.fake_pool import FakePool, fake_pool


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FakePool]:
    """A fake pool in a run directory of its own."""
    with fake_pool(tmp_path) as running:
        yield running
