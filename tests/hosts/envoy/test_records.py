"""Reading access-log entries: what each ending means, and that no value breaks it."""

import json
import math
import time

import pytest
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from shoal.hosts.envoy import decode_records
from shoal.hosts.envoy.accesslog import RECORD_TAG
from shoal.hosts.envoy.recordform import parse_records
from shoal.hosts.envoy.records import MAX_TOKENS, Record, decode_record
from shoal.pool import Outcome


def entry(
    *,
    status: int = 200,
    flags: str = "-",
    details: str = "via_upstream",
    address: str = "10.0.0.1:8000",
    size: int = 1000,
    ttft: str = "5000",
    engine_ttft: str = "4000",
    usage: dict[str, object] | None = None,
    shoal: dict[str, object] | None = None,
) -> accesslog_pb2.HTTPAccessLogEntry:
    own = json.dumps(shoal or {"id": "r1", "picker": "0"})
    used = "-" if usage is None else json.dumps(usage)
    texts = (own, used, status, address or "-", 2, ttft, engine_ttft, size, flags, details)
    made = accesslog_pb2.HTTPAccessLogEntry()
    made.common_properties.custom_tags[RECORD_TAG] = "\t".join(map(str, texts))
    made.common_properties.duration.FromNanoseconds(1_500_000_000)
    return made


def outcome(**fields: object) -> Outcome:
    return decode_record(entry(**fields)).outcome  # type: ignore[arg-type]


def test_a_record_carries_what_was_measured() -> None:
    usage: dict[str, object] = {"prompt": 100, "cached": 64, "completion": 7}
    assert decode_record(entry(usage=usage)) == Record(
        picker="0",
        request_id="r1",
        outcome=Outcome(
            status=200,
            served_address="10.0.0.1:8000",
            attempts=2,
            ttft_s=0.005,
            engine_ttft_s=0.004,
            duration_s=1.5,
            prompt_tokens=100,
            cached_tokens=64,
            completion_tokens=7,
            response_bytes=1000,
        ),
    )


def test_a_field_that_envoy_knows_nothing_of_is_left_out() -> None:
    assert outcome(address="", ttft="-", engine_ttft="-", flags="-", details="-") == Outcome(
        status=200, attempts=2, duration_s=1.5, response_bytes=1000
    )


def test_an_entry_without_our_text_is_nobodys_record() -> None:
    entry = accesslog_pb2.HTTPAccessLogEntry()
    entry.common_properties.custom_tags[RECORD_TAG] = "half\ta\trecord"
    for each in (accesslog_pb2.HTTPAccessLogEntry(), entry):
        assert decode_record(each) == Record(picker="", request_id="", outcome=Outcome())


IDLE: dict[str, object] = {"status": 504, "flags": "SI", "details": "stream_idle_timeout"}
NONE_THERE: dict[str, object] = {"flags": "UH", "details": "no_healthy_upstream", "address": ""}
CUT = "upstream_reset_after_response_started{connection_termination}"


@pytest.mark.parametrize(
    ("fields", "cut", "gone", "failed"),
    [
        ({}, False, False, False),
        ({"flags": "UC", "details": CUT}, True, False, True),
        ({"flags": "UPE", "details": CUT}, True, False, True),
        ({"flags": "UPE", "details": CUT, "status": 502}, False, False, True),
        ({"flags": "UF,URX", "status": 503}, False, False, True),
        ({"flags": "UR", "status": 503, "details": "x"}, False, False, True),
        ({"flags": "DC", "status": 0}, False, True, False),
        ({"flags": "DR"}, False, True, False),
        ({"flags": "DC,UC", "details": CUT}, False, True, False),
        ({"status": 500}, False, False, True),
        ({"status": 503, "flags": "URX"}, False, False, True),
        ({"status": 429}, False, False, False),
        ({"status": 400}, False, False, False),
        (IDLE, False, False, True),
        ({**IDLE, "address": ""}, False, False, False),
        ({**NONE_THERE, "status": 503}, False, False, False),
        ({"status": 500, "details": "response_payload_too_large"}, False, False, False),
        ({"status": 101, "flags": "UC", "details": CUT}, False, False, False),
    ],
)
def test_an_ending_is_told_from_the_others(fields: dict[str, object], cut: bool, gone: bool, failed: bool) -> None:
    got = outcome(**fields)
    assert (got.is_cut, got.is_client_gone, got.is_upstream_failure) == (cut, gone, failed)


