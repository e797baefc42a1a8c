from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.hosts.fleet.backendsfile import parse_backends
from shoal.kernel import ConfigError

HERE = Path("pool.yaml")


def test_our_list_is_read_with_names_engines_and_labels() -> None:
    targets, problems = parse_backends(
        b"""
- url: http://10.0.0.1:8000
  name: a
  engine: sglang
  labels: {llm-d.ai/role: decode}
- {url: https://vllm.example}
""",
        HERE,
    )
    assert problems == []
    assert [target.url for target in targets] == ["http://10.0.0.1:8000", "https://vllm.example:443"]
    assert (targets[0].name, targets[0].engine, targets[0].labels) == ("a", "sglang", {"llm-d.ai/role": "decode"})


def test_an_llmd_discovery_file_is_read_unchanged() -> None:
    targets, problems = parse_backends(
        b"""
endpoints:
  - name: pod-a
    namespace: prod
    address: 10.0.0.1
    port: "8000"
    labels: {llm-d.ai/engine-type: vllm}
  - {name: pod-b, address: 10.0.0.2, port: 8001, extra: kept for others}
""",
        HERE,
    )
    assert problems == []
    assert [(target.name, target.url) for target in targets] == [
        ("prod/pod-a", "http://10.0.0.1:8000"),
        ("default/pod-b", "http://10.0.0.2:8001"),
    ]
    assert targets[0].known_engine == "vllm"


def test_a_list_under_backends_is_read_as_a_bare_one() -> None:
    targets, problems = parse_backends(b"backends:\n- url: http://10.0.0.1:8000\n- URL: http://10.0.0.2:8000\n", HERE)
    assert [target.url for target in targets] == ["http://10.0.0.1:8000"]
    assert [str(problem) for problem in problems] == ["pool.yaml:3: entry 2: unknown field 'URL'; did you mean url?"]


def test_an_unknown_field_that_resembles_none_is_told_the_known_ones() -> None:
    _, (problem,) = parse_backends(b"- {url: 'http://10.0.0.1', weight: 2}", HERE)
    assert problem.message.startswith("unknown field 'weight'; known are url, name, engine, ")


def test_a_bad_entry_is_left_out_and_named_with_its_line() -> None:
    targets, problems = parse_backends(
        b"""- url: http://10.0.0.1:8000
- url: 10.0.0.2:8000
- {url: "http://10.0.0.3", label: {}}
- just text
- {name: x, address: 10.0.0.4, port: many}
- url: http://10.0.0.1:8000
- url: http://10.0.0.5:8000
  labels: {a: 1}
- url: http://10.0.0.6:8000
""",
        HERE,
    )
    assert [target.host for target in targets] == ["10.0.0.1", "10.0.0.6"]
    assert [(problem.line, problem.path) for problem in problems] == [
        (2, "entry 2"),
        (3, "entry 3"),
        (4, "entry 4"),
        (5, "entry 5"),
        (6, "entry 6"),
        (7, "entry 7"),
    ]
    assert str(problems[0]).startswith("pool.yaml:2: entry 2: '10.0.0.2:8000' must begin with http://")
    assert str(problems[1]).endswith("unknown field 'label'; did you mean labels?")
    assert "already named in line 1" in str(problems[4])


