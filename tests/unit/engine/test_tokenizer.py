"""Tokenizers: lossless, streams equal the whole, control tokens only from trusted text."""

from __future__ import annotations

import itertools
import json
import threading
import time
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from millpond.core.errors import InvalidRequest, ModelFormatError
from millpond.engine.model_files import ModelFiles, locate_model
from millpond.engine.tokenizer import Tokenizer
from millpond.engine.tokenizer_files import load_tokenizer
from millpond.engine.word_tokenizer import END_ID, FIRST_WORD, make_word_tokenizer

HARD_TEXTS = [
    "family 👩‍👩‍👧‍👦, flag 🏴󠁧󠁢󠁳󠁣󠁴󠁿, wave 👋🏽",
    "안녕하세요, 한국어로 길게 대답해 주세요.",
    "漢字とかなの混ざった文。简体字和繁體字。",
    "e\u0301 n\u0303 Z\u0351\u036b\u0343 व्यक्ति ﷽",
    "\U0001f468\u200d\U0001f680\ufe0f\u200d\u20e3",
]
# The vocabulary of the built-in model lacks some control characters and the bytes of unassigned planes.
LETTERS = st.characters(exclude_categories=("Cs", "Cc", "Cn"), include_characters="\n\t\r")
TEXTS = st.one_of(
    st.text(LETTERS), st.lists(st.sampled_from([*HARD_TEXTS, "<|im_end|>", " ", "12"])).map("".join)
)


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return load_tokenizer(locate_model("smollm2-135m"))


GOLDEN_IDS = Path(__file__).parents[2] / "golden" / "smollm2_ids.json"
"""[text, ids] pairs of llama.cpp; see make_smollm2_ids.py beside it."""
WORDS = make_word_tokenizer(1000)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.make_detokenizer()
    return [*map(detokenizer.push, ids), detokenizer.flush()]


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_bug_03_one_byte_per_token_never_shows_a_broken_character(text: str) -> None:
    deltas = stream(WORDS, list(text.encode()))
    assert "".join(deltas) == text
    assert deltas[-1] == ""
    assert not any("\ufffd" in delta for delta in deltas)


@given(text=TEXTS)
def test_bug_03_stream_of_real_tokens_joins_to_the_text(smollm: Tokenizer, text: str) -> None:
    ids = list(smollm.encode(text))
    assert "".join(stream(smollm, ids)) == text
    assert smollm.decode(ids) == text


@given(ids=st.lists(st.integers(0, 49151), max_size=60))
def test_bug_03_stream_of_any_tokens_equals_the_whole(smollm: Tokenizer, ids: list[int]) -> None:
    deltas = stream(smollm, ids)
    assert "".join(deltas) == smollm.decode(ids)
    for end in range(len(ids)):  # what was shown never has to be taken back
        assert smollm.decode(ids).startswith("".join(deltas[:end]))


@given(data=st.binary(max_size=40))
def test_stream_of_any_bytes_equals_the_whole(data: bytes) -> None:
    assert "".join(stream(WORDS, list(data))) == data.decode(errors="replace") == WORDS.decode(list(data))


def test_incomplete_end_is_one_replacement_character() -> None:
    assert stream(WORDS, list("é".encode()[:1])) == ["", "\ufffd"]


def test_detokenizer_starts_afresh_after_flush() -> None:
    detokenizer = WORDS.make_detokenizer()
    assert (detokenizer.push(0xE2), detokenizer.flush(), detokenizer.push(65)) == ("", "\ufffd", "A")


def test_control_and_unknown_tokens_have_no_text(smollm: Tokenizer) -> None:
    assert smollm.decode([2, 1, 60000]) == "".join(stream(smollm, [2, 1, 60000])) == ""
    assert smollm.decode([2], keep_control=True) == "<|im_end|>"
    assert smollm.token_bytes(2) == b"<|im_end|>"
    assert smollm.token_bytes(60000) == b""


# --- the built-in model ---------------------------------------------------------------------------


def test_ids_equal_those_of_an_independent_implementation(smollm: Tokenizer) -> None:
    for text, ids in json.loads(GOLDEN_IDS.read_text()):
        assert list(smollm.encode(text)) == ids, text


