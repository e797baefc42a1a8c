"""The handlers that only read a prompt: embeddings, pooling, scores, ranks, and the tokeniser."""

from aiohttp import web

from shoal.hosts.engine import pooling
from shoal.hosts.engine.bodies import DetokenizeBody, PoolingBody, RerankBody, ScoreBody, TokenizeBody, read
from shoal.hosts.engine.context import Call, Context
from shoal.hosts.engine.errors import ApiError
from shoal.hosts.engine.generation import Generation
from shoal.hosts.engine.planning import prompts_of, token_ids
from shoal.hosts.engine.streams import WholeAnswer
from shoal.hosts.engine.tokens import chat, decode, encode, ids, pieces


async def embeddings(context: Context, call: Call) -> web.StreamResponse:
    """POST /v1/embeddings."""
    return await _vectors(context, call, is_pooling=False)


async def pool(context: Context, call: Call) -> web.StreamResponse:
    """POST /pooling."""
    return await _vectors(context, call, is_pooling=True)


async def score(context: Context, call: Call) -> web.StreamResponse:
    """POST /score."""
    body = read(call.body, ScoreBody)
    model, adapter = context.catalog.resolve(body.model)
    generations = await _prefill(context, call, pooling.pairs(body), adapter, None, body.priority)
    return call.respond(pooling.scores(context.answer(call, model), generations))


async def rerank(context: Context, call: Call) -> web.StreamResponse:
    """POST /v1/rerank."""
    body = read(call.body, RerankBody)
    model, adapter = context.catalog.resolve(body.model)
    prompts = pooling.pairs(ScoreBody(text_1=body.query, text_2=body.documents))
    generations = await _prefill(context, call, prompts, adapter, None, body.priority)
    return call.respond(pooling.ranks(context.answer(call, model), body, generations))


async def tokenize(context: Context, call: Call) -> web.StreamResponse:
    """POST /tokenize."""
    body = read(call.body, TokenizeBody)
    context.catalog.resolve(body.model)
    if body.messages is not None:
        prompt = chat(
            body.messages, (body.tools, body.chat_template_kwargs), has_generation_prompt=body.add_generation_prompt
        )
    else:
        prompt = encode(body.prompt or "")
    numbers = ids(prompt)
    return call.respond_json(
        {
            "count": len(numbers),
            "max_model_len": context.planner.max_model_len,
            "tokens": numbers,
            "token_strs": pieces(prompt) if body.return_token_strs else None,
        }
    )


async def detokenize(context: Context, call: Call) -> web.StreamResponse:
    """POST /detokenize."""
    body = read(call.body, DetokenizeBody)
    context.catalog.resolve(body.model)
    return call.respond_json({"prompt": decode(token_ids(body.tokens, "tokens"))})


async def _vectors(context: Context, call: Call, *, is_pooling: bool) -> web.StreamResponse:
    body = read(call.body, PoolingBody)
    model, adapter = context.catalog.resolve(body.model)
    prompts = [chat(body.messages)] if body.messages else prompts_of(body.input, "input")
    generations = await _prefill(context, call, prompts, adapter, body.cache_salt, body.priority)
    return call.respond(pooling.embeddings(context.answer(call, model), body, generations, is_pooling=is_pooling))


async def _prefill(
    context: Context, call: Call, prompts: list[bytes], adapter: str, cache_salt: str | None, priority: int | None
) -> list[Generation]:
    generations = context.planner.prefills(call.answer_id, prompts)
    await context.run(WholeAnswer(len(generations)), generations, adapter, cache_salt, priority, call.rank)
    if any(generation.is_aborted for generation in generations):
        raise ApiError(500, "The request was aborted.", "InternalServerError")
    return generations
