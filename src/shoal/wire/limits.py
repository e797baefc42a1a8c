"""How much of a client's bytes is looked at, and the error for more than that.

Owns the limits that `decode` obeys.  Limits on connections and time belong to the data plane.
"""

import msgspec

from shoal.kernel import InvalidInput


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may cost to read.

    max_body_bytes: of the body as sent, and again of the body once inflated; 64 MiB holds every prompt of
    today's longest contexts plus a few images.  max_model_chars: model names become metric labels, so they are
    short.  max_prompts: prompts in one request; the OpenAI API allows 2048 inputs.
    kept_headers: lower-case names of further headers that a configured plugin reads.
    """

    max_body_bytes: int = 64 * 1024 * 1024
    max_model_chars: int = 512
    max_prompts: int = 4096
    kept_headers: tuple[str, ...] = ()


class BodyTooLarge(InvalidInput):
    """The body, or what it inflates to, is over the limit.  limit_bytes: the limit."""

    def __init__(self, limit_bytes: int, what: str = "the request body") -> None:
        self.limit_bytes = limit_bytes
        super().__init__(f"{what} is larger than the limit of {limit_bytes} bytes; send a smaller request")
