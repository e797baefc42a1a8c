"""TLS towards clients and engines, with certificates that change while Envoy runs."""

import asyncio
import shutil
import ssl
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from shoal.hosts.envoy import BackendTls, EndpointAddress, ListenerTls, write_certificates
from shoal.kernel import ConfigError
from tests.hosts.certificates import make_certificate
from tests.hosts.envoy.envoy_rig import TinyEngine, rig

pytestmark = pytest.mark.e2e


async def _shown(port: int) -> str:
    """The common name of the certificate that the listener shows."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    name = x509.load_der_x509_certificate(shown).subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    return str(name)


async def test_the_listener_speaks_tls_and_takes_a_new_certificate_while_running(tmp_path: Path) -> None:
    chain, key = make_certificate(tmp_path, "first")
    async with rig(tls=ListenerTls(certificate=chain, key=key)) as made:
        trust = ssl.create_default_context(cafile=chain)
        url = made.url.replace("http", "https").replace("127.0.0.1", "localhost")
        async with made.client.post(
            f"{url}/tls", data=b"x", headers={"x-test-pick": made.engines[0].address}, ssl=trust
        ) as answer:
            assert answer.status == 200
        assert {k.lower(): v for k, v in made.engines[0].requests[0][1].items()}["x-forwarded-proto"] == "https"
        assert await _shown(made.settings.port) == "first"
        with pytest.raises(aiohttp.ClientError):
            await made.client.get(f"{made.url}/plain")
        # In place, as `cp` does it.
        fresh_chain, fresh_key = make_certificate(tmp_path, "second")
        for old, new in ((chain, fresh_chain), (key, fresh_key)):
            await asyncio.to_thread(shutil.copyfile, new, old)
        write_certificates(made.settings)
        async with asyncio.timeout(10):
            while await _shown(made.settings.port) != "second":
                await asyncio.sleep(0.05)
        # A key that does not fit is refused, and the pair in use stays.
        make_certificate(tmp_path, "third")
        await asyncio.to_thread(Path(key).write_bytes, (tmp_path / "third.key").read_bytes())
        with pytest.raises(ConfigError, match=r"first\.pem"):
            write_certificates(made.settings)
        assert await _shown(made.settings.port) == "second"


async def test_the_private_key_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    chain, key = make_certificate(tmp_path, "first")
    async with rig(engines=0, pickers=1, tls=ListenerTls(certificate=chain, key=key)) as made:
        assert ((Path(made.directory) / "sds" / "listener.json").stat().st_mode & 0o777) == 0o600


async def test_engines_with_tls_and_without_serve_in_one_fleet_and_a_stranger_does_not(tmp_path: Path) -> None:
    chain, key = make_certificate(tmp_path, "engine")
    stranger_chain, stranger_key = make_certificate(tmp_path, "stranger")
    group = BackendTls(name="mine", ca=chain, sni="engine.test")
    wrong = BackendTls(name="wrong-name", ca=chain, sni="other.test")
    blind = BackendTls(name="blind", is_verified=False)
    async with rig(engines=1, backend_tls=(group, wrong, blind)) as made:
        secured, strange = TinyEngine(), TinyEngine()
        made.engines += [secured, strange]
        for engine, pair in ((secured, (chain, key)), (strange, (stranger_chain, stranger_key))):
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*pair)
            await engine.start(ssl=context)
        members = [
            EndpointAddress(address=made.engines[0].address),
            EndpointAddress(address=secured.address, tls="mine"),
            EndpointAddress(address=strange.address, tls="mine"),
        ]
        await made.fleet(*members)
        for engine, status in ((made.engines[0], 200), (secured, 200), (strange, 503)):
            assert (await made.send("/x", engine.address, x_test_no_retry="1")).status == status
        # A host that only changes its group keeps its open connections; one that joins anew has none.
        await made.fleet(made.engines[0].address)
        await made.fleet(EndpointAddress(address=secured.address, tls="wrong-name"))
        assert (await made.send("/x", secured.address, x_test_no_retry="1")).status == 503
        await made.fleet(EndpointAddress(address=strange.address, tls="blind"))
        assert (await made.send("/x", strange.address, x_test_no_retry="1")).status == 200


@pytest.mark.parametrize("content", ["", "no certificate"])
def test_a_file_that_is_no_certificate_is_refused_with_its_name(tmp_path: Path, content: str) -> None:
    from shoal.hosts.envoy import EnvoySettings, Picker

    bad = tmp_path / "bad.pem"
    bad.write_text(content)
    pickers = (Picker(id="0", socket="/p"),)
    for settings in (
        EnvoySettings(
            run_dir=str(tmp_path), port=1, pickers=pickers, tls=ListenerTls(certificate=str(bad), key=str(bad))
        ),
        EnvoySettings(run_dir=str(tmp_path), port=1, pickers=pickers, backend_tls=(BackendTls(ca=str(bad)),)),
    ):
        with pytest.raises(ConfigError, match=r"bad\.pem"):
            write_certificates(settings)
