"""Folders in HF format: both spellings of a config, shards, round trips, what an export contains."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kvjax.models import decoder, hf, hf_files, hf_table, hf_values
from kvjax.models.spec import Llama3Scaling, Rope


def assert_same(a, b):
    assert a.spec == b.spec
    assert jax.tree.structure(a.params) == jax.tree.structure(b.params)
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def dtypes(model):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(model.params)}


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_both_spellings_of_a_stretched_rope_are_one_spec(kind, golden_folder, spoil):
    rope = json.loads((golden_folder("llama3") / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    rope[kind] = rope.pop("rope_type")
    folder = spoil("llama3", rope_parameters=..., rope_theta=theta, rope_scaling=rope)
    expected = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    )
    assert hf.load(folder).spec == hf.load(golden_folder("llama3")).spec
    assert hf.load(folder).spec.rope == Rope(theta=10_000.0, scaling=expected)


def test_both_spellings_of_a_plain_rope_are_one_spec(golden_folder, spoil):
    folder = spoil("qwen2", rope_parameters=..., rope_theta=1e6, rope_scaling=None)
    assert hf.load(folder).spec == hf.load(golden_folder("qwen2")).spec
    assert hf.load(folder).spec.rope == Rope(theta=1e6)


def test_older_qwen2_configs_name_windows_by_the_first_sliding_layer(golden_folder, spoil):
    folder = spoil("qwen2_window", layer_types=...)
    assert hf.load(folder).spec == hf.load(golden_folder("qwen2_window")).spec


def test_unused_sliding_window_is_full_attention(spoil):
    folder = spoil("qwen2_window", layer_types=..., use_sliding_window=False)
    assert hf.load(folder).spec.windows == (None, None)


def test_ids_of_generation_config_win(spoil):
    folder = spoil("qwen2", bos_token_id=9, eos_token_id=[4])
    assert (hf.load(folder).spec.bos, hf.load(folder).spec.eos) == (1, (2, 3))
    (folder / "generation_config.json").unlink()
    assert (hf.load(folder).spec.bos, hf.load(folder).spec.eos) == (9, (4,))


def test_shards_hold_what_one_file_holds(golden_folder, spoil):
    folder = spoil("llama_bf16_sharded")
    shards = sorted(folder.glob("model-*.safetensors"))
    tensors = {k: v for shard in shards for k, v in load_file(shard).items()}
    for file in [*shards, folder / "model.safetensors.index.json"]:
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    assert len(shards) == 2
    assert_same(hf.load(folder), hf.load(golden_folder("llama_bf16_sharded")))


@pytest.mark.parametrize("limit", [10**9, 20_000])
def test_save_then_load_is_exact(name, limit, golden_folder, tmp_path):
    model = hf.load(golden_folder(name))
    stored = dtypes(model).pop()
    limit = max(limit, *(leaf.nbytes for leaf in jax.tree.leaves(model.params)))  # a tensor is never cut
    hf.save(tmp_path / "out", model.spec, model.params, dtype=stored, max_shard_bytes=limit)
    assert_same(hf.load(tmp_path / "out"), model)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (limit < 10**9)
    for file in files:
        sizes = [array.nbytes for array in load_file(file).values()]
        assert sum(sizes) <= limit or len(sizes) == 1  # a tensor is never cut


def test_export_holds_the_original_tensors_by_name(name, golden_folder, tmp_path):
    model = hf.load(golden_folder(name), dtype="float32")
    hf.save(tmp_path / "out", model.spec, model.params, dtype="float32")
    originals = [load_file(file) for file in golden_folder(name).glob("*.safetensors")]
    original = {k: v for tensors in originals for k, v in tensors.items()}
    export = load_file(tmp_path / "out" / "model.safetensors")
    packed = {key for key in original if key.endswith(("_blocks", "_scales"))}
    unpacked = {key.removesuffix("_blocks") for key in packed if key.endswith("_blocks")}
    assert export.keys() - unpacked == original.keys() - packed
    for key in export.keys() - unpacked:
        array = export[key]
        np.testing.assert_array_equal(array, original[key].astype(np.float32))


def test_dtype_follows_the_argument_then_the_config_then_the_file(golden_folder, spoil):
    assert dtypes(hf.load(golden_folder("llama_bf16_sharded"))) == {"bfloat16"}
    assert dtypes(hf.load(golden_folder("llama3"), dtype="float16")) == {"float16"}
    assert dtypes(hf.load(spoil("llama3", dtype=..., torch_dtype="bfloat16"))) == {"bfloat16"}


def test_without_a_stated_dtype_the_file_decides(spoil):
    assert dtypes(hf.load(spoil("llama_bf16_sharded", dtype=...))) == {"bfloat16"}


def test_export_is_readable_by_both_generations_of_transformers(golden_folder, tmp_path):
    model = hf.load(golden_folder("llama3"))
    hf.save(tmp_path / "out", model.spec, model.params, metadata={"made_by": "a test"})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0
    assert config["rope_scaling"].items() <= config["rope_parameters"].items()
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt", "made_by": "a test"}
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


# Keys that bear on training or a runtime alone, or for which the export leaves a family's default to stand.
SILENT = {
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "initializer_range", "use_cache"),
    *("transformers_version", "pad_token_id", "pretraining_tp", "reorder_and_upcast_attn"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
    *("summary_use_proj", "add_cross_attention", "scale_attn_by_inverse_layer_idx", "scale_attn_weights"),
    *("use_bidirectional_attention", "_sliding_window_pattern", "quantization_config"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
}
UNUSED = {
    "attn_logit_softcapping": None,
    "partial_rotary_factor": 1.0,
    "max_window_layers": 28,
    "original_max_position_embeddings": 4096,
    "sliding_window": None,
    "head_dim": None,
}
"""Keys with their defaults, left out where they have no effect."""


def test_export_says_what_both_generations_of_transformers_say(name, golden_folder, tmp_path):
    """Key by key: what 5.23 and 4.56 wrote of the same model stands in the export with the same value."""
    model = hf.load(golden_folder(name), dtype="float32")
    hf.save(tmp_path / "out", model.spec, model.params, dtype="float32")
    export = json.loads((tmp_path / "out" / "config.json").read_text())
    new = json.loads((golden_folder(name) / "config.json").read_text()) | {"dtype": "float32"}
    old = json.loads((golden_folder("transformers4.json")).read_text())[name]
    for theirs in (new, old):
        other = {k: v for k, v in theirs.items() if k not in SILENT and export.get(k, ...) != v}
        rope = other.pop("rope_parameters", {})
        other |= {k: v for k, v in rope.items() if export["rope_parameters"].get(k) != v}
        assert other.items() <= UNUSED.items()


def test_params_in_other_memory_layouts_are_saved_right(golden_folder, tmp_path):
    """safetensors writes a transposed view's memory as it lies, unless told otherwise."""
    model = hf.load(golden_folder("llama3"))
    views = jax.tree.map(lambda x: np.asfortranarray(np.asarray(x)), model.params)
    hf.save(tmp_path / "out", model.spec, views, dtype="float32")
    assert_same(hf.load(tmp_path / "out"), model)


