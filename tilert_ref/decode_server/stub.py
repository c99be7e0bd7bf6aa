"""The stub engine: answers without a model. A double for testing routers and prefill nodes (http-api.md 2.2)."""

from collections.abc import Callable, Iterator

from tilert_ref.connector.rounding import ScaleRule
from tilert_ref.engine.api import Capabilities, Finished, PromptKV, SamplingParams, Token

REPLY = [11, 22, 33]


class StubEngine:
    """Decodes to ([first] + [11, 22, 33])[:max_tokens], whatever the prompt. Claims every capability, uses none.

    TileRT's stub also accepts grammars; constrained decoding isn't part of this engine contract, the server refuses it.
    """

    name = "StubEngine"
    capabilities = Capabilities(penalties=True, ignore_eos=True, logprobs=True)

    def __init__(self, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len

    def inject(self, kv: PromptKV) -> None:
        pass

    def decode(
        self, first_token_id: int, max_tokens: int, sampling: SamplingParams, top_logprobs: int | None = None
    ) -> Iterator[list[Token] | Finished]:
        for token in [first_token_id, *REPLY][:max_tokens]:
            yield [stub_token(token, top_logprobs)]
        yield Finished("stop")

    def reset(self) -> None:
        pass


def stub_token(token: int, top_logprobs: int | None) -> Token:
    """Logprob of token t: -0.5 - 0.25 (t mod 4); candidate k: token t + k, that much minus 0.5 k."""
    if top_logprobs is None:
        return Token(token)
    logprob = -0.5 - 0.25 * (token % 4)
    return Token(token, logprob, [(token + k, logprob - 0.5 * k) for k in range(top_logprobs)])


def load_engine(
    model_dir: str,
    *,
    device: str,
    max_seq_len: int,
    num_mtp: int,
    kv_cache_dtype: str,
    kv_scale_rule: ScaleRule,
    progress: Callable[[str], None],
) -> StubEngine:
    """Same signature as every engine's factory; only max_seq_len is used."""
    progress(f"stub engine: no weights, always answers {REPLY}")
    return StubEngine(max_seq_len)
