"""A request's bytes to a frozen Request and the bytes of its prompts.

Owns the order in which path, headers and body are read and what is made of them.  The shapes of bodies are in
`bodies`; hashing of prompts belongs to `prefix`; prompt bytes leave this room only in `Decoded`.
"""

from collections.abc import Mapping
from typing import NamedTuple

from shoal.kernel import InvalidInput
from shoal.pool import Api, Request
from shoal.wire.bodies import BodyFacts, read_body, read_named
from shoal.wire.compression import inflate
from shoal.wire.headers import read_headers
from shoal.wire.hints import HINT_HEADERS, read_hints
from shoal.wire.limits import BodyTooLarge, Limits
from shoal.wire.multipart import is_multipart, read_field
from shoal.wire.paths import api_of, strip_query

BYTES_PER_TOKEN = 4
_DEFAULT_LIMITS = Limits()
_HINTS = frozenset(HINT_HEADERS)


class Decoded(NamedTuple):
    """A request, its prompts and its cache salt.

    prompts: canonical bytes of each prompt; for token ids (`request.is_token_exact`) little-endian uint32.  A growing
    conversation gives byte prefixes.  salt: what the client put in `cache_salt`.
    """

    request: Request
    prompts: tuple[bytes, ...] = ()
    salt: bytes = b""


def decode(
    request_id: str,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    limits: Limits = _DEFAULT_LIMITS,
    subset: tuple[str, ...] | None = None,
) -> Decoded:
    """Read one request.  headers: lower-case names.  body: as sent, b"" when there is none.

    Raises BodyTooLarge over the limit, and InvalidInput (`refusal_of` turns both into a Refusal) for a body that its
    API cannot mean.  A body of an unknown path never raises for what is in it.
    """
    if len(body) > limits.max_body_bytes:
        raise BodyTooLarge(limits.max_body_bytes)
    api = api_of(path) if method == "POST" else Api.OTHER
    heads = read_headers(headers, limits.kept_headers)
    api, facts = _read(api, headers, body, limits)
    if len(facts.model) > limits.max_model_chars:
        raise InvalidInput(f"`model` is longer than {limits.max_model_chars} characters")
    if len(facts.prompts) > limits.max_prompts:
        raise InvalidInput(f"one request may hold at most {limits.max_prompts} prompts; split it")
    prompt_bytes = sum(map(len, facts.prompts))
    request = Request(
        id=request_id,
        api=api,
        path=strip_query(path),
        client_id=heads.client_id,
        model=facts.model,
        is_streaming=facts.is_streaming,
        is_token_exact=facts.is_token_exact,
        has_body=bool(body),
        prompt_bytes=prompt_bytes,
        prompt_tokens=-(-prompt_bytes // BYTES_PER_TOKEN),
        max_output_tokens=facts.max_output_tokens,
        body_bytes=len(body),
        tenant_id=heads.tenant_id,
        session_id=heads.session_id,
        objective=heads.objective,
        retry_allowed=heads.retry_allowed and facts.retry_allowed,
        headers=heads.kept,
        subset=subset,
        hints=None if facts.extension is None and _HINTS.isdisjoint(headers) else read_hints(headers, facts.extension),
    )
    return Decoded(request, facts.prompts, facts.salt)


def _read(api: Api, headers: Mapping[str, str], body: bytes, limits: Limits) -> tuple[Api, BodyFacts]:
    """Return the facts of the body, and the API: OTHER when the body is in a coding that cannot be read here."""
    if not body:
        if api in (Api.OTHER, Api.AUDIO):
            return api, BodyFacts()
        raise InvalidInput("the request has no body; send the JSON object that this API asks for")
    encoding = headers.get("content-encoding")
    if encoding:
        plain = _inflated(api, body, encoding, limits)
        if plain is None:
            return Api.OTHER, BodyFacts()
        body = plain
    if api is Api.OTHER:
        return api, read_named(body)
    if api is Api.AUDIO:
        content_type = headers.get("content-type", "")
        if is_multipart(content_type):
            return api, _read_form(body, content_type)
        if body[:64].lstrip()[:1] != b"{":
            return api, BodyFacts()
    return api, read_body(api, body)


def _inflated(api: Api, body: bytes, encoding: str, limits: Limits) -> bytes | None:
    try:
        return inflate(body, encoding, limits.max_body_bytes)
    except BodyTooLarge:
        raise
    except InvalidInput:
        if api is Api.OTHER:
            return None
        raise


def _read_form(body: bytes, content_type: str) -> BodyFacts:
    stream = read_field(body, content_type, "stream")
    return BodyFacts(
        read_field(body, content_type, "model") or "", is_streaming=(stream or "").lower() in ("true", "1")
    )
