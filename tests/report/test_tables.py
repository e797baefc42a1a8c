"""Tables hold every request, every look and every figure, and say of which run they are."""

import io

import numpy as np
from pyarrow import parquet as pq

from shoal.report import TABLES, parquet
from shoal.simulation.results import columns
from tests.report.runs import made


def test_tables_hold_all_runs_and_their_names() -> None:
    runs = [made("a", 1, 2.0), made("b", 7, 2.0, slower=2.0)]
    files = parquet(runs)
    assert set(files) == set(TABLES)
    tables = {name: pq.read_table(io.BytesIO(data)) for name, data in files.items()}
    assert all(table.column_names[:3] == ["policy", "load", "seed"] for table in tables.values())

    requests = tables["requests"]
    assert requests.num_rows == sum(run.result.requests for run in runs)
    assert requests["policy"].to_pylist()[:1] == ["a"]
    assert set(requests["seed"].to_pylist()) == {1, 7}
    assert set(requests["tenant"].to_pylist()) == {"acme", "<b>zeta"}
    ours = np.concatenate([run.requests.ttft_s for run in runs])
    assert np.array_equal(requests["ttft_s"].to_numpy(), ours, equal_nan=True)

    endpoints = tables["endpoints"]
    assert endpoints.num_rows == 2 * 3 * 40
    down = [row for row in endpoints.to_pylist() if row["endpoint"] == "e2" and row["at_s"] >= 20]
    assert down
    assert all(row["running"] != row["running"] for row in down)

    assert tables["runs"]["ttft_p95_s"].to_pylist() == [run.result.ttft_p95_s for run in runs]


def test_a_run_without_a_load_and_without_requests_has_tables_too() -> None:
    run = made()
    empty = run._replace(requests=columns([]))
    table = pq.read_table(io.BytesIO(parquet([run, empty])["requests"]))
    assert table.num_rows == 61
    assert all(load != load for load in table["load"].to_pylist())
