"""Make an engine from its parameters."""

from __future__ import annotations

import torch

from millpond.config.engine_params import EngineParams
from millpond.core.errors import ConfigError
from millpond.core.ports import Engine
from millpond.engine.kv_tensors import DTYPES, KvTensors
from millpond.engine.layers import DecoderLayers
from millpond.engine.llama_config import LlamaConfig
from millpond.engine.memory import choose_max_model_len, plan_memory
from millpond.engine.model.config import is_v41
from millpond.engine.model.load import load_v41_engine
from millpond.engine.model_files import load_llama_config, locate_model
from millpond.engine.native import NativeLayers
from millpond.engine.progress import ShowProgress, show_nothing
from millpond.engine.rope import RopeTable, rope_frequencies
from millpond.engine.runner import LlamaEngine
from millpond.engine.swap.choose import choose_method
from millpond.engine.torch_layers import TorchLayers
from millpond.engine.weights import LlamaWeights, load_weights

_AUTO_DTYPE = "bf16"


def make_layers(
    config: LlamaConfig, weights: LlamaWeights, kv: KvTensors, max_model_len: int, *, is_exact: bool
) -> DecoderLayers:
    """Make the decoder's layers: the native kernels where they fit, torch elsewhere."""
    frequencies, factor = rope_frequencies(config.rope, config.head_dim, config.max_positions)
    if weights.rope_factors is not None:
        frequencies = frequencies / weights.rope_factors.cpu()
    rope = RopeTable(frequencies, factor, max_model_len, weights.embedding.device)
    native = NativeLayers.make(config, weights, kv, rope, is_exact=is_exact)
    return native or TorchLayers(config, weights, kv, rope, is_exact=is_exact)


def load_engine(params: EngineParams, device: str = "cpu", show: ShowProgress = show_nothing) -> Engine:
    """Load a model and allocate its KV memory; `show` is told how far it is.

    Raises:
        UnknownModel: No such model.
        ModelFormatError: The model's files are not what they should be; names file and tensor or field.
        ConfigError: A parameter cannot be honoured.
    """
    dtype = _AUTO_DTYPE if params.dtype == "auto" else params.dtype
    _check_device(device)
    files = locate_model(params.model)
    if is_v41(files):
        return load_v41_engine(files, params, device, show=show)
    config = load_llama_config(files)
    max_model_len = choose_max_model_len(params.max_model_len, config.max_positions)
    place = torch.device(device)
    kv = KvTensors(config, dtype, params.kv_memory, place, params.host_kv_memory)
    weights = load_weights(files, config, DTYPES[dtype], place, show)
    layers = make_layers(config, weights, kv, max_model_len, is_exact=params.numerics == "exact")
    return LlamaEngine(
        config,
        weights,
        kv,
        layers,
        num_slots=plan_memory(kv.layout, params.kv_memory, params.max_num_seqs).num_slots,
        max_model_len=max_model_len,
        swap_method=choose_method(params.swap_method, kv.row_bytes),
    )


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used: {error}", param="group.device") from error
