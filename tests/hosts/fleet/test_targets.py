import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.hosts.fleet import parse_url
from shoal.kernel import ConfigError


def test_a_plain_url_is_one_endpoint_named_by_its_address() -> None:
    endpoint = parse_url("http://10.0.0.1:8000/").endpoint("10.0.0.1")
    assert (endpoint.id, endpoint.address, endpoint.is_tls, endpoint.engine) == (
        "10.0.0.1:8000",
        "10.0.0.1:8000",
        False,
        "vllm",
    )


def test_an_ipv6_url_keeps_its_brackets_in_the_address() -> None:
    target = parse_url("https://[2001:DB8::0:1]:8443")
    assert target.is_literal
    assert target.endpoint(target.host).address == "[2001:db8::1]:8443"
    assert target.url == "https://[2001:db8::1]:8443"


def test_each_address_of_a_named_dns_target_has_an_id_of_its_own() -> None:
    target = parse_url("https://VLLM.example", name="pool")
    assert not target.is_literal
    assert target.host == "vllm.example"
    assert [target.endpoint(ip).id for ip in ("10.0.0.1", "10.0.0.2")] == ["pool@10.0.0.1:443", "pool@10.0.0.2:443"]


@pytest.mark.parametrize("label", ["llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"])
def test_the_engine_is_taken_from_either_label(label: str) -> None:
    assert parse_url("http://10.0.0.1:1", labels={label: "sglang"}).known_engine == "sglang"
    assert parse_url("http://10.0.0.1:1", engine="vllm", labels={label: "sglang"}).known_engine == "vllm"
    assert parse_url("http://10.0.0.1:1", labels={label: "novel"}).known_engine == ""


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("10.0.0.1:8000", "must begin with http://"),
        ("localhost:8000", "must begin with http://"),
        ("ftp://10.0.0.1", "must begin with http://"),
        ("http://10.0.0.1:8000/v1", "write only the server, as http://10.0.0.1:8000"),
        ("http://10.0.0.1:8000?x=1", "has a path"),
        ("http://10.0.0.1:0", "the port"),
        ("http://10.0.0.1:99999", "the port"),
        ("http://10.0.0.1:http", "the port"),
        ("http://", "neither an IP address nor a host name"),
        ("http://10.0.0.999:8000", "neither an IP address nor a host name"),
        ("http://-a..b:8000", "neither an IP address nor a host name"),
        ("http://0.0.0.0:8000", "use 127.0.0.1"),
        ("http://[::1", "not a URL"),
        ("http://ex ample", "not a URL"),
        ("http://example\n", "not a URL"),
        ("http://" + "a" * 250 + ".com!", "neither an IP address nor a host name"),
    ],
)
def test_a_malformed_url_says_what_is_wrong(url: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert says in str(caught.value)
    assert "--backend" in str(caught.value)


def test_a_password_in_a_url_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url("http://user:canary@10.0.0.1:8000")
    assert "canary" not in str(caught.value)


def test_a_target_never_shows_its_key() -> None:
    assert "canary" not in repr(parse_url("http://10.0.0.1:8000", api_key="canary"))
    with pytest.raises(ConfigError) as caught:
        parse_url("http://10.0.0.1:8000", api_key="canary\r\nX: y")
    assert "canary" not in str(caught.value)


@given(st.text(max_size=60))
def test_any_text_is_a_target_or_a_config_error(text: str) -> None:
    try:
        target = parse_url("http://" + text)
    except ConfigError:
        return
    assert 0 < target.port < 65536
    assert parse_url(target.url) == target


@pytest.mark.parametrize("name", ["x" * 201, "\u9be8" * 67, "a\nb", "a\x00", "\ud800"])
def test_a_name_that_could_not_be_told_to_peers_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a name has up to 200 bytes"):
        parse_url("http://10.0.0.1:8000", name=name)
    for longest in ("x" * 200, "\u9be8" * 66):
        assert parse_url("http://10.0.0.1:8000", name=longest).endpoint("10.0.0.1").id == longest
