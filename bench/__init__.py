"""Measurements of Shoal on this machine.

`python -m bench` is the overhead table, `python -m bench.bars --part 1` checks the figures the project promises.
Nothing here is installed with the package.
"""
