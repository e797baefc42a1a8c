import json

import pytest

from shoal.kernel import InvalidInput
from shoal.pool import Api, Refusal, RefusalReason
from shoal.wire import answer, refusal_of
from shoal.wire.limits import BodyTooLarge

STATUSES = {
    RefusalReason.BAD_REQUEST: 400,
    RefusalReason.UNAUTHORIZED: 401,
    RefusalReason.MODEL_NOT_FOUND: 404,
    RefusalReason.ABORTED: 410,
    RefusalReason.PRECONDITION_FAILED: 412,
    RefusalReason.BODY_TOO_LARGE: 413,
    RefusalReason.SATURATED: 429,
    RefusalReason.TTL_EXPIRED: 429,
    RefusalReason.EVICTED: 429,
    RefusalReason.NOT_ADMITTED: 429,
    RefusalReason.OVER_BUDGET: 429,
    RefusalReason.CLIENT_GONE: 503,
    RefusalReason.INTERNAL: 500,
    RefusalReason.NO_ENDPOINTS: 503,
    RefusalReason.SHUTTING_DOWN: 503,
}


@pytest.mark.parametrize("reason", list(RefusalReason))
@pytest.mark.parametrize("api", [Api.CHAT, Api.MESSAGES, Api.OTHER])
def test_every_reason_has_a_status_and_an_error_body(reason: RefusalReason, api: Api) -> None:
    told = answer(Refusal(reason=reason, message='do "this"'), api, "r1")
    headers = dict(told.headers)
    body = json.loads(told.body)
    assert told.status == STATUSES[reason]
    assert headers["content-type"] == "application/json"
    assert headers.get("x-llm-d-request-dropped-reason") == (
        reason.value if reason.value.startswith(("rejected-", "evicted-")) else None
    )
    assert body["error"]["message"] == 'do "this"'
    if api is Api.MESSAGES:
        assert body["type"] == "error"
        assert body["request_id"] == "r1"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}


def test_an_unknown_model_is_told_as_openai_tells_it() -> None:
    told = answer(Refusal(reason=RefusalReason.MODEL_NOT_FOUND, message="no `x`"), Api.CHAT, "r1")
    assert json.loads(told.body)["error"] == {
        "message": "no `x`",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(("wait_s", "header"), [(0.2, "1"), (1.0, "1"), (2.1, "3"), (None, "1")])
def test_a_full_pool_says_when_to_come_back(wait_s: float | None, header: str) -> None:
    refusal = Refusal(reason=RefusalReason.SATURATED, message="full", retry_after_s=wait_s)
    assert dict(answer(refusal, Api.CHAT, "r1").headers)["retry-after"] == header


def test_where_waiting_does_not_help_none_is_asked_for() -> None:
    assert "retry-after" not in dict(answer(Refusal(reason=RefusalReason.INTERNAL, message=""), Api.CHAT, "").headers)


def test_what_cannot_be_read_is_a_refusal() -> None:
    assert refusal_of(InvalidInput("fix it")) == Refusal(reason=RefusalReason.BAD_REQUEST, message="fix it")
    too_large = refusal_of(BodyTooLarge(10))
    assert too_large.reason is RefusalReason.BODY_TOO_LARGE
    assert "10 bytes" in too_large.message
