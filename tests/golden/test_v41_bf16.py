"""The released numerics, block by block from the reference's own inputs, within twice its measured noise."""

from __future__ import annotations

import pytest
import torch

from millpond.engine.model.engram import look_up
from millpond.engine.model.layer import publish_entries, run_attention, run_experts, run_layer
from millpond.engine.model.mhc import collapse
from millpond.engine.model.step import Span, make_step
from tests.golden.goldens import check_close, check_equal, counted, golden_cases, row_errors
from tests.golden.v41_case import SLOT, TABLE, Case, Recorder

FULL_CASES = golden_cases("L33.bf16")
LIMITS = {  # (median, max) of row-relative L2 errors: the READMEs' tables, worst layer of both sets
    "attn_core": (0.002, 0.0034),
    "attn_out": (0.01, 0.056),
    "x_mid": (0.0023, 0.01),
    "ffn_in": (0.0026, 0.0099),
    "ffn_out": (0.02, 1.1),
    "x_out": (0.0034, 0.077),
}
CLOSE = {"attn_pre": 1e-5, "attn_post": 1e-5, "attn_comb": 1e-5}
ALMOST = {"attn_in", "qr", "q", "win_kv", "latent", "idx_q", "idx_w", "idx_score"}
"""Equal but for 1e-4 of the elements: another summation order hardly reaches them."""


def stored_stream(g, prefix, layer, previous):
    """A block's input; the file leaves it out where it is the output of the block before."""
    stored = g.get(f"{prefix}.L{layer}.x_in")
    return previous if stored is None else stored


@pytest.mark.parametrize(("folder", "name"), FULL_CASES)
def test_each_block_of_the_prompt(folder, name):
    case = Case(folder, name)
    g, model, n = case.golden, case.model, case.num_prompt
    step = make_step([Span(case.ids, 0, n, TABLE, SLOT)], model.config.shape, model.device)
    seen = Recorder()
    ctx = model.start(step, case.caches, seen)
    previous = None
    assert g["prefill.rows"].tolist() == list(range(n))
    for layer, w in zip(model.config.shape.layers, model.weights.layers, strict=True):
        number = layer.layer
        stream = stored_stream(g, "prefill", number, previous)
        pre = g[f"prefill.L{number}.pre_in"]
        out, _ = run_layer(ctx, layer, w, stream, pre, None)
        seen.values[number, "x_out"] = [out]
        check_block(g, seen, f"prefill.L{number}", number, layer)
        previous = g["prefill.x_out"][number]
    logits = model.logits(collapse(previous, g["prefill.pre_mix_out"]))
    check_close(logits, g["prefill.logits"], 0.01, "logits of the stored stream")
    for number in (0, 1):
        check_decode_step(case, number)


def check_decode_step(case, number):
    """Attention and experts of every layer from the stored normed inputs, over the caches so far."""
    g, model, n = case.golden, case.model, case.num_prompt + number
    step = make_step([Span(case.ids, n, n + 1, TABLE, SLOT)], model.config.shape, model.device)
    seen = Recorder()
    ctx = model.start(step, case.caches, seen)
    for layer, w in zip(model.config.shape.layers, model.weights.layers, strict=True):
        at, prefix = layer.layer, f"decode.step{number}.L{layer.layer}"
        seen.layer = at
        x = g[f"{prefix}.attn_in"]
        if w.compressor is not None:
            publish_entries(ctx, layer, w.compressor, x)
        out = run_attention(ctx, layer, w, x, step.decoder)
        check_almost(g, seen, prefix, at)
        if layer.owns_index and not g[f"decode.L{at}.topk_tie"][number]:
            golden = g[f"{prefix}.topk"].long()
            check_equal(seen.get(at, "topk")[:, : golden.shape[1]], golden, f"{prefix}.topk")
        check_rows(seen.get(at, "attn_core"), g[f"{prefix}.attn_core"], "attn_core", prefix)
        check_rows(out, g[f"{prefix}.attn_out"], "attn_out", prefix)
        ffn = run_experts(ctx, w, g[f"{prefix}.ffn_in"], None, model.config.shape.num_experts_per_token)
        ours, golden = (
            x.sort(-1).values for x in (seen.get(at, "route_idx"), g[f"{prefix}.route_idx"].long())
        )
        check_equal(ours, golden, f"{prefix}.route_idx")
        check_rows(ffn, g[f"{prefix}.ffn_out"], "ffn_out", prefix)


