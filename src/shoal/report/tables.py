"""Runs as tables for other tools: every request, every look at an endpoint, every figure, as Parquet.

Owns the tables and their columns.  Needs pyarrow, which comes with `pip install 'shoal[twin]'`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shoal.kernel import ConfigError
from shoal.simulation import Run

if TYPE_CHECKING:
    import pyarrow as pa

TABLES = {
    "runs": "a row per run: every figure",
    "requests": "a row per request, in the order in which they ended",
    "endpoints": "a row per endpoint and look at it: requests in it, KV cache in use, tokens so far",
}
"""Name of each table (`NAME.parquet`) and what is in it.  All begin with `policy`, `load` and `seed`."""


def parquet(runs: Sequence[Run]) -> dict[str, bytes]:
    """Return each of TABLES as a file.  Raises ConfigError when pyarrow is not installed."""
    pa = _pyarrow()
    return {
        "runs": _bytes(pa.Table.from_pylist([_figures(run) for run in runs])),
        "requests": _bytes(pa.concat_tables([_requests(run) for run in runs])),
        "endpoints": _bytes(pa.concat_tables([_endpoints(run) for run in runs])),
    }


def check_parquet() -> None:
    """Raise ConfigError when tables cannot be made, so that a long run does not end in nothing."""
    _pyarrow()


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ConfigError("needs pyarrow: pip install 'shoal[twin]'", source="--parquet") from None
    return pyarrow


def _figures(run: Run) -> dict[str, Any]:
    plain = msgspec.to_builtins(run.result)
    return _key(run) | {name: value for name, value in plain.items() if not isinstance(value, dict)}


def _key(run: Run) -> dict[str, Any]:
    return {"policy": run.policy, "load": float("nan") if run.load is None else run.load, "seed": run.seed}


def _requests(run: Run) -> "pa.Table":
    pa = _pyarrow()
    columns: dict[str, Any] = {}
    for name, values in run.requests._asdict().items():
        if isinstance(values, np.ndarray):
            columns[name] = pa.array(values)
        else:
            columns[name] = pa.DictionaryArray.from_arrays(values.codes, pa.array(values.names, pa.string()))
    return _keyed(run, columns, len(run.requests))


def _endpoints(run: Run) -> "pa.Table":
    pa = _pyarrow()
    seen = run.timeline
    looks, endpoints = len(seen.times_s), len(seen.endpoints)
    places = np.tile(np.arange(endpoints, dtype=np.int32), looks)
    columns: dict[str, Any] = {
        "at_s": pa.array(np.repeat(seen.times_s, endpoints)),
        "endpoint": pa.DictionaryArray.from_arrays(places, pa.array(seen.endpoints, pa.string())),
    }
    for name in ("running", "waiting", "kv_usage", "prompt_tokens", "cached_tokens"):
        columns[name] = pa.array(getattr(seen, name).ravel())
    return _keyed(run, columns, looks * endpoints)


def _keyed(run: Run, columns: dict[str, Any], rows: int) -> "pa.Table":
    """Put what names the run before the columns.  A dictionary column differs from run to run; text does not."""
    pa = _pyarrow()
    key = _key(run)
    named: dict[str, Any] = {
        "policy": pa.array([key["policy"]] * rows, pa.string()),
        "load": pa.array(np.full(rows, key["load"])),
        "seed": pa.array(np.full(rows, key["seed"], np.int64)),
    }
    flat = {
        name: values.dictionary_decode() if isinstance(values, pa.DictionaryArray) else values
        for name, values in columns.items()
    }
    return pa.table(named | flat)


def _bytes(table: "pa.Table") -> bytes:
    import pyarrow as pa
    from pyarrow import parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    written: bytes = sink.getvalue().to_pybytes()
    return written