def test_bytes_that_the_vocabulary_lacks_are_left_out(smollm: Tokenizer) -> None:
    assert smollm.decode(smollm.encode("a\x04b")) == "ab"


def test_built_in_model_knows_its_tokens(smollm: Tokenizer) -> None:
    assert smollm.vocab_size == 49152
    assert smollm.stop_ids == (2,)
    assert smollm.named_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert "<|im_start|>" in (smollm.chat_template or "")


def test_long_texts_are_cut_like_short_ones_while_other_threads_run(smollm: Tokenizer) -> None:
    line = "A mill pond holds 12 ducks, 3 boats and <|im_end|> no fish.\n"
    once, many = smollm.encode(line), 4000
    beats: list[int] = []
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.001):
            beats.append(time.perf_counter_ns())

    thread = threading.Thread(target=beat)
    thread.start()
    begin = time.perf_counter_ns()
    ids = smollm.encode(line * many)
    end = time.perf_counter_ns()
    is_over.set()
    thread.join()
    assert ids == once * many
    inside = [begin, *(at for at in beats if begin < at < end), end]
    longest = max(after - before for before, after in itertools.pairwise(inside))
    assert longest < 0.7 * (end - begin)  # all of it while the library holds the interpreter


def test_digits_are_cut_one_by_one(smollm: Tokenizer) -> None:
    assert [smollm.token_bytes(i) for i in smollm.encode("a 120")] == [b"a", b" ", b"1", b"2", b"0"]


@given(text=st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "x", " "])).map("".join))
def test_clients_cannot_write_control_tokens(smollm: Tokenizer, text: str) -> None:
    controls = set(smollm.control_ids.values())
    assert not controls & set(smollm.encode(text))
    assert smollm.decode(smollm.encode(text)) == text


def test_trusted_text_can(smollm: Tokenizer) -> None:
    assert list(smollm.encode_trusted("<|im_start|><|im_end|>")) == [1, 2]
    ids = smollm.encode_trusted("<|im_start|>hi <\ufdd0|im_end|>", "\ufdd0")
    assert ids[0] == 1
    assert 2 not in ids
    assert smollm.decode(ids, keep_control=True) == "<|im_start|>hi <|im_end|>"


def test_half_a_surrogate_pair_is_the_clients_error(smollm: Tokenizer) -> None:
    for encode in (smollm.encode, smollm.encode_trusted):
        with pytest.raises(InvalidRequest, match="character 2"):
            encode("ab\ud83d")


def test_word_tokenizer_spells_ids() -> None:
    assert WORDS.decode([FIRST_WORD, 0x2F1, END_ID]) == " 103 2f1"
    assert list(WORDS.encode("hé")) == [104, 0xC3, 0xA9]
    assert WORDS.vocab_size == 1000


# --- Hugging Face folders -------------------------------------------------------------------------


@pytest.fixture
def hf_files(tmp_path: Path) -> ModelFiles:
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        ["hello world, hello tokenizer", "grüße an alle"],
        trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    core.add_special_tokens(["<s>", "</s>", "<|turn|>"])
    core.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    core.enable_truncation(5)
    core.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "generation_config.json", {"eos_token_id": [7, 9]})
    write(tmp_path / "config.json", {"eos_token_id": 9})
    write(
        tmp_path / "tokenizer_config.json",
        {
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "chat_template": [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}],
        },
    )
    return ModelFiles("hf", "tiny", (), tmp_path)


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def test_folder_gives_everything(hf_files: ModelFiles) -> None:
    tokenizer = load_tokenizer(hf_files)
    end_id = tokenizer.control_ids["</s>"]
    assert tokenizer.stop_ids == (7, 9, end_id)
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.chat_template == "A"
    assert set(tokenizer.control_ids) == {"<s>", "</s>", "<|turn|>"}


def test_folder_prefix_comes_before_raw_text_only(hf_files: ModelFiles) -> None:
    tokenizer = load_tokenizer(hf_files)
    begin = tokenizer.control_ids["<s>"]
    with_prefix = list(tokenizer.encode("hello world, much longer than the truncation asked for"))
    assert with_prefix[0] == begin
    assert (
        list(tokenizer.encode("hello world, much longer than the truncation asked for", add_prefix=False))
        == with_prefix[1:]
    )
    assert begin not in tokenizer.encode_trusted("hello")
    assert tokenizer.decode(with_prefix) == "hello world, much longer than the truncation asked for"


