import asyncio
import ipaddress
import logging
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.hosts.fleet import FileSource, FleetKeeper, Pace, StaticSource, Target, UnknownEndpoint, parse_url
from shoal.pool import EndpointState, ServedModel, Signals
from shoal.routing import events
from tests.hosts.fleet.fleet_engines import FAST, Kept, Recorder, ScriptedEngine, run, target, until


def ready(sink: Recorder, endpoint_id: str) -> bool:
    return sink.states(endpoint_id)[-1:] == ["ready"]


def test_an_engine_that_is_still_loading_joins_when_it_is_ready() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            await engine.stop()
            async with Kept(StaticSource([target(engine)])) as (keeper, sink):
                await until(lambda: keeper.reports()[0].reason == "connection refused")
                assert sink.states(engine.address) == ["joined"]
                engine.status["/health"] = 503
                await engine.start()
                await until(lambda: keeper.reports()[0].reason == "/health answered HTTP 503")
                assert sink.states(engine.address) == ["joined"]
                engine.status.clear()
                await until(lambda: ready(sink, engine.address))
                kinds = [type(event) for event in sink.told]
                assert kinds.index(events.ModelsSeen) < kinds.index(events.EndpointChanged)
                assert sink.of(events.ModelsSeen)[0].models == (ServedModel(id="m"),)
                await until(lambda: sink.of(events.LoadSeen))

    run(test)


def test_what_holds_up_the_start_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async def nowhere(name: str) -> list[str]:
            raise OSError(-2, "Name or service not known")

        async with ScriptedEngine() as engine:
            await engine.stop()
            sources = StaticSource([target(engine), parse_url("http://nowhere.example:8000")])
            async with Kept(sources, lookup=nowhere) as (keeper, _):
                await until(lambda: f"waiting for {engine.url}: connection refused" in caplog.messages)
                unresolved = "waiting for http://nowhere.example:8000: the name cannot be resolved"
                await until(lambda: any(line.startswith(unresolved) for line in caplog.messages))
                assert list(keeper.unresolved()) == ["http://nowhere.example:8000"]

    with caplog.at_level(logging.INFO, logger="shoal"):
        run(test)


def test_a_ready_engine_that_goes_silent_loads_again_and_returns_by_itself() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine, Kept(StaticSource([target(engine)])) as (_, sink):
            await until(lambda: ready(sink, engine.address))
            await engine.stop()
            await until(lambda: sink.states(engine.address)[-1] == "loading")
            await engine.start()
            await until(lambda: ready(sink, engine.address))
            assert sink.states(engine.address) == ["joined", "ready", "loading", "ready"]

    run(test)


def test_one_or_two_failed_checks_change_nothing() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine, Kept(StaticSource([target(engine)])) as (keeper, sink):
            await until(lambda: ready(sink, engine.address))
            for _ in range(5):
                engine.status["/health"] = 500
                await until(lambda: keeper.reports()[0].reason)
                engine.status.clear()
                await until(lambda: not keeper.reports()[0].reason)
            assert sink.states(engine.address)[:2] == ["joined", "ready"]

    run(test)


def test_models_are_read_again_while_an_engine_runs() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine, Kept(StaticSource([target(engine)])) as (_, sink):
            await until(lambda: ready(sink, engine.address))
            engine.models = ["m", "adapter"]
            await until(lambda: len(sink.of(events.ModelsSeen)) == 2)
            asked = engine.calls["/v1/models"]
            await until(lambda: engine.calls["/v1/models"] > asked + 2)
            names = [[model.id for model in event.models] for event in sink.of(events.ModelsSeen)]
            assert names == [["m"], ["m", "adapter"]]

    run(test)


def test_sglang_is_recognised_and_never_asked_for_a_generation() -> None:
    async def test() -> None:
        async with ScriptedEngine("sglang") as engine, Kept(StaticSource([target(engine)])) as (_, sink):
            engine.running = 4
            await until(lambda: ready(sink, engine.address))
            await until(lambda: sink.of(events.LoadSeen))
            assert sink.of(events.EndpointJoined)[-1].endpoint.engine == "sglang"
            assert sink.of(events.LoadSeen)[0].signals == Signals(running=4.0, waiting=0.0)
            assert "/health" not in engine.calls
            assert engine.calls["/model_info"] >= 1

    run(test)


