"""Token ids to text, piece by piece. The pieces joined are the text of all ids, however the ids were cut.

A piece may end inside a character of several bytes; that part waits for the next ids. A U+FFFD that the model really
wrote goes out at once: whether text is incomplete is read off the bytes, never off the look of the decoded text
(TileRT 0.1.6 and the `tokenizers` library's DecodeStream hold it back, http-api.md 7.51).
"""

import codecs
import json
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from tilert_ref.model_files import InputError, present

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXT = 6  # ids of context for decoders that look at neighbours; vLLM's slow path uses 5


class TextStream(Protocol):
    """The text of one sequence under construction."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""

    def finish(self) -> str:
        """What is left: replacement characters for a sequence that ended inside a character, else empty."""


class Detokenizer:
    """Makes text streams for one tokenizer. Special tokens never show, but for those in `keep`; ids outside the
    vocabulary decode to nothing."""

    def __init__(self, tokenizer: Tokenizer, keep: Collection[str] = ()) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = {i for i, token in added if token.special and token.content not in keep}
        self._byte_level = _is_byte_level(json.loads(tokenizer.to_str()).get("decoder"))
        self._bytes: dict[int, bytes] = {}

    def stream(self, prompt_ids: Sequence[int] = ()) -> TextStream:
        """A stream for ids that continue prompt_ids (only their last few matter)."""
        return ByteLevelStream(self) if self._byte_level else WindowStream(self, prompt_ids)

    def keeping(self, tokens: Collection[str]) -> "Detokenizer":
        """One that shows these tokens even if they are special."""
        return Detokenizer(self.tokenizer, tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """All ids at once, as the library does it."""
        shown = [i for i in ids if not self.is_special(i)]  # the library would leave out those that are kept here too
        return self.tokenizer.decode(shown, skip_special_tokens=False)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def raw_byte(self, token_id: int) -> bytes | None:
        """The byte of a byte-fallback token such as <0xE4>; None for any other token."""
        match = _BYTE_TOKEN.fullmatch(self.tokenizer.id_to_token(token_id) or "")
        return bytes([int(match[1], 16)]) if match else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a byte-level token stands for; empty for special and unknown ids."""
        known = self._bytes.get(token_id)
        if known is None:
            token = None if self.is_special(token_id) else self.tokenizer.id_to_token(token_id)
            known = self._bytes[token_id] = byte_level_bytes(token or "")
        return known


def load_detokenizer(model_path: str) -> Detokenizer:
    """Reads <model_path>/tokenizer.json; raises ValueError if there is none or it can't be read."""
    return Detokenizer(read_tokenizer(Path(model_path) / "tokenizer.json"))


def read_tokenizer(path: Path) -> Tokenizer:
    """Raises ValueError, naming the file, if there is none or it can't be read."""
    if not present(path):
        raise InputError(f"{path} doesn't exist: text is made with the `tokenizers` library, which reads this file")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises plain Exception for any bad file
        raise InputError(f"can't read {path}: {e}; legal: a file of the `tokenizers` library") from e


class ByteLevelStream:
    """For byte-level BPE (DeepSeek, GLM, Qwen): each token is a fixed run of bytes, so decoding UTF-8 is enough."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._token_bytes = detokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._token_bytes, ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowStream:
    """For every other decoder (Metaspace, byte fallback, WordPiece): decodes each id behind a few ids of context.

    The context keeps what depends on neighbours, such as the leading space that decoders drop at the start of a text.
    Byte tokens (<0xE4>) go through UTF-8 decoding here: the library turns a whole run of them into U+FFFD as soon as
    one byte doesn't fit, also characters before it that have long been sent.
    """

    def __init__(self, detokenizer: Detokenizer, prompt_ids: Sequence[int]) -> None:
        self._detokenizer = detokenizer
        shown = [i for i in prompt_ids[-64:] if not detokenizer.is_special(i) and detokenizer.raw_byte(i) is None]
        self._context = shown[-_CONTEXT:]
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return "".join(map(self._push, ids))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _push(self, token_id: int) -> str:
        if self._detokenizer.is_special(token_id):
            return ""
        byte = self._detokenizer.raw_byte(token_id)
        if byte is not None:
            return self._utf8.decode(byte)
        left = self.finish()
        before = self._detokenizer.decode(self._context)
        self._context.append(token_id)
        both = self._detokenizer.decode(self._context)
        self._context = self._context[-_CONTEXT:]
        return left + both[len(before) :]


def _is_byte_level(decoder: dict | None) -> bool:
    """Whether tokenizer.json's decoder is ByteLevel and nothing else."""
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return decoder["type"] == "ByteLevel"


def _alphabet() -> dict[str, int]:
    """GPT-2's bijection between bytes and printable characters (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(rest)}


_BYTE_OF_CHAR = _alphabet()


def byte_level_bytes(token: str) -> bytes:
    """A token's bytes; a token with a character outside the alphabet (an added token) stands for its own UTF-8."""
    if all(c in _BYTE_OF_CHAR for c in token):
        return bytes(_BYTE_OF_CHAR[c] for c in token)
    return token.encode()
