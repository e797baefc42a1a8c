"""A tiny model directory: a byte-level BPE trained on a few lines, special tokens, a chat template."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{%- if tools %}<|im_start|>system\n{%- for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- if message.tool_calls %}{% for call in message.tool_calls %}\n{{ call.function.name }}"
    "({{ call.function.arguments | tojson }}){% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = (
    "the quick brown fox jumps over the lazy dog and runs away from the thing that it did not want to see again\n"
    "def main():\n    return sum(range(10))\nclass Thing:\n    pass\n"
)


def tokenizer(*more: AddedToken, special: tuple[str, ...] = SPECIAL) -> Tokenizer:
    """A trained tokenizer, with further added tokens."""
    made = Tokenizer.from_str(_trained(special))
    made.add_tokens(list(more))
    return made


@cache
def _trained(special: tuple[str, ...]) -> str:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(special),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([TEXT] * 3, trainer)
    text: str = made.to_str()
    return text


def with_bos(made: Tokenizer, token: str = "<|bos|>") -> Tokenizer:
    """Have the tokenizer put a token before each text."""
    made.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, made.token_to_id(token))]
    )
    return made


def write(path: Path, made: Tokenizer | None = None, **config: Any) -> Path:
    """Write a model directory."""
    path.mkdir(parents=True, exist_ok=True)
    (made or with_bos(tokenizer())).save(str(path / "tokenizer.json"))
    fields = {"bos_token": "<|bos|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(fields))
    return path
