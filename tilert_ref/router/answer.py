"""The parts of one answer as OpenAI's deltas: text alone, or parsed into reasoning, content and tool calls."""

import logging
import secrets
from typing import Any

from tilert_ref.router.detokenize import TextStream
from tilert_ref.router.parser import Call, Content, Event, Parser, Reasoning, Rejected

log = logging.getLogger(__name__)

Delta = dict[str, Any]


class Answer:
    """Turns ids into deltas, and keeps them for a blocking reply, which so always equals the joined stream.

    text is None without a tokenizer: there are no deltas then. parser None: all text is content. reasoning False leaves
    reasoning out (include_reasoning), parallel False all calls but the first (parallel_tool_calls, as vLLM does it).
    """

    def __init__(
        self, text: TextStream | None, parser: Parser | None = None, *, reasoning: bool = True, parallel: bool = True
    ) -> None:
        self.has_text = text is not None
        self._text = text
        self._parser = parser
        self._show_reasoning = reasoning
        self._parallel = parallel
        self._channels: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self._calls: list[dict[str, Any]] = []

    def push(self, ids: list[int]) -> list[Delta]:
        """What these ids complete."""
        if self._text is None:
            return []
        piece = self._text.push(ids)
        return self._deltas(self._parser.feed(piece) if self._parser else [Content(piece)])

    def finish(self, cut: bool) -> list[Delta]:
        """What is left. cut: the answer ended by its length."""
        if self._text is None:
            return []
        piece = self._text.finish()
        return self._deltas(
            [*self._parser.feed(piece), *self._parser.finish(cut)] if self._parser else [Content(piece)]
        )

    @property
    def called(self) -> bool:
        return bool(self._calls)

    @property
    def content(self) -> str | None:
        return "".join(self._channels["content"]) if self.has_text else None

    def message(self) -> dict[str, Any]:
        """The whole message of a chat reply."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if reasoning := "".join(self._channels["reasoning_content"]):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _deltas(self, events: list[Event]) -> list[Delta]:
        return [delta for event in events if (delta := self._delta(event))]

    def _delta(self, event: Event) -> Delta | None:
        match event:
            case Content(text) if text:
                return self._say("content", text)
            case Reasoning(text) if self._show_reasoning:
                return self._say("reasoning_content", text)
            case Call() if self._parallel or not self._calls:
                return self._call(event)
            case Rejected(name):
                log.warning("left out a call of %.100r: no such tool was offered", name)
        return None

    def _say(self, channel: str, text: str) -> Delta:
        self._channels[channel].append(text)
        return {channel: text}

    def _call(self, call: Call) -> Delta:
        function = {"name": call.name, "arguments": call.arguments}
        made = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
        self._calls.append(made)
        return {"tool_calls": [{"index": len(self._calls) - 1} | made]}
