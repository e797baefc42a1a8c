"""Shoal: one endpoint in front of many model servers.

The rooms, from the bottom up: `kernel`, `pool`, then `wire`, `prefix` and `scheduling`, then
`routing` and `engine`, then `measures`, `hosts` (the only I/O) and `cli`.  docs/map.md is the tour.
"""

__version__ = "0.1.0"
