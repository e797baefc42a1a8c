"""Completion tokens of an answer whose engine reported none, from its size.

Owns one learned figure per API and streaming mode: bytes per output token.  Estimates are always marked as such.
"""

import msgspec

from shoal.pool import Api, Outcome, Request

# An SSE chunk of one token is about 230 bytes in vLLM's chat format; plain answers carry about 4 bytes a token.
FIRST_GUESS_STREAM_BYTES = 230.0
FIRST_GUESS_PLAIN_BYTES = 4.5


class TokenEstimator:
    """Bytes per completion token, learned from answers that carried their usage."""

    __slots__ = ("_bytes_per_token",)

    def __init__(self) -> None:
        self._bytes_per_token: dict[tuple[Api, bool], float] = {}

    def learn(self, api: Api, is_streaming: bool, response_bytes: int, completion_tokens: int) -> None:
        """Take in one complete answer with its reported tokens."""
        if completion_tokens < 1 or response_bytes < 1:
            return
        seen = response_bytes / completion_tokens
        known = self._bytes_per_token.get((api, is_streaming))
        self._bytes_per_token[api, is_streaming] = seen if known is None else 0.95 * known + 0.05 * seen

    def tokens(self, api: Api, is_streaming: bool, response_bytes: int) -> int:
        """Estimate the completion tokens of `response_bytes` of answer."""
        guess = FIRST_GUESS_STREAM_BYTES if is_streaming else FIRST_GUESS_PLAIN_BYTES
        return round(response_bytes / self._bytes_per_token.get((api, is_streaming), guess))

    def complete(self, request: Request, outcome: Outcome) -> Outcome:
        """Estimate the completion tokens that the engine did not report, and mark them so."""
        if outcome.completion_tokens is not None:
            if not outcome.is_cut and not outcome.is_client_gone and not outcome.is_estimated:
                self.learn(request.api, request.is_streaming, outcome.response_bytes, outcome.completion_tokens)
            return outcome
        if outcome.status != 200 or not outcome.response_bytes:
            return outcome
        tokens = self.tokens(request.api, request.is_streaming, outcome.response_bytes)
        return msgspec.structs.replace(outcome, completion_tokens=tokens, is_estimated=True)
