"""Where engines say that they publish, and what of it is believed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.kernel import InvalidInput
from shoal.pool.kvevents import KvSource
from shoal.wire.kvsources import parse_event_sources, parse_server_info


def source(endpoint: Any, host: str = "10.0.0.7", **fields: Any) -> KvSource | None:
    """The publisher of rank 0, None when it is not to be dialled."""
    found = parse_event_sources(json.dumps({"0": {"endpoint": endpoint, **fields}}).encode(), host)
    return found[0] if found else None


def test_publishers_of_vllm_are_read_by_rank() -> None:
    body = {
        "10": {"endpoint": "tcp://*:5567", "topic": "kv@m", "hwm": 100000, "buffer_steps": 10000},
        "2": {"endpoint": "tcp://*:5559", "replay_endpoint": "tcp://*:6559", "topic": ""},
        "x": {"endpoint": "tcp://*:1"},
        "3": None,
        "4": {"endpoint": "tcp://*:5", "publisher": "null"},
    }
    assert parse_event_sources(json.dumps(body).encode(), "10.0.0.7") == (
        KvSource(endpoint="tcp://10.0.0.7:5559", replay_endpoint="tcp://10.0.0.7:6559", rank=2),
        KvSource(endpoint="tcp://10.0.0.7:5567", topic="kv@m", rank=10),
    )
    assert parse_event_sources(b"{}", "10.0.0.7") == ()


@pytest.mark.parametrize(
    "said",
    [
        "tcp://*:5557",
        "tcp://0.0.0.0:5557",
        "tcp://[::]:5557",
        "tcp://10.0.0.7:5557",
        "tcp://node-3:5557",
        # Whoever is named, the endpoint's own host is dialled.
        "tcp://169.254.169.254:5557",
        "tcp://[fe80::1]:5557",
    ],
)
def test_only_the_port_of_an_address_is_believed(said: str) -> None:
    found = source(said, replay_endpoint=said.replace("5557", "5558"))
    assert found == KvSource(endpoint="tcp://10.0.0.7:5557", replay_endpoint="tcp://10.0.0.7:5558")
    over_v6 = source(said, "fd00::7")
    assert over_v6 is not None
    assert over_v6.endpoint == "tcp://[fd00::7]:5557"


@pytest.mark.parametrize("said", ["tcp://127.0.0.1:5557", "tcp://[::1]:5557", "tcp://localhost:5557", "ipc:///tmp/kv"])
def test_what_is_local_to_the_engine_is_dialled_only_where_the_engine_is_local(said: str) -> None:
    assert source(said) is None
    here = source(said, "127.0.0.1")
    assert here is not None
    assert here.endpoint == (said if said.startswith("ipc") else "tcp://127.0.0.1:5557")


@pytest.mark.parametrize(
    "said",
    [None, 5, "", "tcp://*", "tcp://*:0", "tcp://*:99999", "http://*:5557", "inproc://x", "tcp://*:5557" + "x" * 300],
)
def test_an_address_that_cannot_be_dialled_is_left_out(said: Any) -> None:
    assert source(said) is None
    without_replay = source("tcp://*:5557", replay_endpoint=said)
    assert without_replay == KvSource(endpoint="tcp://10.0.0.7:5557")


@pytest.mark.parametrize("topic", [None, 7, "x" * 300, "a\nb"])
def test_a_topic_that_makes_no_sense_is_no_filter(topic: Any) -> None:
    found = source("tcp://*:5557", topic=topic)
    assert found is not None
    assert found.topic == ""


def test_publishers_of_sglang_are_one_port_after_the_other() -> None:
    said = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "replay_endpoint_port_base": 6557,
        "topic": "kv@sg",
        "block_size": 64,
        "dp_size": 2,
    }
    body = json.dumps({"model_path": "m", "kv_events": said}).encode()
    assert parse_server_info(body, "10.0.0.7") == (
        KvSource(endpoint="tcp://10.0.0.7:5557", replay_endpoint="tcp://10.0.0.7:6557", topic="kv@sg"),
        KvSource(endpoint="tcp://10.0.0.7:5558", replay_endpoint="tcp://10.0.0.7:6558", topic="kv@sg", rank=1),
    )
    local = json.dumps({"kv_events": {**said, "endpoint_host": "127.0.0.1"}}).encode()
    assert parse_server_info(local, "10.0.0.7") == ()
    assert len(parse_server_info(local, "127.0.0.1")) == 2


@pytest.mark.parametrize(
    "said",
    [
        None,
        {},
        {"publisher": "null", "endpoint_port_base": 1},
        {"endpoint_port_base": "5557"},
        {"endpoint_port_base": 0},
    ],
)
def test_an_sglang_that_publishes_nothing_has_no_publishers(said: Any) -> None:
    assert parse_server_info(json.dumps({"kv_events": said}).encode(), "10.0.0.7") == ()
    assert parse_server_info(b"{}", "10.0.0.7") == ()


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"<html>", b'{"0": 5}', b"[" * 100_000])
def test_another_answer_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        parse_event_sources(body, "10.0.0.7")


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(0, 1e6), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=9), inner, max_size=3)),
    max_leaves=3,
)
ADDRESSES = st.one_of(
    ANYTHING,
    st.builds(
        "{}://{}:{}".format,
        st.sampled_from(["tcp", "ipc", "http", ""]),
        st.one_of(st.sampled_from(["*", "10.1.1.1", "[::1]", "127.0.0.1", "a@b", "[x"]), st.text(max_size=5)),
        st.integers(-1, 70_000),
    ),
)


@given(
    st.dictionaries(
        st.one_of(st.text(max_size=4), st.integers(0, 999).map(str)),
        st.fixed_dictionaries({}, optional={"endpoint": ADDRESSES, "replay_endpoint": ADDRESSES, "topic": ANYTHING}),
        max_size=3,
    )
)
def test_whatever_is_said_no_other_host_is_dialled(said: Any) -> None:
    for found in parse_event_sources(json.dumps(said).encode(), "10.0.0.7"):
        assert found.endpoint.startswith("tcp://10.0.0.7:")
        assert found.replay_endpoint == "" or found.replay_endpoint.startswith("tcp://10.0.0.7:")
        assert 0 <= found.rank < 256


@given(
    st.dictionaries(st.sampled_from(["publisher", "endpoint_host", "endpoint_port_base", "dp_size", "topic"]), ANYTHING)
)
def test_whatever_sglang_says_is_read_or_left_out(said: Any) -> None:
    for found in parse_server_info(json.dumps({"kv_events": said}).encode(), "10.0.0.7"):
        assert found.endpoint.startswith("tcp://10.0.0.7:")
