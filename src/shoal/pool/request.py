"""What a client asks for, after its bytes were read once.

Holds facts and sizes, never prompt text: a Request may stand in a journal.
"""

from enum import StrEnum

import msgspec


class Api(StrEnum):
    """Which API a request speaks; decides its error format and where usage is found."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    TOKENIZE = "tokenize"
    GENERATE = "generate"
    RERANK = "rerank"
    SCORE = "score"
    POOLING = "pooling"
    AUDIO = "audio"
    OTHER = "other"


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """What a client says of its request beyond the API; None where it says nothing.

    priority: larger goes first.  output_tokens: how long the answer is thought to become.  returns_within_s: after this
    answer the session comes back within so many seconds, as when it calls a tool.
    """

    priority: int | None = None
    output_tokens: int | None = None
    returns_within_s: float | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the router sees it.

    id: minted by the host, unique in the pool.  client_id: the client's own `x-request-id`, a claim.
    model: as the client named it, "" when the API has none.  prompt_tokens: estimated (bytes / 4) unless
    is_token_exact.  max_output_tokens: None when the client set no limit.  body_bytes: size on the wire.
    headers: the few control headers that plugins may read, lower-case names.  subset: `ip:port` names the
    gateway allows, None when it did not say.  hints: None too when they are not believed.
    """

    id: str
    api: Api = Api.OTHER
    path: str = ""
    client_id: str = ""
    model: str = ""
    is_streaming: bool = False
    is_token_exact: bool = False
    has_body: bool = True
    prompt_bytes: int = 0
    prompt_tokens: int = 0
    max_output_tokens: int | None = None
    body_bytes: int = 0
    tenant_id: str = ""
    session_id: str = ""
    objective: str = ""
    retry_allowed: bool = True
    headers: dict[str, str] = {}
    subset: tuple[str, ...] | None = None
    hints: Hints | None = None

    def is_of(self, session_id: str, tenant_id: str | None) -> bool:
        """Whether it belongs to a session, and to a tenant unless that is None."""
        return self.session_id == session_id and (tenant_id is None or self.tenant_id == tenant_id)
