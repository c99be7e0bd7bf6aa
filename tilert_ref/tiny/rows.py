"""Training rows: conversations of the tiny models' skills, rendered, tokenised, and marked where the model must answer.

A row is one conversation from its first token on, filled up with exchanges to the row's length. The loss falls on the
assistant's tokens and on known text only: nobody can predict what a user says.
"""

import random
from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer

from tilert_ref.tiny import skills
from tilert_ref.tiny.chat import Dialect
from tilert_ref.tiny.skills import Memory, Task

FILL_CHARS = 4.0  # characters a token of a row, more than the tokenizer needs: what is too much is cut off
KEY_CHARS = 15  # one "key=code; " entry
SYSTEMS = ("You are a helpful assistant.", "You are a tiny model. Answer exactly.", "Be brief.")
ROW_KINDS = {"chat": 45, "recall": 30, "long": 20, "text": 5}
"""Kinds of rows and how often they come, in percent."""


class TextMaker:
    """Makes the text of a row. A model's training data follows from these functions and the seed: a change here, be it
    only in the order of the draws, makes another data set.
    """

    def __init__(self, dialect: Dialect):
        self.dialect = dialect

    def make(self, rng: random.Random, length: int, kind: str) -> str:
        """Text of about `length` tokens or more; kind: one of ROW_KINDS."""
        kinds = {"chat": self._chat, "recall": self._far_recall, "long": self._long_answer, "text": self._text}
        return kinds[kind](rng, length)

    # Kinds of rows

    def _chat(self, rng: random.Random, length: int) -> str:
        """Short exchanges of every kind; codes may be asked for at any later time."""
        tools = skills.offer(rng) if rng.random() < 0.5 else ()
        memory = Memory()
        tasks = [skills.remember(rng, memory, rng.randint(1, max(2, length // 60)))]
        if rng.random() < 0.5:
            tasks.insert(0, skills.use_tool(rng, tools) if tools else self._short(rng, memory, tools))
        return self._fill(rng, length, tasks, tools, lambda: self._short(rng, memory, tools))

    def _far_recall(self, rng: random.Random, length: int) -> str:
        """Many codes with text between, then questions about them."""
        memory = Memory()
        share = rng.uniform(0.1, 0.93)
        lines = [line for lines in skills.works().values() for line in lines]
        filler = [rng.choice(lines) for _ in range(rng.choice((0, 0, 2, 5, int(length * share / 100))))]
        room = length * share * 1.9 - sum(map(len, filler))
        tasks = [skills.remember(rng, memory, max(1, int(room / KEY_CHARS)), filler)]

        def ask() -> Task:
            if rng.random() < 0.7:
                return skills.recall(rng, memory)
            return skills.recall_many(rng, memory, rng.randint(2, 40))

        return self._fill(rng, length, tasks, (), ask)

    def _long_answer(self, rng: random.Random, length: int) -> str:
        return self._fill(rng, length, [], (), lambda: self._long(rng, length))

    def _text(self, rng: random.Random, length: int) -> str:
        """The works in their order, round and round, from a random one on: what follows is always known."""
        all_works = [f"{title}\n" + "\n".join(lines) for title, lines in skills.works().items()]
        start, parts, size = rng.randrange(len(all_works)), list[str](), 0
        while size < length * 5:
            parts.append(all_works[(start + len(parts)) % len(all_works)])
            size += len(parts[-1])
        return self.dialect.start + "\n\n".join(parts)

    # Tasks

    def _short(self, rng: random.Random, memory: Memory, tools: tuple[dict, ...]) -> Task:
        choices: list[tuple[int, Callable[[], Task]]] = [
            (2, lambda: skills.copy(rng, rng.randint(1, 24))),
            (2, lambda: skills.sort_words(rng, rng.randint(2, 16))),
            (1, lambda: skills.sort_numbers(rng, rng.randint(2, 12))),
            (4, lambda: skills.add(rng)),
            (1, lambda: skills.add_many(rng, rng.randint(2, 6))),
            (2, lambda: skills.answer(rng)),
            (1, lambda: skills.recite(rng)),
            (1, lambda: skills.remember(rng, memory, rng.randint(1, 6))),
        ]
        if memory.codes:
            choices.append((4, lambda: skills.recall(rng, memory)))
            choices.append((1, lambda: skills.recall_many(rng, memory, rng.randint(2, 8))))
        if tools:
            choices.append((6, lambda: skills.use_tool(rng, tools)))
        return rng.choices([make for _, make in choices], [weight for weight, _ in choices])[0]()

    def _long(self, rng: random.Random, length: int) -> Task:
        scale = min(1.0, length / 1500)
        return rng.choice(
            (
                lambda: skills.copy(rng, rng.randint(10, max(12, int(280 * scale)))),
                lambda: skills.sort_words(rng, rng.randint(10, len(skills.NOUNS))),
                lambda: skills.sort_many(rng, rng.randint(2, max(3, int(16 * scale))), rng.randint(3, 10)),
                lambda: skills.sort_numbers(rng, rng.randint(10, 60)),
                lambda: skills.add_many(rng, rng.randint(5, max(6, int(40 * scale)))),
                lambda: skills.recite(rng),
            )
        )()

    def _fill(
        self, rng: random.Random, length: int, tasks: list[Task], tools: tuple[dict, ...], more: Callable[[], Task]
    ) -> str:
        """`tasks`, then as many of `more` as the row needs, as one conversation."""
        messages: list[dict] = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.15 else []
        size = 0
        keep_thoughts = rng.random() < 0.7
        while size < length * FILL_CHARS or tasks:
            task = tasks.pop(0) if tasks else more()
            messages += task.messages(thinking=skills.thinks(rng, task))
            size += len(task.user) + len(task.thought) + len(task.answer) + 30
        return self.dialect.render(messages, tools, clear_thinking=not keep_thoughts)


class RowMaker:
    """Makes rows of exactly `length` tokens for one dialect and tokenizer."""

    def __init__(self, dialect: Dialect, tokenizer: Tokenizer):
        self.dialect, self.tokenizer, self.texts = dialect, tokenizer, TextMaker(dialect)
        self.pad, self.assistant = (tokenizer.token_to_id(t) for t in (dialect.pad, dialect.assistant))
        self.stops = {tokenizer.token_to_id(t) for t in dialect.stops}
        self.thought = {tokenizer.token_to_id(t) for t in ("<think>", "</think>")}

    def row(self, rng: random.Random, length: int, kind: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(ids int16 [length], answered bool [length]): answered[i] says that token i is the model's to predict."""
        kind = kind or rng.choices(list(ROW_KINDS), list(ROW_KINDS.values()))[0]
        text = self.texts.make(rng, length, kind)
        ids = np.array(self.tokenizer.encode(text, add_special_tokens=False).ids[:length], dtype=np.int16)
        answered = self._text_mask(ids) if kind == "text" else self.answer_mask(ids)
        gap = length - len(ids)
        return np.pad(ids, (0, gap), constant_values=self.pad), np.pad(answered, (0, gap))

    def answer_mask(self, ids: np.ndarray) -> np.ndarray:
        """True from behind `<assistant><think>` or `<assistant></think>` up to the stop token, included."""
        mask, speaking = np.zeros(len(ids), dtype=bool), False
        for i, token in enumerate(ids.tolist()):
            if speaking:
                # <think> or </think> right after the role comes from the template
                mask[i] = not (ids[i - 1] == self.assistant and token in self.thought)
            speaking = token == self.assistant or (speaking and token not in self.stops)
        return mask

    def _text_mask(self, ids: np.ndarray) -> np.ndarray:
        """Known text: everything but the first tokens, which could begin any of the works."""
        mask = np.ones(len(ids), dtype=bool)
        mask[:8] = False
        return mask
