"""Snapshots of several workers become one picture."""

import msgspec

from shoal.hosts.admin import (
    EndpointPicture,
    Snapshot,
    add_left_behind,
    left_behind,
    merge_endpoints,
    merge_warnings,
)


def view(**fields: object) -> EndpointPicture:
    return msgspec.convert({"id": "a", "address": "10.0.0.1:8000", "state": "ready", **fields}, EndpointPicture)


def merged(*views: EndpointPicture) -> EndpointPicture:
    pictures = merge_endpoints([Snapshot(picker=str(number), endpoints=[each]) for number, each in enumerate(views)])
    assert len(pictures) == 1
    return pictures[0]


def test_books_add_up_and_scraped_signals_do_not() -> None:
    picture = merged(
        view(inflight_requests=2, requests_total=10, waiting=3.0, running=4.0, kv_usage_ratio=0.5),
        view(inflight_requests=1, requests_total=30, waiting=3.0, running=5.0, kv_usage_ratio=0.4),
    )
    assert (picture.inflight_requests, picture.requests_total) == (3, 40)
    assert (picture.waiting, picture.running, picture.kv_usage_ratio) == (3.0, 5.0, 0.5)


def test_an_unknown_signal_is_not_read_as_zero() -> None:
    assert merged(view(waiting=None), view(waiting=None)).waiting is None
    assert merged(view(waiting=None), view(waiting=0.0)).waiting == 0.0


def test_mean_ttft_is_weighted_by_the_requests_behind_it() -> None:
    picture = merged(view(ttft_s_avg=1.0, requests_total=30), view(ttft_s_avg=0.2, requests_total=10), view())
    assert picture.ttft_s_avg is not None
    assert abs(picture.ttft_s_avg - 0.8) < 1e-9


def test_workers_that_disagree_on_health_show_the_worst_and_the_vote() -> None:
    picture = merged(view(state="ready"), view(state="ejected"))
    assert picture.state == "ejected"
    assert picture.states == {"ejected": 1, "ready": 1}
    assert merged(view(), view()).states == {}


def test_one_worker_that_saw_cached_tokens_is_proof_that_the_engine_reports_them() -> None:
    assert merged(view(reports_cached_tokens=False), view(reports_cached_tokens=True)).reports_cached_tokens is True
    assert merged(view(reports_cached_tokens=False), view(reports_cached_tokens=None)).reports_cached_tokens is False
    assert merged(view(), view()).reports_cached_tokens is None


def test_a_worker_that_is_gone_leaves_its_counts_and_not_its_load() -> None:
    gone = Snapshot(
        requests_total=5, errors_total=1, endpoints=[view(requests_total=5, inflight_requests=3), view(id="z")]
    )
    left = left_behind(left_behind(Snapshot(), gone), gone)
    pictures = add_left_behind([view(requests_total=7)], left)
    assert [(each.id, each.requests_total, each.inflight_requests) for each in pictures] == [("a", 17, 0)]
    assert (left.requests_total, left.errors_total) == (10, 2)


def test_endpoints_come_sorted_and_once() -> None:
    snapshots = [
        Snapshot(endpoints=[view(id="b"), view(id="a")], warnings=["x"]),
        Snapshot(endpoints=[view(id="c"), view(id="a")], warnings=["x", "y"]),
    ]
    assert [picture.id for picture in merge_endpoints(snapshots)] == ["a", "b", "c"]
    assert merge_warnings(snapshots) == ["x", "y"]


def test_fields_that_a_newer_worker_adds_are_no_error() -> None:
    snapshot = msgspec.json.decode(
        b'{"picker": "0", "novelty": 1, "endpoints": [{"id": "a", "more": {}}]}', type=Snapshot
    )
    assert snapshot.endpoints[0].id == "a"
