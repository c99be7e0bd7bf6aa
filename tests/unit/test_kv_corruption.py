"""One wrong byte in one KV row makes a trained model's answer wrong, if the answer depends on that row; else it doesn't.

The prompt names 40 codes and asks for one. Its KV takes the way of a handoff: from the paged cache through the planes'
bytes, where the corruption happens, into the cache that decode reads.

Not every byte matters: a trained model's margins are wide (15 between the right digit and the next best, in logits), so
most flips of one bit change nothing. Bit 2 of a bf16's high byte multiplies a value of 2 to 3 by 256. In the last layer
that is enough in 6 of 128 dimensions tried, in the row that is read; in another row it goes unread.
"""

import random
from dataclasses import dataclass

import pytest
import torch
from tokenizers import Tokenizer

from tilert_ref.connector.layout import INDEX_PAGE_BYTES, page_count
from tilert_ref.connector.planes import gather_index_pages, gather_rows
from tilert_ref.engine.api import LayerKV, PromptKV, SamplingParams
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.tiny import model_dir, skills
from tilert_ref.tiny.chat import GLM
from tilert_ref.tiny.golden import Golden, Speaker

CODES = 40
LATENT_BYTES, ROPE_BYTES = 1024, 128
EXPONENT_BIT = 0x04
LAST_LAYER = 2
"""Layers 0, 1, 2: the last one's rows hold what the answer's digits are read from."""


@dataclass
class Planes:
    """One layer as bytes on the wire. kv: uint8 [tokens, 1024], pe: [tokens, 128], pages: [n, 8448] or None."""

    kv: torch.Tensor
    pe: torch.Tensor
    pages: torch.Tensor | None


@dataclass
class Question:
    """asked, other: positions of the tokens of two codes' entries ("key=1234"), the digits last."""

    engine: RefEngine
    golden: Golden
    asked: list[int]
    other: list[int]

    def hand_over(self) -> list[Planes]:
        """The prompt's planes, gathered from the paged cache as vLLM's are. Fresh copies."""
        cache, tokens = self.engine.cache, len(self.golden.prompt)
        blocks, layers = cache.block_table[: page_count(tokens)], []
        for layer, rows in enumerate(cache.rows):
            kv, pe = (torch.empty(tokens, n, dtype=torch.uint8) for n in (LATENT_BYTES, ROPE_BYTES))
            gather_rows(rows, blocks, tokens, kv, pe)
            pages = None
            if cache.index is not None:
                pages = torch.empty(page_count(tokens), INDEX_PAGE_BYTES, dtype=torch.uint8)
                gather_index_pages(cache.index_blocks(layer), blocks, tokens, pages)
            layers.append(Planes(kv, pe, pages))
        return layers

    def answer(self, planes: list[Planes]) -> list[int]:
        """The greedy answer from these bytes; its first token came from prefill."""
        layers = [LayerKV(p.kv.view(torch.bfloat16), p.pe.view(torch.bfloat16), p.pages) for p in planes]
        prompt = self.golden.prompt
        self.engine.reset()
        self.engine.inject(PromptKV("corrupt", len(prompt), prompt[-1], layers))
        events = self.engine.decode(self.golden.answer[0], 24, SamplingParams(temperature=0.0))
        return [token.id for event in events if isinstance(event, list) for token in event]


def entry(tokens: list[str], text: str) -> list[int]:
    """Positions of the tokens that spell `text`, which comes once."""
    start = "".join(tokens).index(text)
    ends = torch.tensor([len(token) for token in tokens]).cumsum(0)
    begins = torch.cat([torch.tensor([0]), ends[:-1]])
    return ((begins < start + len(text)) & (ends > start)).nonzero()[:, 0].tolist()


def ask(name: str) -> Question:
    tokenizer = Tokenizer.from_file(str(model_dir(name) / "tokenizer.json"))
    rng, memory = random.Random("corruption"), skills.Memory()
    codes = skills.remember(rng, memory, CODES)
    asked, other = list(memory.codes)[CODES // 3], list(memory.codes)[2 * CODES // 3]
    golden = Speaker(GLM, tokenizer).ask([codes], skills.recall(rng, memory, asked), thinking=True)
    tokens = [tokenizer.decode([i], skip_special_tokens=False) for i in golden.prompt]
    places = [entry(tokens, f"{key}={memory.codes[key]}") for key in (asked, other)]
    engine = load_engine(model_dir(name), max_seq_len=1024)
    assert engine.prefill(golden.prompt) == golden.answer[0]
    return Question(engine, golden, *places)


@pytest.fixture(scope="module", params=["tiny-glm5-dense", "tiny-glm5"])
def question(request: pytest.FixtureRequest) -> Question:
    """The sparse model's prompt is longer than its index_topk, so it has to find the row first."""
    made = ask(request.param)
    assert len(made.golden.prompt) > 256
    return made
