"""The table of policies: the same arrivals for all, on the half that nothing was tuned on, and what it says of them."""

from pathlib import Path

import pytest
import yaml

from bench import policies
from bench.bars import policies as bars
from bench.policies import REPORTING, TUNING, Found, Outcome, compared, held_out, lost, main, means, measure, regrets
from shoal.simulation.regret import REFERENCE


def test_seeds_and_traces_are_not_those_that_the_profile_was_tuned_on() -> None:
    assert not set(TUNING) & set(REPORTING)
    mooncake = (policies.ROOT / "examples/twin/mooncake.yaml").read_text()
    workload = yaml.safe_load(held_out(mooncake))["workload"]
    assert workload["skip"] == workload["limit"] == yaml.safe_load(mooncake)["workload"]["limit"]
    chats = (policies.ROOT / "examples/twin/chats.yaml").read_text()
    assert yaml.safe_load(held_out(chats)) == yaml.safe_load(chats)


def test_the_best_is_bold_and_the_mean_is_over_the_best() -> None:
    found = [
        Found("one", (1,), 9, 60, {
            "default": Outcome(0.1, 1.0, 0.0, 0.25),
            "other": Outcome(0.2, 12.0, 3.0, 2.0),
            REFERENCE: Outcome(0.08, 0.8, 0.0, 0.0),
        }),
        Found("two", (1,), 9, 70, {
            "default": Outcome(0.1, 0.4, 0.0, 0.5),
            "other": Outcome(0.099, 0.2, 0.0, 0.1),
            REFERENCE: Outcome(0.08, 0.2, 0.0, 0.0),
        }),
    ]  # fmt: skip
    table = compared(found)
    assert table[0] == "| policy | one | two | mean |"
    # (1 + 1 + 0.1 / 0.099 + 2) / 4 and (2 + 12 + 1 + 1) / 4; one in a hundred is as good as the best.
    assert table[2] == "| default | **100** / **1,000** | **100** / 400 | 1.25 |"
    assert table[3] == "| other | 200 / 12 s, 3 failed | **99** / **200** | 4.00 |"
    assert len(table) == 4
    assert means(found) == pytest.approx({"default": (3 + 0.1 / 0.099) / 4 + 0.25, "other": 4.0})
    table = regrets(found)
    assert table[2] == "| one | 60 | 1 x 9 | 80 / 800 | 25 % | 25 % (default) |"
    assert table[3] == "| two | 70 | 1 x 9 | 80 / 200 | 50 % | 10 % (other) |"


def test_a_policy_has_lost_where_nobody_is_worse() -> None:
    found = [
        Found("one", (1,), 0, 60, {
            "default": Outcome(0.2, 1.0, 0.0, None),
            "other": Outcome(0.2, 1.1, 0.0, None),
            "third": Outcome(0.1, 0.9, 0.0, None),
        }),
        Found("two", (1,), 0, 70, {
            "default": Outcome(0.1, 1.2, 0.0, None),
            "other": Outcome(0.2, 1.0, 0.0, None),
            "third": Outcome(0.3, 1.1, 0.0, None),
        }),
    ]  # fmt: skip
    assert lost(found) == ["two p95"]
    assert lost(found, "other") == ["one p95"]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two policies and a small workload that goes by the name of a large one."""
    (tmp_path / "examples/twin").mkdir(parents=True)
    (tmp_path / "examples/policies").symlink_to(policies.ROOT / "examples/policies")
    (tmp_path / "examples/twin/chats.yaml").write_text("workload: {shape: multi-turn, sessions: 10, turns: [2, 3]}\n")
    trace = "workload: {shape: trace, format: mooncake, path: nowhere.jsonl, limit: 10}\n"
    (tmp_path / "examples/twin/mooncake.yaml").write_text(trace)
    monkeypatch.setattr(policies, "ROOT", tmp_path)
    monkeypatch.setattr(policies, "WORKLOADS", ("chats", "mooncake"))
    monkeypatch.setattr(policies, "POLICIES", ("default", "examples/policies/round-robin.yaml"))


@pytest.mark.usefixtures("small")
def test_a_workload_is_measured_with_all_policies_and_its_reference() -> None:
    found = measure("chats", (101, 102), 6, 1, is_tuning=False)
    assert found.requests >= 20
    assert list(found.outcomes) == ["default", "round-robin", REFERENCE]
    assert found.outcomes[REFERENCE].regret == 0.0
    assert all((outcome.regret or 0.0) >= 0.0 for outcome in found.outcomes.values())
    assert found.outcomes["round-robin"].p95_s > 0.0


@pytest.mark.usefixtures("small")
def test_what_was_kept_is_not_run_again_and_a_trace_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.jsonl"
    monkeypatch.setattr("sys.argv", ["policies", "--seeds", "1", "--results", str(kept)])
    assert main() == 0
    first = capsys.readouterr()
    assert "mooncake: its trace is not here" in first.err
    assert "| round-robin | " in first.out
    assert "regret" not in first.out
    monkeypatch.setattr(policies, "measure", None)
    assert main() == 0
    assert capsys.readouterr().out == first.out


@pytest.mark.usefixtures("small")
def test_the_bars_compare_with_the_best_other_policy_and_search_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "_QUICK", ("chats", "mooncake"))
    bars._compared.cache_clear()
    mean, worst, regret = bars._mean(0.3), bars._worst(0.3), bars._regret(0.03)
    are_lost = lost(bars._compared(0.3))
    bars._compared.cache_clear()
    assert mean.details["workloads"] == ["chats"]
    assert mean.value == mean.details["means"]["default"] / mean.details["means"]["round-robin"] < 1.0
    assert (worst.value, worst.why) == (len(are_lost), ", ".join(are_lost))
    assert regret.value == regret.details["chats"] >= 0.0
    assert regret.details["trials"] == 3
