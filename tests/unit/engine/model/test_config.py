"""Configs: the released figures, the roles, and every contradiction refused by name."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest

from millpond.core.errors import ModelFormatError
from millpond.core.shapes import (
    KvFormat,
    LayerRole,
    encoder_state_bytes,
    kv_bytes_per_token,
    kv_layout,
    num_backbone_parameters,
)
from millpond.engine.model.config import load_config, parse_config
from millpond.engine.model.info import describe_model
from millpond.engine.model.tensors import language_weights
from tests.golden.goldens import IN_REPO, golden_folder

FLASH = IN_REPO / "v41_flash_config.json"


def flash():
    return json.loads(FLASH.read_text(encoding="utf-8"))


def tiny():
    return json.loads((IN_REPO / "tiny_a" / "config.json").read_text(encoding="utf-8"))


def test_figures_of_the_released_model():
    shape = parse_config(flash()).shape
    layout = kv_layout(shape, KvFormat.PACKED)
    assert kv_bytes_per_token(shape) == 890
    assert layout.block_bytes == 113_920
    assert [row.num_bytes for row in layout.rows] == [22_784, 22_784, 22_784, 45_568]
    assert [row.parts[0].num_bytes for row in layout.rows] == [4_352, 4_352, 4_352, 8_704]
    assert encoder_state_bytes(layout) == 1_415_040
    assert layout.state_bytes == 3_128_352
    assert round(num_backbone_parameters(shape) / 1e9, 1) == 551.6
    text = describe_model(parse_config(flash()))
    for figure in ("890 B", "113,920 B", "1,415,040 B", "551.6 billion", "196.6 billion"):
        assert figure in text


def test_roles_of_the_released_model():
    layers = parse_config(flash()).shape.layers
    roles = [layer.role for layer in layers]
    assert roles[:2] == [LayerRole.WINDOW] * 2
    assert [layer.layer for layer in layers if layer.role is LayerRole.FULL] == [2, 8, 14, 20]
    assert [layer.layer for layer in layers if layer.role is LayerRole.REINDEX] == [24, 28, 32, 36]
    assert [(x.kv_source, x.index_source) for x in (layers[7], layers[19], layers[23], layers[39])] == [
        (2, 2), (14, 14), (20, 20), (20, 36),
    ]  # fmt: skip


@pytest.mark.parametrize("config", ["tiny_a", "small", "flash"])
def test_parameters_are_counted_as_the_checkpoint_holds_them(config):
    parsed = parse_config({"tiny_a": tiny, "small": small, "flash": flash}[config]())
    held = sum(
        math.prod(weight.size)
        for weight in language_weights(parsed)
        if not weight.name.startswith("mtp.") and ".engram." not in weight.name
    )
    assert held == num_backbone_parameters(parsed.shape)


def small():
    path = Path(__file__).parents[5] / "shared" / "configs" / "v41_small.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else tiny()


def test_the_golden_configs_are_accepted():
    for name in ("tiny_a", "tiny_b"):
        folder = golden_folder(name)
        if folder is not None:
            load_config(folder / "config.json")


TEXT = [
    ("num_key_value_heads", 2, None),
    ("scoring_func", "sigmoid", None),
    ("norm_topk_prob", False, None),
    ("use_fp4_sparse_kv", False, None),
    ("hc_shifted", False, None),
    ("attention_bias", True, None),
    ("hidden_size", 80, None),
    ("head_dim", 48, None),
    ("hidden_size", "64", None),
    ("vocab_size", 0, None),
    ("vocab_size", None, None),
    ("num_hidden_layers", 13, "compress_ratios"),
    ("compress_ratios", [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 0, 0, 0], None),
    ("compress_ratios", [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 2], None),
    ("compress_ratios", [0, 0, 4, 4, 4, 4, 1, 1, 1, 1, 1, 1, 0, 0, 0], None),
    ("kv_source_layer_ids", [2, 4], None),
    ("kv_source_layer_ids", [3, 4, 6], None),
    ("kv_source_layer_ids", [1, 2, 4, 6], None),
    ("kv_source_layer_ids", [2, 4, 6, 8], None),
    ("kv_source_layer_ids", [4, 2, 6], None),
    ("kv_source_layer_ids", [], None),
    ("kv_source_layer_ids", 2, None),
    ("index_source_layer_ids", [2, 6, 8, 10], None),
    ("index_source_layer_ids", [2, 3, 4, 6], None),
    ("index_source_layer_ids", [2, 4, 6, 12], None),
    ("index_k_source_layer_ids", [2, 6], None),
    ("candidate_source_layer_id", 4, None),
    ("candidate_block_size", 2, "candidate_topk_blocks"),
    ("qk_rope_head_dim", 15, None),
    ("qk_rope_head_dim", 64, None),
    ("o_groups", 3, None),
    ("num_experts_per_tok", 9, None),
    ("dspark_num_experts_per_tok", 7, None),
    ("dspark_target_layer_ids", [11, 10], None),
    ("dspark_target_layer_ids", [], None),
    ("dspark_noise_token_id", 512, None),
    ("engram_num_embeddings", [660], None),
    ("engram_num_embeddings", [660, 865], None),
    ("engram_layer_ids", [1, 12], None),
    ("engram_pad_token_id", 600, None),
    ("swiglu_limit", 0, None),
    ("rope_scaling", None, None),
    ("compress_rope_theta", 1, None),
    ("rms_norm_eps", True, None),
    ("hc_sinkhorn_iters", 2**31 - 1, None),
]


@pytest.mark.parametrize(("field", "value", "named"), TEXT)
def test_contradictions_name_the_field(field, value, named):
    values = copy.deepcopy(tiny())
    values["text_config"][field] = value
    with pytest.raises(ModelFormatError, match=named or field) as caught:
        parse_config(values)
    assert caught.value.param == (named or field)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        (None, "model_type", "deepseek_v4"),
        (None, "image_token_id", 512),
        (None, "text_config", []),
        ("quantization_config", "weight_block_size", [128, 128]),
        ("quantization_config", "scale_fmt", "float"),
        ("quantization_config", "expert_dtype", "fp8"),
        ("vision_config", "num_attention_heads", 3),
        ("vision_config", "max_wh_ratio", 4),
    ],
)
def test_other_sections_are_checked_too(section, field, value):
    values = copy.deepcopy(tiny())
    (values if section is None else values[section])[field] = value
    with pytest.raises(ModelFormatError, match=field):
        parse_config(values)


@pytest.mark.parametrize("field", ["beta_fast", "beta_slow"])
@pytest.mark.parametrize("value", [0, 1e-320, 1e308])
def test_turns_that_have_no_logarithm_are_refused(field, value):
    values = copy.deepcopy(tiny())
    values["text_config"]["rope_scaling"][field] = value
    with pytest.raises(ModelFormatError, match=field) as caught:
        parse_config(values)
    assert caught.value.param == field


def test_a_file_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        load_config(path)
