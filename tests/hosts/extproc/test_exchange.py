import json
import time
from typing import Any

import msgspec
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from shoal.hosts.driver import Driver
from shoal.hosts.extproc import Exchange, Picker
from shoal.kernel import Chance
from shoal.measures import Fold, render
from shoal.pool import Endpoint, EndpointState, ServedModel
from shoal.prefix import BlockHasher
from shoal.routing import Account, Router
from shoal.routing.config import load
from shoal.routing.events import EndpointChanged, EndpointJoined, ModelsSeen

CANARY = "the canary sings at midnight"


class Door:
    """A picker with two endpoints behind it, and a clock that does not move."""

    def __init__(self, config: str = "", check_key: Any = None, router: Router | None = None) -> None:
        self.accounts: list[Account] = []
        settings = load(config, "test")
        router = router or Router(settings, Chance(1))
        self.driver = Driver(router, Fold(), on_account=self.accounts.append, clock=lambda: 1.0)
        self.picker = Picker(self.driver, settings, BlockHasher(7), "0", "run", check_key)
        for number in (1, 2):
            name = f"10.0.0.{number}:8000"
            self.driver.feed(EndpointJoined(Endpoint(id=name, address=name)))
            self.driver.feed(ModelsSeen(name, (ServedModel(id="m"),)))
            self.driver.feed(EndpointChanged(name, EndpointState.READY))


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Door:
    monkeypatch.setattr(Driver, "_arm", lambda self, now: None)
    return Door()


def head(
    path: str = "/v1/chat/completions", *, method: str = "POST", is_end: bool = False, mode: int = 2, **headers: str
) -> Any:
    message = pb.ProcessingRequest()
    values = {":method": method, ":path": path, **{name.replace("_", "-"): value for name, value in headers.items()}}
    for name, value in values.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.request_headers.end_of_stream = is_end
    message.protocol_config.request_body_mode = mode
    return message


def body(content: Any, is_end: bool = True) -> Any:
    message = pb.ProcessingRequest()
    message.request_body.body = content if isinstance(content, bytes) else json.dumps(content).encode()
    message.request_body.end_of_stream = is_end
    return message


