"""Who may do what: keys of clients, keys of engines, TLS on the listener, and doors that stay shut."""

import datetime
import http.client
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shoal.hosts.keys import new_key
from tests.hosts.supervisor.pool_rig import body, until
from tests.scenarios.backends import Backend, backend
from tests.scenarios.engines import free_port
from tests.scenarios.pools import ScenarioPool, pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def write_certificate(folder: Path, name: str) -> None:
    """A self-signed certificate for 127.0.0.1 whose common name is `name`."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for file, content in (("key.pem", private), ("cert.pem", certificate.public_bytes(encoding))):
        fresh = folder / f"{file}.new"
        fresh.write_bytes(content)
        fresh.replace(folder / file)


def shown_name(url: str) -> str:
    """The common name of the certificate that the listener shows."""
    address = httpx.URL(url)
    pem = ssl.get_server_certificate((address.host, address.port or 443), timeout=30.0)
    (found,) = x509.load_pem_x509_certificate(pem.encode()).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found.value)


@pytest.fixture(scope="module")
def echo() -> Iterator[Backend]:
    """The backend that shows what it got."""
    with backend() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the files of the guarded pool lie."""
    return tmp_path_factory.mktemp("guarded")


@pytest.fixture(scope="module")
def key(folder: Path) -> str:
    """The key of the one client that is let in."""
    secret, line = new_key("alice")
    (folder / "keys").write_text(f"# clients\n{line}\n")
    return secret


@pytest.fixture(scope="module")
def guarded(plane: str, folder: Path, key: str, echo: Backend) -> Iterator[ScenarioPool]:
    """A pool with keys, TLS, a key for its engine, and a metrics port."""
    write_certificate(folder, "first")
    (folder / "engine-key").write_text("engine-secret\n")
    settings = (
        f"auth: {{keys_file: {folder}/keys}}\n"
        f"tls: {{cert: {folder}/cert.pem, key: {folder}/key.pem}}\n"
        f"backends: [{{url: '{echo.url}', api_key_file: {folder}/engine-key}}]\n"
    )
    with pool(plane, folder / "pool", ["--metrics-port", str(free_port())], settings) as running:
        yield running


def test_without_a_key_the_answer_is_401_in_the_clients_own_error_shape(guarded: ScenarioPool, key: str) -> None:
    assert guarded.url.startswith("https://")
    answer = guarded.post(body("x"))
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert guarded.post(body("x"), {"authorization": "Bearer wrong"}).status_code == 401
    assert guarded.http.get(f"{guarded.url}/v1/models").status_code == 401
    assert guarded.http.get(f"{guarded.url}/anything").status_code == 401
    assert guarded.post(body("x"), {"authorization": f"Bearer {key}"}).status_code == 200
    said = guarded.post(body("x"), {"x-api-key": "wrong"}, "/v1/messages").json()
    assert (said["type"], said["error"]["type"]) == ("error", "authentication_error")


def test_a_key_is_taken_from_either_header(guarded: ScenarioPool, key: str) -> None:
    assert guarded.post(body("x"), {"authorization": f"Bearer {key}"}).status_code == 200
    assert guarded.post(body("x"), {"x-api-key": key}, "/v1/messages").status_code == 200


def test_the_engine_gets_its_own_key_and_never_the_clients(guarded: ScenarioPool, key: str, echo: Backend) -> None:
    headers = [("authorization", f"Bearer {key}"), ("authorization", "Bearer other"), ("x-api-key", key)]
    answer = guarded.http.post(f"{guarded.url}/v1/chat/completions", json=body("x"), headers=headers)
    assert answer.status_code in (200, 401)
    assert guarded.post(body("y"), {"x-api-key": key}).status_code == 200
    arrived = echo.seen.pop()
    assert arrived.values("authorization") == ["Bearer engine-secret"]
    assert arrived.values("x-api-key") == []
    assert key not in str([one.headers for one in echo.seen])