@pytest.mark.parametrize("text", [b"", b"# nothing yet\n", b"[]", b"endpoints:\n", b"endpoints: []\n", b"backends:\n"])
def test_an_empty_file_names_no_backend(text: bytes) -> None:
    assert parse_backends(text, HERE) == ([], [])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"- url: [", "is not YAML"),
        (b"just text", "expected a list of backends"),
        (b"pods: []", "or one under `backends:`"),
        (b"backend: []", "did you mean backends?"),
        (b"backends: {a: b}", "expected a list of backends"),
        (b"kind: Pool\nbackends: []", "give a configuration with --config"),
        (b"endpoints: {a: b}", "expected a list of backends"),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"[" * 100_000, "nest"),
    ],
)
def test_a_file_that_is_no_list_is_an_error(text: bytes, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_backends(text, HERE)
    assert says in str(caught.value)


def test_a_key_and_a_ca_are_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("canary-key\n")
    (tmp_path / "ca.pem").write_text("PEM")
    targets, problems = parse_backends(
        b"""
- {url: "https://10.0.0.1", api_key_file: key, ca_file: ca.pem}
- {url: "https://10.0.0.2", api_key_file: missing}
- {url: "https://10.0.0.3", ca_file: missing.pem}
""",
        tmp_path / "pool.yaml",
    )
    assert targets[0].api_key == "canary-key"
    assert targets[0].ca_file == str(tmp_path / "ca.pem")
    assert [problem.line for problem in problems] == [3, 4]


@given(st.text(alphabet="-:{}[]&*!|>'\"#a1 \n\turlendpoints./", max_size=80))
def test_any_text_gives_targets_or_a_config_error(text: str) -> None:
    try:
        targets, _ = parse_backends(text.encode(), HERE)
    except ConfigError:
        return
    assert all(target.port for target in targets)


def test_where_an_engine_publishes_is_a_port_an_address_or_one_for_each_rank() -> None:
    targets, problems = parse_backends(
        b"""
- {url: http://10.0.0.1:8000, kv_events: 5557}
- {url: http://10.0.0.2:8000, kv_events: [5557, tcp://10.9.9.9:5558], kv_replay: [6557, "6558"]}
- {url: "http://[fd00::3]:8000", kv_events: 5557, kv_replay: tcp://replays.example:6557}
- {url: http://10.0.0.4:8000, labels: {shoal.dev/kv-events-port: "5557", shoal.dev/kv-replay-port: "6557"}}
- {url: http://10.0.0.5:8000, labels: {shoal.dev/kv-events-port: "many"}}
""",
        HERE,
    )
    assert problems == []
    sources = [
        [(source.endpoint, source.replay_endpoint, source.rank) for source in target.endpoint(target.host).kv_sources]
        for target in targets
    ]
    assert sources == [
        [("tcp://10.0.0.1:5557", "", 0)],
        [("tcp://10.0.0.2:5557", "tcp://10.0.0.2:6557", 0), ("tcp://10.9.9.9:5558", "tcp://10.0.0.2:6558", 1)],
        [("tcp://[fd00::3]:5557", "tcp://replays.example:6557", 0)],
        [("tcp://10.0.0.4:5557", "tcp://10.0.0.4:6557", 0)],
        [],
    ]


@pytest.mark.parametrize(
    "fields",
    [
        "kv_events: 0",
        "kv_events: 70000",
        "kv_events: tcp://*:5557",
        "kv_events: http://10.0.0.1:5557",
        "kv_events: tcp://10.0.0.1",
        "kv_events: {a: 1}",
        "kv_events: [1, 2], kv_replay: [3]",
        "kv_replay: 5557",
    ],
)
def test_an_entry_that_cannot_be_subscribed_to_is_left_out(fields: str) -> None:
    targets, problems = parse_backends(f"- {{url: 'http://10.0.0.1:8000', {fields}}}".encode(), HERE)
    assert targets == []
    assert "kv_" in str(problems[0])


@pytest.mark.parametrize("odd", ["!!bool maybe", "!!int ''", "!!timestamp x", "2026-13-40"])
def test_a_value_that_cannot_be_read_costs_its_entry_and_no_other(odd: str) -> None:
    targets, problems = parse_backends(f"- url: {odd}\n- url: http://10.0.0.1:8000\n".encode(), HERE)
    assert [target.url for target in targets] == ["http://10.0.0.1:8000"]
    assert [(problem.line, "cannot be read" in problem.message) for problem in problems] == [(1, True)]


def test_a_field_that_stands_twice_costs_its_entry() -> None:
    text = b"- {url: 'http://10.0.0.1:8000', url: 'http://10.0.0.2:8000'}\n- url: http://10.0.0.3:8000\n"
    targets, problems = parse_backends(text, HERE)
    assert [target.host for target in targets] == ["10.0.0.3"]
    assert "duplicate key" in problems[0].message


def test_a_few_lines_of_aliases_are_not_read_for_ever() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20)]
    with pytest.raises(ConfigError, match="stands for more than"):
        parse_backends("\n".join([*lines, "backends: [*a19]"]).encode(), HERE)