def test_flags_are_written_as_envoy_prints_them() -> None:
    got = outcome(flags="UF,URX", status=503)
    assert got.flags == "UF,URX"


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"input": 100, "output": 7, "input_cached": 64}, (100, 64, 7)),
        ({"input": 36, "output": 7, "cache_read": 64}, (100, 64, 7)),
        ({"input": 30, "output": 7, "cache_read": 64, "cache_created": 6}, (100, 64, 7)),
        ({"input": 100, "output": 7}, (100, None, 7)),
        ({"prompt": 100, "cached": 101, "completion": 7}, (100, None, 7)),
        ({"cached": 5, "completion": 7}, (None, None, 7)),
        ({"prompt": -1, "completion": 7.9}, (None, None, 7)),
    ],
)
def test_usage_of_every_api_becomes_the_same_three_figures(
    usage: dict[str, object], tokens: tuple[int | None, int | None, int | None]
) -> None:
    got = outcome(usage=usage)
    assert (got.prompt_tokens, got.cached_tokens, got.completion_tokens) == tokens


def test_tokens_that_the_engine_did_not_report_are_left_to_the_router() -> None:
    stream = outcome(size=2200)
    assert (stream.completion_tokens, stream.is_estimated, stream.response_bytes) == (None, False, 2200)


@pytest.mark.parametrize("ttft", ["", "-", "-5", "1e9", "9" * 40, "٣", "nan"])
def test_an_odd_ttft_is_no_ttft(ttft: str) -> None:
    got = outcome(ttft=ttft, engine_ttft=ttft)
    assert (got.ttft_s, got.engine_ttft_s) == (None, None)


scalars = st.one_of(
    st.none(), st.booleans(), st.floats(allow_nan=True, allow_infinity=True), st.text(), st.lists(st.floats(width=32))
)
names = st.sampled_from(
    ["prompt", "cached", "completion", "input", "output", "cache_read", "input_cached", "id", "picker"]
)


@given(
    usage=st.dictionaries(names, scalars),
    own=st.dictionaries(names, scalars, min_size=1),
    status=st.integers(0, 2**32 - 1),
    size=st.integers(0, 2**64 - 1),
    ttft=st.text(),
)
def test_no_value_breaks_a_record(
    usage: dict[str, object], own: dict[str, object], status: int, size: int, ttft: str
) -> None:
    made = entry(usage=usage, shoal=own, status=status, size=size, ttft=ttft)
    record = decode_record(made)
    got = record.outcome
    assert isinstance(record.request_id, str)
    for figure in (got.prompt_tokens, got.cached_tokens):
        assert figure is None or 0 <= figure <= 3 * MAX_TOKENS
    assert got.cached_tokens is None or (got.prompt_tokens is not None and got.cached_tokens <= got.prompt_tokens)
    assert got.ttft_s is None or math.isfinite(got.ttft_s)


def test_records_of_one_message_keep_their_order_and_an_empty_message_has_none() -> None:
    message = als_pb2.StreamAccessLogsMessage()
    assert decode_records(message) == []
    message.http_logs.log_entry.extend([entry(shoal={"id": str(n), "picker": "0"}) for n in range(5)])
    assert [record.request_id for record in decode_records(message)] == ["0", "1", "2", "3", "4"]


def test_a_record_is_cheap_to_read() -> None:
    message = als_pb2.StreamAccessLogsMessage()
    usage: dict[str, object] = {"prompt": 100, "cached": 64, "completion": 7}
    message.http_logs.log_entry.extend([entry(usage=usage)] * 200)
    wire = message.SerializeToString()

    def cost_s() -> float:
        started = time.process_time()
        assert len(decode_records(als_pb2.StreamAccessLogsMessage.FromString(wire))) == 200
        return (time.process_time() - started) / 200

    # CPU time of this process, best of many: load on the machine does not enter.
    assert min(cost_s() for _ in range(30)) < 80e-6


def test_words_of_a_client_that_are_no_utf8_cost_nobody_a_record() -> None:
    message = als_pb2.StreamAccessLogsMessage()
    message.identifier.log_name = "0"
    message.http_logs.log_entry.extend([entry(shoal={"id": str(n), "picker": "0"}) for n in range(3)])
    message.http_logs.log_entry[1].request.request_id = "bad-bytes"
    wire = message.SerializeToString().replace(b"bad-bytes", b"bad-\xff\xfe\x80es")
    with pytest.raises(DecodeError):
        als_pb2.StreamAccessLogsMessage.FromString(wire)
    assert decode_records(parse_records(wire)) == decode_records(message)


def test_what_is_read_of_a_message_is_all_that_a_record_is_made_of() -> None:
    message = als_pb2.StreamAccessLogsMessage()
    made = entry(usage={"prompt": 100, "cached": 64, "completion": 7})
    made.common_properties.duration.FromMicroseconds(1_234_567)
    message.http_logs.log_entry.extend([made])
    assert decode_records(parse_records(message.SerializeToString())) == [decode_record(made)]
    assert decode_record(made).outcome.duration_s == pytest.approx(1.234567)
