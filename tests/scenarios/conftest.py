"""Runs the tests with pools under each data plane."""

from tests.hosts.supervisor.planes import plane, pytest_collection_modifyitems, pytest_configure

__all__ = ["plane", "pytest_collection_modifyitems", "pytest_configure"]
