"""Where engines write token usage, for every API shape, as selectors of Envoy's response parsers.

Names the metadata keys that `records` reads.  Does not add them up: input and cached tokens mean
different things in different APIs.
"""

from shoal.hosts.envoy.settings import EnvoySettings
from shoal.hosts.envoy.typed import Document, extension, typed

NAMESPACE = "shoal.usage"

# OpenAI chat and completions: prompt_tokens.  Responses: input_tokens, nested one deeper in a stream.
# Anthropic: input_tokens without what was read from cache; message_start nests it in `message`.
_PATHS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("prompt", ("usage", "prompt_tokens")),
    ("completion", ("usage", "completion_tokens")),
    ("cached", ("usage", "prompt_tokens_details", "cached_tokens")),
    ("input", ("usage", "input_tokens")),
    ("output", ("usage", "output_tokens")),
    ("input_cached", ("usage", "input_tokens_details", "cached_tokens")),
    ("cache_read", ("usage", "cache_read_input_tokens")),
    ("cache_created", ("usage", "cache_creation_input_tokens")),
)
_STREAM_PATHS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("input", ("message", "usage", "input_tokens")),
    ("output", ("message", "usage", "output_tokens")),
    ("cache_read", ("message", "usage", "cache_read_input_tokens")),
    ("cache_created", ("message", "usage", "cache_creation_input_tokens")),
    ("input", ("response", "usage", "input_tokens")),
    ("output", ("response", "usage", "output_tokens")),
    ("input_cached", ("response", "usage", "input_tokens_details", "cached_tokens")),
)

# Only these answers are searched for usage when they are plain JSON: the search holds an answer back and parses it
# whole, which a file or a megabyte of embeddings should be spared.  Event streams are searched on every path.
GENERATION_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
)
USAGE_PATHS = (*GENERATION_PATHS, "/v1/rerank", "/rerank", "/v1/score", "/score")

JSON_FILTER = "envoy.filters.http.json_to_metadata"


def _rule(key: str, path: tuple[str, ...]) -> Document:
    return {
        "selectors": [{"key": step} for step in path],
        "on_present": {"metadata_namespace": NAMESPACE, "key": key, "type": "NUMBER"},
    }


def usage_filters(settings: EnvoySettings) -> list[Document]:
    """Return the filters that read usage from plain JSON answers and from event streams."""
    json_rules = {
        "rules": [_rule(key, path) for key, path in _PATHS],
        "allow_content_types_regex": {"regex": r"application/json(\s*;.*)?"},
    }
    stream_rules = [{"rule": _rule(key, path)} for key, path in _PATHS + _STREAM_PATHS]
    parser = {
        "name": "json",
        "typed_config": typed("extensions.content_parsers.json.v3.JsonContentParser", rules=stream_rules),
    }
    return [
        extension(
            JSON_FILTER,
            "extensions.filters.http.json_to_metadata.v3.JsonToMetadata",
            response_rules=json_rules,
        ),
        extension(
            "envoy.filters.http.sse_to_metadata",
            "extensions.filters.http.sse_to_metadata.v3.SseToMetadata",
            response_rules={"content_parser": parser, "max_event_size": settings.limits.max_usage_event_bytes},
        ),
    ]
