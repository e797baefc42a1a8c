"""How requests pass: choice, fallbacks, retries, headers, and who gets the records."""

import asyncio
import gzip
import json

import aiohttp
import httpx
import pytest
from aiohttp import web

from shoal.hosts.envoy import EndpointAddress, loaded, write_endpoints
from tests.hosts.envoy.envoy_rig import Rig, free_port, rig, sse

pytestmark = pytest.mark.e2e


async def _die_before_head(request: web.Request, _: bytes) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _die_after_head(request: web.Request, _: bytes) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await answer.prepare(request)
    await asyncio.sleep(0.05)
    assert request.transport is not None
    request.transport.abort()
    return answer


async def test_the_picked_engine_serves_and_the_record_says_so(live: Rig) -> None:
    for count, engine in enumerate(live.engines, start=1):
        answer = await live.send("/v1/x", engine.address)
        assert json.loads(answer.body)["served"] == engine.address
        assert (await live.record("/v1/x", count)).request_id
    served = {record.outcome.served_address for record in live.records}
    assert served == {engine.address for engine in live.engines}


async def test_a_dead_first_choice_falls_to_the_second_and_counts_two_attempts(live: Rig) -> None:
    dead, alive = f"127.0.0.1:{free_port()}", live.engines[1].address
    await live.fleet(dead, *(engine.address for engine in live.engines))
    answer = await live.send("/second", f"{dead},{alive}")
    assert json.loads(answer.body)["served"] == alive
    outcome = (await live.record("/second")).outcome
    assert (outcome.attempts, outcome.served_address, outcome.is_upstream_failure) == (2, alive, False)


async def test_an_engine_that_dies_before_its_head_is_retried_elsewhere(live: Rig) -> None:
    first, second = live.engines
    first.answers["/before"] = _die_before_head
    answer = await live.send("/before", f"{first.address},{second.address}")
    assert answer.status == 200
    assert (first.hits, second.hits) == (1, 1)


async def test_an_engine_that_dies_after_its_head_is_not_retried_and_the_client_sees_a_cut(live: Rig) -> None:
    first, second = live.engines
    first.answers["/after"] = _die_after_head
    with pytest.raises(aiohttp.ClientPayloadError):
        await live.send("/after", f"{first.address},{second.address}")
    assert (first.hits, second.hits) == (1, 0)
    outcome = (await live.record("/after")).outcome
    assert (outcome.status, outcome.ttft_s, outcome.response_bytes) == (200, None, 0)
    assert outcome.is_cut
    assert outcome.is_upstream_failure
    assert not outcome.is_client_gone


async def test_a_stream_that_breaks_is_an_aborted_transfer_and_a_cut_record(live: Rig) -> None:
    engine = live.engines[0]
    events = [{"usage": {"prompt_tokens": 9, "completion_tokens": n}} for n in range(4)]
    engine.answers["/cut"] = lambda request, _: sse(request, events, cut=True, gap_s=0.02)
    with pytest.raises(aiohttp.ClientPayloadError):
        await live.send("/cut", engine.address)
    outcome = (await live.record("/cut")).outcome
    assert outcome.is_cut
    assert outcome.response_bytes > 0
    # Tokens that were spent until then are known.
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (9, 3)


async def test_a_plain_answer_that_breaks_is_a_clean_error(live: Rig) -> None:
    async def cut(request: web.Request, _: bytes) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "application/json", "content-length": "100"})
        await answer.prepare(request)
        await answer.write(b'{"a":')
        assert request.transport is not None
        request.transport.abort()
        return answer

    live.engines[0].answers["/v1/completions"] = cut
    answer = await live.send("/v1/completions", live.engines[0].address)
    assert answer.status == 502
    assert answer.error["code"] == "bad_gateway"
    outcome = (await live.record("/v1/completions")).outcome
    assert outcome.is_upstream_failure
    assert not outcome.is_cut


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_an_overloaded_engine_is_retried_and_its_own_error_passes_when_all_are(live: Rig, status: int) -> None:
    first, second = live.engines

    async def overloaded(_: web.Request, __: bytes) -> web.Response:
        return web.json_response({"error": {"message": "busy", "mine": True}}, status=status)

    first.answers["/busy"] = overloaded
    pair = f"{first.address},{second.address}"
    assert (await live.send("/busy", pair)).status == 200
    answer = await live.send("/busy", pair, x_test_no_retry="1")
    assert (answer.status, answer.error) == (status, {"message": "busy", "mine": True})
    outcome = (await live.record("/busy", 2)).outcome
    assert {record.outcome.status for record in live.records if record.path == "/busy"} == {200, status}
    assert outcome is not None
    assert any(record.outcome.is_upstream_failure for record in live.records if record.outcome.status == status)


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500])
async def test_other_errors_of_an_engine_pass_unchanged_and_are_not_retried(live: Rig, status: int) -> None:
    first, second = live.engines

    async def refuse(_: web.Request, __: bytes) -> web.Response:
        return web.json_response({"error": {"message": "too long", "code": status}}, status=status)

    first.answers["/refuse"] = refuse
    answer = await live.send("/refuse", f"{first.address},{second.address}")
    assert (answer.status, answer.error) == (status, {"message": "too long", "code": status})
    assert (first.hits, second.hits) == (1, 0)
    assert (await live.record("/refuse")).outcome.is_upstream_failure is (status >= 500)


