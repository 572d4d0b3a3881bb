"""One chat with the real model over HTTP, by OpenAI's client: the tokens of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from real_prompts import CHATS, NEW, PLAIN

from tests.serving.serving_client import running

openai = pytest.importorskip("openai", reason="pip install 'kvjax[test]'")
pytestmark = pytest.mark.real

GOLDEN = np.load(Path(__file__).with_name("golden.npz"))


def test_a_chat_over_http(smollm2_folder, smollm2):
    first, second = (GOLDEN[f"greedy_{len(PLAIN) + i}"].tolist() for i in range(len(CHATS)))
    end = second.index(smollm2.spec.eos[0])
    with (
        running(smollm2_folder, "--dtype", "float32", "--context", "256") as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        ask = client.chat.completions.create
        long = ask(model="tiny", messages=CHATS[0], max_completion_tokens=NEW, temperature=0)
        assert long.choices[0].message.content == smollm2.text.decode(first)
        assert long.choices[0].finish_reason == "length"
        short = ask(model="tiny", messages=CHATS[1], max_completion_tokens=NEW, temperature=0)
        assert short.choices[0].message.content == smollm2.text.decode(second[:end])
        assert short.choices[0].finish_reason == "stop"
        pieces = ask(model="tiny", messages=CHATS[0], max_completion_tokens=NEW, temperature=0, stream=True)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == long.choices[0].message.content
