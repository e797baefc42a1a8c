"""Exact tokens of the embedded engine: its own tokeniser, called in this process."""

import msgspec

from shoal.hosts.engine.bodies import ChatBody, CompletionBody, GenerateBody, MessagesBody, ResponsesBody
from shoal.hosts.engine.errors import ApiError
from shoal.hosts.engine.planning import prompts_of, responses_prompt, token_ids
from shoal.hosts.engine.tokens import Turn, chat
from shoal.hosts.tokens.prompts import NoTokens, salt_of
from shoal.kernel import UNREADABLE
from shoal.pool import Api


def tokenise(api: Api, body: bytes) -> tuple[list[bytes], str]:
    """Return the ids of each prompt of a body, little-endian uint32, and its cache salt.  Raises NoTokens."""
    try:
        match api:
            case Api.CHAT:
                asked = msgspec.json.decode(body, type=ChatBody)
                shape = (asked.tools, asked.chat_template_kwargs)
                prompt = chat(asked.messages, shape, has_generation_prompt=asked.add_generation_prompt)
                return [prompt], salt_of(asked.cache_salt)
            case Api.COMPLETIONS:
                text = msgspec.json.decode(body, type=CompletionBody)
                return prompts_of(text.prompt, "prompt"), salt_of(text.cache_salt)
            case Api.RESPONSES:
                response = msgspec.json.decode(body, type=ResponsesBody)
                return [responses_prompt(response)], salt_of(response.cache_salt)
            case Api.MESSAGES:
                message = msgspec.json.decode(body, type=MessagesBody)
                system = [Turn(role="system", content=message.system)] if message.system else []
                return [chat([*system, *message.messages], (message.tools,))], salt_of(message.cache_salt)
            case Api.GENERATE:
                given = msgspec.json.decode(body, type=GenerateBody)
                return [token_ids(given.token_ids, "token_ids")], salt_of(given.cache_salt)
    except (ApiError, *UNREADABLE, UnicodeError):
        # The engine answers it with a 400.
        raise NoTokens("refused") from None
    raise NoTokens("unsupported")
