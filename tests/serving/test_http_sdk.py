"""OpenAI's own client, sync and async: it understands every answer, every stream and every error."""

from __future__ import annotations

import asyncio

import pytest
from serving_client import generated, running, until

openai = pytest.importorskip("openai", reason="pip install 'kvjax[test]'")

CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(server):
    """Without a key, as the server is without one; nothing is asked twice."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


def test_texts_and_what_the_cache_held(client, tiny_folder):
    done = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=8, temperature=0, extra_body={"kv_policy": "window(16)"}
    )
    assert done.choices[0].text == generated(tiny_folder, "window(16)", "Hello", 8)[0]
    assert done.usage.model_extra["kv"]["policy"] == "window(16)"
    assert done.usage.model_extra["kv"]["tokens_seen"] == 6 + 7
    assert done._request_id.startswith("req-")


def test_chats_and_streams(client):
    whole = client.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=8, temperature=0
    )
    with client.chat.completions.create(
        model="tiny",
        messages=CHAT,
        max_completion_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *chunks, last = stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert last.choices == []
    assert last.usage.completion_tokens == 8


def test_the_model_can_be_asked_for(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_extra["max_model_len"] == 512


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"model": "gpt-4"}, "NotFoundError", "model_not_found"),
        ({"extra_body": {"kv_policy": "snapkw"}}, "BadRequestError", "invalid_policy"),
        ({"max_tokens": 5000}, "BadRequestError", "context_length_exceeded"),
        ({"top_p": 2}, "UnprocessableEntityError", "less_than_equal"),
    ],
)
def test_errors_are_the_clients_own(client, fields, kind, code):
    with pytest.raises(getattr(openai, kind)) as error:
        client.completions.create(**{"model": "tiny", "prompt": "x"} | fields)
    assert error.value.code == code
    assert error.value.body["message"] in str(error.value)


@pytest.mark.slow
def test_an_error_in_the_middle_of_a_stream_is_raised(tiny_folder):
    with running(tiny_folder) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model="tiny", prompt="Hello", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        server.service.engine.close()
        with pytest.raises(openai.APIError, match="engine"):
            list(stream)


@pytest.mark.slow
def test_keys_and_a_full_queue(tiny_folder):
    with running(tiny_folder, "--queue", "1", "--max-rows", "1", keys=("sesame",)) as server:

        def client(key: str, retries: int) -> openai.OpenAI:
            return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=retries)

        with pytest.raises(openai.AuthenticationError) as error:
            client("wrong", 0).models.list()
        assert error.value.code == "invalid_api_key"
        long = {"model": "tiny", "prompt": "Hello", "max_tokens": 400, "extra_body": {"ignore_eos": True}}
        streams = [client("sesame", 0).completions.create(**long, stream=True)]
        assert until(lambda: server.service.engine.metrics().running == 1, 300)
        streams.append(client("sesame", 0).completions.create(**long, stream=True))
        with pytest.raises(openai.RateLimitError) as full:
            client("sesame", 0).completions.create(**long)
        assert int(full.value.response.headers["retry-after"]) >= 1
        # A client that may ask again waits as long as it is told, and is served in the end.
        for stream in streams:
            stream.close()
        assert client("sesame", 5).completions.create(**long | {"max_tokens": 3}).choices[0].text


def test_async_streams_side_by_side_one_of_them_left(server, tiny_folder):
    alone = generated(tiny_folder, "full", "Hello", 12)[0]

    async def one(client: openai.AsyncOpenAI, leave: bool) -> str:
        stream = await client.completions.create(
            model="tiny", prompt="Hello", max_tokens=400 if leave else 12, temperature=0, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if leave:
                await stream.close()
                break
        return text

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, leave=at == 2) for at in range(5)))

    texts = asyncio.run(main())
    assert [text for at, text in enumerate(texts) if at != 2] == [alone] * 4
    assert until(lambda: server.service.engine.metrics().running == 0)
