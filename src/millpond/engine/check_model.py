"""Whether a model can be served as configured, found out in seconds and before any process starts.

No torch here, and no tensor is read: what the engine would refuse after loading is refused from headers.
"""

from __future__ import annotations

from millpond.config.engine_params import EngineParams
from millpond.core.errors import ConfigError
from millpond.core.shapes import KvFormat, kv_layout
from millpond.engine.llama_tensors import check_llama_files
from millpond.engine.memory import choose_max_model_len, llama_kv_layout, plan_memory
from millpond.engine.model.check import check_kept_tokens, check_v41_files
from millpond.engine.model.config import is_v41
from millpond.engine.model_files import locate_model
from millpond.engine.tokenizer_files import load_tokenizer


def check_model(params: EngineParams) -> None:
    """Check the files of the configured model and the parameters that depend on them.

    Raises:
        UnknownModel: No such model.
        ModelFormatError: A file is not what it should be; names file and tensor or field.
        ConfigError: A parameter cannot be honoured.
    """
    files = locate_model(params.model)
    if is_v41(files):
        v41 = check_v41_files(files)
        layout = kv_layout(v41.shape, KvFormat.FP32 if params.dtype == "fp32" else KvFormat.PACKED)
        limit = v41.max_positions
        check_kept_tokens(params.num_kept_tokens, v41.shape)
    else:
        llama = check_llama_files(files)
        if params.weights != "unpacked":
            raise ConfigError(
                f"engine.weights = {params.weights!r}: this model has no packed weights; use unpacked",
                param="engine.weights",
            )
        load_tokenizer(files)
        layout = llama_kv_layout(llama, "fp32" if params.dtype == "fp32" else "bf16")
        limit = llama.max_positions
    choose_max_model_len(params.max_model_len, limit)
    plan_memory(layout, params.kv_memory, params.max_num_seqs)
