"""The whole model against the reference, end to end in float32: prefill, decode, drafts, every cache."""

from __future__ import annotations

import pytest
import torch

from tests.golden.goldens import check_close, check_equal, counted, golden_cases
from tests.golden.v41_case import NUM_DECODED, Case, as_int64

STRICT = 2e-5
AFTER_FLIP = 1e-2
"""What one flipped code in a cached row may do to a later result."""
CASES = [case for mode in ("fp32", "fp32q") for case in golden_cases(f"L*.{mode}")]


def unclear_candidates(scores, num_blocks, block_size):
    """Rows whose last candidate block is kept by a hair; scores [rows, entries]."""
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % block_size), value=-torch.inf)
    blocks = padded.unflatten(1, (-1, block_size)).amax(-1)
    newest = (blocks > -torch.inf).sum(-1, keepdim=True) - 1  # pinned, so out of the competition
    blocks = blocks.scatter(1, newest.clamp_min(0), torch.inf).sort(-1, descending=True).values
    if blocks.shape[1] <= num_blocks:
        return torch.zeros(len(scores), dtype=torch.bool)
    kept, left = blocks[:, num_blocks - 1], blocks[:, num_blocks]
    return (left > -torch.inf) & (kept - left < 1e-5)


def ambiguous_rows(case, seen):
    """Rows whose selection the reference leaves to chance, per layer: from there on they may differ."""
    g, shape = case.golden, case.model.config.shape
    unclear = torch.zeros(case.num_prompt, dtype=torch.bool)
    result = []
    for layer in range(len(shape.layers)):
        if layer == shape.candidate_source:
            scores = seen.get(layer, "idx_score").float()
            unclear = unclear | unclear_candidates(scores, shape.candidate_blocks, shape.candidate_block_size)
        margin = g.get(f"prefill.L{layer}.topk_margin")
        if margin is not None:
            unclear = unclear | (margin < 1e-5) | g[f"prefill.L{layer}.topk_tie"].bool()
        unclear = unclear | (g["prefill.route_margin"][layer] < 1e-5)
        result.append(unclear.clone())
    return result


def spread(unclear, window):
    """Later rows see an unclear row through their windows."""
    out = unclear.clone()
    for row in torch.nonzero(unclear).flatten().tolist():
        out[row : row + window] = True
    return out


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_end_to_end(folder, name):
    case = Case(folder, name)
    check_decode(case, check_prefill(case))


def check_prefill(case, images=None):
    """Run the prompt and compare everything; returns the drafts made right after it, if wanted."""
    g, n, shape = case.golden, case.num_prompt, case.model.config.shape
    out, ctx, seen = case.run(0, n, images)
    if images is not None:
        check_close(seen.values["embed"][0], g["prefill.embed"], STRICT, "embeddings")
    unclear = ambiguous_rows(case, seen)
    rows = g["prefill.rows"].long()
    _check_streams(case, seen, unclear, rows)
    _check_lists(case, seen, unclear)
    _check_caches(case, "prefill.cache", n, unclear)
    logits = case.model.logits(out.hidden)
    clear = ~spread(unclear[-1], shape.window)[rows]
    check_close(out.hidden[rows][clear], g["prefill.final_hidden"][clear], STRICT, "final hidden")
    check_close(logits[rows][clear], g["prefill.logits"][clear], STRICT, "logits")
    if "prefill.main_hidden" in g:  # not without draft stages
        check_close(out.main_hidden[rows][clear], g["prefill.main_hidden"][clear], STRICT, "main hidden")
    pre = seen.values["pre_mix_out"][0][rows]
    check_close(pre[clear], g["prefill.pre_mix_out"][clear], STRICT, "pre mix")
    if not unclear[-1][-shape.window :].any():
        check_close(logits[-1], g["prefill.logits_last"], STRICT, "last logits")
    return {n - 1: _draft(case, ctx, seen, n - 1)} if n - 1 in _draft_positions(g) else {}


def _draft_positions(golden):
    """Positions after which the reference drafted; none without draft stages."""
    return golden["draft.position"].tolist() if "draft.position" in golden else []


def _check_streams(case, seen, unclear, rows):
    g, window = case.golden, case.model.config.shape.window
    counted()
    assert len(g["prefill.x_out"]) == len(unclear)
    for layer, golden in enumerate(g["prefill.x_out"]):
        ours = seen.get(layer, "x_out")[rows]
        clear = ~spread(unclear[layer], window)[rows]
        if case.mode == "fp32":
            difference = (ours[clear] - golden[clear]).abs().max()
            assert difference <= STRICT, f"stream after layer {layer}: {difference:.3g}"
        else:  # a value on the border of a quantiser may fall to the other side
            errors = (ours[clear] - golden[clear]).abs().flatten(1).amax(1)
            assert (errors <= 1e-4).float().mean() >= 0.95, f"stream after layer {layer}"