def check_rows(ours, golden, what, prefix):
    """A single row has no median: the largest difference counts."""
    counted()
    error = row_errors(ours, golden).max()
    assert error <= 2 * LIMITS[what][1], f"{prefix}.{what}: {error:.2g}"


def check_almost(g, seen, prefix, number):
    for what in sorted(ALMOST):
        golden = g.get(f"{prefix}.{what}")
        if golden is None or (number, what) not in seen.values:
            continue
        ours = seen.get(number, what)
        counted()
        assert ours.shape == golden.shape, f"{prefix}.{what}"
        unequal = (ours.float() != golden.float()).float().mean()
        assert unequal <= 1e-4, f"{prefix}.{what}: {unequal:.2%} of the elements differ"


def check_block(g, seen, prefix, number, layer):
    check_almost(g, seen, prefix, number)
    for what, tolerance in CLOSE.items():
        check_close(seen.get(number, what), g[f"{prefix}.{what}"], tolerance, f"{prefix}.{what}")
    if layer.owns_index:
        clear = g[f"{prefix}.topk_tie"] == 0
        golden = g[f"{prefix}.topk"].long()
        check_equal(seen.get(number, "topk")[clear, : golden.shape[1]], golden[clear], f"{prefix}.topk")
    same = seen.get(number, "route_idx").sort(-1).values == g[f"{prefix}.route_idx"].sort(-1).values
    same = same.all(-1)
    for what, (median, largest) in LIMITS.items():
        golden = g[f"prefill.{what}"][number] if what == "x_out" else g[f"{prefix}.{what}"]
        errors = row_errors(seen.get(number, what), golden)
        if what in ("ffn_out", "x_out"):
            errors = errors[same]
        counted()
        assert errors.median() <= 2 * median, f"{prefix}.{what}: median {errors.median():.2g}"
        assert errors.max() <= 2 * largest, f"{prefix}.{what}: largest {errors.max():.2g}"


@pytest.mark.parametrize(("folder", "name"), FULL_CASES)
def test_table_rows(folder, name):
    case = Case(folder, name)
    for layer, w in zip(case.model.config.shape.layers, case.model.weights.layers, strict=True):
        if w.engram is not None:
            ids = case.golden[f"prefill.L{layer.layer}.engram_ids"].long()
            golden = case.golden[f"prefill.L{layer.layer}.engram_rows"]
            check_equal(look_up(w.engram, ids).bfloat16(), golden, f"table rows of layer {layer.layer}")


@pytest.mark.parametrize(("folder", "name"), golden_cases("L*.bf16"))
def test_end_to_end_is_near(folder, name):
    """Rounding is amplified by quantisers and selection: compared by medians, as the README says."""
    case = Case(folder, name)
    g, n = case.golden, case.num_prompt
    out, _, seen = case.run(0, n)
    rows = g["prefill.rows"].long()
    first = row_errors(seen.get(0, "x_out")[rows], g["prefill.x_out"][0])
    counted()
    assert first.median() <= 2 * 0.0032
    logits = case.model.logits(out.hidden)[rows]
    cosine = torch.cosine_similarity(logits, g["prefill.logits"], dim=-1)
    counted()
    assert cosine.median() >= 0.97
    for layer in case.model.config.shape.layers:
        if layer.has_engram:
            golden = g[f"prefill.L{layer.layer}.engram_ids"].long()
            check_equal(seen.get(layer.layer, "engram_ids"), golden, "engram rows")
