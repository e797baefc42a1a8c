"""What exact tokens of a growing conversation cost, with a tokenizer and a template of a model's own."""

import json
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from bench.bars.registry import Figure, bar
from shoal.hosts.tokens.keys import make_keys
from shoal.hosts.tokens.local import LocalTokenizer
from shoal.hosts.tokens.prompts import read_prompt
from shoal.pool import Api
from shoal.prefix.tokens import TokenHasher

CONVERSATION_TOKENS = 50_000
TURN_TOKENS = 500
_TURNS = 20
_SPECIAL = ["<|im_start|>", "<|im_end|>"]
# The shape of the templates that most open models have: a loop over messages, tools, and the arguments of calls.
_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + content.strip('\\n') }}
        {%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def _model(path: Path) -> list[str]:
    """Write a model directory; returns the words that it was made of."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=16_384,
        special_tokens=_SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train([str(file) for file in files], trainer)
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": _TEMPLATE}))
    return " ".join(file.read_text(errors="replace") for file in files).split()


def _turns(words: list[str], plain: Tokenizer) -> Iterator[dict[str, Any]]:
    """Messages of about half a turn each, for ever."""
    random = np.random.default_rng(5)
    sample = plain.encode(" ".join(words[:4000]), add_special_tokens=False)
    count = int(4000 / len(sample.ids) * TURN_TOKENS / 2)
    roles = ("user", "assistant")
    number = 0
    while True:
        yield {"role": roles[number % 2], "content": " ".join(random.choice(words, count).tolist())}
        number += 1


@bar(
    "tokens.next-turn",
    "CPU for the exact tokens and keys of the next turn of a conversation of 50,000 tokens",
    unit="ms",
    at_most=5,
    part=3,
)
def _next_turn(scale: float) -> Figure:
    with tempfile.TemporaryDirectory(prefix="shoal-tokens-") as root:
        words = _model(Path(root))
        tokenizer, hasher = LocalTokenizer(Path(root), 64 << 20, 7), TokenHasher(7)
        turns = _turns(words, Tokenizer.from_file(str(Path(root) / "tokenizer.json")))
    messages = [next(turns) for _ in range(CONVERSATION_TOKENS // TURN_TOKENS * 2)]

    def fetch() -> tuple[float, int]:
        body = json.dumps({"model": "m", "messages": messages}).encode()
        began = time.thread_time()
        (ids,) = tokenizer.tokenise(read_prompt(Api.CHAT, body))
        make_keys(hasher, ids, model="m", adapter="", salt="", block_sizes=(16,))
        return (time.thread_time() - began) * 1e3, len(ids) // 4

    cold_ms, tokens = fetch()
    spent = []
    for _ in range(max(3, int(_TURNS * scale))):
        messages += [next(turns), next(turns)]
        spent.append(fetch()[0])
    details = {
        "first_ms": round(cold_ms, 1),
        "tokens": tokens,
        "turns_ms": [round(each, 2) for each in spent],
        "memory_bytes": tokenizer.used_bytes,
    }
    return Figure(value=float(np.median(spent)), details=details)
