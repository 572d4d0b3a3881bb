"""GGUF files give what the same values in another form give, and what transformers computes from them."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator

import gguf_files as files
import jax
import numpy as np
import pytest
from gguf import GGUFReader, dequantize
from test_hf_golden import logits_at

import kvjax
from kvjax.models import gguf_file, hf
from kvjax.models.hf_table import table
from kvjax.models.spec import LongRope
from kvjax.plan import _arguments as planning
from kvjax.weights import fingerprint

FOLDERS = (
    "llama3",
    "llama_tied",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3_long",
    "phi4_mini",
)
# What the format has no key for, and what a file says in other words.
UNSAID = {
    **dict.fromkeys(("llama3", "phi3_long", "phi4_mini"), {"rope"}),
    "qwen2": {"eos"},
    "gemma2": {"query_pre_attn_scalar"},
    "gemma3": {"query_pre_attn_scalar"},
}


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(files.Path(__file__).parents[1] / "golden" / "gguf.npz"))


@pytest.mark.parametrize("arch", files.ARCHITECTURES)
def test_logits_are_those_of_transformers(arch, golden, tmp_path):
    """Of a file whose matrices are quantised in every way that is read."""
    model = kvjax.load(files.tiny(tmp_path / "tiny.gguf", arch), dtype="float32")
    tokens, positions, wanted = (golden[f"{arch}/{part}"] for part in ("tokens", "positions", "logits"))
    for row in range(2):
        spec = model.spec.at(int(positions[row].max()) + 1)
        found = logits_at(spec, model.params, tokens[[row]], positions[[row]])
        print(f"{arch}: largest difference {np.abs(found[0] - wanted[row]).max():.1e}")
        np.testing.assert_allclose(found[0], wanted[row], atol=2e-4)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_is_the_folder_it_was_made_of(name, golden_folder, tmp_path):
    folder = golden_folder(name)
    model = kvjax.load(files.of_folder(folder, tmp_path / "model.gguf"), dtype="float32")
    wanted = kvjax.load(folder, dtype="float32")
    said = {field.name for field in dataclasses.fields(model.spec)} - UNSAID.get(name, set())
    assert {key: getattr(model.spec, key) for key in said} == {key: getattr(wanted.spec, key) for key in said}
    for context in (8, 1024):  # factors are float32
        ropes = [one.spec.rope.at(context) for one in (model, wanted)]
        rounded, exact = (rope.frequencies(wanted.spec.head_dim) for rope in ropes)
        np.testing.assert_allclose(rounded, exact, rtol=1e-6)
        np.testing.assert_allclose(ropes[0].amplitude, ropes[1].amplitude, rtol=1e-6)
    # A scale plus one has fewer digits left than the scale.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=3e-7), model.params, wanted.params
    )
    assert fingerprint(model) == fingerprint(wanted)


def test_rope_factors_of_llama_3_are_its_rule_or_themselves(golden_folder, tmp_path):
    real = kvjax.load(files.tiny(tmp_path / "real.gguf", "llama")).spec.rope
    assert (real.scaling.factor, real.scaling.original_max_position_embeddings) == (8.0, 8192)
    folder = golden_folder("llama3")
    other = kvjax.load(files.of_folder(folder, tmp_path / "other.gguf")).spec.rope
    assert isinstance(other.scaling, LongRope)


@pytest.mark.parametrize("kind", gguf_file.KINDS)
def test_every_quantisation_is_read_as_the_package_reads_it(kind, tmp_path):
    """In pieces of a few rows, straight to bfloat16; some of them also as slices."""
    rng = np.random.default_rng(0)
    down = files.k_quant(rng, kind, files.HIDDEN)
    whole = files.tiny(tmp_path / "tiny.gguf", "qwen2", **{"blk.1.ffn_down.weight": down})
    (stored,) = [t for t in GGUFReader(whole).tensors if t.name == "blk.1.ffn_down.weight"]
    assert stored.tensor_type.name == kind
    wanted = dequantize(stored.data, stored.tensor_type).reshape(files.HIDDEN, files.MLP)
    model = kvjax.load(whole, dtype="float32")
    np.testing.assert_array_equal(model.params["layers"][1]["w_down"], wanted)
    header = gguf_file.read_header(whole)
    tensors = gguf_file.GgufWeights(header, model.spec, "bfloat16")
    part = tensors.slices("model.layers.1.mlp.down_proj.weight")[10:50, 32:96]
    np.testing.assert_array_equal(part, wanted[10:50, 32:96].astype("bfloat16"))


def test_pieces_change_nothing(monkeypatch, tmp_path):
    whole = kvjax.load(files.tiny(tmp_path / "tiny.gguf", "llama"))
    monkeypatch.setattr(gguf_file, "_PIECE", 3 * files.HIDDEN)  # less than a head, so whole heads
    pieces = kvjax.load(tmp_path / "tiny.gguf")
    jax.tree.map(np.testing.assert_array_equal, whole.params, pieces.params)


def test_weights_are_bfloat16_unless_asked_otherwise(tmp_path):
    file = files.tiny(tmp_path / "tiny.gguf", "qwen3")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(kvjax.load(file).params)} == {"bfloat16"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(kvjax.load(str(file), "float16").params)} == {
        "float16"
    }
    assert planning.hf.read_spec(file) == (kvjax.load(file).spec, "bfloat16")


@pytest.mark.parametrize("arch", ["llama", "phi3"])
def test_devices_of_a_mesh_read_their_parts(arch, tmp_path):
    """Halves of every tensor, along each dimension that a mesh may cut."""
    file = files.tiny(tmp_path / "tiny.gguf", arch)
    model, header = kvjax.load(file), gguf_file.read_header(file)
    tensors = gguf_file.GgufWeights(header, model.spec, "bfloat16")
    for entry in table(model.spec):
        for at, (path, shape) in enumerate(zip(entry.paths, entry.shapes)):
            leaf = functools.reduce(operator.getitem, path, model.params)
            for axis in (group[0] for group in entry._groups(len(shape))):  # heads stay whole
                half = [slice(0, size) for size in shape]
                half[axis] = slice(shape[axis] // 2, shape[axis])
                part = entry.part(tensors.slices(entry.name), at, tuple(half))
                np.testing.assert_array_equal(part, np.asarray(leaf)[tuple(half)])


def test_scales_of_the_27b_gemmas(tmp_path):
    """Their scores are divided by sqrt(D / N), which llama.cpp knows by the number of layers."""
    keys = files.sizes("gemma2", 46)
    row = np.ones((1, files.HIDDEN), np.float32)
    blocks = {f"blk.{layer}.attn_norm.weight": row[0] for layer in range(46)}
    file = files.write(tmp_path / "27b.gguf", "gemma2", keys, {"token_embd.weight": row, **blocks})
    assert hf.read_spec(file)[0].query_pre_attn_scalar == files.HIDDEN // files.HEADS


def test_text_and_answers_come_from_the_file(tmp_path):
    model = kvjax.load(files.tiny(tmp_path / "tiny.gguf", "qwen3"))
    assert model.folder == tmp_path / "tiny.gguf"
    assert model.text.eos == model.spec.eos == (1,)
    assert model.text.bos is None
    ids = [3, 5, 8]
    run = kvjax.generate(model, kvjax.policy("window(4) + sinks(1)"), [ids], max_new_tokens=4)
    assert len(run.tokens[0]) == 4


def test_a_file_is_saved_as_a_folder_with_its_tokenizer(tmp_path):
    keys = files.byte_level("qwen2", **{"add_bos_token": True})
    file = files.tiny(
        tmp_path / "tiny.gguf", "qwen3", keys | {"tokenizer.chat_template": "{{ bos_token }}"}, vocab=300
    )
    model = kvjax.load(file)
    hf.save(tmp_path / "out", model.spec, model.params, tokenizer=model.folder)
    saved = kvjax.load(tmp_path / "out")
    assert saved.spec == model.spec
    assert model.text.template == "{{ bos_token }}"
    jax.tree.map(np.testing.assert_array_equal, saved.params, model.params)
    line = "the Ⅷ cafe\u0301s, isn't it?\n\n  <s> 12"
    assert saved.text.encode(line) == model.text.encode(line)
    assert saved.text.encode(line)[0] == 0
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ bos_token }}"
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")


# --- packages --------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts a distribution ``tiny-model`` with the module ``tiny_model`` on the path."""

    def put(*names: str, listed: bool = True, module: str = "tiny_model") -> files.Path:
        site = tmp_path / "site"
        package, info = site / module, site / "tiny_model-1.0.dist-info"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise SystemExit('imported')\n")
        for name in names:
            files.tiny(package / name, "qwen2")
        if listed:
            info.mkdir()
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
            (info / "RECORD").write_text("".join(f"{module}/{name},,\n" for name in ("__init__.py", *names)))
        monkeypatch.syspath_prepend(str(site))
        return package

    return put


@pytest.mark.parametrize("word", ["tiny_model", "tiny-model"])
@pytest.mark.parametrize("listed", [True, False])
def test_the_file_in_a_package_is_found_without_importing_it(word, listed, installed):
    package = installed("q8.gguf", listed=listed)
    model = kvjax.load(f"package:{word}")
    assert model.folder == package / "q8.gguf"
    assert model.name == f"package:{word}"
    assert fingerprint(model) == fingerprint(kvjax.load(package / "q8.gguf"))


def test_a_distribution_may_have_another_name_than_its_module(installed):
    package = installed("q8.gguf", module="weights_of_tiny")
    assert kvjax.load("package:tiny-model").folder == package / "q8.gguf"


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_a_package_needs_one_file(names, installed):
    package = installed(*names)
    with pytest.raises(
        hf.ModelError, match=f"package with one GGUF file, and this one has {len(names)}"
    ) as caught:
        kvjax.load("package:tiny_model")
    assert all(str(package / name) in str(caught.value) for name in names)


@pytest.mark.parametrize("word", ["no_such_package", "no.such", "a/b", ""])
def test_a_package_that_is_not_installed(word):
    with pytest.raises(hf.ModelError, match="finds no such package"):
        kvjax.load(f"package:{word}")