def test_an_engine_without_a_health_path_or_metrics_is_ready_by_its_models() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            engine.status = {"/health": 404, "/metrics": 404}
            async with Kept(StaticSource([target(engine)])) as (_, sink):
                await until(lambda: ready(sink, engine.address))
                await until(lambda: engine.calls["/metrics"] > 3)
                assert [event.signals for event in sink.of(events.LoadSeen)] == [Signals()]
                assert engine.calls["/health"] == 1

    run(test)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "did not answer a model list"),
        (b'{"data":[]}', "names no model"),
        (b"[" * 100_000, "did not answer a model list"),
        (b" " * (2 << 20), "is larger than"),
    ],
)
def test_hostile_answers_hold_back_only_their_own_endpoint(body: bytes, says: str) -> None:
    async def test() -> None:
        async with ScriptedEngine() as bad, ScriptedEngine() as good:
            bad.models_body = body
            async with Kept(StaticSource([target(bad), target(good)])) as (keeper, sink):
                await until(lambda: ready(sink, good.address))
                await until(lambda: any(says in report.reason for report in keeper.reports()))
                assert sink.states(bad.address) == ["joined"]

    run(test)


def test_endpoints_that_hang_do_not_hold_up_those_that_answer() -> None:
    async def test() -> None:
        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        tar = await asyncio.start_server(hang, "127.0.0.1", 0)
        port = tar.sockets[0].getsockname()[1]
        pits = [parse_url(f"http://127.0.0.{last}:{port}") for last in range(2, 6)]
        stuck = [parse_url(f"http://127.0.0.1:{port}", name="pit"), *pits]
        pace = msgspec.structs.replace(FAST, slots=2)
        async with (
            ScriptedEngine() as engine,
            Kept(StaticSource([target(engine), *stuck]), pace=pace) as (_, sink),
        ):
            await until(lambda: ready(sink, engine.address))
            asked = engine.calls["/health"]
            await until(lambda: engine.calls["/health"] > asked + 5)
        tar.close()
        await until(lambda: len(asyncio.all_tasks()) == 1)

    run(test)


def test_drain_waits_for_requests_in_flight_and_then_removes() -> None:
    async def test() -> None:
        done = asyncio.Event()
        asked: list[str] = []

        async def drained(endpoint_id: str) -> None:
            asked.append(endpoint_id)
            await done.wait()

        async with (
            ScriptedEngine() as engine,
            Kept(StaticSource([target(engine)]), drained=drained) as (keeper, sink),
        ):
            await until(lambda: ready(sink, engine.address))
            assert keeper.drain(engine.url) == [engine.address]
            await until(lambda: asked)
            assert sink.states(engine.address) == ["joined", "ready", "draining"]
            done.set()
            await until(lambda: sink.states(engine.address)[-1] == "left")
            assert keeper.reports() == []
            assert keeper.snapshot() == []
            assert keeper.add(target(engine)) == [engine.address]
            await until(lambda: ready(sink, engine.address))

    run(test)


def test_a_draining_endpoint_can_be_taken_back() -> None:
    async def test() -> None:
        async def never(endpoint_id: str) -> None:
            await asyncio.Event().wait()

        async with (
            ScriptedEngine() as engine,
            Kept(StaticSource([target(engine)]), drained=never) as (keeper, sink),
        ):
            await until(lambda: ready(sink, engine.address))
            keeper.drain(engine.address)
            await until(lambda: sink.states(engine.address)[-1] == "draining")
            keeper.add(target(engine))
            await until(lambda: ready(sink, engine.address))
            assert sink.states(engine.address) == ["joined", "ready", "draining", "loading", "ready"]

    run(test)


def test_what_is_in_the_fleet_is_known_under_its_id_until_it_drains() -> None:
    async def test() -> None:
        async def nowhere(name: str) -> list[str]:
            raise OSError(-2, "Name or service not known")

        async with ScriptedEngine() as engine:
            named = StaticSource([target(engine, name="gpu-1"), parse_url("http://nowhere.example:8000")])
            async with Kept(named, lookup=nowhere, busy=lambda _: True) as (keeper, sink):
                assert keeper.known_as(target(engine)) == ["gpu-1"]
                assert keeper.known_as(parse_url("http://nowhere.example:8000")) == []
                assert keeper.known_as(parse_url("http://elsewhere.example:8000")) is None
                assert keeper.known_as(parse_url("http://127.0.0.1:9")) is None
                await until(lambda: ready(sink, "gpu-1"))
                keeper.drain("gpu-1")
                assert keeper.known_as(target(engine)) is None
                assert keeper.add(target(engine)) == ["gpu-1"]
                assert keeper.known_as(target(engine)) == ["gpu-1"]

    run(test)


def test_without_a_callback_drain_watches_whether_the_endpoint_is_busy() -> None:
    async def test() -> None:
        work = {"is_on": True}
        async with (
            ScriptedEngine() as engine,
            Kept(StaticSource([target(engine)]), busy=lambda _: work["is_on"]) as (keeper, sink),
        ):
            await until(lambda: ready(sink, engine.address))
            keeper.drain(engine.address)
            for _ in range(20):
                await asyncio.sleep(0.005)
            assert sink.states(engine.address)[-1] == "draining"
            work["is_on"] = False
            await until(lambda: sink.states(engine.address)[-1] == "left")

    run(test)