def chat(text: str = "hello", model: str = "m", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def parse(reply: bytes) -> Any:
    return pb.ProcessingResponse.FromString(reply)


def headers_of(mutation: Any) -> dict[str, str]:
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


def refused(replies: list[bytes]) -> tuple[int, dict[str, Any]]:
    (reply,) = replies
    answer = parse(reply).immediate_response
    return answer.status.code, json.loads(answer.body)


def test_a_chat_request_is_sent_to_an_endpoint_with_a_fallback_and_its_minted_id(door: Door) -> None:
    exchange = Exchange(door.picker)
    (first,) = exchange.receive(head())
    assert parse(first).WhichOneof("response") == "request_headers"
    (second,) = exchange.receive(body(chat()))
    reply = parse(second)
    target = headers_of(reply.request_body.response.header_mutation)["x-gateway-destination-endpoint"]
    assert sorted(target.split(",")) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert headers_of(reply.request_body.response.header_mutation)["x-envoy-max-retries"] == "1"
    own = reply.dynamic_metadata.fields["shoal"].struct_value.fields
    assert own["id"].string_value == exchange.request_id
    assert own["picker"].string_value == "0"
    lb = reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    assert lb["x-gateway-destination-endpoint"].string_value == target
    assert not reply.request_body.response.HasField("body_mutation")


def test_the_end_of_the_stream_takes_the_request_off_the_books_once(door: Door) -> None:
    exchange = Exchange(door.picker)
    exchange.receive(head())
    exchange.receive(body(chat()))
    assert door.driver.router.status().inflight == 1
    exchange.end()
    exchange.end()
    assert door.driver.router.status().inflight == 0


def test_a_request_without_body_is_decided_on_its_head(door: Door) -> None:
    exchange = Exchange(door.picker)
    (reply,) = exchange.receive(head("/metrics-like", method="GET", is_end=True))
    assert headers_of(parse(reply).request_headers.response.header_mutation)["x-gateway-destination-endpoint"]
    exchange.end()
    assert door.driver.router.status().inflight == 0


def test_a_declared_length_over_the_limit_is_refused_on_the_head_with_the_limit_named(door: Door) -> None:
    limit = door.picker.limits.max_body_bytes
    status, answer = refused(Exchange(door.picker).receive(head(content_length=str(limit + 1))))
    assert status == 413
    assert str(limit) in answer["error"]["message"]


def test_half_sent_bodies_are_charged_to_a_budget_and_given_back(door: Door) -> None:
    budget = door.picker.settings.limits.max_buffered_bytes
    limit = door.picker.limits.max_body_bytes
    waiting = []
    while (sum(1 for _ in waiting) + 1) * limit <= budget:
        exchange = Exchange(door.picker)
        assert parse(exchange.receive(head(content_length=str(limit)))[0]).WhichOneof("response") == "request_headers"
        waiting.append(exchange)
    status, _ = refused(Exchange(door.picker).receive(head(content_length=str(limit))))
    assert status == 429
    for exchange in waiting:
        exchange.end()
    assert door.picker.buffered_bytes == 0


def test_malformed_json_is_400_and_an_unknown_model_404(door: Door) -> None:
    exchange = Exchange(door.picker)
    exchange.receive(head())
    assert refused(exchange.receive(body(b"{bad")))[0] == 400
    other = Exchange(door.picker)
    other.receive(head())
    status, answer = refused(other.receive(body(chat(model="mm"))))
    assert status == 404
    assert "m" in answer["error"]["message"]


def test_an_anthropic_client_gets_an_anthropic_error(door: Door) -> None:
    exchange = Exchange(door.picker)
    exchange.receive(head("/v1/messages"))
    status, answer = refused(exchange.receive(body(chat(model="nope"))))
    assert (status, answer["type"]) == (404, "error")


def test_the_models_of_the_pool_are_listed_without_asking_an_engine(door: Door) -> None:
    status, answer = refused(Exchange(door.picker).receive(head("/v1/models", method="GET", is_end=True)))
    assert status == 200
    assert [model["id"] for model in answer["data"]] == ["m"]


def test_a_missing_key_is_401_when_keys_are_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_arm", lambda self, now: None)
    door = Door(check_key=lambda bearer, key: "me" if bearer == "Bearer good" else None)
    assert refused(Exchange(door.picker).receive(head()))[0] == 401
    exchange = Exchange(door.picker)
    exchange.receive(head(authorization="Bearer good"))
    (reply,) = exchange.receive(body(chat()))
    assert "authorization" in parse(reply).request_body.response.header_mutation.remove_headers


def test_an_alias_rewrites_only_the_model_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_arm", lambda self, now: None)
    door = Door("apiVersion: shoal.dev/v1alpha1\nkind: Pool\naliases: {gpt: m}\n")
    exchange = Exchange(door.picker)
    exchange.receive(head())
    (reply,) = exchange.receive(body(b'{"model": "gpt",  "messages": [{"role":"user","content":"x"}]}'))
    response = parse(reply).request_body.response
    assert response.body_mutation.body == b'{"model": "m",  "messages": [{"role":"user","content":"x"}]}'
    assert headers_of(response.header_mutation)["content-length"] == str(len(response.body_mutation.body))


def test_a_full_duplex_gateway_gets_the_decision_and_the_body_back_in_small_frames(door: Door) -> None:
    exchange = Exchange(door.picker)
    assert exchange.receive(head(mode=4)) == []
    raw = json.dumps(chat("x" * 200_000)).encode()
    assert exchange.receive(body(raw[:1000], is_end=False)) == []
    replies = [parse(reply) for reply in exchange.receive(body(raw[1000:]))]
    assert headers_of(replies[0].request_headers.response.header_mutation)["x-gateway-destination-endpoint"]
    chunks = [reply.request_body.response.body_mutation.streamed_response for reply in replies[1:]]
    assert b"".join(chunk.body for chunk in chunks) == raw
    assert max(len(chunk.body) for chunk in chunks) <= 62_000
    assert [chunk.end_of_stream for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def named(door: Door) -> list[str]:
    exchange = Exchange(door.picker)
    exchange.receive(head())
    (reply,) = exchange.receive(body(chat()))
    headers = headers_of(parse(reply).request_body.response.header_mutation)
    return headers["x-gateway-destination-endpoint"].split(",")


def test_a_gateway_is_given_fallbacks_only_when_the_file_asks_for_them(door: Door) -> None:
    both = ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert sorted(named(door)) == both
    door.picker.is_behind_gateway = True
    assert len(named(door)) == 1
    door.picker.configure(load("apiVersion: shoal.dev/v1alpha1\nkind: Pool\nretries: {fallbacks: 1}\n", "test"))
    assert sorted(named(door)) == both


def test_a_gateway_that_shows_the_response_gets_its_request_recorded(door: Door) -> None:
    exchange = Exchange(door.picker)
    exchange.receive(head(mode=4))
    exchange.receive(body(chat()))
    message = pb.ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    served = message.metadata_context.filter_metadata["envoy.lb"].fields
    served["x-gateway-destination-endpoint-served"].string_value = "10.0.0.2:8000"
    (reply,) = exchange.receive(message)
    assert parse(reply).WhichOneof("response") == "response_headers"
    exchange.end()
    (account,) = door.accounts
    assert (account.outcome.status, account.endpoint_id) == (200, "10.0.0.2:8000")


def test_the_subset_hint_of_a_gateway_is_obeyed(door: Door) -> None:
    for allowed in ("10.0.0.1:8000", "10.0.0.2:8000"):
        exchange = Exchange(door.picker)
        message = head()
        hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint.fields["x-gateway-destination-endpoint-subset"].list_value.values.add(string_value=allowed)
        exchange.receive(message)
        (reply,) = exchange.receive(body(chat()))
        mutation = parse(reply).request_body.response.header_mutation
        assert headers_of(mutation)["x-gateway-destination-endpoint"] == allowed


def test_no_prompt_text_is_in_metrics_explanations_or_accounts(door: Door) -> None:
    exchange = Exchange(door.picker)
    exchange.receive(head(x_request_id="mine"))
    exchange.receive(body(chat(CANARY * 20)))
    found = door.driver.router.explanations.find("mine")
    exchange.end()
    page = render(door.driver.fold.families(door.driver.router.status()))
    for text in (json.dumps(found), page, msgspec.json.encode(door.accounts).decode()):
        assert CANARY not in text
    assert found is not None


def test_one_model_of_the_pool_is_answered_and_an_unknown_one_is_404(door: Door) -> None:
    status, answer = refused(Exchange(door.picker).receive(head("/v1/models/m", method="GET", is_end=True)))
    assert (status, answer["id"]) == (200, "m")
    status, _ = refused(Exchange(door.picker).receive(head("/v1/models/org%2Fnope", method="GET", is_end=True)))
    assert status == 404


def test_large_uploads_cannot_shut_out_small_bodies(door: Door) -> None:
    door.picker.buffered_bytes = door.picker.settings.limits.max_buffered_bytes
    (reply,) = Exchange(door.picker).receive(head(content_length="1000"))
    assert parse(reply).WhichOneof("response") == "request_headers"


def test_bodies_of_a_megabyte_are_not_small(door: Door) -> None:
    door.picker.buffered_bytes = door.picker.settings.limits.max_buffered_bytes
    assert refused(Exchange(door.picker).receive(head(content_length="1000000")))[0] == 429


def test_a_request_belongs_to_its_key_and_not_to_what_a_header_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_arm", lambda self, now: None)
    door = Door(check_key=lambda bearer, key: "team-a")
    exchange = Exchange(door.picker)
    exchange.receive(head(authorization="Bearer x", x_llm_d_inference_fairness_id="team-b"))
    exchange.receive(body(chat()))
    page = render(door.driver.fold.families(door.driver.router.status()))
    assert 'fairness_id="team-a"' in page
    assert "team-b" not in page


def test_a_fault_after_the_booking_leaves_nothing_booked(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a plugin's fault")

    monkeypatch.setattr("shoal.scheduling.Scheduler.dispatched", fail)
    exchange = Exchange(door.picker)
    exchange.receive(head())
    with pytest.raises(RuntimeError):
        exchange.receive(body(chat()))
    exchange.end()
    assert door.driver.router.status().inflight == 0


def test_a_fault_in_noting_down_costs_no_request_its_answer(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OverflowError("a number that no journal holds")

    monkeypatch.setattr(Fold, "observe", fail)
    exchange = Exchange(door.picker)
    exchange.receive(head())
    (reply,) = exchange.receive(body(chat()))
    assert parse(reply).WhichOneof("response") == "request_body"
    exchange.end()
    assert door.driver.router.status().inflight == 0


def test_a_small_limit_on_bodies_lets_requests_without_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_arm", lambda self, now: None)
    door = Door("apiVersion: shoal.dev/v1alpha1\nkind: Pool\nlimits: {max_body_bytes: 1000}\n")
    assert refused(Exchange(door.picker).receive(head("/v1/models", method="GET", is_end=True)))[0] == 200
    exchange = Exchange(door.picker)
    (reply,) = exchange.receive(head(transfer_encoding="chunked"))
    assert parse(reply).WhichOneof("response") == "request_headers"
    assert door.picker.buffered_bytes == 1000
    exchange.end()
    assert door.picker.buffered_bytes == 0
    assert refused(Exchange(door.picker).receive(head(content_length="1001")))[0] == 413


def test_what_comes_behind_a_refusal_at_the_door_is_not_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_arm", lambda self, now: None)
    door = Door(check_key=lambda bearer, key: "me" if bearer == "Bearer good" else None)
    exchange = Exchange(door.picker)
    # A gateway that streams does not wait for the word on the head before it sends the body.
    assert refused(exchange.receive(head(mode=4, authorization="Bearer bad")))[0] == 401
    assert exchange.receive(body(chat(), is_end=False)) == []
    assert exchange.receive(body(b"", is_end=True)) == []
    assert door.driver.router.status().inflight == 0
    exchange.end()
    assert door.accounts == []


def test_a_streamed_body_over_the_limit_is_refused_once_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_arm", lambda self, now: None)
    door = Door("apiVersion: shoal.dev/v1alpha1\nkind: Pool\nlimits: {max_body_bytes: 1Ki, max_buffered_bytes: 1Mi}\n")
    exchange = Exchange(door.picker)
    exchange.receive(head(mode=4))
    assert refused(exchange.receive(body(b"x" * 1025, is_end=False)))[0] == 413
    assert exchange.receive(body(b"x" * 1025, is_end=False)) == []
    assert exchange.receive(body(b"x", is_end=True)) == []
    assert door.picker.buffered_bytes == 0


def test_a_streamed_body_is_charged_for_what_it_has_become(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_arm", lambda self, now: None)
    door = Door("apiVersion: shoal.dev/v1alpha1\nkind: Pool\nlimits: {max_body_bytes: 4Mi, max_buffered_bytes: 4Mi}\n")
    first, second = Exchange(door.picker), Exchange(door.picker)
    for exchange in (first, second):
        exchange.receive(head(mode=4))
        assert exchange.receive(body(b"x" * 1_500_000, is_end=False)) == []
    assert door.picker.buffered_bytes >= 3_000_000
    assert first.receive(body(b"x" * 1_000_000, is_end=False)) == []
    assert refused(second.receive(body(b"x" * 1_000_000, is_end=False)))[0] == 429
    first.end()
    second.end()
    assert door.picker.buffered_bytes == 0


def test_a_body_in_many_small_parts_costs_no_more_per_part_than_one_in_few(door: Door) -> None:
    def cost_s(parts: int) -> float:
        exchange = Exchange(door.picker)
        exchange.receive(head(mode=4))
        began = time.process_time()
        for _ in range(parts):
            exchange.receive_body(b"x", is_end=False)
        spent = time.process_time() - began
        exchange.end()
        return spent / parts

    assert min(cost_s(40_000) for _ in range(3)) < 10 * min(cost_s(1_000) for _ in range(3))


def test_a_field_that_comes_twice_is_one_list_as_in_the_direct_data_plane(door: Door) -> None:
    message = head()
    for value in ("if-available", "return=minimal"):
        message.request_headers.headers.headers.add(key="prefer", raw_value=value.encode())
    exchange = Exchange(door.picker)
    exchange.receive(message)
    code, error = refused(exchange.receive(body(chat("nobody has this " * 200))))
    assert (code, error["error"]["code"]) == (412, "precondition_failed")
