"""What a decode engine is: the contract between the engine process and any engine (`ref`, `stub`).

Source: TileRT 0.1.6's engine contract (inject, decode, reset, capability flags), recast so that one request is one
generator: the caller pulls events, and closing the generator cancels between two steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Capabilities:
    """What `/capabilities` publishes; the router refuses requests that need more."""

    penalties: bool = False
    ignore_eos: bool = False
    logprobs: bool = False


@dataclass(frozen=True)
class SamplingParams:
    """Resolved sampling values of one request.

    temperature < 1e-5 means greedy. top_k <= 0 means no limit. `seed` None draws from the engine's own generator.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


@dataclass(frozen=True)
class LayerKV:
    """One layer of a prompt's KV as it came over the wire; views of the receive buffer, not copies: in host memory, or
    on the engine's device.

    latent: the normalised compressed KV (DeepSeek-V2 paper, c^KV): [seq_len, kv_lora_rank] bf16, or of fp8_ds_mla rows
        uint8 [seq_len, 528], codes and scales as the wire carries them (protocol.md 8.3).
    rope: [seq_len, qk_rope_head_dim] bf16, the shared rotary key after RoPE.
    index_pages: [ceil(seq_len / 64), 8448] uint8 indexer key pages; None for a dense model.
    """

    latent: torch.Tensor
    rope: torch.Tensor
    index_pages: torch.Tensor | None = None


@dataclass(frozen=True)
class PromptKV:
    """The handed-over state of one prompt: positions 0 .. seq_len-1 of every layer, the MTP layer (if any) last."""

    rid: str
    seq_len: int
    last_prompt_token: int
    layers: list[LayerKV]


@dataclass(frozen=True)
class Token:
    """One generated token. logprob and top are None unless logprobs were asked for; top holds (id, logprob) pairs."""

    id: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None


@dataclass(frozen=True)
class Finished:
    """Last event of a decode. stats goes into the reply's timing_ms (numbers and strings only)."""

    reason: FinishReason
    stats: dict[str, float | int | str] = field(default_factory=dict)


class DecodeEngine(Protocol):
    """One sequence at a time: inject, then decode, then reset."""

    name: str
    capabilities: Capabilities
    max_seq_len: int

    def inject(self, kv: PromptKV) -> None:
        """Copies the planes into the engine's cache; the caller may reuse the receive buffer when it returns."""

    def decode(
        self, first_token_id: int, max_tokens: int, sampling: SamplingParams, top_logprobs: int | None = None
    ) -> Iterator[list[Token] | Finished]:
        """Yields the tokens of each step in order, first token included, then exactly one `Finished`.

        Budget: min(max_tokens, max_seq_len - seq_len - 1), at least the first token. Stop tokens are not yielded.
        Closing the generator between two steps cancels the request.
        """

    def reset(self) -> None:
        """Forgets the sequence. Legal at any time, also after a failed or closed decode."""