def _check_lists(case, seen, unclear):
    g, shape, n = case.golden, case.model.config.shape, case.num_prompt
    for layer in shape.layers:
        name = f"prefill.L{layer.layer}."
        before = unclear[layer.layer - 1] if layer.layer else torch.zeros(n, dtype=torch.bool)
        clear = ~(unclear[layer.layer] | spread(before, shape.window))
        ours, golden = seen.get(layer.layer, "route_idx"), g[name + "route_idx"]
        check_equal(ours.sort(-1).values[clear], golden.sort(-1).values[clear].long(), name + "experts")
        ours, golden = (
            x.sort(-1).values[clear] for x in (seen.get(layer.layer, "route_w"), g[name + "route_w"])
        )
        check_close(ours, golden, STRICT, name + "expert weights")
        if layer.owns_index and name + "topk" in g and n // layer.ratio:
            golden = g[name + "topk"].long()
            check_equal(seen.get(layer.layer, "topk")[clear, : golden.shape[1]], golden[clear], name + "topk")
        if name + "idx_score" in g:
            ours, golden = seen.get(layer.layer, "idx_score"), g[name + "idx_score"]
            check_equal(ours == -torch.inf, golden == -torch.inf, name + "reachable")
            finite = (golden > -torch.inf) & clear[:, None]
            check_close(ours[finite], golden[finite], STRICT, name + "scores")
        if name + "candidates_packed" in g:
            packed = g[name + "candidates_packed"].int()
            bits = (packed[..., None] >> torch.arange(8)) & 1
            golden = bits.flatten(1)[:, : n // layer.ratio].bool()
            check_equal(seen.get(layer.layer, "candidates")[clear], golden[clear], name + "candidates")
        if layer.has_engram:
            check_equal(seen.get(layer.layer, "engram_ids"), g[name + "engram_ids"].long(), name + "rows")
            ours = seen.get(layer.layer, "engram_gate")
            check_close(ours[clear], g[name + "engram_gate"][clear], STRICT, name + "gate")


def _check_caches(case, name, length, unclear=None):
    """Compare every cached row but those of tokens that an ambiguous choice has reached."""
    g, shape = case.golden, case.model.config.shape
    if case.mode != "fp32":
        if unclear is None or not torch.stack(unclear).any():
            _check_rows_alike(case, name, length)
        return
    for layer in range(len(shape.layers) + shape.num_draft_stages):
        clear = _clear_before(layer, length, unclear, shape)
        last = torch.arange(max(0, length - shape.window), length)
        slots = last[clear[last]] % shape.window
        ours, golden = case.ring_after(layer, length), g[f"{name}.L{layer}.window_kv"]
        check_close(ours[slots], golden[slots], STRICT, f"{name} window {layer}")
        assert torch.equal(ours.any(-1), golden.any(-1))
    for layer in shape.kv_sources:
        main, keys = case.entries_after(layer.layer, length)
        clear = _clear_before(layer.layer, length, unclear, shape)
        whole = clear[: length // layer.ratio * layer.ratio].unflatten(0, (-1, layer.ratio)).all(1)
        prefix = f"{name}.L{layer.layer}."
        for kind, ours in (("compress_kv", main), ("index_k", keys)):
            if prefix + kind in g:
                check_close(ours[whole], g[prefix + kind][whole], STRICT, prefix + kind)
            elif prefix + kind + "_new" in g:
                golden = g[prefix + kind + "_new"]
                check_close(ours[len(ours) - len(golden) :], golden, STRICT, prefix + kind)
        if length % layer.ratio and clear[-1]:
            values, scores = case.held_after(layer.layer, length)
            check_close(values, g[prefix + "kv_state"], STRICT, prefix + "values held")
            check_close(scores, g[prefix + "score_state"], STRICT, prefix + "scores held")


def _clear_before(layer, length, unclear, shape):
    """Tokens that no ambiguous choice of an earlier layer has reached; `unclear` None for all."""
    if unclear is None or layer == 0:
        return torch.ones(length, dtype=torch.bool)
    return ~spread(unclear[min(layer, len(shape.layers)) - 1], shape.window)


def _check_rows_alike(case, name, length):
    """All but 5 % of the cached rows are equal: a value on a quantiser's border may go to the other side."""
    g, shape = case.golden, case.model.config.shape
    pairs = [
        (case.ring_after(layer, length), g[f"{name}.L{layer}.window_kv"])
        for layer in range(len(shape.layers) + shape.num_draft_stages)
    ]
    equal = torch.cat([(ours - golden).abs().amax(-1) <= STRICT for ours, golden in pairs])
    counted(len(pairs))
    assert equal.float().mean() >= 0.95, f"{name}: {int((~equal).sum())} of {len(equal)} rows differ"
    if name == "prefill.cache":
        ours, golden = (torch.stack(x[len(shape.layers) :]) for x in zip(*pairs, strict=True))
        case.has_flipped_draft_rows = bool(((ours - golden).abs() > STRICT).any())


def check_decode(case, drafts):
    """Run the teacher-forced steps and compare logits, lists, streams, drafts and the caches at the end."""
    g, n, shape = case.golden, case.num_prompt, case.model.config.shape
    logits, routed, main_hidden, streams = [], [], [], {}
    for step in range(NUM_DECODED):
        out, ctx, seen = case.run(n + step, n + step + 1)
        logits.append(case.model.logits(out.hidden)[0])
        main_hidden.append(out.main_hidden[0])
        routed.append(torch.stack([seen.get(x.layer, "route_idx")[0] for x in shape.layers]))
        streams[step] = torch.stack([seen.get(x.layer, "x_out")[0] for x in shape.layers])
        for layer in shape.layers:
            _check_decode_lists(case, seen, layer, step)
        if n + step in _draft_positions(g):
            drafts[n + step] = _draft(case, ctx, seen, n + step)
    tied = any(bool(g[f"decode.L{x.layer}.topk_tie"].any()) for x in shape.layers if x.owns_index)
    if tied:
        return
    check_close(torch.stack(logits), g["decode.logits"], STRICT, "decode logits")
    if "decode.main_hidden" in g:
        check_close(torch.stack(main_hidden), g["decode.main_hidden"], STRICT, "decode main hidden")
    check_equal(
        torch.stack(routed).sort(-1).values, g["decode.route_idx"].long().sort(-1).values, "decode experts"
    )
    kept = torch.stack([streams[step] for step in g["decode.x_out_steps"].tolist()])
    check_close(kept, g["decode.x_out"], STRICT, "decode streams")
    _check_drafts(case, drafts)
    _check_caches(case, "decode_end.cache", n + NUM_DECODED)


def _check_decode_lists(case, seen, layer, step):
    g, name = case.golden, f"decode.L{layer.layer}."
    if layer.owns_index and not g[name + "topk_tie"][step]:
        golden = g[name + "topk"][step].long()
        ours = seen.get(layer.layer, "topk")[0]
        assert ours[: len(golden)].tolist() == golden.tolist(), f"{name}topk at step {step}"
    if name + "candidates" in g and not g[name + "topk_tie"][step]:
        ours = seen.get(layer.layer, "candidates")[0]
        assert ours.tolist() == g[name + "candidates"][step][: len(ours)].bool().tolist()
    if layer.has_engram:
        golden = g[name + "engram_ids"][step].tolist()
        assert seen.get(layer.layer, "engram_ids")[0].tolist() == golden, f"{name}rows at step {step}"


def _draft(case, ctx, seen, position):
    drafts = case.propose(ctx, int(case.ids[position + 1]), position)
    return drafts, dict(seen.values)


def _check_drafts(case, drafts):
    g = case.golden
    limit = AFTER_FLIP if case.has_flipped_draft_rows else STRICT
    for number, position in enumerate(_draft_positions(g)):
        guess, seen = drafts[position]
        output = torch.cat([as_int64(case.ids[position + 1 : position + 2]), guess.token_ids[0]])
        check_equal(output, g["draft.output_ids"][number].long(), "draft ids")
        check_close(guess.confidence[0], g["draft.confidence"][number], limit, "confidence")
        logits = torch.cat(seen["draft_logits"])
        check_close(logits, g["draft.logits"][number], 2 * limit, "draft logits")
        check_close(seen["draft_hidden"][0], g["draft.hidden"][number], limit, "draft hidden")
        check_close(seen["main_x"][0][-1], g["draft.main_x"][number], STRICT, "main x")
        check_close(torch.stack(seen["draft_x_out"]), g["draft.x_out"][number], limit, "draft streams")


@pytest.mark.parametrize(("folder", "name"), golden_cases("L*.fp32"))
def test_greedy_continuation(folder, name):
    case = Case(folder, name)
    g = case.golden
    num_clear = int((g["greedy.top2_margin"] > 1e-4).int().cumprod(0).sum())  # at a near tie either is right
    golden = g["greedy.ids"][:num_clear].tolist()
    ids = as_int64(case.ids[: case.num_prompt]).int().tolist()
    for at, wanted in enumerate(golden):
        case.ids = as_int64(ids).int().numpy()
        out, _, _ = case.run(0 if at == 0 else len(ids) - 1, len(ids))
        chosen = int(case.model.logits(out.hidden[-1:])[0].argmax())
        assert chosen == wanted, f"token {at}"
        ids.append(chosen)
    counted()
