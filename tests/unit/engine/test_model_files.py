"""Finding models, reading their shape, and what is said when a file is not what it should be."""

from __future__ import annotations

import hashlib
import json
import struct

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from millpond.core.errors import ConfigError, ModelFormatError, UnknownModel
from millpond.engine.model_files import (
    load_llama_config,
    locate_model,
    model_fingerprint,
    read_gguf,
)
from tests.unit.engine.tiny_llama import TINY, Hand, tiny_engine, tiny_tensors, write_checkpoint


def test_the_built_in_model_is_found_and_described():
    files = locate_model("smollm2-135m")
    config = load_llama_config(files)
    assert (files.kind, files.name) == ("gguf", "smollm2-135m")
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.vocab_size, config.max_positions) == (64, 49152, 8192)
    assert config.tie_embeddings
    assert config.rope.theta == 100000.0
    metadata = read_gguf(files.weight_files[0]).metadata
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert metadata["tokenizer.ggml.eos_token_id"] == 2


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(UnknownModel, match="smollm2-135m"):
        locate_model("no-such-model")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["BertModel"]}, "architectures"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 31}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window"),
    ],
)
def test_a_config_that_cannot_be_honoured_names_the_field(tmp_path, changes, field):
    folder = write_checkpoint(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(TINY | changes), encoding="utf-8")
    with pytest.raises(ModelFormatError, match=field) as caught:
        load_llama_config(locate_model(str(folder)))
    assert caught.value.param == field


def test_a_missing_a_misshaped_and_an_integer_tensor_are_named(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for wrong in (None, tensors[name][:-1].clone(), tensors[name].int()):
        changed = {key: value for key, value in tensors.items() if key != name}
        if wrong is not None:
            changed[name] = wrong
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ModelFormatError, match=name.replace(".", r"\.")):
            tiny_engine(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, 50_000])
def test_a_truncated_safetensors_file_is_named(tmp_path, keep):
    folder = write_checkpoint(tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors"):
        tiny_engine(folder)


def test_an_index_that_names_a_missing_file_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    index = {"weight_map": {"model.norm.weight": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(ModelFormatError, match=r"model-2\.safetensors"):
        locate_model(str(folder))


def test_the_fingerprint_follows_interfaces_a1_and_every_byte(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    weights = (folder / "model.safetensors").read_bytes()
    text = json.dumps(TINY, sort_keys=True, separators=(",", ":")).encode()
    name = b"model.safetensors"
    by_hand = struct.pack("<I", len(text)) + text + struct.pack("<I", len(name)) + name
    by_hand += struct.pack("<Q", len(weights)) + hashlib.sha256(weights).digest()
    files = locate_model(str(folder))
    assert model_fingerprint(files) == hashlib.sha256(by_hand).digest()
    changed = bytearray(weights)
    changed[-1] ^= 1
    (folder / "model.safetensors").write_bytes(changed)
    assert model_fingerprint(files) != hashlib.sha256(by_hand).digest()


def test_too_little_memory_for_a_block_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"engine\.kv_memory"):
        tiny_engine(write_checkpoint(tmp_path / "model"), kv_memory=1000)


# --- GGUF ---------------------------------------------------------------------------------------------


def _write_gguf(path, config, tensors, kinds):
    """Write tensors as the public converter does: own names, query and key rows interleaved."""
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, tensor in tensors.items():
        values = tensor.numpy()
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                count = config[heads]
                halves = values.reshape(count, 2, values.shape[0] // count // 2, -1)
                values = halves.swapaxes(1, 2).reshape(values.shape)
        if name in names:
            own = names[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            own = f"blk.{layer}.{parts[rest.removesuffix('.weight')]}.weight"
        kind = kinds(name) if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(own, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kinds(name):
    if "mlp" in name:
        return gguf.GGMLQuantizationType.F16
    return gguf.GGMLQuantizationType.Q8_0 if "embed" in name else gguf.GGMLQuantizationType.F32


def test_a_gguf_file_gives_the_same_model_as_the_folder_it_came_from(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    tensors = tiny_tensors(TINY)
    for name in tensors:  # what the file can hold, so that both sides load equal numbers
        if tensors[name].ndim == 2:
            kind = _kinds(name)
            kept = gguf.quants.dequantize(gguf.quants.quantize(tensors[name].numpy(), kind), kind)
            tensors[name] = torch.from_numpy(kept.copy())
    save_file(tensors, folder / "model.safetensors")
    _write_gguf(tmp_path / "tiny.gguf", TINY, tensors, _kinds)
    hands = [Hand(tiny_engine(path)) for path in (folder, tmp_path / "tiny.gguf")]
    for hand in hands:
        hand.prefill("a", [3, 1, 4, 1, 5, 9, 2, 6])
    assert torch.equal(hands[0].logits[0], hands[1].logits[0])


def test_a_gguf_file_cut_anywhere_gives_one_typed_error(tmp_path):
    _write_gguf(tmp_path / "tiny.gguf", TINY, tiny_tensors(TINY), _kinds)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for keep in (0, 3, 8, 20, 200, 900, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:keep])
        with pytest.raises(ModelFormatError, match=r"cut\.gguf"):
            tiny_engine(cut)


def test_a_foreign_gguf_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFormatError, match="mamba"):
        load_llama_config(locate_model(str(tmp_path / "other.gguf")))
