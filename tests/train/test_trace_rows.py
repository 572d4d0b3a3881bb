"""Sequences for traces, as a model's own tokenizer writes them."""

from __future__ import annotations

import pytest

import kvjax
from kvjax.text import Text
from train import trace_rows
from train.ranker import settings
from train.text import BOS as EMBEDDED_BOS


@pytest.mark.parametrize("begins", [True, False])
def test_sequences_are_written_as_the_models_tokenizer_writes_them(
    tmp_path, tiny_folder, monkeypatch, begins
):
    """One whose own template adds BOS and EOS to each text, for a model with a BOS and one without."""
    from tokenizers import processors

    monkeypatch.setenv("KVJAX_DATA", "/nowhere")
    model = kvjax.load(tiny_folder)
    tokenizer, bos = model.text.tokenizer, model.text.bos
    assert bos is not None
    ends = tokenizer.token_to_id("<eos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", bos), ("<eos>", ends)]
    )
    written = Text(tokenizer, bos=bos if begins else None)
    tree = {
        "name": "tiny",
        "seed": 0,
        "folder": str(tmp_path / "run"),
        "model": {"source": str(tiny_folder)},
        "traces": {
            "folder": str(tmp_path / "traces"),
            "sequences": 10,
            "held": 3,
            "lengths": [1200, 1600],
            "shares": [1, 1],
            "data": {"kind": "rows", "mix": {"ruler": 1, "books": 1, "facts": 2, "repeats": 1}},
        },
        "plan": {"steps": 1},
    }
    drawn = trace_rows.sequences(settings.parse(tree), written)
    seen, firsts = set(), set()
    for index in range(13):
        task, ids = drawn.draw(index)
        seen.add(task)
        firsts.add(int(ids[0]))
        assert len(ids) == drawn.length(index)
        assert (ids == bos).sum() == int(begins)
        assert (ids[0] == bos) == begins
        assert ends not in ids
        # Nothing but its beginning depends on whether there is a BOS.
        said = written.decode(ids.tolist())
        assert said.isascii()
        assert len(said) == len(ids) - begins
    # Whatever stands first where there is no BOS, it is not the embedded model's, which rows are drawn with.
    assert firsts == {bos} if begins else EMBEDDED_BOS not in firsts
    assert {"books", "facts", "repeats"} < seen
    assert seen - {"books", "facts", "repeats", "ruler/text"}
