"""A decode engine whose answer is a checksum of every plane it was given: `--engine fault_engine:load_engine`.

Token 0 is the prefill's, then one token a plane. The first token says how many ms each step takes, and each layer of
the injection. Every decode is noted in the file $FAULT_LOG, by its rid and this process's number.
"""

import os
import time
import zlib
from collections.abc import Iterator
from typing import Any

import torch

from tilert_ref.engine.api import Capabilities, Finished, PromptKV, SamplingParams, Token


def checksum(plane: torch.Tensor) -> int:
    return zlib.crc32(plane.contiguous().view(torch.uint8).numpy().tobytes()) % 100_000


class ChecksumEngine:
    name = "ChecksumEngine"
    capabilities = Capabilities(ignore_eos=True)

    def __init__(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len
        self.tokens: list[int] = []

    def inject(self, kv: PromptKV) -> None:
        with open(os.environ["FAULT_LOG"], "a") as log:
            log.write(f"{kv.rid} {os.getpid()}\n")
        for layer in kv.layers:
            self.tokens += [checksum(plane) for plane in (layer.latent, layer.rope, layer.index_pages)]
            time.sleep(kv.last_prompt_token / 1000)

    def decode(
        self, first_token_id: int, max_tokens: int, sampling: SamplingParams, top_logprobs: int | None = None
    ) -> Iterator[list[Token] | Finished]:
        for token in [first_token_id, *self.tokens][:max_tokens]:
            yield [Token(token)]
            time.sleep(first_token_id / 1000)
        yield Finished("length")

    def reset(self) -> None:
        self.tokens = []


def load_engine(model_dir: str, *, max_seq_len: int, **others: Any) -> ChecksumEngine:
    return ChecksumEngine(max_seq_len)
