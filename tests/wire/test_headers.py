from shoal.wire.headers import read_headers


def test_of_a_cookie_only_a_digest_of_the_one_that_is_asked_for_is_kept() -> None:
    headers = {"cookie": "theme=dark; sid=top-secret-session; other=also-secret"}
    kept = read_headers(headers, ("cookie:sid",)).kept
    assert list(kept) == ["cookie:sid"]
    assert "secret" not in str(kept)
    assert kept == read_headers({"cookie": "sid=top-secret-session"}, ("cookie:sid",)).kept
    assert kept != read_headers({"cookie": "sid=another"}, ("cookie:sid",)).kept
    assert read_headers({"cookie": "theme=dark"}, ("cookie:sid",)).kept == {}
