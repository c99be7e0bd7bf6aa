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

CHARS_PER_TOKEN = 2.0  # below what the tokenizer reaches, so that a row is rarely too short
KEY_CHARS = 15  # one "key=code; " entry
SYSTEMS = ("You are a helpful assistant.", "You are a tiny model. Answer exactly.", "Be brief.")
ROW_KINDS = {"chat": 45, "recall": 30, "long": 20, "text": 5}
"""Kinds of rows and how often they come, in percent."""


class RowMaker:
    """Makes rows of exactly `length` tokens for one dialect and tokenizer."""

    def __init__(self, dialect: Dialect, tokenizer: Tokenizer):
        self.dialect, self.tokenizer = dialect, tokenizer
        self.pad, self.assistant = (tokenizer.token_to_id(t) for t in (dialect.pad, dialect.assistant))
        self.stops = {tokenizer.token_to_id(t) for t in dialect.stops}
        self.thought = {tokenizer.token_to_id(t) for t in ("<think>", "</think>")}

    @classmethod
    def for_text(cls, dialect: Dialect) -> "RowMaker":
        """A maker that can make text but no rows: a tokenizer is trained on what it makes."""
        maker = cls.__new__(cls)
        maker.dialect = dialect
        return maker

    def row(self, rng: random.Random, length: int, kind: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(ids int16 [length], answered bool [length]): answered[i] says that token i is the model's to predict."""
        kind = kind or rng.choices(list(ROW_KINDS), list(ROW_KINDS.values()))[0]
        text, is_text = self.text(rng, length, kind)
        ids = np.array(self.tokenizer.encode(text, add_special_tokens=False).ids[:length], dtype=np.int16)
        answered = self._text_mask(ids) if is_text else self.answer_mask(ids)
        gap = length - len(ids)
        return np.pad(ids, (0, gap), constant_values=self.pad), np.pad(answered, (0, gap))

    def text(self, rng: random.Random, length: int, kind: str) -> tuple[str, bool]:
        """(about `length` tokens of text or more, whether it is plain text)."""
        make = {"chat": self._chat, "recall": self._far_recall, "long": self._long_answer, "text": self._text}
        return make[kind](rng, length)

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

    # Kinds of rows: (text, whether it is plain text)

    def _chat(self, rng: random.Random, length: int) -> tuple[str, bool]:
        """Short exchanges of every kind; codes may be asked for at any later time."""
        tools = skills.offer(rng) if rng.random() < 0.5 else ()
        memory = Memory()
        memory_task = skills.remember(rng, memory, rng.randint(1, max(2, length // 60)))
        tasks = [memory_task]
        if rng.random() < 0.5:
            tasks = (
                [self._short(rng, memory, tools), memory_task] if not tools else [skills.use_tool(rng, tools), *tasks]
            )
        return self._fill(rng, length, tasks, tools, lambda: self._short(rng, memory, tools)), False

    def _far_recall(self, rng: random.Random, length: int) -> tuple[str, bool]:
        """Many codes with text between, then questions about them."""
        memory = Memory()
        share = rng.uniform(0.1, 0.93)
        lines = [line for lines in skills.works().values() for line in lines]
        filler = [rng.choice(lines) for _ in range(rng.choice((0, 0, 2, 5, int(length * share / 100))))]
        room = length * share * 1.9 - sum(map(len, filler))
        tasks = [skills.remember(rng, memory, max(1, int(room / KEY_CHARS)), filler)]

        def ask() -> Task:
            return (
                skills.recall(rng, memory)
                if rng.random() < 0.7
                else skills.recall_many(rng, memory, rng.randint(2, 40))
            )

        return self._fill(rng, length, tasks, (), ask), False

    def _long_answer(self, rng: random.Random, length: int) -> tuple[str, bool]:
        return self._fill(rng, length, [], (), lambda: self._long(rng, length)), False

    def _text(self, rng: random.Random, length: int) -> tuple[str, bool]:
        """The works in their order, round and round, from a random one on: what follows is always known."""
        all_works = [f"{title}\n" + "\n".join(lines) for title, lines in skills.works().items()]
        start, parts, size = rng.randrange(len(all_works)), list[str](), 0
        while size < length * 5:
            parts.append(all_works[(start + len(parts)) % len(all_works)])
            size += len(parts[-1])
        return self.dialect.start + "\n\n".join(parts), True

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
        messages: list[dict] = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.15 else []
        size = 0
        keep_thoughts = rng.random() < 0.7
        while size < length * CHARS_PER_TOKEN * 2 or tasks:
            task = tasks.pop(0) if tasks else more()
            messages += task.messages(thinking=skills.thinks(rng, task))
            size += len(task.user) + len(task.thought) + len(task.answer) + 30
        return self.dialect.render(messages, tools, clear_thinking=not keep_thoughts)
