"""OpenAI's answer shapes, blocking and as server-sent events (http-api.md 4.4, 4.5)."""

import json
import time
from collections.abc import Iterator
from typing import Any

from tilert_ref.router.decode import Done
from tilert_ref.router.detokenize import TextStream
from tilert_ref.router.errors import RouterError
from tilert_ref.router.prefill import Prefilled
from tilert_ref.router.request import Request

DONE_EVENT = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(body) + b"\n\n"


def to_json(body: Any) -> bytes:
    """Compact JSON. A lone surrogate, which a field name may hold, has no UTF-8 and comes out as its escape."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def error_events(error: RouterError) -> bytes:
    """How a stream ends after a failure: an error event, then [DONE].

    vLLM does the same (chat_completion/serving.py, chat_completion_stream_generator: create_streaming_error_response,
    then always "[DONE]"), and the openai client raises APIError at the event. Never any text in the answer.
    """
    return event(error.body()) + DONE_EVENT


class Reply:
    """One answer under construction: collects ids, text and times, and renders them.

    text is None without a tokenizer; then content is null and the ids are given. started: time.monotonic() when the
    request's body had been read; queue_ms: its wait for a decode node.
    """

    def __init__(
        self, request: Request, prefilled: Prefilled, text: TextStream | None, started: float, queue_ms: float
    ) -> None:
        self._request = request
        self._prefilled = prefilled
        self._text = text
        self._started = started
        self._queue_ms = queue_ms
        self._first_token_ms: float | None = None
        self._chat = request.endpoint == "chat"
        self._show_ids = request.return_token_ids or text is None
        self.ids: list[int] = []
        self._pieces: list[str] = []
        prefix = "chatcmpl-" if self._chat else "cmpl-"
        self._head = {
            "id": prefix + (request.caller_id or prefilled.rid),
            "object": "chat.completion" if self._chat else "text_completion",
            "created": prefilled.created,
            "model": prefilled.model,
        }

    def take(self, ids: list[int]) -> str | None:
        """Adds tokens; returns the text that they complete, None without a tokenizer."""
        if ids and self._first_token_ms is None:
            self._first_token_ms = (time.monotonic() - self._started) * 1e3
        self.ids += ids
        return self._keep(self._text.push(ids)) if self._text else None

    def _keep(self, piece: str) -> str:
        self._pieces.append(piece)
        return piece

    def _rest(self) -> str | None:
        return self._keep(self._text.finish()) if self._text else None

    # Blocking

    def whole(self, done: Done) -> dict[str, Any]:
        """The blocking reply."""
        self._rest()
        content = "".join(self._pieces) if self._text else None
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": done.finish_reason,
            "logprobs": None,
            "stop_reason": None,
        }
        choice |= {"message": {"role": "assistant", "content": content}} if self._chat else {"text": content}
        if self._show_ids or not self._chat:  # TileRT gives ids on every completion
            choice["token_ids"] = self.ids
        return self._head | self._prompt_ids(choice) | {
            "choices": [choice],
            "usage": self._usage(),
            "pd_timing_ms": self._timing(done),
        }  # fmt: skip

    # Streaming

    def opening(self) -> Iterator[dict[str, Any]]:
        """The chunk with the role (chat), or with the prompt's ids if a completion asked for them."""
        choice = self._choice({"role": "assistant", "content": ""} if self._chat else "")
        extra = self._prompt_ids(choice)
        if self._chat or self._request.return_token_ids:
            yield self._chunk(choice) | extra

    def pieces(self, ids: list[int]) -> Iterator[dict[str, Any]]:
        """The chunk for newly decoded ids; none as long as they complete no text."""
        text = self.take(ids)
        if text or (self._show_ids and ids):
            yield self._piece(text, ids)

    def closing(self, done: Done, usage: bool) -> Iterator[dict[str, Any]]:
        """What is left of the text, the chunk with finish_reason and timing, and the usage chunk if wanted."""
        if rest := self._rest():
            yield self._piece(rest, [])
        choice = self._choice({} if self._chat else "") | {"finish_reason": done.finish_reason, "stop_reason": None}
        yield self._chunk(choice) | {"pd_timing_ms": self._timing(done)}
        if usage:
            yield self._chunk(None) | {"usage": self._usage()}

    def _piece(self, text: str | None, ids: list[int]) -> dict[str, Any]:
        choice = self._choice({"content": text} if self._chat else text)
        return self._chunk(choice | ({"token_ids": ids} if self._show_ids else {}))

    def _choice(self, content: Any) -> dict[str, Any]:
        name = "delta" if self._chat else "text"
        return {"index": 0, name: content, "logprobs": None, "finish_reason": None}

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = {"object": "chat.completion.chunk"} if self._chat else {}
        return self._head | kind | {"choices": [] if choice is None else [choice]}

    # Parts of both

    def _prompt_ids(self, choice: dict[str, Any]) -> dict[str, Any]:
        """prompt_token_ids where vLLM puts them: in the reply for chat, in the choice for completions."""
        if not self._request.return_token_ids:
            return {}
        ids = {"prompt_token_ids": self._prefilled.prompt_token_ids}
        if self._chat:
            return ids
        choice |= ids
        return {}

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self._prefilled.prompt_tokens, len(self.ids)
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        details = self._prefilled.prompt_tokens_details
        return usage | ({"prompt_tokens_details": details} if details else {})

    def _timing(self, done: Done) -> dict[str, Any]:
        """ms. queue, prefill and first_token (since the body was read) are the router's clock, the rest the node's."""
        timing = {"queue": round(self._queue_ms, 1), "prefill": round(self._prefilled.ms, 1)} | done.timing_ms
        if self._first_token_ms is not None:
            timing["first_token"] = round(self._first_token_ms, 1)
        return timing
