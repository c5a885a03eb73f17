"""Single functions against vectors of the reference."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from millpond.engine.model.attention import KvPart, attend
from millpond.engine.model.config import RopeScaling, load_config
from millpond.engine.model.engram_ids import compress_vocabulary, look_back, make_hashes, multipliers
from millpond.engine.model.formats import (
    Fp4IndexRows,
    Fp4MainRows,
    Fp8Rows,
    dequantise_fp4_weight,
    dequantise_tiles,
    quantise_fp4_index,
    quantise_fp4_main,
    quantise_fp8,
    round_fp8,
)
from millpond.engine.model.image_plan import ImagePlan, plan_image
from millpond.engine.model.mhc import Mix, MixWeights, collapse, compute_mix, expand, split_mix
from millpond.engine.model.moe import ExpertWeights, MoeWeights, mix_experts, route, run_routed, run_shared
from millpond.engine.model.numerics import BF16, rms_norm
from millpond.engine.model.rope import Rotation, rope_frequencies
from millpond.engine.model.selection import choose_candidates
from millpond.engine.model.step import Rows, Span
from millpond.engine.model.vision import GridRotation
from tests.golden.goldens import check_close, check_equal, check_ulps, golden_folder, load_golden

E4M3 = torch.float8_e4m3fn


def units(name):
    return load_golden("units", name)


def unit_json(name):
    folder = golden_folder("units")
    assert folder is not None
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_quantised_rows_have_the_reference_bytes_and_values():
    g = units("quant")
    for name, quantise, rows in (
        ("fp8", quantise_fp8, Fp8Rows()),
        ("fp4_ue8m0", quantise_fp4_index, Fp4IndexRows()),
        ("fp4_e4m3", quantise_fp4_main, Fp4MainRows()),
    ):
        data, scale = quantise(g["x"])
        check_equal(scale, g[f"{name}.scale"], f"{name} scales")
        check_equal(data, g[f"{name}.data"], f"{name} data")
        packed = rows.encode(g["x"])
        assert packed.shape[-1] == rows.row_bytes(64)
        check_equal(rows.decode(packed, 64).bfloat16(), g[f"{name}.dequant"], f"{name} values")
    check_equal(round_fp8(g["x"]), g["fp8.dequant"], "rounded activations")


def test_weights_and_quantised_linears():
    g = units("quant")
    fp8 = dequantise_tiles(g["weight.fp8.data"], g["weight.fp8.scale"])
    fp4 = dequantise_fp4_weight(g["weight.fp4.data"], g["weight.fp4.scale"])
    check_equal(fp8, g["weight.fp8.dequant"], "fp8 weight")
    check_equal(fp4, g["weight.fp4.dequant"], "fp4 weight")
    check_ulps(BF16.quantised_linear(g["linear.x"], fp8), g["linear.fp8.y"], 1, "fp8 linear")
    check_ulps(BF16.quantised_linear(g["linear.x"], fp4), g["linear.fp4.y"], 1, "fp4 linear")


def test_hyper_connections():
    g = units("mhc")
    w = MixWeights(g["fn"], g["base"], g["scale"])
    mix = compute_mix(g["X"], w, BF16, norm_eps=1e-20, iters=20, eps=1e-6)
    for name, value in (("pre", mix.pre), ("post", mix.post), ("comb", mix.comb)):
        check_close(value, g[name], 1e-5, name)
    check_ulps(collapse(g["X"], g["pre_mix"]), g["collapse"], 1, "collapse")
    golden_mix = Mix(g["pre"], g["post"], g["comb"])
    check_ulps(expand(g["X"], g["out"], golden_mix), g["expand"], 1, "expand")
    for case in ("split", "extreme"):
        unit = MixWeights(g["fn"], torch.zeros(24), torch.ones(3))
        mix = split_mix(g[f"{case}.m"], unit, 4, iters=20, eps=1e-6)
        for name, value in (("pre", mix.pre), ("post", mix.post), ("comb", mix.comb)):
            check_close(value, g[f"{case}.{name}"], 1e-5, f"{case} {name}")


def test_rms_norm():
    g = units("mhc")
    check_ulps(rms_norm(g["rmsnorm.x"], g["rmsnorm.weight"], 1e-20), g["rmsnorm.y"], 1, "rms norm")


def test_rotary_positions():
    g = units("rope")
    yarn = RopeScaling(factor=16, beta_fast=32, beta_slow=1, original_positions=65536)
    for name, theta, scaling in (("plain", 1e4, None), ("yarn", 1.6e5, yarn)):
        rope = Rotation(rope_frequencies(theta, 64, scaling), g["positions"])
        check_close(rope.cos, g[f"real.{name}.cos"], 1e-6, f"{name} cos")
        check_close(rope.sin, g[f"real.{name}.sin"], 1e-6, f"{name} sin")
        check_ulps(rope.apply(g[f"real.{name}.x"]), g[f"real.{name}.rotated"], 1, f"{name} rotated")
        check_ulps(rope.undo(g[f"real.{name}.x"]), g[f"real.{name}.unrotated"], 1, f"{name} unrotated")
    positions = torch.arange(0, 512, 37)
    for name, dim, theta, original, factor in (
        ("tiny_rope16_plain", 16, 1e4, 0, 0),
        ("tiny_rope16_theta160000_orig32_factor4", 16, 1.6e5, 32, 4),
        ("tiny_rope16_theta160000_orig64_factor16", 16, 1.6e5, 64, 16),
        ("rope32_theta160000_orig4096_factor8", 32, 1.6e5, 4096, 8),
    ):
        scaling = RopeScaling(factor, 32, 1, original) if original else None
        rope = Rotation(rope_frequencies(theta, dim, scaling), positions)
        check_close(rope.cos, g[f"{name}.cos"], 1e-6, f"{name} cos")
        check_close(rope.sin, g[f"{name}.sin"], 1e-6, f"{name} sin")


def test_yarn_ramp_of_the_released_model():
    f = rope_frequencies(1.6e5, 64, RopeScaling(16, 32, 1, 65536))
    for k, wanted in ((15, 3.635539e-3), (20, 2.969778e-4), (25, 5.372312e-6)):
        assert math.isclose(f[k].item(), wanted, rel_tol=1e-6)


def test_attention_over_gathered_rows():
    g = units("attention")
    for name in ("a", "b"):
        part = KvPart(g[f"{name}.kv"].float(), g[f"{name}.idx"].long())
        out = attend(g[f"{name}.q"], [part], g[f"{name}.sink"], torch.bfloat16)
        check_close(out, g[f"{name}.out"], 0.0157, f"{name} attention")


def test_windows_of_a_prompt_and_of_a_decode_row():
    g = units("attention")
    shape = tiny_shape()
    for window, count in ((16, 5), (16, 40), (128, 130)):
        span = Span(np.zeros(count, np.int32), 0, count, (1, 2), 0)
        index = Rows((span,), replace(shape, window=window), torch.device("cpu")).window.index
        golden = g[f"window_idx.prefill_w{window}_s{count}"].long()
        # the reference puts the -1 of what is before the sequence at the end of a row; ours stand in front
        absent = torch.iinfo(torch.int64).max
        golden = functional.pad(golden, (0, index.shape[1] - golden.shape[1]), value=-1)
        ours, theirs = (x.masked_fill(x < 0, absent).sort(-1).values for x in (index, golden))
        check_equal(ours, theirs, f"window {window} of {count}")
    for window, position in ((16, 3), (16, 15), (16, 16), (16, 37), (128, 300)):
        span = Span(np.zeros(position + 1, np.int32), position, position + 1, (1, 2, 3), 0)
        rows = Rows((span,), replace(shape, window=window), torch.device("cpu")).window
        seen = rows.index[0][rows.index[0] >= 0]
        ours = torch.arange(max(0, position - window + 1), position + 1)
        assert torch.equal(torch.cat([rows.read_rows, rows.write_rows])[seen], ours % shape_ring(window))
        golden = g[f"window_slots.decode_w{window}_p{position}"]
        check_equal(ours % window, golden[golden >= 0], f"slots of window {window} at {position}")


def tiny_shape():
    folder = golden_folder("tiny_a")
    assert folder is not None
    return load_config(folder / "config.json").shape


def shape_ring(window):
    return replace(tiny_shape(), window=window).ring_rows


def test_candidate_blocks():
    g = units("candidates")
    for case in ("a", "b", "c", "d"):
        num_blocks, block_size = g[f"{case}.params"].tolist()
        score = g[f"{case}.score"]
        visible = (score > -torch.inf).sum(-1)
        mask = choose_candidates(score, visible, num_blocks, block_size)
        clear = g[f"{case}.boundary_tie"] == 0
        check_equal(mask[clear], g[f"{case}.mask"][clear].bool(), f"{case} candidates")
        if clear[-1]:
            last = choose_candidates(score[-1:], visible[-1:], num_blocks, block_size)[0]
            check_equal(last, g[f"{case}.decode_mask"].bool(), f"{case} candidates of the last row")


def moe_weights(g):
    def expert(name, dequantise):
        w1, w2, w3 = (dequantise(g[f"{name}.w{i}.weight"], g[f"{name}.w{i}.scale"]) for i in (1, 2, 3))
        return torch.cat([w1, w3]), w2

    experts = [expert(f"experts.{e}", dequantise_fp4_weight) for e in range(12)]
    return MoeWeights(
        gate=g["gate.weight"].float(),
        bias=g["gate.bias"],
        bias_image=g["gate.bias_vl"],
        experts=ExpertWeights(torch.stack([e[0] for e in experts]), torch.stack([e[1] for e in experts])),
        shared=ExpertWeights(*expert("shared_experts", dequantise_tiles)),
    )


def test_experts():
    g = units("moe")
    w = moe_weights(g)
    for case, mask in (("text", None), ("mixed", g["image_mask"].bool())):
        routing = route(g["x"], w, mask, 4, 1.5, BF16)
        clear = g[f"{case}.route_margin"] > 1e-6
        assert clear.all()
        check_equal(routing.experts, g[f"{case}.route_idx"], f"{case} experts")
        check_close(routing.weights, g[f"{case}.route_w"], 1e-6, f"{case} weights")
        check_ulps(mix_experts(g["x"], w, routing, 1.0, BF16), g[f"{case}.y"], 2, f"{case} output")
    rounded = BF16.quantised_input(g["x"])
    check_ulps(run_shared(rounded, w.shared, 1.0, BF16), g["shared.y"], 2, "shared expert")
    weight = torch.full((40,), 0.7, dtype=torch.bfloat16).float()  # the vector was made with a bf16 0.7
    out = run_routed(rounded, w.experts, torch.eye(len(w.gate), dtype=torch.int64)[3] * 40, weight, 1.0, BF16)
    check_ulps(out, g["expert3_weight0.7.y"], 2, "expert 3")


def test_engram_primes_multipliers_and_hashes():
    g = units("engram")
    hashes = make_hashes([1, 14], 4, 8, 16_000_000, 99092)
    for i, own in enumerate(hashes):
        check_equal(torch.from_numpy(own.primes), g["primes"][i], "primes")
        check_equal(torch.from_numpy(own.multipliers), g["multipliers"][i], "multipliers")
        check_equal(torch.from_numpy(own.offsets), g["offsets"][i], "offsets")
    for layer in (0, 5, 20):
        name = f"multipliers_layer{layer}_ngram5_vocab512"
        check_equal(torch.from_numpy(multipliers(layer, 5, 512)), g[name], name)
    ids = g["compressed_ids"].numpy().astype(np.int64)
    pad = int(g["pad_compressed_id"])
    for case, dead in (("text", np.zeros(60, bool)), ("masked", g["token_mask"].numpy() == 0)):
        recent = look_back(ids, dead, pad, 0, 4)
        rows = np.stack([own.rows(recent) for own in hashes], axis=1)
        check_equal(torch.from_numpy(rows), g[f"hash_ids_{case}"], f"{case} rows")
    for step in range(4):
        history = np.concatenate([ids, g["decode_ids"].numpy()[: step + 1]])
        dead = np.concatenate([g["token_mask"].numpy() == 0, np.zeros(step + 1, bool)])
        recent = look_back(history[-4:], dead[-4:], pad, 3, 4)
        rows = np.stack([own.rows(recent) for own in hashes], axis=1)
        check_equal(torch.from_numpy(rows[0]), g["hash_ids_decode_after_masked"][step], f"decode {step}")


def test_engram_rows_of_one_known_context():
    first = make_hashes([1, 14], 4, 8, 16_000_000, 99092)[0]
    row = first.rows(np.array([[10, 20, 30, 40]]))[0]
    assert row[[0, 1, 2, 8, 9, 23]].tolist() == [
        10250667,
        16051853,
        42761335,
        130904169,
        147647512,
        381142068,
    ]


def test_compressed_vocabulary():
    for folder, name in (("units", "engram_vocab.json"), ("tiny_a", "vocab.json"), ("tiny_b", "vocab.json")):
        root = golden_folder(folder)
        if root is None:
            continue
        vocab = json.loads((root / name).read_text(encoding="utf-8"))
        ours = compress_vocabulary((token["text"], token["piece"]) for token in vocab["tokens"])
        golden = vocab.get("token_map")
        golden = torch.tensor(golden) if golden else load_golden(folder, "engram_layout")["token_map"]
        check_equal(torch.from_numpy(ours), golden, f"token map of {folder}")
        assert ours.max() + 1 == vocab["compressed_vocab_size"]


def test_resize_plans():
    golden = unit_json("resize_plans.json")
    config = replace(
        vision_config(), patch_size=golden["patch_size"], downsample=golden["downsample_ratio"],
        max_image_tokens=golden["max_image_tokens"], min_pixels=golden["min_pixels"],
    )  # fmt: skip
    for wanted in golden["plans"]:
        plan = plan_image(wanted["width"], wanted["height"], config)
        ours = (plan.pixel_height, plan.pixel_width, plan.patch_rows, plan.patch_columns)
        ours = (*ours, plan.grid_rows, plan.grid_columns, plan.num_tokens)
        names = (
            "pixel_height",
            "pixel_width",
            "patch_rows",
            "patch_cols",
            "grid_rows",
            "grid_cols",
            "tokens",
        )
        assert ours == tuple(wanted[name] for name in names), (wanted["width"], wanted["height"])


def vision_config():
    folder = golden_folder("tiny_a")
    assert folder is not None
    config = load_config(folder / "config.json").vision
    assert config is not None
    return config


def test_grid_positions_and_token_types():
    g = units("vision_rope")
    rotation = GridRotation(5, 7, 64, 1e4)
    check_close(rotation.cos, g["cos"], 1e-6, "cos")
    check_close(rotation.sin, g["sin"], 1e-6, "sin")
    check_ulps(rotation.apply(g["x"]), g["rotated"], 1, "rotated")
    types = ImagePlan(0, 0, 0, 0, 3, 4).token_types()
    check_equal(torch.tensor(types), g["types_3x4"], "token types")