async def test_a_request_without_retries_is_sent_once(live: Rig) -> None:
    first, second = live.engines
    first.answers["/once"] = _die_before_head
    answer = await live.send("/once", f"{first.address},{second.address}", x_test_no_retry="1")
    assert answer.status == 503
    assert answer.error["code"] == "engine_unavailable"
    assert (first.hits, second.hits) == (1, 0)
    # The switch is for Envoy alone.
    assert not [name for name in first.requests[0][1] if name.lower().startswith("x-envoy")]


async def test_a_client_cannot_switch_anything_that_only_the_picker_may(live: Rig) -> None:
    engine = live.engines[0]
    spoofed = {
        "x-gateway-destination-endpoint": live.engines[1].address,
        "x-gateway-destination-endpoint-subset": "a",
        "x-prefiller-host-port": "1.2.3.4:5",
        "x-encoder-hosts-ports": "1.2.3.4:5",
        "x-data-parallel-host-port": "1.2.3.4:5",
        "x-kv-cache-source-host-port": "1.2.3.4:5",
        "x-shoal-internal-anything": "1",
        "x-shoal-endpoint": "1.2.3.4:5",
        "x-envoy-max-retries": "99",
        "x-envoy-upstream-rq-timeout-ms": "1",
        "X-Envoy-Retry-On": "5xx",
    }
    answer = await live.send("/spoof", engine.address, headers=spoofed)
    assert json.loads(answer.body)["served"] == engine.address
    seen = next(headers for picker in live.pickers for headers in picker.seen)
    assert not set(seen) & {name.lower() for name in spoofed}
    upstream = {name.lower(): value for name, value in engine.requests[0][1].items()}
    assert upstream["x-gateway-destination-endpoint"] == engine.address
    assert set(upstream) & {name.lower() for name in spoofed} == {"x-gateway-destination-endpoint"}


async def test_the_picker_gives_the_answer_headers_through_its_metadata(live: Rig) -> None:
    engine = live.engines[0]
    refused = {name.lower() for name in (await live.send("/said", x_test_refuse="429")).headers}
    assert not refused & {"x-session-token", "x-shoal-endpoint"}
    answer = await live.send("/said", engine.address, x_test_token="abc==")
    headers = {name.lower(): value for name, value in answer.headers.items()}
    assert headers["x-session-token"] == "abc=="
    assert headers["x-shoal-endpoint"] == engine.address
    await live.record("/said", 2)
    assert headers["x-shoal-request-id"] in {record.request_id for record in live.records}
    assert "x-session-token" not in {name.lower() for name in (await live.send("/said", engine.address)).headers}


async def test_a_clients_wish_for_no_retry_reaches_the_picker(live: Rig) -> None:
    await live.send("/wish", live.engines[0].address, x_shoal_no_retry="1")
    assert [headers["x-shoal-no-retry"] for picker in live.pickers for headers in picker.seen] == ["1"]


async def test_hop_by_hop_headers_and_those_that_connection_lists_end_at_the_router(live: Rig) -> None:
    engine = live.engines[0]
    await live.send(
        "/hops",
        engine.address,
        headers={
            "Connection": "keep-alive, X-Private",
            "X-Private": "1",
            "Keep-Alive": "timeout=5",
            "Proxy-Connection": "x",
        },
    )
    upstream = {name.lower() for name in engine.requests[0][1]}
    assert not upstream & {"connection", "x-private", "keep-alive", "proxy-connection", "upgrade"}


async def test_the_clients_request_id_is_kept_and_returned_and_one_is_made_if_absent(live: Rig) -> None:
    engine = live.engines[0]
    answer = await live.send("/id", engine.address, x_request_id="my own/id 1")
    assert answer.headers["X-Request-ID"] == "my own/id 1"
    assert {k.lower(): v for k, v in engine.requests[0][1].items()}["x-request-id"] == "my own/id 1"
    answer = await live.send("/id", engine.address)
    assert len(answer.headers["X-Request-ID"]) == 36
    # The join is on the minted id, so two requests with one claimed id stay two.
    await live.send("/id", engine.address, x_request_id="my own/id 1")
    await live.record("/id", 3)
    assert len({record.request_id for record in live.records if record.path == "/id"}) == 3


