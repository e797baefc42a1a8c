"""The configuration as documents: what must hold whatever the settings are."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.hosts.envoy import (
    BackendTls,
    EndpointAddress,
    EnvoySettings,
    FailureMode,
    Picker,
    certificates,
    write_config,
    write_endpoints,
)
from shoal.hosts.envoy.accesslog import access_loggers
from shoal.hosts.envoy.clusters import clusters
from shoal.hosts.envoy.files import write_document
from shoal.hosts.envoy.filters import http_filters
from shoal.hosts.envoy.listeners import listeners
from shoal.hosts.envoy.routes import route_configuration
from shoal.hosts.envoy.settings import CONTROL_HEADERS, Clocks
from shoal.hosts.envoy.typed import seconds
from shoal.kernel import ConfigError
from shoal.routing.flowplan import LONGEST_WAIT_S

PICKERS = (Picker(id="0", socket="/run/p0"), Picker(id="1", socket="/run/p1"))


def settings(**more: Any) -> EnvoySettings:
    return EnvoySettings(**{"run_dir": "/run/shoal", "port": 8080, "pickers": PICKERS, **more})


def _manager(of: EnvoySettings) -> dict[str, Any]:
    found: dict[str, Any] = listeners(of)[0]["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def test_control_headers_are_removed_before_the_picker_speaks_and_not_on_a_route() -> None:
    filters = http_filters(settings())
    names = [one["name"] for one in filters]
    assert names[0] == "envoy.filters.http.header_mutation"
    assert names.index("envoy.filters.http.ext_proc") == 1
    removed = {each.get("remove") for each in filters[0]["typed_config"]["mutations"]["request_mutations"]}
    assert set(CONTROL_HEADERS) <= removed
    assert "request_headers_to_remove" not in json.dumps(route_configuration(settings()))


@pytest.mark.parametrize("mode", FailureMode)
def test_a_dead_picker_never_cuts_a_stream_and_closed_mode_has_a_guard(mode: FailureMode) -> None:
    filters = {one["name"]: one["typed_config"] for one in http_filters(settings(failure_mode=mode))}
    assert filters["envoy.filters.http.ext_proc"]["failure_mode_allow"] is True
    assert ("envoy.filters.http.rbac" in filters) is (mode is FailureMode.CLOSED)


def test_the_pickers_time_is_envoys_longest_and_responses_never_cross() -> None:
    picker = http_filters(settings())[1]["typed_config"]
    assert picker["message_timeout"] == "3600s"
    assert Clocks().message_s > LONGEST_WAIT_S
    mode = picker["processing_mode"]
    assert (mode["request_body_mode"], mode["response_header_mode"], mode["response_body_mode"]) == (
        "BUFFERED",
        "SKIP",
        "NONE",
    )


def test_no_cluster_keeps_envoys_default_of_1024_requests() -> None:
    for cluster in clusters(settings()):
        (limits,) = cluster["circuit_breakers"]["thresholds"]
        assert min(limits[name] for name in ("max_connections", "max_pending_requests", "max_requests")) >= 100_000


def test_retries_have_a_budget() -> None:
    pool = next(one for one in clusters(settings()) if one["name"] == "engines")
    assert pool["circuit_breakers"]["thresholds"][0]["retry_budget"]["budget_percent"] == {"value": 20.0}


def test_silence_of_fifteen_minutes_is_allowed_by_every_timer() -> None:
    manager = _manager(settings())
    assert float(manager["stream_idle_timeout"].rstrip("s")) > 3600
    for route in route_configuration(settings())["virtual_hosts"][0]["routes"]:
        if "direct_response" in route:
            continue
        forward = route["route"]
        assert forward["timeout"] == "0s"
        assert float(forward["idle_timeout"].rstrip("s")) > 3600
        assert forward["retry_policy"]["per_try_timeout"] == forward["retry_policy"]["per_try_idle_timeout"] == "0s"


def test_each_picker_has_a_logger_of_its_own_and_the_first_gets_the_rest() -> None:
    loggers = access_loggers(settings())
    filters = [one["filter"]["metadata_filter"] for one in loggers]
    assert [one["matcher"]["value"]["string_match"]["exact"] for one in filters] == ["0", "1"]
    assert [one["match_if_key_not_found"] for one in filters] == [True, False]
    names = {one["name"] for one in clusters(settings())}
    targets = {one["typed_config"]["common_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] for one in loggers}
    assert targets <= names


def test_durations_are_written_exactly() -> None:
    assert [seconds(value) for value in (0.0, 0.05, 1.0, 3600.0, 0.000001)] == [
        "0s",
        "0.05s",
        "1s",
        "3600s",
        "0.000001s",
    ]


def test_files_are_private_replaced_whole_and_left_alone_when_nothing_changed(tmp_path: Path) -> None:
    path = tmp_path / "kind" / "kind.json"
    assert write_document(path, {"a": 1})
    first = path.stat()
    assert first.st_mode & 0o777 == 0o600
    assert not write_document(path, {"a": 1})
    assert path.stat().st_ino == first.st_ino
    assert write_document(path, {"a": 2})
    # A new file by rename: a reader of the old one still reads it whole.
    assert path.stat().st_ino != first.st_ino
    assert [one.name for one in path.parent.iterdir()] == ["kind.json"]


def test_the_fleets_version_depends_on_the_fleet_and_not_on_its_order(tmp_path: Path) -> None:
    one, two = EndpointAddress(address="10.0.0.1:1"), EndpointAddress(address="[fd00::1]:2", tls="t", authorization="k")
    version = write_endpoints(str(tmp_path), [one, two])
    assert write_endpoints(str(tmp_path), [two, one]) == version
    assert write_endpoints(str(tmp_path), [one]) != version
    write_endpoints(str(tmp_path), [two])
    document = json.loads((tmp_path / "eds" / "eds.json").read_text())
    (member,) = document["resources"][0]["endpoints"][0]["lb_endpoints"]
    assert member["endpoint"]["address"]["socket_address"] == {"address": "fd00::1", "port_value": 2}


def test_writing_the_configuration_again_keeps_the_fleet(tmp_path: Path) -> None:
    of = settings(run_dir=str(tmp_path))
    write_config(of)
    write_endpoints(str(tmp_path), [EndpointAddress(address="10.0.0.1:1")])
    fleet = (tmp_path / "eds" / "eds.json").read_bytes()
    write_config(msgspec.structs.replace(of, clocks=Clocks(upload_s=7.0)))
    assert (tmp_path / "eds" / "eds.json").read_bytes() == fleet
    assert "7s" in (tmp_path / "lds" / "lds.json").read_text()


def test_without_https_backends_no_file_of_roots_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/no/such/file")
    pool = next(one for one in clusters(settings()) if one["name"] == "engines")
    assert [match["name"] for match in pool["transport_socket_matches"]] == ["plain"]


def test_the_systems_roots_are_where_its_tls_library_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = tmp_path / "roots.pem"
    roots.write_text("")
    monkeypatch.setenv("SSL_CERT_FILE", str(roots))
    pool = next(one for one in clusters(settings(backend_tls=(BackendTls(),))) if one["name"] == "engines")
    assert str(roots) in json.dumps(pool["transport_socket_matches"])
    monkeypatch.setattr(certificates, "_USUAL_ROOTS", ())
    roots.unlink()
    with pytest.raises(ConfigError, match="ca_file"):
        clusters(settings(backend_tls=(BackendTls(),)))
