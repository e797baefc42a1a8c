"""Which headers pass, who is let in, which paths are public, and whose records say what."""

import gzip
import json
from pathlib import Path

import pytest

from shoal.hosts.backends import Backends, BackendsFile, write_backends
from shoal.hosts.direct.settings import CONTROL_PREFIXES
from shoal.hosts.envoy import EndpointAddress, EnvoySettings
from tests.hosts.direct.direct_rig import CHUNKED_HEAD, Seen, Wire, chat, chunk, plain, pool, request, says, until

KEYS = {"Bearer good": "team-a", "Bearer other": "team-b"}


def check_key(authorization: str | None, x_api_key: str | None) -> str | None:
    return KEYS.get(authorization or "") or ("team-a" if x_api_key == "good" else None)


def test_the_prefixes_of_control_headers_are_those_of_the_envoy_plane() -> None:
    assert EnvoySettings(run_dir="/x", port=1, pickers=()).control_prefixes == CONTROL_PREFIXES


async def test_a_client_cannot_set_what_only_the_pool_may() -> None:
    spoofed = {
        "X-Gateway-Destination-Endpoint": "1.2.3.4:5",
        "x-gateway-destination-endpoint-subset": "1.2.3.4:5",
        "x-gateway-destination-endpoint-served": "1.2.3.4:5",
        "x-prefiller-host-port": "1.2.3.4:5",
        "x-encoder-hosts-ports": "1.2.3.4:5",
        "x-data-parallel-host-port": "1.2.3.4:5",
        "x-kv-cache-source-host-port": "1.2.3.4:5",
        "x-shoal-internal-anything": "1",
        "x-shoal-endpoint": "1.2.3.4:5",
        "x-shoal-request-id": "mine",
        "x-envoy-max-retries": "99",
        "X-Envoy-Retry-On": "5xx",
        "x-forwarded-proto": "gopher",
    }
    async with pool() as it:
        lines = "".join(f"{name}: {value}\r\n" for name, value in spoofed.items())
        assert (await it.ask(request(headers=lines))).status == 200
        seen = it.engines[0].seen[0]
        assert seen.values("x-gateway-destination-endpoint") == [it.engines[0].address]
        assert seen.values("x-forwarded-proto") == ["http"]
        for name in {name.lower() for name in spoofed} - {"x-gateway-destination-endpoint", "x-forwarded-proto"}:
            assert seen.values(name) == [], name


async def test_control_headers_that_clients_may_set_reach_router_and_engine() -> None:
    async with pool() as it:
        lines = "x-llm-d-inference-objective: fast\r\nx-gateway-inference-fairness-id: me\r\nX-Session-Id: s\r\n"
        await it.ask(request(headers=lines))
        await it.outcome()
        assert it.accounts[0].tenant_id == "me"
        assert it.engines[0].seen[0].values("x-session-id") == ["s"]