async def test_the_engines_server_header_passes_and_ours_stands_on_our_own_answers(live: Rig) -> None:
    assert "aiohttp" in (await live.send("/x", live.engines[0].address)).headers["Server"]
    assert (await live.send("/x", x_test_refuse="429")).headers["Server"] == "shoal"


async def test_bodies_reach_the_engine_byte_for_byte(live: Rig) -> None:
    engine = live.engines[0]
    body = gzip.compress(b'{"model": "m",  "prompt": "\xc3\xa9"}')
    await live.send("/gz?q=a%2Fb", engine.address, body=body, Content_Encoding="gzip")
    assert engine.requests[0][2] == gzip.decompress(body)
    body = b'{"a" : 1,\n "a": 2}'
    await live.send("//odd/../path", engine.address, body=body)
    assert engine.requests[1][2] == body


async def test_http2_clients_are_served_on_the_same_port(live: Rig) -> None:
    async with httpx.AsyncClient(http2=True, http1=False) as client:
        answer = await client.post(
            live.url + "/h2", content=b"z" * 3_000_000, headers={"x-test-pick": live.engines[0].address}
        )
    assert answer.http_version == "HTTP/2"
    assert answer.json() == {"served": live.engines[0].address, "bytes": 3_000_000}


async def test_a_websocket_goes_to_the_picked_engine_and_is_tracked_to_its_end(live: Rig) -> None:
    engine = live.engines[1]
    url = live.url.replace("http", "ws") + "/v1/realtime"
    async with live.client.ws_connect(url, headers={"x-test-pick": engine.address}) as socket:
        for text in ("one", "two"):
            await socket.send_str(text)
            assert (await socket.receive()).data == f"{engine.address} {text}"
        assert sum(picker.open_streams for picker in live.pickers) == 1
    record = await live.record("/v1/realtime")
    assert record.outcome.status == 101
    assert not record.outcome.is_cut
    assert not record.outcome.is_upstream_failure
    assert sum(picker.open_streams for picker in live.pickers) == 0


async def test_an_upgrade_header_without_its_connection_header_is_an_ordinary_request(live: Rig) -> None:
    answer = await live.send("/up", live.engines[0].address, body=b"abc", Upgrade="websocket")
    assert json.loads(answer.body)["bytes"] == 3
    assert [size for picker in live.pickers for size in picker.bodies] == [3]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_pickers_stream_lasts_exactly_as_long_as_the_request(live: Rig, method: str) -> None:
    engine = live.engines[0]
    engine.answers["/lasting"] = lambda request, _: sse(request, [{}] * 5, gap_s=0.05)
    headers = {"x-test-pick": engine.address}
    body = b"{}" if method == "POST" else None
    async with live.client.request(method, live.url + "/lasting", data=body, headers=headers) as answer:
        assert answer.status == 200
        assert sum(picker.open_streams for picker in live.pickers) == 1
        await answer.read()
    await live.record("/lasting")
    assert [len(picker.ended) for picker in live.pickers if picker.ended] == [1]


async def test_a_client_that_leaves_ends_the_pickers_stream_and_reaches_the_engine(live: Rig) -> None:
    engine = live.engines[0]

    async def long(request: web.Request, _: bytes) -> web.StreamResponse:
        return await sse(request, [{}] * 1000, gap_s=0.05)

    async def silent(request: web.Request, _: bytes) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    engine.answers |= {"/leave": long, "/silent": silent}
    for path in ("/leave", "/silent"):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(live.send(path, engine.address), 0.4)
        outcome = (await live.record(path)).outcome
        assert outcome.is_client_gone
        assert not outcome.is_cut
        assert not outcome.is_upstream_failure
    async with asyncio.timeout(5):
        while engine.aborted < 2:
            await asyncio.sleep(0.01)
    assert sum(picker.open_streams for picker in live.pickers) == 0


async def test_a_client_that_leaves_while_queued_ends_the_pickers_stream(live: Rig) -> None:
    for picker in live.pickers:
        picker.hold = asyncio.Event()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(live.send("/queued", live.engines[0].address), 0.3)
    assert (await live.record_unseen()).outcome.is_client_gone
    assert sum(picker.open_streams for picker in live.pickers) == 0
    assert live.engines[0].hits == 0


