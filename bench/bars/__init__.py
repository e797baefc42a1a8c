"""The figures that the project promises, each with the way to measure it.

A bar is measured through the public face: a pool that was started by `shoal up`, requests over HTTP, `/metrics`,
`/proc`; only the machines that have no process of their own are called directly.  Most are ratios of one run.

    python -m bench.bars --part 1
    python -m bench.bars --id router.cpu-small --scale 0.1
"""

from bench.bars.registry import BARS, Bar, Figure, bar

__all__ = ["BARS", "Bar", "Figure", "bar"]
