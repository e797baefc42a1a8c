"""Do we tokenise as a running engine does?  Asks it for the ids of the prompts of a few typical requests."""

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.pool import Api

TOOL = {"type": "function", "function": {"name": "look", "description": "at it", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}
HISTORY = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": [{"type": "text", "text": "what is this?"}, {"type": "text", "text": "  and that?"}]},
    {"role": "assistant", "content": "hm <|im_end|> 你好 \n"},
    {"role": "user", "content": "go on"},
]
REQUESTS: list[tuple[Api, str, dict[str, Any]]] = [
    (Api.CHAT, "/v1/chat/completions", {"messages": HISTORY}),
    (Api.CHAT, "/v1/chat/completions", {"messages": HISTORY[:1] + HISTORY[1:2] * 30}),
    (Api.CHAT, "/v1/chat/completions", {"messages": HISTORY, "add_generation_prompt": False}),
    (Api.COMPLETIONS, "/v1/completions", {"prompt": "def main():\n    return 'é'\n"}),
    (Api.COMPLETIONS, "/v1/completions", {"prompt": [5, 6, 7, 8]}),
]


def differing(url: str, model: str, tokenise: Callable[[Api, bytes], list[bytes]]) -> list[str]:
    """Return what differs, one line per request that does; none when all ids are the same.

    url: of the engine.  tokenise: API and body -> the ids of each prompt, little-endian uint32.
    """
    found = []
    for api, path, fields in REQUESTS:
        body = json.dumps({"model": model, "max_tokens": 1, "return_token_ids": True, **fields}).encode()
        request = urllib.request.Request(url + path, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            told = json.loads(answer.read())
        theirs = told["choices"][0]["prompt_token_ids"] if api is Api.COMPLETIONS else told["prompt_token_ids"]
        ours = np.frombuffer(tokenise(api, body)[0], "<u4").tolist()
        if ours != theirs:
            found.append(f"{path} {str(fields)[:60]}: {len(ours)} tokens, the engine has {len(theirs)}")
    return found
