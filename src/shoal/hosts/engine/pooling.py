"""The shapes of answers that only read: embeddings, pooling, scores, ranks.  Values have no meaning, only a form."""

import base64

import msgspec

from shoal.hosts.engine.answer import Answer, Usage, usage_of
from shoal.hosts.engine.answers import score, vector
from shoal.hosts.engine.bodies import PoolingBody, RerankBody, ScoreBody
from shoal.hosts.engine.errors import bad_request
from shoal.hosts.engine.generation import Generation
from shoal.hosts.engine.tokens import encode

_DIMENSIONS = 256


def embeddings(answer: Answer, body: PoolingBody, generations: list[Generation], *, is_pooling: bool) -> bytes:
    """Return the body of /v1/embeddings, or of /pooling, which names its vectors `data`."""
    kind, field, prefix = ("pooling", "data", "pool") if is_pooling else ("embedding", "embedding", "embd")
    size = body.dimensions or _DIMENSIONS
    data = []
    for generation in generations:
        values = vector(generation.prompt, size)
        shown: object = values.tolist()
        if body.encoding_format == "base64":
            shown = base64.b64encode(values.astype("<f4").tobytes()).decode()
        data.append({"index": generation.index, "object": kind, field: shown})
    return _listing(f"{prefix}-{answer.id}", answer, data, usage_of(generations))


def pairs(body: ScoreBody) -> list[bytes]:
    """Return the prompts of /score: one per document, its query before it.  Raises ApiError 400."""
    queries = _texts(body.text_1 if body.text_1 is not None else body.queries)
    documents = _texts(body.text_2 if body.text_2 is not None else body.documents)
    if not queries or not documents or len(queries) not in (1, len(documents)):
        raise bad_request("Input lengths must be either 1:1, 1:N or N:N", "text_1")
    if len(queries) == 1:
        queries *= len(documents)
    return [encode(query) + encode(document) for query, document in zip(queries, documents, strict=True)]


def scores(answer: Answer, generations: list[Generation]) -> bytes:
    """Return the body of /score."""
    data = [
        {"index": generation.index, "object": "score", "score": score(generation.prompt)} for generation in generations
    ]
    return _listing(f"score-{answer.id}", answer, data, usage_of(generations))


def ranks(answer: Answer, body: RerankBody, generations: list[Generation]) -> bytes:
    """Return the body of /rerank, best first."""
    ordered = sorted(generations, key=lambda generation: score(generation.prompt), reverse=True)
    results = [
        {
            "index": generation.index,
            "document": {"text": body.documents[generation.index], "multi_modal": None},
            "relevance_score": score(generation.prompt),
        }
        for generation in ordered
    ]
    usage = usage_of(generations)
    return msgspec.json.encode(
        {
            "id": f"rerank-{answer.id}",
            "model": answer.model,
            "usage": {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt},
            "results": results[: body.top_n or None],
        }
    )


def _listing(identity: str, answer: Answer, data: list[dict[str, object]], usage: Usage) -> bytes:
    return msgspec.json.encode(
        {
            "id": identity,
            "object": "list",
            "created": answer.created,
            "model": answer.model,
            "data": data,
            "usage": {
                "prompt_tokens": usage.prompt,
                "total_tokens": usage.prompt,
                "completion_tokens": 0,
                "prompt_tokens_details": {"cached_tokens": usage.cached} if answer.has_cached else None,
            },
        }
    )


def _texts(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
