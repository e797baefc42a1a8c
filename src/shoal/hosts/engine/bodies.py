"""Request bodies as clients send them, one struct per API; unknown fields are ignored, as vLLM does.

Owns the reading only: what a field means for the engine is `planning`.
"""

from typing import TypeVar

import msgspec

from shoal.hosts.engine.errors import unreadable
from shoal.hosts.engine.tokens import Turn

BodyT = TypeVar("BodyT")


class StreamOptions(msgspec.Struct):
    """`stream_options` of the OpenAI APIs."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(msgspec.Struct, kw_only=True):
    """Fields that every generating API shares."""

    model: str | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = 0
    cache_salt: str | None = None
    priority: int | None = 0
    return_token_ids: bool | None = False


class ChatBody(Sampling, kw_only=True):
    """/v1/chat/completions."""

    messages: list[Turn]
    max_completion_tokens: int | None = None
    tools: msgspec.Raw = msgspec.Raw()
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()
    add_generation_prompt: bool = True


class CompletionBody(Sampling, kw_only=True):
    """/v1/completions.  prompt: text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = False


class ResponsesBody(Sampling, kw_only=True):
    """/v1/responses.  input: text or a list of items."""

    input: str | list[msgspec.Raw]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: msgspec.Raw = msgspec.Raw()
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None


class InputItem(msgspec.Struct):
    """An item of a Responses input; `rest` of it counts by its raw bytes."""

    role: str | None = None
    content: str | list[msgspec.Raw] | None = None


class MessagesBody(Sampling, kw_only=True):
    """/v1/messages; Anthropic wants max_tokens."""

    messages: list[Turn]
    max_tokens: int
    system: str | list[msgspec.Raw] | None = None
    tools: msgspec.Raw = msgspec.Raw()


class CountBody(MessagesBody, kw_only=True):
    """/v1/messages/count_tokens: a messages body that needs no limit."""

    max_tokens: int = 1


class SamplingParams(msgspec.Struct):
    """`sampling_params` of /inference/v1/generate."""

    n: int | None = 1
    max_tokens: int | None = 16
    min_tokens: int | None = 0


class GenerateBody(Sampling, kw_only=True):
    """/inference/v1/generate: tokens in, tokens out."""

    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str | None = None


class PoolingBody(msgspec.Struct, kw_only=True):
    """/v1/embeddings and /pooling."""

    model: str | None = None
    input: str | list[str | int | list[int]] | None = None
    messages: list[Turn] | None = None
    encoding_format: str | None = "float"
    dimensions: int | None = None
    cache_salt: str | None = None
    priority: int | None = 0


class ScoreBody(msgspec.Struct, kw_only=True):
    """/score: text_1 against text_2; newer clients call them queries and documents."""

    model: str | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    priority: int | None = 0


class RerankBody(msgspec.Struct, kw_only=True):
    """/v1/rerank."""

    query: str
    documents: list[str]
    model: str | None = None
    top_n: int | None = 0
    priority: int | None = 0


class TokenizeBody(msgspec.Struct, kw_only=True):
    """/tokenize, of a prompt or of messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Turn] | None = None
    tools: msgspec.Raw = msgspec.Raw()
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """/detokenize."""

    tokens: list[int]
    model: str | None = None


class AdapterBody(msgspec.Struct, kw_only=True):
    """/v1/load_lora_adapter and /v1/unload_lora_adapter."""

    lora_name: str
    lora_path: str = ""
    load_inplace: bool = False


class AbortBody(msgspec.Struct, kw_only=True):
    """/abort_requests."""

    request_ids: list[str]


class AbortOneBody(msgspec.Struct, kw_only=True):
    """SGLang's /abort_request: all requests whose id begins with `rid`."""

    rid: str = ""
    abort_all: bool = False


class PauseGenerationBody(msgspec.Struct, kw_only=True):
    """SGLang's /pause_generation."""

    mode: str = "abort"


class WeightVersionBody(msgspec.Struct, kw_only=True):
    """/update_weight_version; SGLang says `new_version`."""

    weight_version: str | None = None
    new_version: str | None = None


def read(body: bytes, kind: type[BodyT]) -> BodyT:
    """Return the body as `kind`.  Raises ApiError 400 in vLLM's words."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise unreadable(error, body) from None
    except RecursionError:
        raise unreadable(msgspec.DecodeError("JSON is nested too deep (byte 0)"), body) from None
    except UnicodeDecodeError:
        raise unreadable(msgspec.DecodeError("Invalid UTF-8 (byte 0)"), body) from None
