"""Load a model's tokenizer: `tokenizer.json` of a Hugging Face folder, or the metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, pre_tokenizers

from millpond.core.errors import ModelFormatError
from millpond.engine.model_files import ModelFiles, read_gguf
from millpond.engine.tokenizer import Tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_GGUF_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_CONTROL = 3
_GGUF_USER_DEFINED = 4

_LONG_CHARS = 4096
"""Texts from here on are cut by the library's batch call, which lets other threads run meanwhile."""

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GGUF_SPLITS = {
    "gpt-2": (_GPT2_SPLIT,),
    "smollm": (r"\p{N}", _GPT2_SPLIT),
    "llama-bpe": (_LETTERS + r"\p{N}{1,3}" + _REST,),
    "qwen2": (_LETTERS + r"\p{N}" + _REST,),
}
"""Name in `tokenizer.ggml.pre` -> patterns by which text is cut before merging, one after the other."""


def load_tokenizer(files: ModelFiles, control_texts: Collection[str] = ()) -> Tokenizer:
    """Load the tokenizer that belongs to a model.

    Args:
        files: The model.
        control_texts: Added tokens that are control tokens whether or not `tokenizer.json` says so.

    Raises:
        ModelFormatError: It is missing, broken or of a kind that is not supported (named).
    """
    if files.kind == "gguf":
        file = read_gguf(files.weight_files[0])
        return _from_gguf(file.metadata, file.path.name)
    return _from_hf(files.root, control_texts)


# --- Hugging Face folder ----------------------------------------------------------------------------


def _from_hf(root: Path, control_texts: Collection[str]) -> Tokenizer:
    path = root / "tokenizer.json"
    record = _read_json(path)
    if record is None:
        raise ModelFormatError(f"{root.name}: no tokenizer.json in the model folder", code="model.tokenizer")
    for added in record.get("added_tokens") or ():
        added["special"] = added.get("special", False) or added.get("content") in control_texts
    core = _parse(record, path.name)
    to_bytes = _bytes_rule(record, path.name)
    settings = _read_json(root / "tokenizer_config.json") or {}
    named = {name: text for name in _NAMED_TOKENS if (text := _token_text(settings.get(name)))}
    prefix_ids = core.encode("").ids
    template_file = root / "chat_template.jinja"
    template = template_file.read_text(encoding="utf-8") if template_file.is_file() else None
    return _wrap(
        core,
        to_bytes,
        inner=_inner_core(record, path.name),
        prefix_ids=prefix_ids,
        stop_ids=_hf_stop_ids(root, core, named.get("eos_token")),
        chat_template=template or _default_template(settings.get("chat_template")),
        named_tokens=named,
    )


def _parse(record: Mapping[str, Any], source: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(record))
    except Exception as error:  # the library raises nothing more specific
        raise ModelFormatError(f"{source}: {error}", code="model.tokenizer") from error


def _inner_core(record: Mapping[str, Any], source: str) -> tokenizers.Tokenizer | None:
    """What cuts text after a control token, where a space is put before the beginning of a text only."""
    cut = record.get("pre_tokenizer") or {}
    if cut.get("type") != "Metaspace" or cut.get("prepend_scheme") != "first":
        return None
    return _parse({**record, "pre_tokenizer": {**cut, "prepend_scheme": "never"}}, source)


def _bytes_rule(record: Mapping[str, Any], source: str) -> type[_ByteLevel] | type[_Sentencepiece]:
    kinds = set(_kinds(record.get("decoder"))) | set(_kinds(record.get("pre_tokenizer")))
    if "ByteLevel" in kinds:
        return _ByteLevel
    if "Metaspace" in kinds or "ByteFallback" in kinds:
        return _Sentencepiece
    raise ModelFormatError(
        f"{source}: decoder of kinds {sorted(kinds)} is not supported", code="model.tokenizer"
    )


def _kinds(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(kind := node.get("type"), str):
            yield kind
        for value in node.values():
            yield from _kinds(value)
    elif isinstance(node, list):
        for value in node:
            yield from _kinds(value)


def _hf_stop_ids(root: Path, core: tokenizers.Tokenizer, eos_token: str | None) -> list[int]:
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = (_read_json(root / name) or {}).get("eos_token_id")
        found += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)]
    eos_id = core.token_to_id(eos_token) if eos_token else None
    return list(dict.fromkeys(found if eos_id is None else [*found, eos_id]))


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _default_template(value: object) -> str | None:
    if isinstance(value, list):
        by_name = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = by_name.get("default")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFormatError(f"{path.name}: not JSON: {error}", code="model.tokenizer") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path.name}: not a JSON object", code="model.tokenizer")
    return value


