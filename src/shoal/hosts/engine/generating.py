"""The handlers that generate: chat, completions, responses, messages, token ids, audio."""

from aiohttp import web

from shoal.hosts.engine.audio import AudioShape, prompt_tokens_of, seconds_of
from shoal.hosts.engine.bodies import (
    ChatBody,
    CompletionBody,
    CountBody,
    GenerateBody,
    MessagesBody,
    ResponsesBody,
    Sampling,
    read,
)
from shoal.hosts.engine.chat import ChatShape
from shoal.hosts.engine.completions import CompletionShape
from shoal.hosts.engine.context import Call, Context
from shoal.hosts.engine.errors import bad_request
from shoal.hosts.engine.forms import read_form
from shoal.hosts.engine.generate import GenerateShape
from shoal.hosts.engine.messages import MessagesShape
from shoal.hosts.engine.planning import prompts_of, responses_prompt, token_ids
from shoal.hosts.engine.responses import ResponsesShape
from shoal.hosts.engine.tokens import TOKEN_BYTES, Turn, chat, encode

_DEFAULT_COMPLETION_TOKENS = 16


async def chat_completions(context: Context, call: Call) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    body = read(call.body, ChatBody)
    model, adapter = context.catalog.resolve(body.model)
    prompt = chat(
        body.messages, (body.tools, body.chat_template_kwargs), has_generation_prompt=body.add_generation_prompt
    )
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    limit = context.planner.limit(asked, prompt)
    generations = context.planner.generations(call.answer_id, [prompt], body, limit)
    shape = ChatShape(context.answer(call, model), body)
    return await context.generate(call, body, adapter, generations, shape)


async def completions(context: Context, call: Call) -> web.StreamResponse:
    """POST /v1/completions."""
    body = read(call.body, CompletionBody)
    model, adapter = context.catalog.resolve(body.model)
    prompts = prompts_of(body.prompt, "prompt")
    longest = max(prompts, key=len)
    limit = context.planner.limit(body.max_tokens, longest, default=_DEFAULT_COMPLETION_TOKENS)
    generations = context.planner.generations(call.answer_id, prompts, body, limit)
    shape = CompletionShape(context.answer(call, model), body)
    return await context.generate(call, body, adapter, generations, shape)


async def responses(context: Context, call: Call) -> web.StreamResponse:
    """POST /v1/responses."""
    body = read(call.body, ResponsesBody)
    model, adapter = context.catalog.resolve(body.model)
    prompt = responses_prompt(body)
    limit = context.planner.limit(body.max_output_tokens, prompt, name="max_output_tokens")
    generations = context.planner.generations(call.answer_id, [prompt], body, limit, n=1)
    shape = ResponsesShape(context.answer(call, model), body, generations[0].limit)
    return await context.generate(call, body, adapter, generations, shape)


async def messages(context: Context, call: Call) -> web.StreamResponse:
    """POST /v1/messages."""
    body = read(call.body, MessagesBody)
    model, adapter = context.catalog.resolve(body.model)
    prompt = _messages_prompt(body)
    limit = context.planner.limit(body.max_tokens, prompt)
    generations = context.planner.generations(call.answer_id, [prompt], body, limit, n=1)
    return await context.generate(call, body, adapter, generations, MessagesShape(context.answer(call, model)))


async def count_tokens(context: Context, call: Call) -> web.StreamResponse:
    """POST /v1/messages/count_tokens; `max_tokens` is not part of it."""
    body = read(call.body, CountBody)
    context.catalog.resolve(body.model)
    return call.respond_json({"input_tokens": len(_messages_prompt(body)) // TOKEN_BYTES})


async def generate(context: Context, call: Call) -> web.StreamResponse:
    """POST /inference/v1/generate."""
    body = read(call.body, GenerateBody)
    model, adapter = context.catalog.resolve(body.model)
    prompt = token_ids(body.token_ids, "token_ids")
    params = body.sampling_params
    limit = context.planner.limit(params.max_tokens, prompt)
    own_id = body.request_id or call.answer_id
    generations = context.planner.generations(own_id, [prompt], body, limit, n=params.n or 1)
    answer = context.answer(call, model)._replace(id=own_id)
    return await context.generate(call, body, adapter, generations, GenerateShape(answer, body))


async def transcriptions(context: Context, call: Call) -> web.StreamResponse:
    """POST /v1/audio/transcriptions and /v1/audio/translations."""
    form = read_form(call.body, call.request.headers.get("Content-Type", ""))
    sound = form.get("file")
    if not sound:
        raise bad_request("1 validation error:\n  {'type': 'missing', 'loc': 'body.file'}", "body.file")
    model, adapter = context.catalog.resolve(form.get("model", b"").decode(errors="replace"))
    size = prompt_tokens_of(sound) * TOKEN_BYTES
    prompt = encode("transcribe") + sound[:size].ljust(size, b"\0")
    limit = context.planner.limit(None, prompt)
    body = Sampling(stream=form.get("stream", b"").lower() in (b"true", b"1"))
    generations = context.planner.generations(call.answer_id, [prompt], body, limit)
    answer_format = form.get("response_format", b"json").decode(errors="replace")
    shape = AudioShape(context.answer(call, model), answer_format, seconds_of(sound))
    return await context.generate(call, body, adapter, generations, shape)


def _messages_prompt(body: MessagesBody) -> bytes:
    turns = [Turn(role="system", content=body.system)] if body.system else []
    return chat([*turns, *body.messages], (body.tools,))
