from shoal.wire.headers import MAX_KEPT_CHARS, joined, read_headers


def test_of_a_cookie_only_a_digest_of_the_one_that_is_asked_for_is_kept() -> None:
    headers = {"cookie": "theme=dark; sid=top-secret-session; other=also-secret"}
    kept = read_headers(headers, ("cookie:sid",)).kept
    assert list(kept) == ["cookie:sid"]
    assert "secret" not in str(kept)
    assert kept == read_headers({"cookie": "sid=top-secret-session"}, ("cookie:sid",)).kept
    assert kept != read_headers({"cookie": "sid=another"}, ("cookie:sid",)).kept
    assert read_headers({"cookie": "theme=dark"}, ("cookie:sid",)).kept == {}


def test_no_kept_header_is_longer_than_tables_and_journals_bear() -> None:
    long = "x" * (MAX_KEPT_CHARS + 1)
    kept = read_headers({"prefer": long, "x-session-token": long, "x-own": long}, ("x-own",)).kept
    assert {name: len(value) for name, value in kept.items()} == dict.fromkeys(
        ("prefer", "x-session-token", "x-own"), MAX_KEPT_CHARS
    )


def test_fields_of_one_name_are_one_list() -> None:
    fields = [("prefer", "respond-async"), ("cookie", "a=1"), ("prefer", "if-available"), ("cookie", "b=2")]
    assert joined(fields) == {"prefer": "respond-async, if-available", "cookie": "a=1; b=2"}
    assert joined([]) == {}
