"""Who is ready and who is waited for, and how it is said."""

from collections.abc import Sequence
from typing import cast

from shoal.hosts.admin import EndpointPicture
from shoal.hosts.fleet import EndpointReport, FleetKeeper
from shoal.hosts.supervisor.waiting import Roll, Waiting, call_roll, with_waiting
from shoal.pool import EndpointState


class Keeper:
    """A fleet keeper that knows what it is given."""

    def __init__(self, reports: Sequence[EndpointReport], unresolved: dict[str, str]) -> None:
        self._reports, self._unresolved = list(reports), unresolved

    def reports(self) -> list[EndpointReport]:
        return self._reports

    def unresolved(self) -> dict[str, str]:
        return self._unresolved


def report(name: str, state: EndpointState, reason: str = "") -> EndpointReport:
    return EndpointReport(id=name, url=f"http://10.0.0.1/{name}", state=state, engine="vllm", reason=reason)


def roll_of(reports: Sequence[EndpointReport], **more: object) -> Roll:
    keeper = Keeper(reports, cast(dict[str, str], more.pop("unresolved", {})))
    return call_roll(cast(FleetKeeper, keeper), **more)  # type: ignore[arg-type]


def test_ready_ones_are_counted_and_the_others_named_with_their_reasons() -> None:
    roll = roll_of(
        [
            report("a", EndpointState.READY),
            report("b", EndpointState.LOADING, "connection refused"),
            report("c", EndpointState.DRAINING),
        ],
        unresolved={"http://gpu:8000": "the name has no address"},
        starting=["engine-0"],
    )
    assert roll.share == "1 of 4 endpoints"
    assert [(each.id, each.state) for each in roll.waiting] == [
        ("b", "loading"),
        ("http://gpu:8000", "unresolved"),
        ("engine-0", "starting"),
    ]
    assert roll.reasons.startswith("no endpoint is ready: http://10.0.0.1/b: connection refused; http://gpu:8000: the")


def test_one_that_no_request_is_placed_on_yet_is_waited_for_though_it_is_ready() -> None:
    ready = [report("a", EndpointState.READY), report("b", EndpointState.READY)]
    assert roll_of(ready, offered=["a"]).share == "1 of 2 endpoints"
    assert roll_of(ready).share == "2 of 2 endpoints"


def test_a_long_list_is_cut_and_counted() -> None:
    roll = Roll(0, [Waiting(f"e{number}", "loading", "slow") for number in range(8)])
    assert roll.reasons.endswith("e4: slow; 3 more")
    assert roll.summary == "no endpoint is ready (0 of 8 endpoints)"
    assert Roll(0, []).summary == "no endpoint is ready: none is named"


def test_reasons_join_what_workers_show_and_the_unknown_ones_come_last() -> None:
    shown = [EndpointPicture(id="a", state="ready"), EndpointPicture(id="b", state="loading", requests_total=7)]
    waiting = [Waiting("z", "unresolved", "no address", "http://z:1"), Waiting("b", "loading", "refused", "http://b:1")]
    found = with_waiting(shown, waiting)
    assert [(each.id, each.state, each.reason, each.requests_total) for each in found] == [
        ("a", "ready", "", 0),
        ("b", "loading", "refused", 7),
        ("z", "unresolved", "no address", 0),
    ]


def test_a_paused_endpoint_is_named_with_what_takes_it_back() -> None:
    roll = roll_of([report("a", EndpointState.PAUSED)])
    assert (roll.ready, roll.share) == (0, "0 of 1 endpoint")
    assert roll.reasons == "no endpoint is ready: http://10.0.0.1/a: paused until `shoal endpoint resume`"
