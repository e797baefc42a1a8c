"""Marks on the type of a value that a configuration file gives: how it may be written there.

Which file, and what reads it, is not known here.
"""

from typing import NamedTuple


class Quantity(NamedTuple):
    """Mark on an int: a file may write it as in Kubernetes, `64Mi` or `5k`."""


class Duration(NamedTuple):
    """Mark on a float of seconds: a file writes it as in Go, `1m30s` or `200ms`."""
