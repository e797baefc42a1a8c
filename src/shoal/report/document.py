"""The results file: everything that is said of runs, as JSON.

Owns its form, `shoal-twin/1`: fields may be added to it, and none is renamed or taken away while it has that name.
"""

import platform
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from shoal import __version__
from shoal.report.comparison import compare
from shoal.simulation import Experiment, Run

FORMAT = "shoal-twin/1"


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What was run.  command: as it was given.  policies: text of each configuration, "" for the default profile.

    load_unit: of the loads of a sweep.  versions: of what the figures depend on.  planned: runs that were asked for;
    fewer are there when somebody interrupted.  trials: of the search for the reference, 0 without one.
    """

    experiment: Experiment
    policies: dict[str, str]
    seeds: tuple[int, ...]
    loads: tuple[float, ...] = ()
    load_unit: str = ""
    command: str = ""
    planned: int = 0
    trials: int = 0
    versions: dict[str, str] = {}


def about() -> dict[str, str]:
    """Return the versions of what the figures depend on."""
    return {
        "shoal": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
    }


def as_json(document: Document, runs: Sequence[Run]) -> bytes:
    """Return the file.

    `runs` has one entry per policy, load and seed, with every figure of `simulation.Result`; `comparison` one per
    policy and load: mean, half the width of the 95 % interval, and the change against the first policy.
    """
    plain: dict[str, Any] = {"format": FORMAT, **msgspec.to_builtins(document)}
    plain["is_partial"] = len(runs) < document.planned or any(run.result.is_partial for run in runs)
    plain["comparison"] = [
        {
            "policy": row.policy,
            "load": row.load,
            "seeds": row.seeds,
            "figures": {key: _without_nan(cell._asdict()) for key, cell in row.cells.items()},
        }
        for row in compare(runs)
    ]
    plain["runs"] = [
        {"policy": run.policy, "load": run.load, "seed": run.seed, **msgspec.to_builtins(run.result)} for run in runs
    ]
    return msgspec.json.format(msgspec.json.encode(plain)) + b"\n"


def _without_nan(values: dict[str, float]) -> dict[str, float | None]:
    return {key: None if value != value else value for key, value in values.items()}
