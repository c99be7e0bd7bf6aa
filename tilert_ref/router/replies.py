"""OpenAI's answer shapes, blocking and as server-sent events (http-api.md 4.4, 4.5)."""

import json
import time
from collections.abc import Iterator
from typing import Any

from tilert_ref.router.answer import Answer, Delta
from tilert_ref.router.decode import Done
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
    """One answer under construction: collects ids and times, and renders them with the answer's parts.

    An answer without text (no tokenizer) has null content, and the ids are given. started: time.monotonic() when the
    request's body had been read; queue_ms: its wait for a decode node.
    """

    def __init__(self, request: Request, prefilled: Prefilled, answer: Answer, started: float, queue_ms: float) -> None:
        self._request = request
        self._prefilled = prefilled
        self._answer = answer
        self._started = started
        self._queue_ms = queue_ms
        self._first_token_ms: float | None = None
        self._chat = request.endpoint == "chat"
        self._show_ids = request.return_token_ids or not answer.has_text
        self.ids: list[int] = []
        prefix = "chatcmpl-" if self._chat else "cmpl-"
        self._head = {
            "id": prefix + (request.caller_id or prefilled.rid),
            "object": "chat.completion" if self._chat else "text_completion",
            "created": prefilled.created,
            "model": prefilled.model,
        }

    def take(self, ids: list[int]) -> list[Delta]:
        """Adds tokens; returns what they complete."""
        if ids and self._first_token_ms is None:
            self._first_token_ms = (time.monotonic() - self._started) * 1e3
        self.ids += ids
        return self._answer.push(ids)

    def _finish(self, done: Done) -> tuple[list[Delta], str]:
        """What is left, and the finish reason: any call makes it tool_calls (http-api.md 4.3)."""
        rest = self._answer.finish(cut=done.finish_reason == "length")
        return rest, "tool_calls" if self._answer.called else done.finish_reason

    # Blocking

    def whole(self, done: Done) -> dict[str, Any]:
        """The blocking reply."""
        _, finish_reason = self._finish(done)
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None, "stop_reason": None}
        choice |= {"message": self._answer.message()} if self._chat else {"text": self._answer.content}
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
        choice = self._choice({"role": "assistant", "content": ""} if self._chat else {"content": ""})
        extra = self._prompt_ids(choice)
        if self._chat or self._request.return_token_ids:
            yield self._chunk(choice) | extra

    def pieces(self, ids: list[int]) -> Iterator[dict[str, Any]]:
        """The chunks for newly decoded ids; none as long as they complete nothing. The first one has the ids."""
        deltas = self.take(ids)
        if not deltas and self._show_ids and ids:
            deltas = [{"content": "" if self._answer.has_text else None}]
        for n, delta in enumerate(deltas):
            yield self._piece(delta, [] if n else ids)

    def closing(self, done: Done, usage: bool) -> Iterator[dict[str, Any]]:
        """What is left of the answer, the chunk with finish_reason and timing, and the usage chunk if wanted."""
        rest, finish_reason = self._finish(done)
        for delta in rest:
            yield self._piece(delta, [])
        choice = self._choice({} if self._chat else {"content": ""})
        choice |= {"finish_reason": finish_reason, "stop_reason": None}
        yield self._chunk(choice) | {"pd_timing_ms": self._timing(done)}
        if usage:
            yield self._chunk(None) | {"usage": self._usage()}

    def _piece(self, delta: Delta, ids: list[int]) -> dict[str, Any]:
        return self._chunk(self._choice(delta) | ({"token_ids": ids} if self._show_ids else {}))

    def _choice(self, delta: Delta) -> dict[str, Any]:
        content = {"delta": delta} if self._chat else {"text": delta["content"]}
        return {"index": 0} | content | {"logprobs": None, "finish_reason": None}

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
