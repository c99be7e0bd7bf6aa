"""An answer's text, split into reasoning, content and tool calls: a pure state machine fed with pieces of text.

How the text is cut into pieces doesn't matter (case K8): every cut gives the same channels and the same calls. Nothing
is guessed from a piece that could still become a tag; such an end waits for the next piece. No text raises.

A grammar (grammars.py) is a table: in which state which tag leads to which state. A call is collected whole and read by
its grammar at its end, because that is how TileRT hands it out: one complete call, never a part (http-api.md 4.3).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class State(Enum):
    """What the text at hand is part of."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Call:
    """arguments is a JSON object as text. It is cut off, and so no JSON, where the answer was cut off."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Rejected:
    """A call of a tool that the client didn't offer. It is left out of the answer, as vLLM does with GLM's."""

    name: str


Event = Reasoning | Content | Call | Rejected
Tools = Mapping[str, Mapping[str, Any]]  # name -> parameter -> JSON schema
Moves = Mapping[State, Mapping[str, State]]


@dataclass(frozen=True)
class Grammar:
    """How one family of models writes an answer.

    moves: the tags of each state and where they lead. A tag shows nowhere in the channels; it begins with "<" and has
    no other "<". read_call(text between the tags, tools, cut) makes a call of any text; cut says that the answer ended
    by length inside it. thinking_tags don't count when thinking is off.
    tokens: what a tokenizer has to have for `--parser auto` to choose this grammar; the text keeps them.
    turn_tokens: begin a turn of the prompt. switches: the template's variables that turn thinking on or off;
    thinks: what holds without them.
    """

    name: str
    moves: Moves
    read_call: Callable[[str, Tools, bool], Call]
    tokens: tuple[str, ...]
    turn_tokens: tuple[str, ...]
    switches: tuple[str, ...]
    thinks: bool
    thinking_tags: tuple[str, str] = ("<think>", "</think>")

    def moves_of(self, *, thinking: bool, calls: bool) -> Moves:
        """The moves for an answer that may (True) or can't (False) have reasoning, and calls."""
        return {
            state: {tag: to for tag, to in tags.items() if (thinking if tag in self.thinking_tags else calls)}
            for state, tags in self.moves.items()
        }


@dataclass
class Parser:
    """Parses one answer. tools: those offered, or None if a call can't be answered: then its markup stays text.

    Whitespace at the end of reasoning and around calls is dropped. It can only be told from other whitespace by what
    follows, so it waits.
    """

    grammar: Grammar
    tools: Tools | None
    state: State

    def __post_init__(self) -> None:
        self._held = ""
        self._body: list[str] = []
        self._called = False
        thinking = self.state is State.REASONING
        self._moves = self.grammar.moves_of(thinking=thinking, calls=self.tools is not None)
        self._tags = {state: _any_of(tags) for state, tags in self._moves.items()}
        self._space: dict[State, list[str]] = {State.REASONING: [], State.CONTENT: []}

    def feed(self, text: str) -> list[Event]:
        """What this piece completes."""
        events: list[Event] = []
        text, done = self._held + text, 0
        while match := self._tags[self.state].search(text, done):
            events += self._add(text[done : match.start()])
            events += self._move(match[0])
            done = match.end()
        cut = max(done, partial_tag(text, self._moves[self.state]))
        self._held = text[cut:]
        return events + self._add(text[done:cut])

    def finish(self, cut: bool = False) -> list[Event]:
        """What is left at the end. cut: the answer was cut off by its length."""
        if self.state is State.CALL:  # what is held is the beginning of the closing tag
            return self._close(cut)
        events = self._add(self._held)
        if not self._called and (space := "".join(self._space[State.CONTENT])):
            events.append(Content(space))
        return events

    def _add(self, text: str) -> list[Event]:
        """Puts text without tags into the channel of the state."""
        if not text:
            return []
        if self.state is State.CALL:
            self._body.append(text)
            return []
        space, shown = self._space[self.state], text.rstrip()
        if not shown:
            space.append(text)
            return []
        shown, space[:] = "".join(space) + shown, [text[len(shown) :]]
        return [Reasoning(shown) if self.state is State.REASONING else Content(shown)]

    def _move(self, tag: str) -> list[Event]:
        events = self._close(cut=False) if self.state is State.CALL else []
        self.state = self._moves[self.state][tag]
        if self.state is State.CALL:
            self._called = True
            self._body.clear()
            self._space[State.CONTENT].clear()
        return events

    def _close(self, cut: bool) -> list[Event]:
        assert self.tools is not None
        call = self.grammar.read_call("".join(self._body), self.tools, cut)
        return [call if call.name in self.tools else Rejected(call.name)]


def partial_tag(text: str, tags: Mapping[str, Any] | tuple[str, ...]) -> int:
    """Where an unfinished tag at the end of text begins; len(text) if there is none."""
    start = text.rfind("<")
    if start >= 0 and any(tag.startswith(text[start:]) and tag != text[start:] for tag in tags):
        return start
    return len(text)


def _any_of(tags: Mapping[str, State]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)) or "(?!)")
