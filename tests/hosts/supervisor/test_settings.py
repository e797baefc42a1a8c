"""From the configuration to what each part hears."""

from pathlib import Path

import pytest

from shoal.hosts.supervisor.options import Options
from shoal.hosts.supervisor.settings import (
    Ground,
    envoy_settings,
    ground_of,
    needs_new_workers,
    needs_restart,
    targets_of,
)
from shoal.kernel import ConfigError
from shoal.routing.config import RouterConfig, load

GROUND = Ground(host="127.0.0.1", port=8080, metrics_port=9090)


def config(settings: str = "") -> RouterConfig:
    return load(f"apiVersion: shoal.dev/v1alpha1\nkind: Pool\n{settings}", "test.yaml")


def test_a_flag_wins_over_the_configuration_and_the_configuration_over_the_default() -> None:
    pool = config("listen: {host: 0.0.0.0, port: 8000}\nmetrics: {port: 0}\n").pool
    assert ground_of(Options(), pool) == Ground(host="0.0.0.0", port=8000, metrics_port=0)
    flags = Options(host="127.0.0.1", port=9000, metrics_port=9999)
    assert ground_of(flags, pool) == Ground(host="127.0.0.1", port=9000, metrics_port=9999)
    assert ground_of(Options(), config().pool) == GROUND
    assert ground_of(Options(), config("data_plane: direct\n").pool).data_plane == "direct"
    assert ground_of(Options(data_plane="envoy"), config("data_plane: direct\n").pool).data_plane == "envoy"


def test_envoy_is_told_the_limits_retries_and_failure_mode_of_the_configuration() -> None:
    pool = config(
        "limits: {max_body_bytes: 32Mi, request_timeout_s: 7, max_stream_duration_s: 90}\n"
        "retries: {attempts: 0}\nfailure_mode: closed\nforward_client_key: true\ntls: {cert: a.pem, key: b.pem}\n"
    ).pool
    settings = envoy_settings(pool, GROUND, Path("/run/x"))
    assert settings.limits.max_body_bytes == 32 * 1024 * 1024
    assert (settings.clocks.upload_s, settings.clocks.stream_s) == (7, 90)
    assert settings.retries.attempts == 1
    assert settings.failure_mode == "closed"
    assert settings.forward_authorization
    assert settings.tls is not None
    assert (settings.tls.certificate, settings.tls.key) == ("a.pem", "b.pem")


def test_envoy_is_told_the_response_headers_of_the_plugins() -> None:
    picker = "---\napiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
    picker += "- type: session-affinity-filter\n"
    picker += "  parameters: {encodedEndpointHeaderConfig: {header: X-Where}}\n"
    loaded = config(picker)
    assert loaded.response_headers == ("x-where",)
    settings = envoy_settings(loaded.pool, GROUND, Path("/run/x"), loaded.response_headers)
    assert settings.response_headers == ("x-where",)


def test_a_clients_key_stays_here_unless_configured() -> None:
    assert not envoy_settings(config().pool, GROUND, Path("/run/x")).forward_authorization


def test_settings_that_only_a_restart_brings_into_use_are_named() -> None:
    after = config("listen: {port: 8001}\nmetrics: {port: 9091}\ndata_plane: direct\n")
    assert needs_restart(GROUND, Options(), config(), after) == ["listen.port", "metrics.port", "data_plane"]
    assert needs_restart(GROUND, Options(data_plane="envoy"), config(), config("data_plane: direct\n")) == []
    assert (
        needs_restart(GROUND, Options(port=8080, metrics_port=9090), config(), config("listen: {port: 8001}\n")) == []
    )
    assert needs_restart(GROUND, Options(), config(), config("usage: inject\n")) == []


def test_what_a_worker_reads_at_its_start_asks_for_new_workers() -> None:
    assert needs_new_workers(config().pool, config("auth: {keys_file: keys}\n").pool) == ["auth"]
    assert needs_new_workers(config().pool, config("aliases: {a: b}\n").pool) == []


def test_backends_of_the_configuration_become_targets_with_their_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("sk-one\n")
    monkeypatch.setenv("ENGINE_KEY", "sk-two")
    pool = config(
        f"backends:\n- {{url: 'http://10.0.0.1:8000', name: one, api_key_file: {tmp_path}/key, labels: {{role: x}}}}\n"
        "- {url: 'https://engine.example', api_key_env: ENGINE_KEY, engine: sglang}\n"
    ).pool
    one, two = targets_of(pool)
    assert (one.name, one.url, one.api_key, one.labels) == ("one", "http://10.0.0.1:8000", "sk-one", {"role": "x"})
    assert (two.url, two.is_tls, two.api_key, two.engine) == ("https://engine.example:443", True, "sk-two", "sglang")


def test_a_backend_of_the_configuration_says_where_it_publishes_its_kv_events() -> None:
    url = "url: 'http://10.0.0.1:8000'"
    pool = config(f"backends:\n- {{{url}, kv_events: [5557, 'tcp://10.0.0.1:6000'], kv_replay: [5558, 6001]}}\n").pool
    (target,) = targets_of(pool)
    assert (target.kv_events, target.kv_replay) == (("5557", "tcp://10.0.0.1:6000"), ("5558", "6001"))
    pool = config(f"backends:\n- {{{url}, kv_events: 5557, kv_replay: [1, 2]}}\n").pool
    with pytest.raises(ConfigError, match=r"backends\[0\]: kv_replay must name as many as kv_events: 1, not 2"):
        targets_of(pool)
    pool = config(f"backends:\n- {{{url}, kv_events: {{a: b}}}}\n").pool
    with pytest.raises(ConfigError, match=r"backends\[0\]: kv_events must be a port, an address"):
        targets_of(pool)


def test_a_backend_whose_key_is_missing_is_named_by_its_place() -> None:
    pool = config("backends:\n- {url: 'http://10.0.0.1:8000', api_key_env: NO_SUCH_VARIABLE}\n").pool
    with pytest.raises(ConfigError, match=r"backends\[0\]: environment variable NO_SUCH_VARIABLE is not set"):
        targets_of(pool)