# --- GGUF -------------------------------------------------------------------------------------------


def _from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    split_name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise ModelFormatError(
            f"{source}: tokenizer.ggml.model is {kind!r}; supported: gpt2", code="model.tokenizer"
        )
    if split_name not in _GGUF_SPLITS:
        raise ModelFormatError(
            f"{source}: tokenizer.ggml.pre is {split_name!r}; supported: {', '.join(_GGUF_SPLITS)}",
            code="model.tokenizer",
        )
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    merges: list[str] = metadata.get("tokenizer.ggml.merges") or []
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not tokens or len(kinds) != len(tokens):
        raise ModelFormatError(
            f"{source}: tokenizer.ggml.tokens has {len(tokens)} entries, token_type {len(kinds)}",
            code="model.tokenizer",
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = models.BPE(vocab, pairs, ignore_merges=split_name == "llama-bpe")
    except Exception as error:  # the library raises nothing more specific
        raise ModelFormatError(f"{source}: {error}", code="model.tokenizer") from error
    core = tokenizers.Tokenizer(model)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _GGUF_SPLITS[split_name]]
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_letters])
    by_kind = list(zip(tokens, kinds, strict=True))
    core.add_special_tokens(
        [_added(token, is_control=True) for token, kind in by_kind if kind == _GGUF_CONTROL]
    )
    core.add_tokens(
        [_added(token, is_control=False) for token, kind in by_kind if kind == _GGUF_USER_DEFINED]
    )

    def named_id(name: str) -> int | None:
        token_id = metadata.get(f"tokenizer.ggml.{name}")
        return token_id if isinstance(token_id, int) and token_id < len(tokens) else None

    bos_id, eos_id = named_id("bos_token_id"), named_id("eos_token_id")
    named = {"bos_token": bos_id, "eos_token": eos_id}
    return _wrap(
        core,
        _ByteLevel,
        prefix_ids=[bos_id] if metadata.get("tokenizer.ggml.add_bos_token") and bos_id is not None else [],
        stop_ids=list(dict.fromkeys(i for key in _GGUF_STOP_KEYS if (i := named_id(key)) is not None)),
        chat_template=metadata.get("tokenizer.chat_template"),
        named_tokens={name: tokens[token_id] for name, token_id in named.items() if token_id is not None},
    )


def _added(text: str, *, is_control: bool) -> AddedToken:
    return AddedToken(text, special=is_control, normalized=False)


# --- both -------------------------------------------------------------------------------------------


def _wrap(
    core: tokenizers.Tokenizer,
    to_bytes: type[_ByteLevel] | type[_Sentencepiece],
    *,
    inner: tokenizers.Tokenizer | None = None,
    prefix_ids: list[int],
    stop_ids: list[int],
    chat_template: str | None,
    named_tokens: Mapping[str, str],
) -> Tokenizer:
    added = core.get_added_tokens_decoder()
    token_bytes = [b""] * core.get_vocab_size(with_added_tokens=True)
    for text, token_id in core.get_vocab(with_added_tokens=True).items():
        if token_id >= len(token_bytes):  # ids with gaps
            token_bytes.extend([b""] * (token_id + 1 - len(token_bytes)))
        token_bytes[token_id] = text.encode() if token_id in added else to_bytes.of(text)
    return Tokenizer(
        encode_plain=_plain_encoder(core),
        encode_inner=_plain_encoder(inner) if inner else None,
        token_bytes=token_bytes,
        control_ids={token.content: token_id for token_id, token in added.items() if token.special},
        prefix_ids=prefix_ids,
        stop_ids=stop_ids,
        chat_template=chat_template,
        named_tokens=named_tokens,
    )


def _plain_encoder(core: tokenizers.Tokenizer) -> Callable[[str], list[int]]:
    core.encode_special_tokens = True  # control tokens are then cut like any other text
    core.no_padding()
    core.no_truncation()

    def encode(text: str) -> list[int]:
        if len(text) < _LONG_CHARS:
            return core.encode(text, add_special_tokens=False).ids
        return core.encode_batch_fast([text], add_special_tokens=False)[0].ids

    return encode


class _ByteLevel:
    """Tokens spell bytes as printable letters (GPT-2's table)."""

    @staticmethod
    def of(token: str) -> bytes:
        table = _byte_by_letter()
        return bytes(table[letter] for letter in token)


class _Sentencepiece:
    """Tokens are text with U+2581 for the space; `<0xNN>` is one byte."""

    @staticmethod
    def of(token: str) -> bytes:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


@cache
def _byte_by_letter() -> dict[str, int]:
    """Printable Latin-1 letters stand for themselves, the other bytes for U+0100 onward in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
