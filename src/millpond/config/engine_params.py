"""Parameters of the torch engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineParams:
    """What one engine process runs and with how much memory."""

    model: str = "smollm2-135m"
    """Built-in name (`smollm2-135m`), a GGUF file, or a folder with config.json and safetensors."""
    dtype: str = "auto"
    """Type of weights and KV: `bf16`, `fp32`, or `auto` = bf16, which decodes fastest."""
    weights: str = "unpacked"
    """`unpacked`: FP8 and FP4 weights of V4.1 are laid out for fast products when they are loaded, most as
    floats. `packed`: they stay mapped as they are stored and become floats for each product, with equal
    results: slower, less memory.
    """
    numerics: str = "fast"
    """`fast`, or `exact`: a row's bits do not depend on batch, chunk borders or position in the batch."""
    num_kept_tokens: int = 0
    """V4.1: the decoder layers, which add no long-range KV, run on this many last tokens of a prompt only,
    at least a window and its drafts; 0 runs them on all. Saves up to half of a prefill, and approximates:
    the first kept tokens see a cut window. So it is off by default, and refused with `numerics` = exact:
    where a sequence is computed again after a preemption or on another group, its prompt ends elsewhere,
    and its text could go on differently.
    """
    kv_memory: int = 288 * 1024 * 1024
    """Bytes of KV block memory. The default holds 101 blocks of 128 tokens of smollm2-135m in bf16."""
    host_kv_memory: int = 4 * 288 * 1024 * 1024
    """Llama family: bytes of host memory on a prefill rank for prompts that its block memory cannot hold.
    They pass through it layer by layer. Taken when it is first needed; 0: none, such prompts are refused.
    """
    max_num_seqs: int = 32
    """Most sequences that run at once, 1 ... 65536. State slots are 1.2 times as many, plus one, for those
    being handed over."""
    swap_method: str = "auto"
    """How KV is copied from the host's shared memory: `per_block`, `batched`, `gather`, `one_sided`, or
    `auto`: the quickest on this host, by a measurement at start."""
    max_model_len: int = 0
    """Most tokens of one sequence, prompt and output; 0 = the model's own limit."""
