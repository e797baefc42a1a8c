"""Bytes to nouns and back, pure: requests, answers, event streams, metrics pages, model lists.

Here is everything that knows the formats of OpenAI, Anthropic, vLLM and SGLang; past this room there are only typed
values.  Sockets and protobuf belong to `hosts`, hashing of prompts to `prefix`, decisions to `routing`.
"""

from shoal.wire.decoding import Decoded, decode
from shoal.wire.engine_metrics import read_signals
from shoal.wire.errors import answer, refusal_of
from shoal.wire.limits import Limits
from shoal.wire.models import near_names, parse_models, render_model, render_models
from shoal.wire.paths import api_of
from shoal.wire.rewriting import rewrite
from shoal.wire.sse import SseSplitter
from shoal.wire.usage import Usage, UsageMeter

__all__ = [
    "Decoded",
    "Limits",
    "SseSplitter",
    "Usage",
    "UsageMeter",
    "answer",
    "api_of",
    "decode",
    "near_names",
    "parse_models",
    "read_signals",
    "refusal_of",
    "render_model",
    "render_models",
    "rewrite",
]
