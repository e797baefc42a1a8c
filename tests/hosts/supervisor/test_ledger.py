"""The ledger tells a new worker what the others were told."""

from shoal.hosts.supervisor.ledger import FRESH_S, Ledger
from shoal.pool import Endpoint, EndpointState, ServedModel, Signals
from shoal.routing.events import (
    Configured,
    EndpointChanged,
    EndpointJoined,
    EndpointLeft,
    LoadSeen,
    ModelsSeen,
)

A = Endpoint(id="a", address="10.0.0.1:8000")
B = Endpoint(id="b", address="10.0.0.2:8000")
MODEL = ServedModel(id="m")


def told() -> Ledger:
    ledger = Ledger()
    ledger.apply(
        [
            EndpointJoined(B),
            EndpointJoined(A),
            ModelsSeen("a", (MODEL,)),
            EndpointChanged("a", EndpointState.READY),
            LoadSeen("a", Signals(running=1.0)),
            LoadSeen("a", Signals(running=2.0)),
        ],
        now=100.0,
    )
    return ledger


def test_a_new_worker_is_told_the_present_and_not_the_way_there() -> None:
    assert told().present(now=101.0) == [
        EndpointJoined(A, EndpointState.READY),
        EndpointChanged("a", EndpointState.READY),
        ModelsSeen("a", (MODEL,)),
        LoadSeen("a", Signals(running=2.0)),
        EndpointJoined(B, EndpointState.LOADING),
        EndpointChanged("b", EndpointState.LOADING),
    ]


def test_a_stale_reading_is_not_passed_on_as_fresh() -> None:
    assert not [event for event in told().present(now=100.1 + FRESH_S) if isinstance(event, LoadSeen)]


def test_an_engine_that_loads_again_has_no_known_load() -> None:
    ledger = told()
    ledger.apply([EndpointChanged("a", EndpointState.LOADING)], now=101.0)
    assert not [event for event in ledger.present(now=101.0) if isinstance(event, LoadSeen)]
    assert ledger.ready() == {}


def test_an_endpoint_that_left_is_forgotten() -> None:
    ledger = told()
    ledger.apply([EndpointLeft("a"), LoadSeen("a", Signals(running=9.0))], now=101.0)
    assert ledger.ids() == {"b"}


def test_a_configuration_that_was_reloaded_comes_first() -> None:
    ledger = told()
    ledger.apply([Configured("new")], now=101.0)
    assert ledger.present(now=101.0)[0] == Configured("new")


def test_a_trial_on_a_copy_changes_nothing() -> None:
    ledger = told()
    copy = ledger.copy()
    copy.apply([EndpointChanged("b", EndpointState.READY), EndpointLeft("a")], now=101.0)
    assert copy.ready() == {"b": B}
    assert ledger.ready() == {"a": A}