def test_folder_trusted_text_is_cut_as_the_library_does(hf_files: ModelFiles) -> None:
    ours = load_tokenizer(hf_files)
    theirs = tokenizers.Tokenizer.from_file(str(hf_files.root / "tokenizer.json"))
    theirs.no_truncation()
    pieces = st.sampled_from(["<s>", "</s>", "<|turn|>", "<think>", "hello", " wörld", "\n", "<", "s>"])

    @given(st.lists(pieces).map("".join))
    def check(text: str) -> None:
        assert list(ours.encode_trusted(text)) == theirs.encode(text, add_special_tokens=False).ids

    check()


def test_folder_template_file_wins(hf_files: ModelFiles) -> None:
    (hf_files.root / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(hf_files).chat_template == "from the file"


def test_folder_user_defined_tokens_are_text(hf_files: ModelFiles) -> None:
    tokenizer = load_tokenizer(hf_files)
    ids = tokenizer.encode("<think>hello", add_prefix=False)
    assert tokenizer.token_bytes(ids[0]) == b"<think>"
    assert tokenizer.decode(ids) == "<think>hello"


def test_folder_of_sentencepiece_kind(tmp_path: Path) -> None:
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for token in ("\u2581", "a", "b", "\u2581a"):
        vocab[token] = len(vocab)
    core = tokenizers.Tokenizer(
        models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(ModelFiles("hf", "tiny", (), tmp_path))
    ids = list(tokenizer.encode("b a é"))
    assert tokenizer.decode(ids) == "b a é" == "".join(stream(tokenizer, ids))
    assert tokenizer.chat_template is None
    assert tokenizer.stop_ids == ()


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_folder_puts_its_space_where_the_library_does(tmp_path: Path, scheme: str) -> None:
    vocab = {
        token: token_id for token_id, token in enumerate(["<unk>", "\u2581", "a", "b", "\u2581a", "</s>"])
    }
    core = tokenizers.Tokenizer(models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    core.add_special_tokens(["</s>"])
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(ModelFiles("hf", "tiny", (), tmp_path))
    for text in ("a b</s>a</s> b", "</s>a", "</s></s>ba</s>", "a", ""):
        assert list(tokenizer.encode_trusted(text)) == core.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no tokenizer.json"),
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "tokenizer.json"),
    ],
)
def test_broken_folder_names_the_file(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFormatError, match=message):
        load_tokenizer(ModelFiles("hf", "tiny", (), tmp_path))


def test_folder_of_unsupported_kind_is_named(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    core.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelFormatError, match="WordPiece"):
        load_tokenizer(ModelFiles("hf", "tiny", (), tmp_path))


# --- GGUF files -----------------------------------------------------------------------------------


def gguf_files(tmp_path: Path, **changes: object) -> ModelFiles:
    fields: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["<s>", "<tool>", "a", "b", "ab", "\u0120", "1"],
        "tokenizer.ggml.token_type": [3, 4, 1, 1, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    } | changes
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in fields.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return ModelFiles("gguf", "tiny", (path,), tmp_path)


def test_gguf_gives_everything(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(gguf_files(tmp_path))
    assert list(tokenizer.encode("ab a<tool>")) == [0, 4, 5, 2, 1]
    assert tokenizer.stop_ids == (3, 2)
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "b"}
    assert set(tokenizer.control_ids) == {"<s>"}
    assert tokenizer.decode([0, 4, 5, 1]) == "ab <tool>"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokenizer.ggml.model", "llama", "tokenizer.ggml.model is 'llama'"),
        ("tokenizer.ggml.pre", "unheard-of", "tokenizer.ggml.pre is 'unheard-of'"),
        ("tokenizer.ggml.token_type", [1], "7 entries, token_type 1"),
        ("tokenizer.ggml.merges", ["a zz"], "tiny.gguf"),
    ],
)
def test_unsupported_gguf_names_the_field(tmp_path: Path, field: str, value: object, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load_tokenizer(gguf_files(tmp_path, **{field: value}))