def test_remove_does_not_wait_and_the_source_does_not_bring_it_back() -> None:
    async def test() -> None:
        async with (
            ScriptedEngine() as engine,
            Kept(StaticSource([target(engine, name="a")]), busy=lambda _: True) as (keeper, sink),
        ):
            await until(lambda: ready(sink, "a"))
            keeper.drain("a")
            keeper.remove("a")
            await until(lambda: sink.states("a")[-1] == "left")
            assert sink.states("a") == ["joined", "ready", "draining", "left"]
            keeper._reconcile()
            assert keeper.reports() == []
            with pytest.raises(UnknownEndpoint, match="known: none"):
                keeper.drain("a")

    run(test)


def test_a_backends_file_is_followed_through_atomic_replacement_and_broken_edits(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "pool.yaml"

        def replace(text: str) -> None:
            fresh = tmp_path / "fresh"
            fresh.write_text(text)
            os.replace(fresh, path)

        async with ScriptedEngine() as first, ScriptedEngine() as second:
            replace(f"- url: {first.url}\n")
            async with Kept(FileSource(path)) as (keeper, sink):
                await until(lambda: ready(sink, first.address))
                replace(f"- url: {first.url}\n  labels: {{zone: a}}\n- url: {second.url}\n")
                await until(lambda: ready(sink, second.address))
                assert sink.states(first.address) == ["joined", "ready", "joined"]
                assert sink.of(events.EndpointJoined)[-1].endpoint.labels in ({"zone": "a"}, {})
                replace("- url: [broken")
                replace_done = asyncio.get_running_loop().time()
                await until(lambda: asyncio.get_running_loop().time() > replace_done + 0.3)
                assert len(keeper.reports()) == 2
                path.write_text(f"- url: {second.url}\n")
                await until(lambda: sink.states(first.address)[-1] == "left")
                assert sink.states(second.address)[-1] == "ready"

    run(test)


def test_each_address_of_a_dns_name_is_an_endpoint_and_a_lost_one_leaves() -> None:
    async def test() -> None:
        answers = ["127.0.0.1", "127.0.0.2"]

        async def lookup(name: str) -> list[str]:
            return answers

        async with ScriptedEngine() as engine:
            aim = parse_url(f"http://vllm.example:{engine.port}")
            async with Kept(StaticSource([aim]), lookup=lookup) as (_, sink):
                await until(lambda: ready(sink, engine.address))
                assert engine.headers["Host"] == f"vllm.example:{engine.port}"
                other = f"127.0.0.2:{engine.port}"
                assert sink.states(other) == ["joined"]
                answers.remove("127.0.0.2")
                await until(lambda: sink.states(other)[-1] == "left")
                assert sink.states(engine.address) == ["joined", "ready"]

    run(test)


def test_an_engine_under_a_new_name_moves_at_once() -> None:
    async def test() -> None:
        class Named(StaticSource):
            name = "old"

            def targets(self) -> list[Target]:
                return [target(engine, name=self.name)]

        async with ScriptedEngine() as engine:
            source = Named([])
            async with Kept(source, busy=lambda _: True) as (keeper, sink):
                await until(lambda: ready(sink, "old"))
                source.name = "new"
                keeper._reconcile()
                await until(lambda: ready(sink, "new"))
                joined = next(event for event in sink.of(events.EndpointJoined) if event.endpoint.id == "new")
                assert sink.told.index(events.EndpointLeft("old")) < sink.told.index(joined)

    run(test)


def test_two_sources_that_name_the_same_engine_make_one_endpoint() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            sources = (StaticSource([target(engine)]), StaticSource([target(engine, name="again"), target(engine)]))
            async with Kept(*sources) as (keeper, sink):
                await until(lambda: ready(sink, engine.address))
                assert [report.id for report in keeper.reports()] == [engine.address]

    run(test)


def test_a_clash_that_was_settled_is_forgotten_and_told_again_when_it_returns() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            first, second = target(engine, name="a"), target(engine, name="b")
            source = StaticSource([first, second])
            async with Kept(source) as (keeper, _):
                assert keeper._told_clashes == {("b", second.endpoint(second.host).address)}
                source._targets = (first,)
                keeper._reconcile()
                assert keeper._told_clashes == set()

    run(test)


def test_a_backend_key_goes_to_its_engine_and_a_missing_one_is_told() -> None:
    async def test() -> None:
        async with (
            ScriptedEngine() as engine,
            Kept(StaticSource([target(engine, api_key="canary")])) as (keeper, sink),
        ):
            await until(lambda: ready(sink, engine.address))
            assert engine.headers["Authorization"] == "Bearer canary"
            engine.status["/v1/models"] = 401
            await until(lambda: "wants an API key" in keeper.reports()[0].reason)

    run(test)


def test_a_certificate_is_trusted_by_its_own_authority_only(tmp_path: Path) -> None:
    key_file, ca_file = self_signed(tmp_path)

    async def test() -> None:
        engine = ScriptedEngine()
        engine.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        engine.tls.load_cert_chain(ca_file, key_file)
        async with engine:
            trusted = target(engine, name="trusted", ca_file=str(ca_file))
            async with Kept(StaticSource([trusted])) as (_, sink):
                await until(lambda: ready(sink, "trusted"))
                assert sink.of(events.EndpointJoined)[0].endpoint.is_tls
            async with Kept(StaticSource([target(engine)])) as (keeper, _):
                await until(lambda: "certificate is not trusted" in keeper.reports()[0].reason)
            missing = target(engine, ca_file=str(tmp_path / "gone.pem"))
            async with Kept(StaticSource([missing])) as (keeper, _):
                await until(lambda: "gone.pem cannot be used" in keeper.reports()[0].reason)

    run(test)


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Write a key and a certificate for 127.0.0.1; return their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "engine")])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    certificate = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    key_file, ca_file = folder / "key.pem", folder / "ca.pem"
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return key_file, ca_file


