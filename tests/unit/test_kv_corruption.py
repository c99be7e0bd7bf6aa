"""One wrong byte in one KV row makes a trained model's answer wrong if the answer depends on that row, else not.

The prompt names 40 codes and asks for one. Its KV takes the way of a handoff: from the paged cache through the planes'
bytes, where the corruption happens, into the cache that decode reads.

Not every byte matters: a trained model's margins are wide (15 between the right digit and the next best, in logits), so
most flips of one bit change nothing. Bit 2 of a bf16's high byte multiplies a value of 2 to 3 by 256. In the last layer
that was enough in 10 of 256 pairs of row and dimension tried, in 9 of them only in the row that is read and not in the
other code's.
"""

import random
from copy import deepcopy
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


def gather(engine: RefEngine, tokens: int) -> list[Planes]:
    """The planes of a prompt that the engine has prefilled, gathered from its paged cache as from vLLM's."""
    cache, layers = engine.cache, []
    blocks = cache.block_table[: page_count(tokens)]
    for layer, rows in enumerate(cache.rows):
        kv, pe = (torch.empty(tokens, n, dtype=torch.uint8) for n in (LATENT_BYTES, ROPE_BYTES))
        gather_rows(rows, blocks, tokens, kv, pe)
        pages = None
        if cache.index is not None:
            pages = torch.empty(page_count(tokens), INDEX_PAGE_BYTES, dtype=torch.uint8)
            gather_index_pages(cache.index_blocks(layer), blocks, tokens, pages)
        layers.append(Planes(kv, pe, pages))
    return layers


@dataclass
class Question:
    """asked, other: positions of the tokens of two codes' entries ("key=1234"), the digits last."""

    engine: RefEngine
    golden: Golden
    asked: list[int]
    other: list[int]
    planes: list[Planes]

    def hand_over(self) -> list[Planes]:
        return deepcopy(self.planes)

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
    return Question(engine, golden, *places, gather(engine, len(golden.prompt)))


@pytest.fixture(scope="module", params=["tiny-glm5-dense", "tiny-glm5"])
def question(request: pytest.FixtureRequest) -> Question:
    """The sparse model's prompt is longer than its index_topk, so it has to find the row first."""
    made = ask(request.param)
    assert len(made.golden.prompt) > 256
    return made


def flip(planes: list[Planes], layer: int, position: int, value: int) -> list[Planes]:
    """One bit of the high byte of one latent value."""
    planes[layer].kv[position, 2 * value + 1] ^= EXPONENT_BIT
    return planes


def test_the_bytes_as_they_came_give_the_right_answer(question: Question) -> None:
    assert question.answer(question.hand_over()) == question.golden.answer


@pytest.mark.parametrize("value", [21, 237, 274, 328])
def test_one_byte_of_one_row(question: Question, value: int) -> None:
    """In the row that the second digit is read from, the answer becomes wrong; in another code's row it doesn't."""
    wrong = question.answer(flip(question.hand_over(), LAST_LAYER, question.asked[-3], value))
    assert wrong != question.golden.answer
    assert question.answer(flip(question.hand_over(), LAST_LAYER, question.other[-3], value)) == question.golden.answer


def test_the_row_of_another_code(question: Question) -> None:
    """With the latents of the two codes' first digits swapped in one layer, the other code's digit is answered.

    The latents only: a row with its rotary key carries its position along, and attention does not mind the order.
    """
    planes = question.hand_over()
    kv, here, there = planes[LAST_LAYER].kv, question.asked[-4], question.other[-4]
    kv[[here, there]] = kv[[there, here]]
    right, others = question.golden.answer, question.golden.prompt[there]
    assert others != right[-4]
    assert question.answer(planes) == [*right[:-4], others, *right[-3:]]