def test_keys_are_read_again_when_their_file_changes(guarded: ScenarioPool, key: str, folder: Path) -> None:
    secret, line = new_key("bob")
    before = (folder / "keys").read_text()
    (folder / "keys").write_text(f"{before}{line}\n")
    until(lambda: guarded.post(body("x"), {"authorization": f"Bearer {secret}"}).status_code == 200, why=guarded.said)
    (folder / "keys").write_text("no such line\n")
    until(lambda: "keys not reloaded" in guarded.said(), why=guarded.said)
    assert guarded.post(body("x"), {"authorization": f"Bearer {secret}"}).status_code == 200
    (folder / "keys").write_text(before)
    until(lambda: guarded.post(body("x"), {"authorization": f"Bearer {secret}"}).status_code == 401, why=guarded.said)
    assert guarded.post(body("x"), {"authorization": f"Bearer {key}"}).status_code == 200


def test_a_certificate_is_read_again_when_its_file_changes(guarded: ScenarioPool, key: str, folder: Path) -> None:
    assert shown_name(guarded.url) == "first"
    write_certificate(folder, "second")
    until(lambda: shown_name(guarded.url) == "second", why=guarded.said)
    assert guarded.post(body("x"), {"authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.only_plane("envoy", "the direct plane speaks HTTP/1 alone")
def test_http2_is_offered_on_the_tls_listener(guarded: ScenarioPool, key: str) -> None:
    with httpx.Client(http2=True, verify=False, timeout=30.0) as client:
        answer = client.get(f"{guarded.url}/v1/models", headers={"authorization": f"Bearer {key}"})
    assert (answer.http_version, answer.status_code) == ("HTTP/2", 200)


def test_nobody_gets_in_without_a_key_while_the_picker_is_dead(guarded: ScenarioPool) -> None:
    (victim,) = guarded.worker_pids()
    os.kill(victim, 9)
    statuses: set[int] = set()
    while guarded.client.picture().is_partial or not statuses:
        statuses.add(guarded.post(body("x")).status_code)
    assert statuses <= {401, 503}
    until(lambda: guarded.worker_pids() not in ([], [victim]), why=guarded.said)


def test_nothing_of_the_operators_is_on_the_public_port(guarded: ScenarioPool, key: str, echo: Backend) -> None:
    headers = {"authorization": f"Bearer {key}"}
    for path in ("/metrics", "/snapshot", "/explain/x", "/healthz", "/config_dump", "/stats", "/events"):
        answer = guarded.http.get(guarded.url + path, headers=headers)
        assert "llm_d_epp" not in answer.text
        assert "shoal_" not in answer.text
        assert "candidates" not in answer.text
        # Whatever is no API of the router is the engine's business.
        assert path == "/metrics" or echo.seen.pop().path == path


def test_the_metrics_port_is_on_the_loopback_and_answers_metrics_alone(guarded: ScenarioPool) -> None:
    (line,) = [line for line in guarded.said().splitlines() if "metrics" in line and "open to" in line]
    assert "127.0.0.1:" in line
    port = int(line.rsplit("127.0.0.1:", 1)[1].split("/")[0].split()[0])

    def status(path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30.0)
        connection.request("GET", path)
        try:
            return connection.getresponse().status
        finally:
            connection.close()

    assert status("/metrics") == 200
    assert [status(path) for path in ("/snapshot", "/explain/x", "/endpoints", "/reload")] == [404] * 4


def test_a_clients_key_reaches_an_engine_without_its_own_only_when_configured(
    plane: str, tmp_path: Path, echo: Backend
) -> None:
    with pool(plane, tmp_path, ["--backend", echo.url], "forward_client_key: true\n") as forwarding:
        assert forwarding.post(body("x"), {"authorization": "Bearer mine"}).status_code == 200
        assert echo.seen.pop().values("authorization") == ["Bearer mine"]
        headers = [("authorization", "Bearer mine"), ("authorization", "Bearer another")]
        forwarding.http.post(f"{forwarding.url}/v1/chat/completions", json=body("x"), headers=headers)
        assert len(echo.seen.pop().values("authorization")) <= 1
