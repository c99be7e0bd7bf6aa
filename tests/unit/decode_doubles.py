"""Engines that misbehave on request, for tests of the decode server: `--engine decode_doubles:load_engine`.

What goes wrong is said by the request id: "<what>" or "<what>-<anything>". Everything else decodes normally: the first
token, then one token per plane of the prompt's KV, `plane_token` of its bytes: a test can tell which bytes were read.
"""

import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tilert_ref.connector.rounding import ScaleRule
from tilert_ref.engine.api import Capabilities, Finished, PromptKV, SamplingParams, Token


def plane_token(plane: torch.Tensor) -> int:
    return zlib.crc32(plane.contiguous().view(torch.uint8).numpy().tobytes()) % 100_000


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    threading.Event().wait()


class DoubleEngine:
    name = "DoubleEngine"
    capabilities = Capabilities(ignore_eos=True, logprobs=True)

    def __init__(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len
        self.kv: PromptKV | None = None
        self.answer: list[int] = []

    def inject(self, kv: PromptKV) -> None:
        if self.kv is not None:
            raise RuntimeError(f"inject of {kv.rid} before reset of {self.kv.rid}")
        self.kv = kv
        match kv.rid.split("-")[0]:
            case "inject_hang":
                hang()
            case "inject_raise":
                raise ValueError("this prompt is refused")
            case "inject_slow":
                time.sleep(0.5)
            case "inject_layers":
                for _ in range(200):
                    for _ in kv.layers:
                        time.sleep(0.05)
        # Now, not while it decodes: the slot belongs to the next request as soon as this returns.
        planes = [plane for layer in kv.layers for plane in (layer.latent, layer.rope, layer.index_pages)]
        self.answer = [plane_token(plane) for plane in planes if plane is not None]

    def decode(
        self, first_token_id: int, max_tokens: int, sampling: SamplingParams, top_logprobs: int | None = None
    ) -> Iterator[list[Token] | Finished]:
        what = self.kv.rid.split("-")[0]
        if what == "stop_first":
            yield Finished("stop")
            return
        yield [self._token(first_token_id, top_logprobs)]
        match what:
            case "crash":
                time.sleep(0.2)  # what was yielded has left the process
                die()
            case "hang":
                hang()
            case "raise":
                raise RuntimeError("decode broke")
            case "endless":
                yield from self._endless()
            case "pairs":
                yield [self._token(t, top_logprobs) for t in (100, 101)]
            case "no_logprob":
                yield [Token(7)]
            case "infinite_logprob":
                yield [Token(7, -float("inf"), [(8, -float("inf"))])]
            case "no_end":
                return
            case _:
                for token in self.answer[: max_tokens - 1]:
                    yield [self._token(token, top_logprobs)]
        yield Finished("length", {"steps": 3})

    def _endless(self) -> Iterator[list[Token]]:
        while True:
            time.sleep(0.005)
            yield [Token(1)]

    def _token(self, token: int, top_logprobs: int | None) -> Token:
        return Token(token) if top_logprobs is None else Token(token, -1.0, [(token, -1.0)] * top_logprobs)

    def reset(self) -> None:
        self.kv = None


def load_engine(
    model_dir: str,
    *,
    device: str,
    max_seq_len: int,
    num_mtp: int,
    kv_cache_dtype: str,
    kv_scale_rule: ScaleRule,
    progress: Callable[[str], None],
) -> DoubleEngine:
    """A directory called "broken" fails to load, "dies" dies while it loads."""
    progress("loading the double")
    match Path(model_dir).name:
        case "broken":
            raise ValueError("missing weight: model.norm.weight")
        case "dies":
            die()
    return DoubleEngine(max_seq_len)
