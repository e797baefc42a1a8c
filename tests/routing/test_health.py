from typing import NamedTuple

from shoal.routing.health import Health


class Policy(NamedTuple):
    failures: int = 3
    base_s: float = 5.0
    max_s: float = 60.0


def test_failures_in_a_row_eject_and_a_success_in_between_does_not() -> None:
    health, policy = Health(), Policy()
    assert not health.failed(policy, 0.0)
    health.succeeded()
    assert not health.failed(policy, 1.0)
    assert not health.failed(policy, 2.0)
    assert health.failed(policy, 3.0)
    assert not health.is_offered(3.1, 0)


def test_an_ejected_endpoint_gets_one_probe_at_a_time_and_returns_by_its_success() -> None:
    health, policy = Health(), Policy()
    for _ in range(3):
        health.failed(policy, 0.0)
    assert not health.is_offered(4.9, 0)
    assert health.is_offered(5.0, 0)
    assert not health.is_offered(5.0, 1)
    assert health.succeeded()
    assert health.is_offered(5.1, 7)


def test_a_failed_probe_doubles_the_time_out_up_to_its_limit() -> None:
    health, policy = Health(), Policy()
    for _ in range(3):
        health.failed(policy, 0.0)
    now = 5.0
    for expected in (10.0, 20.0, 40.0, 60.0, 60.0):
        assert health.failed(policy, now)
        assert health.ejected_until == now + expected
        now += expected


def test_late_failures_of_requests_sent_before_the_ejection_do_not_prolong_it() -> None:
    health, policy = Health(), Policy()
    for _ in range(3):
        health.failed(policy, 0.0)
    assert not health.failed(policy, 1.0)
    assert health.ejected_until == 5.0
