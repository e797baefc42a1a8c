"""Which API a request path speaks.

Owns the table of path endings.  A gateway may put anything before them (`/openai/v1/chat/completions`), so the
longest ending that fits wins, as in llm-d.  What the body holds is read in `bodies`.
"""

from functools import lru_cache

from shoal.pool import Api

_ENDINGS = {
    "/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/completions": Api.COMPLETIONS,
    "/v1/responses": Api.RESPONSES,
    "/v1/messages": Api.MESSAGES,
    "/v1/messages/count_tokens": Api.MESSAGES,
    "/embeddings": Api.EMBEDDINGS,
    "/tokenize": Api.TOKENIZE,
    "/inference/v1/generate": Api.GENERATE,
    "/generate": Api.GENERATE,
    "/rerank": Api.RERANK,
    "/score": Api.SCORE,
    "/pooling": Api.POOLING,
    "/v1/audio/transcriptions": Api.AUDIO,
    "/v1/audio/translations": Api.AUDIO,
    "/v1/audio/speech": Api.AUDIO,
}
_LONGEST_FIRST = tuple(sorted(_ENDINGS.items(), key=lambda item: (-len(item[0]), item[0])))


def strip_query(path: str) -> str:
    """Return `path` without query and fragment, which may hold keys."""
    if "?" not in path and "#" not in path:
        return path
    return path.partition("?")[0].partition("#")[0]


@lru_cache(maxsize=512)
def api_of(path: str) -> Api:
    """Return the API of `path` (as sent, query included); OTHER when no ending fits."""
    bare = strip_query(path).rstrip("/")
    known = _ENDINGS.get(bare)
    if known is not None:
        return known
    for ending, api in _LONGEST_FIRST:
        if bare.endswith(ending):
            return api
    return Api.AUDIO if "/v1/audio/" in bare else Api.OTHER