def test_tied_head_in_the_file_is_accepted_if_it_is_the_embedding(golden_folder, spoil):
    folder = spoil("llama_tied")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert_same(hf.load(folder), hf.load(golden_folder("llama_tied")))
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(hf.ModelError, match="lm_head.weight that is not the embedding"):
        hf.load(folder)


def test_windows_and_several_eos_survive_an_export(golden_folder, tmp_path):
    model = hf.load(golden_folder("qwen2_window"))
    spec = dataclasses.replace(model.spec, windows=(7, None), eos=(5, 6, 7), bos=None)
    hf.save(tmp_path / "out", spec, jax.tree.map(jnp.asarray, model.params), dtype="float32")
    assert hf.load(tmp_path / "out").spec == spec


class Asked:
    """A file's tensor that counts what it is asked for."""

    def __init__(self, file, name):
        self.slices, self.read = file.get_slice(name), 0

    def __getitem__(self, index):
        piece = self.slices[index]
        self.read += piece.size
        return piece


def test_tensors_are_read_as_they_are_and_taken_over_without_a_copy(golden_folder):
    """The sharded golden in bfloat16; jax on a CPU takes over what is placed well."""
    folder = golden_folder("llama_bf16_sharded")
    for file in hf_files.open_folder(folder, hf.read_spec(folder)[0]):
        with safe_open(file.path, framework="np") as theirs:
            for name in file.names:
                tensor = file.tensor(name)
                assert tensor.dtype == "bfloat16"
                np.testing.assert_array_equal(tensor, theirs.get_tensor(name))
                assert jax.device_put(tensor).unsafe_buffer_pointer() == tensor.ctypes.data
    cast = hf_values.cast(tensor, "float32", name)
    np.testing.assert_array_equal(cast, tensor.astype(np.float32))
    assert jax.device_put(cast).unsafe_buffer_pointer() == cast.ctypes.data


def test_a_file_that_is_cut_off_while_it_is_read_is_refused(golden_folder, tmp_path):
    shutil.copyfile(golden_folder("llama_tied") / "model.safetensors", tmp_path / "model.safetensors")
    (file,) = hf_files.open_folder(tmp_path, hf.read_spec(golden_folder("llama_tied"))[0])
    os.truncate(file.path, file.header_size + 8)
    with pytest.raises(hf.ModelError, match="has become shorter"):
        file.tensor(file.names[-1])


def test_a_part_of_a_tensor_is_read_alone(name, golden_folder):
    model = hf.load(golden_folder(name))
    files = [safe_open(file, framework="np") for file in golden_folder(name).glob("*.safetensors")]
    names = [(file, key) for file in files for key in file.keys()]  # noqa: SIM118
    where = {hf_table.stored_as(model.spec, key): (file, key) for file, key in names}
    cuts = 0
    for entry in hf_table.table(model.spec):
        for at, path in enumerate(entry.paths):
            leaf = np.asarray(functools.reduce(lambda tree, key: tree[key], path, model.params))
            if entry.name not in where:  # packed as MXFP4
                continue
            letters = decoder.LETTERS.get(path[-1], "")
            for axis in [
                d for d, letter in enumerate(letters) if letter in "KNFV" and leaf.shape[d] % 2 == 0
            ]:
                half = slice(leaf.shape[axis] // 2, leaf.shape[axis])
                index = tuple(half if d == axis else slice(None) for d in range(leaf.ndim))
                recorded = Asked(*where[entry.name])
                part = entry.part(recorded, at, index).astype(leaf.dtype)
                np.testing.assert_array_equal(part, leaf[index])
                assert recorded.read == leaf.size // 2, entry.name
                cuts += 1
    assert cuts > model.spec.num_layers