async def test_each_record_goes_to_the_picker_that_chose(live: Rig) -> None:
    await asyncio.gather(*(live.send("/many", live.engines[n % 2].address) for n in range(40)))
    await live.record("/many", 40)
    for picker in live.pickers:
        assert picker.records
        assert {record.picker for record in picker.records} == {picker.id}
        assert {record.request_id for record in picker.records} <= set(picker.ended)


async def test_a_name_outside_the_fleet_is_balanced_by_envoy_and_the_record_says_who_served(live: Rig) -> None:
    await live.fleet(*(engine.address for engine in live.engines))
    await live.send("/outside", "192.0.2.1:9")
    served = (await live.record("/outside")).outcome.served_address
    assert served in {engine.address for engine in live.engines}


async def test_an_endpoint_serves_once_it_is_loaded_and_no_longer_once_it_is_gone(live: Rig) -> None:
    first, second = live.engines
    version = write_endpoints(live.settings.run_dir, [EndpointAddress(address=first.address)])
    assert await loaded(live.envoy.admin, version)
    assert json.loads((await live.send("/fleet", second.address)).body)["served"] == first.address
    version = write_endpoints(live.settings.run_dir, [EndpointAddress(address=one.address) for one in live.engines])
    assert await loaded(live.envoy.admin, version)
    assert json.loads((await live.send("/fleet", second.address)).body)["served"] == second.address
    assert not await loaded(live.envoy.admin, "never written", timeout_s=0.1)


async def test_a_fleet_without_engines_is_an_openai_error(live: Rig) -> None:
    await live.fleet()
    answer = await live.send("/none", live.engines[0].address)
    await live.fleet(*(engine.address for engine in live.engines))
    assert answer.status == 503
    assert answer.error["code"] == "engine_unavailable"


async def test_an_engine_that_envoy_ejected_still_serves_when_the_picker_names_it(live: Rig) -> None:
    first, second = live.engines

    async def failing(_: web.Request, __: bytes) -> web.Response:
        return web.Response(status=500)

    first.answers["/bad"] = failing
    for _ in range(6):
        await live.send("/bad", first.address)
    async with asyncio.timeout(10):
        while not await live.stat("cluster.engines.outlier_detection.ejections_active"):
            await live.send("/bad", first.address)
            await asyncio.sleep(0.05)
    assert json.loads((await live.send("/named", first.address)).body)["served"] == first.address
    # Unnamed requests avoid it, as soon as Envoy's threads know.
    await asyncio.sleep(0.3)
    served = {json.loads((await live.send("/unnamed")).body)["served"] for _ in range(6)}
    assert served == {second.address}


async def test_each_engine_gets_its_own_key_and_never_the_clients(live: Rig) -> None:
    dead = f"127.0.0.1:{free_port()}"
    keyed, plain = live.engines
    await live.fleet(
        EndpointAddress(address=dead, authorization="Bearer of-the-dead"),
        EndpointAddress(address=keyed.address, authorization="Bearer mine"),
        plain.address,
    )
    for target in (keyed, plain):
        await live.send("/key", f"{dead},{target.address}", authorization="Bearer client", x_api_key="client")
    await live.fleet(*(engine.address for engine in live.engines))
    seen = [[(k.lower(), v) for k, v in engine.requests[0][1].items()] for engine in (keyed, plain)]
    keys = [[pair for pair in headers if pair[0] in ("authorization", "x-api-key")] for headers in seen]
    assert keys == [[("authorization", "Bearer mine")], []]
    # The picker saw it, to check it.
    assert all(headers["authorization"] == "Bearer client" for picker in live.pickers for headers in picker.seen)


async def test_a_forwarded_client_key_reaches_only_engines_without_a_key_under_either_name() -> None:
    dead = f"127.0.0.1:{free_port()}"
    async with rig(engines=2, pickers=1, forward_authorization=True) as made:
        keyed, plain = made.engines
        await made.fleet(dead, plain.address, EndpointAddress(address=keyed.address, authorization="Bearer mine"))
        sent: list[dict[str, str]] = [{"x-api-key": "a"}, {"authorization": "b"}, {}]
        for headers in sent:
            for target in (keyed, plain):
                # The first try goes to an engine that may have the client's key.
                assert (await made.send("/key", f"{dead},{target.address}", headers=headers)).status == 200
        arrived = [
            [
                {k.lower(): v for k, v in got.items() if k.lower() in ("authorization", "x-api-key")}
                for _, got, _ in engine.requests
            ]
            for engine in (keyed, plain)
        ]
        assert arrived == [[{"authorization": "Bearer mine"}] * 3, sent]