async def test_hop_by_hop_headers_and_those_that_connection_names_end_here() -> None:
    lines = (
        "Connection: keep-alive, X-Private\r\nX-Private: 1\r\nKeep-Alive: timeout=5\r\nProxy-Connection: x\r\n"
        "TE: trailers\r\nTrailer: x\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    )
    answer = plain(
        headers=b"connection: keep-alive, x-mine\r\nx-mine: 1\r\nkeep-alive: timeout=5\r\ntrailer: y\r\nx-a: b\r\n"
    )
    async with pool() as it:
        it.engines[0].script = says(answer)
        got = await it.ask(request(headers=lines))
        seen = it.engines[0].seen[0]
        for name in ("connection", "x-private", "keep-alive", "proxy-connection", "te", "trailer", "upgrade"):
            assert seen.values(name) == []
        assert seen.values("http2-settings") == []
        assert [got.header(name) for name in ("connection", "x-mine", "keep-alive", "trailer")] == [None] * 4
        assert got.header("x-a") == "b"


async def test_a_client_cannot_have_framing_or_our_own_fields_removed_by_naming_them() -> None:
    named = "Connection: host, content-length, content-type, x-forwarded-for, x-request-id\r\n"
    async with pool() as it:
        await it.ask(request(headers=named + "content-type: a/b\r\nx-request-id: mine\r\n"))
        seen = it.engines[0].seen[0]
        assert seen.body == it.engines[0].seen[0].body != b""
        assert (seen.values("host"), seen.values("content-type")) == (["pool"], ["a/b"])
        assert seen.values("x-forwarded-for") == ["127.0.0.1"]
        assert len(seen.values("x-request-id")) == 1


async def test_the_clients_request_id_is_kept_and_one_is_made_if_absent() -> None:
    async with pool() as it:
        it.engines[0].script = says(plain(headers=b"x-request-id: engines-own\r\n"))
        answer = await it.ask(request(headers="X-Request-ID: my own/id 1\r\n"))
        assert answer.header("x-request-id") == "my own/id 1"
        assert it.engines[0].seen[0].values("x-request-id") == ["my own/id 1"]
        answer = await it.ask(request())
        made = answer.header("x-request-id")
        assert made is not None
        assert len(made) == 36
        assert it.engines[0].seen[1].values("x-request-id") == [made]
        await it.outcome(2)
        assert it.accounts[0].client_id == "my own/id 1"
        assert it.picker.driver.router.explanations.find("my own/id 1") is not None
        # Our own answers have it too.
        refused = await it.ask(request({"model": "nope", "messages": []}, headers="x-request-id: r\r\n"))
        assert (refused.status, refused.header("x-request-id"), refused.header("x-shoal-endpoint")) == (404, "r", None)


async def test_the_client_is_named_to_the_engine_behind_those_before_it() -> None:
    async with pool() as it:
        await it.ask(request(headers="X-Forwarded-For: 10.1.1.1\r\nx-forwarded-for: 10.2.2.2\r\n"))
        await it.ask(request())
        assert it.engines[0].seen[0].values("x-forwarded-for") == ["10.1.1.1, 10.2.2.2, 127.0.0.1"]
        assert it.engines[0].seen[1].values("x-forwarded-for") == ["127.0.0.1"]


async def test_the_engines_server_and_date_pass_and_ours_stand_where_it_has_none() -> None:
    async with pool() as it:
        it.engines[0].script = says(plain(headers=b"Server: uvicorn\r\nDate: yesterday\r\n"))
        answer = await it.ask(request())
        assert (answer.header("server"), answer.header("date")) == ("uvicorn", "yesterday")
        it.engines[0].script = says(plain())
        answer = await it.ask(request())
        assert answer.header("server") == "shoal"
        assert "GMT" in (answer.header("date") or "")


async def test_an_engine_cannot_speak_for_the_pool() -> None:
    async with pool() as it:
        it.engines[0].script = says(plain(headers=b"x-shoal-endpoint: other\r\nx-shoal-request-id: other\r\n"))
        answer = await it.ask(request())
        assert answer.header("x-shoal-endpoint") == it.engines[0].address


async def test_a_missing_or_bad_key_is_401_before_the_body_and_no_engine_sees_a_key() -> None:
    async with pool(check_key=check_key) as it:
        client = await it.client()
        await client.send(request(b"x" * 5000)[:200])
        answer = await client.answer()
        assert (answer.status, answer.header("www-authenticate")) == (401, "Bearer")
        assert (await it.ask(request(headers="Authorization: Bearer bad\r\n"))).status == 401
        assert (await it.ask(request(path="/v1/models", method="GET"))).status == 401
        twice = "Authorization: Bearer good\r\nAuthorization: Bearer good\r\n"
        assert (await it.ask(request(headers=twice))).status == 401
        assert (await it.ask(request(headers="Authorization: Bearer good\r\n"))).status == 200
        assert (await it.ask(request(headers="X-Api-Key: good\r\n"))).status == 200
        for seen in it.engines[0].seen:
            assert seen.values("authorization") == seen.values("x-api-key") == []
        await it.outcome(2)
        assert it.accounts[0].tenant_id == "team-a"


async def test_a_key_is_asked_for_on_each_request_of_a_connection() -> None:
    async with pool(check_key=check_key) as it:
        client = await it.client()
        assert (await client.ask(request(headers="Authorization: Bearer good\r\n"))).status == 200
        assert (await client.ask(request())).status == 401
        assert (await client.ask(request(headers="Authorization: Bearer other\r\n"))).status == 200
        await it.outcome(2)
        assert [account.tenant_id for account in it.accounts] == ["team-a", "team-b"]


async def test_each_engine_gets_its_own_key_also_on_a_retry_and_never_the_clients(tmp_path: Path) -> None:
    path = tmp_path / "backends.json"
    file = BackendsFile(path)
    async with pool(2, backends=file) as it:
        first, second = it.engines
        write_backends(
            path,
            Backends(
                endpoints=(
                    EndpointAddress(address=first.address, authorization="Bearer first"),
                    EndpointAddress(address=second.address, authorization="Bearer second"),
                )
            ),
        )
        file.look()
        it.prefer(first.address, second.address)

        async def dies(wire: Wire, _: Seen) -> None:
            wire.abort()

        first.script = dies
        assert (await it.ask(request(headers="Authorization: Bearer c\r\nX-Api-Key: c\r\n"))).status == 200
        assert [engine.seen[0].values("authorization") for engine in it.engines] == [
            ["Bearer first"],
            ["Bearer second"],
        ]
        assert [engine.seen[0].values("x-api-key") for engine in it.engines] == [[], []]


async def test_a_forwarded_client_key_reaches_only_engines_without_their_own(tmp_path: Path) -> None:
    config = "apiVersion: shoal.dev/v1alpha1\nkind: Pool\nforward_client_key: true\n"
    path = tmp_path / "backends.json"
    file = BackendsFile(path)
    async with pool(2, config, backends=file) as it:
        keyed, bare = it.engines
        write_backends(path, Backends(endpoints=(EndpointAddress(address=keyed.address, authorization="Bearer mine"),)))
        file.look()
        for engine in (keyed, bare):
            it.prefer(engine.address)
            for line in ("Authorization: a\r\n", "X-Api-Key: b\r\n", ""):
                await it.ask(request(headers=line))
        assert [(seen.values("authorization"), seen.values("x-api-key")) for seen in keyed.seen] == [
            (["Bearer mine"], [])
        ] * 3
        assert [(seen.values("authorization"), seen.values("x-api-key")) for seen in bare.seen] == [
            (["a"], []),
            ([], ["b"]),
            ([], []),
        ]


async def test_an_engine_that_the_backends_file_does_not_name_yet_is_looked_up_when_it_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "backends.json"
    async with pool(1, backends=BackendsFile(path)) as it:
        address = it.engines[0].address
        write_backends(path, Backends(endpoints=(EndpointAddress(address=address, authorization="Bearer k"),)))
        await it.ask(request())
        assert it.engines[0].seen[0].values("authorization") == ["Bearer k"]
        # A change is seen in time; a file that is bad changes nothing.
        path.write_text("{")
        it.plane.pools.backends.look()
        write_backends(path, Backends(endpoints=(EndpointAddress(address=address, authorization="Bearer l"),)))
        it.plane.pools.backends.look()
        await it.ask(request())
        assert it.engines[0].seen[1].values("authorization") == ["Bearer l"]


@pytest.mark.parametrize(
    "path", ["/metrics", "/sleep", "/v1/load_lora_adapter", "/x/%6detrics", "/v1/../metrics?a=b", "//metrics"]
)
async def test_paths_for_operators_are_404_on_the_public_port_and_reach_no_engine(path: str) -> None:
    async with pool() as it:
        answer = await it.ask(request(path=path, method="GET"))
        assert (answer.status, answer.error["code"]) == (404, "path_not_public")
        assert it.engines[0].seen == []
    async with pool(config="apiVersion: shoal.dev/v1alpha1\nkind: Pool\npublic_paths: all\n") as it:
        assert (await it.ask(request(path=path, method="GET"))).status == 200


async def test_the_models_of_the_pool_are_answered_here() -> None:
    async with pool() as it:
        client = await it.client()
        answer = await client.ask(request(path="/v1/models", method="GET"))
        assert [model["id"] for model in json.loads(answer.body)["data"]] == ["m"]
        assert json.loads((await client.ask(request(path="/v1/models/m", method="GET"))).body)["id"] == "m"
        assert (await client.ask(request(path="/v1/models/x", method="GET"))).status == 404
        assert it.engines[0].seen == []


async def test_refusals_come_in_the_shape_of_the_api_and_leave_the_connection_usable() -> None:
    async with pool() as it:
        client = await it.client()
        answer = await client.ask(request(b"{bad"))
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
        answer = await client.ask(request({"model": "nope", "messages": [], "max_tokens": 1}, "/v1/messages"))
        assert (answer.status, json.loads(answer.body)["type"]) == (404, "error")
        assert (await client.ask(request())).status == 200


async def test_a_fault_of_the_router_is_500_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool() as it:

        def fail(*_: object) -> None:
            raise RuntimeError("a plugin's fault")

        with monkeypatch.context() as patch:
            patch.setattr("shoal.scheduling.Scheduler.dispatched", fail)
            client = await it.client()
            answer = await client.ask(request())
        assert (answer.status, answer.error["code"]) == (500, "router_error")
        assert it.inflight == it.plane.active == 0
        assert (await client.ask(request())).status == 200


async def test_an_alias_rewrites_only_the_model_of_the_body() -> None:
    async with pool(config="apiVersion: shoal.dev/v1alpha1\nkind: Pool\naliases: {gpt: m}\n") as it:
        await it.ask(request(b'{"model": "gpt",  "messages": [{"role":"user","content":"x"}]}'))
        seen = it.engines[0].seen[0]
        assert seen.body == b'{"model": "m",  "messages": [{"role":"user","content":"x"}]}'
        assert seen.values("content-length") == [str(len(seen.body))]


async def test_usage_is_asked_for_where_the_configuration_says_so() -> None:
    async with pool(config="apiVersion: shoal.dev/v1alpha1\nkind: Pool\nusage: inject\n") as it:
        it.engines[0].script = says(CHUNKED_HEAD + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await it.ask(request(chat(stream=True)))
        assert json.loads(it.engines[0].seen[0].body)["stream_options"] == {"include_usage": True}


async def test_a_compressed_body_passes_as_it_is_and_plain_where_it_had_to_be_changed() -> None:

    body = gzip.compress(json.dumps({**chat(), "model": "gpt"}).encode())
    for config, plain_expected in (
        ("", False),
        ("apiVersion: shoal.dev/v1alpha1\nkind: Pool\naliases: {gpt: m}\n", True),
    ):
        async with pool(config=config) as it:
            sent = body if plain_expected else gzip.compress(json.dumps(chat()).encode())
            assert (await it.ask(request(sent, headers="Content-Encoding: gzip\r\n"))).status == 200
            seen = it.engines[0].seen[0]
            assert seen.values("content-encoding") == ([] if plain_expected else ["gzip"])
            assert (seen.body == sent) is not plain_expected


async def test_connections_over_the_limit_are_closed_at_once_and_the_rest_served() -> None:
    async with pool(max_connections=2) as it:
        kept = [await it.client() for _ in range(2)]
        for client in kept:
            assert (await client.ask(request())).status == 200
        over = await it.client()
        assert await over.is_closed()
        kept[0].close()
        await until(lambda: it.plane.clients == 1)
        assert (await it.ask(request())).status == 200
