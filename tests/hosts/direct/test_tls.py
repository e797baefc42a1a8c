"""TLS towards clients and engines, with certificates that change while the plane runs."""

import asyncio
import shutil
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from shoal.hosts.backends import Backends, BackendsFile, context_of, write_backends
from shoal.hosts.direct.certificates import Certificate
from shoal.hosts.envoy import BackendTls, EndpointAddress
from shoal.kernel import ConfigError
from shoal.routing.settings import Tls
from tests.hosts.certificates import make_certificate
from tests.hosts.direct.direct_rig import (
    CHUNKED_HEAD,
    Engine,
    Seen,
    Wire,
    chat,
    chunk,
    plain,
    pool,
    request,
    says,
    until,
)


def server_context(chain: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    return context


async def test_clients_are_served_over_tls_and_the_engine_is_told(tmp_path: Path) -> None:
    chain, key = make_certificate(tmp_path, "pool")
    certificate = Certificate(Tls(cert=chain, key=key))
    trusting = ssl.create_default_context(cafile=chain)
    trusting.set_alpn_protocols(["h2", "http/1.1"])
    async with pool(tls=certificate.context) as it:
        client = await it.client(trusting, "localhost")
        assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        body = b"x" * 1_000_000
        assert (await client.ask(request(body, "/any"))).status == 200
        assert it.engines[0].seen[0].body == body
        assert it.engines[0].seen[0].values("x-forwarded-proto") == ["https"]
        answer = await client.ask(request(headers="Connection: close\r\n"))
        assert (answer.status, await client.is_closed()) == (200, True)


async def test_a_stream_over_tls_that_breaks_has_no_end_and_a_client_that_leaves_stops_the_engine(
    tmp_path: Path,
) -> None:
    chain, key = make_certificate(tmp_path, "pool")
    lost = asyncio.Event()

    async def breaks(wire: Wire, _: Seen) -> None:
        await wire.send(CHUNKED_HEAD + chunk(b"data: x\n\n"))
        await asyncio.sleep(0.02)
        wire.abort()

    async def goes_on(wire: Wire, _: Seen) -> None:
        await wire.send(CHUNKED_HEAD + chunk(b"data: x\n\n"))
        await wire.lost()
        lost.set()

    trusting = ssl.create_default_context(cafile=chain)
    async with pool(tls=Certificate(Tls(cert=chain, key=key)).context) as it:
        it.engines[0].script = breaks
        answer = await (await it.client(trusting, "localhost")).ask(request(chat(stream=True)))
        assert not answer.is_whole
        assert b"engine_lost" in answer.body
        it.engines[0].script = goes_on
        client = await it.client(trusting, "localhost")
        await client.send(request(chat(stream=True)))
        await client.head()
        client.close()
        await lost.wait()


async def test_a_refused_upload_over_tls_is_answered(tmp_path: Path) -> None:
    chain, key = make_certificate(tmp_path, "pool")
    config = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nlimits: {max_body_bytes: 1000}\n"
    trusting = ssl.create_default_context(cafile=chain)
    async with pool(config=config, tls=Certificate(Tls(cert=chain, key=key)).context) as it:
        client = await it.client(trusting, "localhost")
        await client.send(request(b"x" * 2000)[:-1000])
        assert (await client.answer()).status == 413


async def _shown(port: int) -> str:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    name = x509.load_der_x509_certificate(shown).subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    return str(name)


async def test_a_renewed_certificate_is_shown_and_a_bad_pair_is_not(tmp_path: Path) -> None:
    first, second = make_certificate(tmp_path, "first"), make_certificate(tmp_path, "second")
    files = Tls(cert=str(tmp_path / "chain"), key=str(tmp_path / "key"))

    def put(chain: str, key: str) -> None:
        shutil.copy(chain, files.cert)
        shutil.copy(key, files.key)

    put(*first)
    certificate = Certificate(files)
    async with pool(tls=certificate.context) as it:
        assert await _shown(it.port) == "first"
        put(first[0], second[1])
        certificate.look(files)
        assert await _shown(it.port) == "first"
        put(*second)
        certificate.look(files)
        assert await _shown(it.port) == "second"


def test_a_certificate_that_cannot_be_used_is_an_error_with_the_files_name(tmp_path: Path) -> None:
    (tmp_path / "chain").write_text("nonsense")
    with pytest.raises(ConfigError, match="chain"):
        Certificate(Tls(cert=str(tmp_path / "chain"), key=str(tmp_path / "key")))
    with pytest.raises(ConfigError, match="roots"):
        context_of(BackendTls(ca=str(tmp_path / "chain")))


@pytest.mark.parametrize(
    ("group", "status"),
    [
        (BackendTls(name="g", ca="own"), 200),
        (BackendTls(name="g", ca="own", sni="engine.test"), 200),
        (BackendTls(name="g", ca="own", sni="other.test"), 503),
        (BackendTls(name="g", ca="other"), 503),
        (BackendTls(name="g", sni="engine.test"), 503),
        (BackendTls(name="g", is_verified=False, sni="other.test"), 200),
        (BackendTls(name="g", ca="other", is_verified=False), 200),
    ],
)
async def test_an_engine_with_tls_is_dialled_as_its_group_says(tmp_path: Path, group: BackendTls, status: int) -> None:
    chain, key = make_certificate(tmp_path, "own")
    other, _ = make_certificate(tmp_path, "other")
    paths = {"own": chain, "other": other, "": ""}
    path = tmp_path / "backends.json"
    engine = Engine()
    names: list[str | None] = []
    context = server_context(chain, key)
    context.sni_callback = lambda _, name, __: names.append(name)
    await engine.start(context)
    chosen = BackendTls(name=group.name, ca=paths[group.ca], sni=group.sni, is_verified=group.is_verified)
    write_backends(
        path,
        Backends(
            endpoints=(EndpointAddress(address=engine.address, tls="g", authorization="Bearer k"),), groups=(chosen,)
        ),
    )
    try:
        async with pool(0, backends=BackendsFile(path)) as it:
            it.join(engine.address)
            client = await it.client()
            for _ in range(2):
                assert (await client.ask(request(b"x" * 300_000, "/any"))).status == status
            if status == 200:
                assert engine.connections == 1
                assert engine.seen[0].values("authorization") == ["Bearer k"]
                assert names == ([group.sni] if group.sni else [None])
            else:
                assert (await it.outcome()).is_upstream_failure
    finally:
        await engine.stop()


async def test_renewed_roots_are_trusted_and_connections_under_the_old_ones_end(tmp_path: Path) -> None:
    own, other = make_certificate(tmp_path, "own"), make_certificate(tmp_path, "other")
    roots = tmp_path / "roots.pem"
    shutil.copy(other[0], roots)
    engine = Engine()
    await engine.start(server_context(*own))
    path = tmp_path / "backends.json"
    write_backends(
        path,
        Backends(
            endpoints=(EndpointAddress(address=engine.address, tls="g"),),
            groups=(BackendTls(name="g", ca=str(roots)),),
        ),
    )
    file = BackendsFile(path)
    try:
        async with pool(0, backends=file) as it:
            it.join(engine.address)
            assert (await it.ask(request())).status == 503
            shutil.copy(own[0], roots)
            file.look()
            assert (await it.ask(request())).status == 200
            file.look()
            assert (await it.ask(request())).status == 200
            assert engine.connections == 1
            # A change of something else lets connections be.
            endpoints = (EndpointAddress(address=engine.address, tls="g", authorization="Bearer k"),)
            write_backends(path, Backends(endpoints=endpoints, groups=(BackendTls(name="g", ca=str(roots)),)))
            file.look()
            assert (await it.ask(request())).status == 200
            assert (engine.connections, engine.seen[-1].values("authorization")) == (1, ["Bearer k"])
            roots.write_text(roots.read_text() + "\n")
            file.look()
            await until(lambda: engine.closed == 1)
    finally:
        await engine.stop()


async def test_an_engine_lost_under_tls_is_replaced(tmp_path: Path) -> None:
    chain, key = make_certificate(tmp_path, "own")
    engine = Engine()
    await engine.start(server_context(chain, key))

    async def dies(wire: Wire, _: Seen) -> None:
        wire.abort()

    engine.script = dies
    path = tmp_path / "backends.json"
    write_backends(
        path,
        Backends(
            endpoints=(EndpointAddress(address=engine.address, tls="g"),), groups=(BackendTls(name="g", ca=chain),)
        ),
    )
    try:
        async with pool(1, backends=BackendsFile(path)) as it:
            it.engines[0].script = says(plain())
            it.join(engine.address)
            it.prefer(engine.address, it.engines[0].address)
            assert (await it.ask(request())).status == 200
            assert (await it.outcome()).attempts == 2
    finally:
        await engine.stop()


async def test_roots_that_could_not_be_used_at_first_are_used_once_they_can(tmp_path: Path) -> None:
    own = make_certificate(tmp_path, "own")
    roots, path = tmp_path / "roots.pem", tmp_path / "backends.json"
    group = BackendTls(name="g", ca=str(roots))
    write_backends(path, Backends(endpoints=(EndpointAddress(address="a:1", tls="g"),), groups=(group,)))
    file = BackendsFile(path)
    assert file.of("a:1").tls is None
    shutil.copy(own[0], roots)
    file.look()
    assert file.of("a:1").tls is not None
