import gzip

import pytest

from shoal.kernel import InvalidInput
from shoal.wire.compression import MAX_MEMBERS, inflate


def test_a_few_members_are_read_as_one_body() -> None:
    assert inflate(gzip.compress(b"ab") + gzip.compress(b"cd"), "gzip", 100) == b"abcd"


def test_a_body_of_countless_empty_members_is_refused_at_once() -> None:
    with pytest.raises(InvalidInput, match=str(MAX_MEMBERS)):
        inflate(gzip.compress(b"") * 50_000, "gzip", 1 << 20)
