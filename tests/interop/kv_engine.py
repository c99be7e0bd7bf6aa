"""An engine for our decode server whose tokens show what it was given: `--engine kv_engine:load_engine`.

Each token after the first is a word chosen by the checksum of one plane of the prompt's KV, so an answer is right only
if every byte of those planes is. The request id's first word may ask for something else: `endless` words, `stop` (the
first token is a stop token), `raise` or `crash` after the first token.
"""

import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer

import tilert_ref.tiny
from tilert_ref.connector.rounding import ScaleRule
from tilert_ref.engine.api import Capabilities, Finished, LayerKV, PromptKV, SamplingParams, Token

MODEL_DIR = Path(tilert_ref.tiny.__file__).parent / "models" / "tiny-glm5"
LENGTH = 12
FIRST_WORD = 7


def words() -> list[int]:
    """Token ids whose text is ASCII letters, alone and after each other."""
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
    return [token for token, text in texts.items() if text.isascii() and text.strip().isalpha()]


def text_of(tokens: list[int]) -> str:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).decode(tokens)


def answer(layers: list[LayerKV], first_token: int) -> list[int]:
    """The whole answer: the first token and one for each of the next planes."""
    known = words()
    planes = [plane for layer in layers for plane in (layer.latent, layer.rope, layer.index_pages)]
    return [first_token] + [known[_checksum(plane) % len(known)] for plane in planes[: LENGTH - 1]]


def _checksum(plane: torch.Tensor) -> int:
    return zlib.crc32(plane.contiguous().view(torch.uint8).numpy().tobytes())


def logprob_of(token: int) -> float:
    return -0.125 * (1 + token % 8)


class KvEngine:
    name = "KvEngine"
    capabilities = Capabilities(penalties=False, ignore_eos=True, logprobs=True)

    def __init__(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len
        self._kv: PromptKV | None = None

    def inject(self, kv: PromptKV) -> None:
        self._kv = kv

    def decode(
        self, first_token_id: int, max_tokens: int, sampling: SamplingParams, top_logprobs: int | None = None
    ) -> Iterator[list[Token] | Finished]:
        what = self._kv.rid.split("-")[0]
        if what == "stop":
            yield Finished("stop")
            return
        tokens = answer(self._kv.layers, first_token_id)
        yield [self._token(first_token_id, top_logprobs)]
        if what == "raise":
            raise RuntimeError("decode broke")
        if what == "crash":
            time.sleep(0.3)  # the first token has left the process
            os.kill(os.getpid(), signal.SIGKILL)
        while what == "endless":
            time.sleep(0.01)
            yield [self._token(tokens[1], top_logprobs)]
        for token in tokens[1:max_tokens]:
            yield [self._token(token, top_logprobs)]
        yield Finished("length" if max_tokens < len(tokens) else "stop")

    def _token(self, token: int, top_logprobs: int | None) -> Token:
        if top_logprobs is None:
            return Token(token)
        logprob = logprob_of(token)
        return Token(token, logprob, [(token + k, logprob - k) for k in range(top_logprobs)])

    def reset(self) -> None:
        self._kv = None


def load_engine(
    model_dir: str,
    *,
    device: str,
    max_seq_len: int,
    num_mtp: int,
    kv_cache_dtype: str,
    kv_scale_rule: ScaleRule,
    progress: Callable[[str], None],
) -> KvEngine:
    return KvEngine(max_seq_len)