def test_a_drain_whose_books_cannot_be_read_waits_on() -> None:
    async def test() -> None:
        asked = 0

        async def unknown(endpoint_id: str) -> None:
            nonlocal asked
            asked += 1
            raise TimeoutError

        async with ScriptedEngine() as engine, Kept(StaticSource([target(engine)]), drained=unknown) as (keeper, sink):
            await until(lambda: ready(sink, engine.address))
            keeper.drain(engine.address)
            await until(lambda: asked >= 2)
            assert sink.states(engine.address)[-1] == "draining"

    run(test)


def test_a_snapshot_brings_a_new_worker_to_the_present() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine, Kept(StaticSource([target(engine)])) as (keeper, sink):
            await until(lambda: sink.of(events.LoadSeen))
            joined, models, load = keeper.snapshot()
            assert joined == events.EndpointJoined(sink.of(events.EndpointJoined)[0].endpoint, EndpointState.READY)
            assert models == events.ModelsSeen(engine.address, (ServedModel(id="m"),))
            assert isinstance(load, events.LoadSeen)

    run(test)


def test_adding_and_removing_a_thousand_endpoints_leaves_no_task_and_no_connection() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine, Kept(pace=Pace(linger_s=0.001)) as (keeper, sink):
            baseline = len(asyncio.all_tasks())
            for hundred in range(10):
                ids = []
                for last in range(100):
                    ip = f"127.1.{hundred}.{last + 1}"
                    ids += keeper.add(parse_url(f"http://{ip}:{engine.port}"))
                assert len(ids) == 100
                await asyncio.sleep(0)
                for endpoint_id in ids:
                    keeper.remove(endpoint_id)
                await until(lambda: not keeper.reports())
            # Those that were being asked when they left are said goodbye to a little later.
            await until(lambda: len(sink.of(events.EndpointLeft)) >= 1000)
            assert len(sink.of(events.EndpointLeft)) == 1000
            assert keeper.reports() == []
            assert keeper._removed == set()
            assert keeper._goodbyes == {}
            await until(lambda: len(asyncio.all_tasks()) <= baseline)

    run(test)


def test_closing_leaves_nothing_behind_though_engines_are_in_every_state() -> None:
    async def test() -> None:
        async with ScriptedEngine() as one, ScriptedEngine() as two:
            sources = StaticSource([target(one), target(two), parse_url("http://127.0.0.1:9")])
            keeper = FleetKeeper([sources], lambda _: None, pace=FAST)
            await keeper.start()
            await until(lambda: sum(report.state is EndpointState.READY for report in keeper.reports()) == 2)
            keeper.drain(two.url)
            keeper.remove(one.url)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await keeper.close()

    run(test)


def test_a_ready_engine_without_a_metrics_page_is_reported_until_it_has_one_or_serves_no_more() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            engine.status["/metrics"] = 404
            async with Kept(StaticSource([target(engine)])) as (keeper, _):
                await until(lambda: "HTTP 404" in keeper.reports()[0].load_problem)
                assert keeper.reports()[0].state is EndpointState.READY
                engine.status["/health"] = 503
                await until(lambda: keeper.reports()[0].state is EndpointState.LOADING)
                assert keeper.reports()[0].load_problem == ""
                engine.status = {}
                await until(lambda: keeper.reports()[0].signals is not None)
                assert keeper.reports()[0].load_problem == ""

    run(test)
