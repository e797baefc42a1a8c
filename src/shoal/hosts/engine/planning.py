"""From a request's fields to the generations the engine works on: limits, prompts, answers, block hashes.

Owns the checks that vLLM makes before an answer begins; everything refused here is refused before the head.
"""

import itertools
from collections.abc import Iterable

import msgspec
import xxhash

from shoal.engine import Submitted, hash_blocks
from shoal.hosts.engine.answers import Answers
from shoal.hosts.engine.bodies import InputItem, ResponsesBody, Sampling
from shoal.hosts.engine.errors import ApiError, bad_request
from shoal.hosts.engine.generation import Generation
from shoal.hosts.engine.tokens import TOKEN_BYTES, Turn, chat, encode, pack


class Planner:
    """Makes generations for one engine."""

    __slots__ = ("_answers", "_has_tokens", "_hash_seed", "_numbers", "_seed", "block_size", "max_model_len")

    def __init__(
        self,
        answers: Answers,
        block_size: int,
        max_model_len: int,
        seed: int,
        *,
        hash_seed: int = 0,
        has_tokens: bool = False,
    ) -> None:
        self._answers = answers
        self.block_size = block_size
        self._has_tokens = has_tokens
        self._hash_seed = hash_seed
        self._numbers = itertools.count(1)
        self._seed = seed
        self.max_model_len = max_model_len

    @property
    def tape(self) -> bytes:
        """The words that answers are made of."""
        return self._answers.tape

    def fresh_id(self) -> str:
        """Return 16 hex digits that this engine has not used."""
        return f"{xxhash.xxh3_64_intdigest(str(next(self._numbers)).encode(), self._seed):016x}"

    def limit(
        self, asked: int | None, prompt: bytes, *, name: str = "max_tokens", default: int | None = None
    ) -> int | None:
        """Return the token limit of an answer, None when neither the client nor `default` sets one.

        Raises ApiError 400 where vLLM does: limit out of range, prompt too long, or both together too long.
        """
        tokens = len(prompt) // TOKEN_BYTES
        longest = self.max_model_len
        if asked is not None and asked < 1:
            raise bad_request(f"{name} must be at least 1, got {asked}. (parameter={name}, value={asked})", name)
        if asked is not None and asked > longest:
            message = (
                f"{name}={asked} cannot be greater than max_model_len={longest}. Please request fewer output tokens. "
                f"(parameter={name}, value={asked})"
            )
            raise bad_request(message, name)
        if tokens >= longest:
            raise self.too_long(tokens)
        if asked is not None and tokens + asked > longest:
            message = (
                f"You passed {tokens} input tokens and requested {asked} output tokens. However, the model's context "
                f"length is only {longest} tokens, resulting in a maximum input length of {longest - asked} tokens. "
                f"Please reduce the length of the input prompt. (parameter=input_tokens, value={tokens})"
            )
            raise bad_request(message, "input_tokens")
        if asked is None and default is not None:
            return min(default, longest - tokens)
        return asked

    def too_long(self, tokens: int) -> ApiError:
        """The refusal of a prompt that leaves no room for an answer."""
        message = (
            f"This model's maximum context length is {self.max_model_len} tokens. However, your request has {tokens} "
            f"input tokens. Please reduce the length of the input messages. (parameter=input_tokens, value={tokens})"
        )
        return bad_request(message, "input_tokens")

    def generations(
        self, request_id: str, prompts: list[bytes], body: Sampling, limit: int | None, n: int | None = None
    ) -> list[Generation]:
        """Return the generations of a request: each prompt times `n`, in order of choices.

        With a limit the answer has exactly that many tokens, as from a model that does not stop by itself; without
        one it has the length that its text decides.
        """
        samples = (body.n if n is None else n) or 1
        if samples < 1:
            raise bad_request(f"n must be at least 1, got {samples}.", "n")
        out: list[Generation] = []
        number = next(self._numbers)
        for prompt in prompts:
            if not prompt:
                raise bad_request("The decoder prompt cannot be empty.", "prompt")
            room = self.max_model_len - len(prompt) // TOKEN_BYTES
            for sample in range(samples):
                offset = self._answers.offset(prompt, sample)
                count = limit or min(max(self._answers.natural_length(offset), body.min_tokens or 0), room)
                index = len(out)
                answer = self._answers.packed(offset, count)
                out.append(Generation(f"{request_id}-{number}-{index}", index, prompt, answer, limit or room))
        return out

    def prefills(self, request_id: str, prompts: Iterable[bytes]) -> list[Generation]:
        """Return generations that only read their prompt.  Raises ApiError 400 for a prompt that is too long."""
        number = next(self._numbers)
        out = []
        for index, prompt in enumerate(prompts):
            tokens = len(prompt) // TOKEN_BYTES
            if tokens > self.max_model_len:
                raise self.too_long(tokens)
            if not tokens:
                raise bad_request("The decoder prompt cannot be empty.", "input")
            out.append(Generation(f"{request_id}-{number}-{index}", index, prompt, b"", 0))
        return out

    def event(
        self, generation: Generation, adapter: str, identity: str, cache_salt: str | None, priority: int | None
    ) -> Submitted:
        """Return what the engine is told of a generation.  identity: of the adapter's content."""
        salt = cache_salt or ""
        tokens = generation.prompt + generation.answer
        return Submitted(
            request_id=generation.id,
            prompt_tokens=generation.prompt_tokens,
            output_tokens=generation.output_tokens,
            max_tokens=generation.limit,
            block_hashes=hash_blocks(tokens, self.block_size, f"{identity}\0{salt}", self._hash_seed),
            adapter=adapter,
            priority=priority or 0,
            tokens=tokens if self._has_tokens else b"",
            cache_salt=salt,
        )


def prompts_of(value: str | list[str | int | list[int]] | None, field: str) -> list[bytes]:
    """Return the packed prompts of an OpenAI `prompt` or `input`: text, texts, token ids, lists of token ids."""
    if value is None or value == []:
        raise bad_request(f"Either {field} or messages must be provided and non-empty.", field)
    if isinstance(value, str):
        return [encode(value)]
    numbers = [each for each in value if isinstance(each, int)]
    if numbers:
        if len(numbers) != len(value):
            raise bad_request(f"{field} must not mix token ids with texts.", field)
        return [token_ids(numbers, field)]
    return [
        encode(each) if isinstance(each, str) else token_ids(each, field) for each in value if not isinstance(each, int)
    ]


def token_ids(numbers: list[int], field: str) -> bytes:
    """Return token ids packed.  Raises ApiError 400 for one that is no token."""
    try:
        return pack(numbers)
    except (OverflowError, ValueError):
        raise bad_request(f"Token id {max(numbers, key=abs)} is out of vocabulary", field) from None


def responses_prompt(body: ResponsesBody) -> bytes:
    """Return the packed prompt of a Responses request."""
    turns = [Turn(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        turns.append(Turn(role="user", content=body.input))
    else:
        for raw in body.input:
            item = msgspec.json.decode(raw, type=InputItem)
            turns.append(
                Turn(role=item.role, content=item.content)
                if item.role
                else Turn(role="tool", content=[msgspec.Raw(raw)])
            )
    return chat(turns, (body.tools,))
