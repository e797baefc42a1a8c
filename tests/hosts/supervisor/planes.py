"""Every test with a pool runs under each data plane and demands the same; what differs is marked with its reason."""

import pytest

PLANES = ("envoy", "direct")


@pytest.fixture(scope="module", params=PLANES)
def plane(request: pytest.FixtureRequest) -> str:
    """The data plane of the pools of a test."""
    return str(request.param)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", "only_plane(name, why): runs under one data plane alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other data planes of tests that are about one."""
    left_out = [item for item in items if isinstance(item, pytest.Function) and _is_of_another_plane(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _is_of_another_plane(item: pytest.Function) -> bool:
    mark = item.get_closest_marker("only_plane")
    if mark is None or not hasattr(item, "callspec"):
        return False
    name, _ = mark.args
    return bool(item.callspec.params.get("plane", name) != name)
