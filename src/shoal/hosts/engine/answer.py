"""What every shape of an answer knows: ids, the model's name, usage figures, and how an event looks."""

from typing import NamedTuple

import msgspec

from shoal import __version__
from shoal.hosts.engine.generation import Generation

DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"shoal-{__version__}"


class Answer(NamedTuple):
    """The outside of an answer.

    id: the part of the response id after its prefix.  has_cached: whether usage tells cached tokens.
    """

    id: str
    model: str
    created: int
    has_cached: bool


class Usage(NamedTuple):
    """Tokens of a request, all its choices together; a prompt with several samples counts once."""

    prompt: int
    completion: int
    cached: int


def usage_of(generations: list[Generation]) -> Usage:
    """Return the usage of finished generations; samples of one prompt follow each other."""
    prompt = cached = completion = 0
    last: bytes | None = None
    for generation in generations:
        completion += generation.output_tokens
        if generation.prompt is not last:
            prompt += generation.prompt_tokens
            cached += generation.cached_tokens
            last = generation.prompt
    return Usage(prompt, completion, cached)


def usage_whole(usage: Usage, has_cached: bool, created_cache_tokens: int | None = None) -> dict[str, object]:
    """Return vLLM's usage object of an unstreamed answer."""
    details = {
        "cached_tokens": usage.cached,
        "created_cache_tokens": created_cache_tokens,
        "multimodal_tokens": None,
    }
    return {
        "prompt_tokens": usage.prompt,
        "total_tokens": usage.prompt + usage.completion,
        "completion_tokens": usage.completion,
        "prompt_tokens_details": details if has_cached else None,
        "completion_tokens_details": None,
    }


def usage_final(usage: Usage, has_cached: bool) -> dict[str, object]:
    """Return vLLM's usage object of a stream's last chunk, which leaves out what is null."""
    out: dict[str, object] = {
        "prompt_tokens": usage.prompt,
        "total_tokens": usage.prompt + usage.completion,
        "completion_tokens": usage.completion,
    }
    if has_cached:
        out["prompt_tokens_details"] = {"cached_tokens": usage.cached, "created_cache_tokens": 0}
    return out


def usage_running(prompt: int, completion: int) -> dict[str, object]:
    """Return vLLM's usage object of `continuous_usage_stats`, in every chunk."""
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "completion_tokens_details": None,
    }


def data_event(payload: object) -> bytes:
    """Return an unnamed event, as the OpenAI completion APIs send it."""
    return b"data: %b\n\n" % msgspec.json.encode(payload)


def named_event(name: str, payload: object) -> bytes:
    """Return a named event, as the Responses and Anthropic APIs send it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(payload))
