"""The results file says what was run, and everything that came of it."""

import json

from shoal.report import Document, about, as_json
from shoal.simulation import Run, read_experiment
from tests.report.runs import made

EXPERIMENT = read_experiment("workload: {shape: hot}\nname: x\n", "test")


def read(runs: list[Run], planned: int) -> dict[str, object]:
    document = Document(experiment=EXPERIMENT, policies={"a": ""}, seeds=(1, 2), planned=planned, versions=about())
    found: dict[str, object] = json.loads(as_json(document, runs))
    return found


def test_everything_is_there_and_no_number_that_is_none() -> None:
    runs = [made("a", seed) for seed in (1, 2)] + [made("b", 1)]
    data = read(runs, 3)
    assert data["format"] == "shoal-twin/1"
    assert data["is_partial"] is False
    assert data["experiment"]["fleet"][0]["profile"] == "h100-8b"  # type: ignore[index]
    assert {"shoal", "python", "numpy", "machine"} <= set(data["versions"])  # type: ignore[call-overload]
    entries: list[dict[str, object]] = data["runs"]  # type: ignore[assignment]
    assert [(entry["policy"], entry["seed"]) for entry in entries] == [("a", 1), ("a", 2), ("b", 1)]
    assert entries[0]["tenants"]["acme"]["failed"] == 1  # type: ignore[index]
    comparison: list[dict[str, dict[str, dict[str, object]]]] = data["comparison"]  # type: ignore[assignment]
    assert comparison[0]["figures"]["ttft_p50"]["change"] is None
    assert comparison[1]["figures"]["ttft_p50"]["half"] is None


def test_runs_that_are_missing_or_cut_short_are_said_to_be() -> None:
    assert read([made("a", 1)], 2)["is_partial"] is True
    assert read([made("a", 1, is_partial=True)], 1)["is_partial"] is True
