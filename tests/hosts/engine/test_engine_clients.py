"""The official clients against the embedded engine."""

import anthropic
import openai
import pytest

from tests.hosts.engine.engine_http import Engine, quick, run


def openai_client(engine: Engine) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=engine.url + "/v1", api_key="none", max_retries=0)


def anthropic_client(engine: Engine) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=engine.url, api_key="none", max_retries=0)


def test_the_openai_client_chats_whole_and_streamed() -> None:
    async def check(engine: Engine) -> None:
        async with openai_client(engine) as client:
            whole = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=12
            )
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 12
            assert whole.choices[0].finish_reason == "length"
            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=12,
                stream=True,
                stream_options={"include_usage": True},
            )
            text, usage = "", None
            async for chunk in stream:
                usage = chunk.usage or usage
                text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            assert text == whole.choices[0].message.content
            assert usage is not None
            assert usage.completion_tokens == 12

    run(check)


def test_the_openai_client_uses_the_other_apis() -> None:
    async def check(engine: Engine) -> None:
        async with openai_client(engine) as client:
            completion = await client.completions.create(model="tiny", prompt="x", max_tokens=4, n=2)
            assert len(completion.choices) == 2
            response = await client.responses.create(model="tiny", input="hi", max_output_tokens=4)
            assert response.output_text
            assert response.usage is not None
            assert response.usage.output_tokens == 4
            kinds = [
                event.type
                async for event in await client.responses.create(
                    model="tiny", input="hi", max_output_tokens=4, stream=True
                )
            ]
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
            vectors = await client.embeddings.create(model="tiny", input=["a", "b"])
            assert [len(item.embedding) for item in vectors.data] == [256, 256]
            transcript = await client.audio.transcriptions.create(model="tiny", file=("a.wav", b"x" * 9000))
            assert transcript.text
            assert [model.id async for model in client.models.list()] == ["tiny"]

    run(check)


def test_the_openai_client_raises_the_right_errors() -> None:
    async def check(engine: Engine) -> None:
        async with openai_client(engine) as client:
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.completions.create(model="nope", prompt="x")
            with pytest.raises(openai.BadRequestError, match="cannot be greater than max_model_len"):
                await client.completions.create(model="tiny", prompt="x", max_tokens=10**6)
            await engine.post("/faults", {"fail_rate": 1})
            with pytest.raises(openai.InternalServerError):
                await client.completions.create(model="tiny", prompt="x")
            await engine.post("/faults", {"fail_rate": 0, "cut_after": 2})
            stream = await client.completions.create(model="tiny", prompt="x", max_tokens=9, stream=True)
            with pytest.raises(openai.APIConnectionError):
                async for _ in stream:
                    pass

    run(check)


def test_the_anthropic_client_gets_messages_whole_and_streamed() -> None:
    async def check(engine: Engine) -> None:
        async with anthropic_client(engine) as client:
            whole = await client.messages.create(
                model="tiny", max_tokens=7, system="be brief", messages=[{"role": "user", "content": "hello"}]
            )
            assert whole.stop_reason == "max_tokens"
            assert whole.usage.output_tokens == 7
            async with client.messages.stream(
                model="tiny", max_tokens=7, system="be brief", messages=[{"role": "user", "content": "hello"}]
            ) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
            assert [block.text for block in whole.content if block.type == "text"] == [text]
            assert final.usage.output_tokens == 7
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(model="nope", max_tokens=1, messages=[{"role": "user", "content": "x"}])

    run(check, quick())
