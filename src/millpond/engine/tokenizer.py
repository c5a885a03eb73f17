"""Text to token ids and back.

Every token stands for a fixed string of bytes, so text is the UTF-8 decoding of the joined bytes, and a
stream is the same decoding done piece by piece: its deltas always join to the text of the whole.

Control tokens (`<|im_end|>` and the like) come only from trusted text, which is what a chat template writes.
The same characters in a client's text are encoded as the ordinary text they are.
"""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

from millpond.core.errors import InvalidRequest
from millpond.core.request import token_ids


class Detokenizer:
    """Text of one growing sequence, token by token.

    Bytes of an incomplete character are held back until it is complete. Control tokens have no text.

    Guarantees:
        All texts returned, joined, equal `Tokenizer.decode` of all ids pushed.
    """

    __slots__ = ("_decoder", "_texts")

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that one more token completes; may be empty."""
        texts = self._texts
        return self._decoder.decode(texts[token_id] if token_id < len(texts) else b"")

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character, else nothing."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class Tokenizer:
    """One model's vocabulary and how text is cut into it.

    Attributes:
        vocab_size: Token ids known to the tokenizer; a model may have more, which stand for no text.
        stop_ids: Ids that end a sequence.
        chat_template: Jinja source, None if the model has none.
        named_tokens: Control tokens by the names templates use: `bos_token`, `eos_token`, ...
        control_ids: Control tokens that trusted text may contain, by their text.
    """

    def __init__(
        self,
        *,
        encode_plain: Callable[[str], list[int]],
        encode_inner: Callable[[str], list[int]] | None = None,
        token_bytes: Sequence[bytes],
        control_ids: Mapping[str, int],
        prefix_ids: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        encode_plain: Cuts text without ever producing a control token.
        encode_inner: The same for text after a control token; some models begin only a whole text with a
            space.
        token_bytes: Bytes of every token, by id; for control tokens those of their text.
        control_ids: Control tokens by their text.
        prefix_ids: What the model expects before any raw text, for example a begin token.
        stop_ids: Ids that end a sequence.
        chat_template: Jinja source.
        named_tokens: Control tokens by the names templates use.
        """
        self.vocab_size = len(token_bytes)
        self.stop_ids = tuple(stop_ids)
        self.chat_template = chat_template
        self.named_tokens = dict(named_tokens or {})
        # One-character tokens cannot be told apart once a text is protected (engine.chat_template).
        self.control_ids = {text: token_id for text, token_id in control_ids.items() if len(text) > 1}
        self._encode_plain = encode_plain
        self._encode_inner = encode_inner or encode_plain
        self._prefix_ids = list(prefix_ids)
        self._bytes = token_bytes
        self._texts = list(token_bytes)
        for token_id in control_ids.values():
            self._texts[token_id] = b""
        longest_first = sorted(self.control_ids, key=lambda text: (-len(text), text))
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, text: str, *, add_prefix: bool = True) -> array[int]:
        """Ids of a client's text; control tokens in it are ordinary characters.

        Bytes for which the model has no token (rare control characters) are left out.

        Args:
            text: Any text.
            add_prefix: Put the model's prefix (begin token) before it, as for a raw completion.

        Returns:
            int32.

        Raises:
            InvalidRequest: The text holds half of a surrogate pair.
        """
        prefix = self._prefix_ids if add_prefix else []
        return token_ids(prefix + self._encode_plain(_checked(text)))

    def encode_trusted(self, text: str, mark: str = "") -> array[int]:
        """Ids of text in which control tokens are meant.

        Args:
            text: For example a rendered conversation.
            mark: Character that splits what must not be read as a control token; removed afterwards.

        Returns:
            int32.
        """
        ids: list[int] = []
        end = 0
        for match in self._control.finditer(_checked(text)):
            ids += self._encode_piece(text[end : match.start()], mark, is_first=end == 0)
            ids.append(self.control_ids[match.group()])
            end = match.end()
        return token_ids(ids + self._encode_piece(text[end:], mark, is_first=end == 0))

    def decode(self, ids: Sequence[int], *, keep_control: bool = False) -> str:
        """Text of some tokens; invalid UTF-8 becomes U+FFFD."""
        texts = self._bytes if keep_control else self._texts
        return b"".join(texts[token_id] for token_id in ids if token_id < len(texts)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes a token stands for; for control tokens those of their text; empty for unknown ids."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def make_detokenizer(self) -> Detokenizer:
        """Start the text of a new sequence."""
        return Detokenizer(self._texts)

    def detokenizer_with(self, control_texts: Iterable[str]) -> Callable[[], Detokenizer]:
        """Make what starts the text of a new sequence in which some control tokens have their text."""
        texts = list(self._texts)
        for text in control_texts:
            texts[self.control_ids[text]] = text.encode()
        return lambda: Detokenizer(texts)

    def _encode_piece(self, text: str, mark: str, *, is_first: bool) -> list[int]:
        text = text.replace(mark, "") if mark else text
        if not text:
            return []
        return self._encode_plain(text) if is_first else self._encode_inner(text)


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text is not valid Unicode: half of a surrogate pair at character {error.start}",
            code="invalid_unicode",
        ) from error
    return text
