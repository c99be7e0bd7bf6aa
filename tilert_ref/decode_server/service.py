"""The request pipeline: lease, validate, wait for KV, wait for its turn, inject, decode, release. No HTTP in here.

One request at a time has the engine. With several receive slots, requests that ask for it (`queue`) hold leases behind
it, one slot each: their KV arrives meanwhile, and the first of them has its turn the moment the engine is free. Whoever
takes a lease must give it back with `DecodeService.release`, which returns only when nothing works on the request any
more: not the KV wait, not the engine.

    service = DecodeService(engine, receiver, receive_slots=2)
    lease = service.try_lease(body)              None: busy
    try:
        decode = await service.begin(lease)      DecodeError: an HTTP status
        async for line in decode.lines(0): ...   DecodeError: an error line
        decode.closing_line()
    finally:
        await service.release(lease)
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from tilert_ref.connector.admission import Record
from tilert_ref.connector.receiver import HandoffCancelled, HandoffError, HandoffFailed, HandoffTimeout
from tilert_ref.decode_server.engine_client import (
    EngineClosed,
    EngineCrashed,
    EngineRun,
    EngineStalled,
    EngineStatus,
    EngineUnavailable,
)
from tilert_ref.decode_server.messages import Ended, Failed, Generate, Injected, Ready, RunEvent, Stepped
from tilert_ref.decode_server.validation import DecodeBody, DecodeError, check_body
from tilert_ref.engine.api import SamplingParams

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't say. The value that the router publishes for it."""


class Engine(Protocol):
    """What the pipeline needs of EngineClient."""

    status: EngineStatus
    ready: Ready | None

    def generate(self, request: Generate) -> EngineRun: ...


class Receiver(Protocol):
    """What the pipeline needs of ReceiveServer."""

    def expect(self, rid: str) -> None: ...

    def wait(
        self, rid: str, timeout: float, cancelled: threading.Event, announce_timeout: float | None = None
    ) -> Record: ...

    def release(self, rid: str) -> None: ...

    def health(self) -> dict[str, Any]: ...


class Lease:
    """The right to use the node for one request, and the means to cancel that request wherever it is.

    turn: set when the engine is this request's, or the request was cancelled.
    """

    def __init__(self, body: DecodeBody) -> None:
        self.body = body
        self.rid = body.rid
        self.started = time.perf_counter()
        self.came = time.monotonic()
        self.cancelled = threading.Event()
        self.turn = asyncio.Event()
        self.wait: asyncio.Future[Record] | None = None
        self.run: EngineRun | None = None

    def cancel(self) -> None:
        self.cancelled.set()
        self.turn.set()
        if self.run:
            self.run.cancel()


@dataclass
class Timing:
    """Milliseconds of `timing_ms` (http-api.md 1.8).

    Ours: queue, from the KV's arrival to the request's turn. first_step, to the start of the first decode step from the
    KV's last byte, which a receiver of one-sided writes knows by the sender's `done`; from the request itself if that
    came later, from its turn if it waited for it.
    """

    wire_wait: float = 0.0
    queue: float = 0.0
    convert: float = 0.0
    inject: float = 0.0
    first_step: float = 0.0
    decode: float = 0.0

    def rounded(self) -> dict[str, float]:
        times = {name: round(value, 1) for name, value in vars(self).items()}
        return times if self.queue else {name: value for name, value in times.items() if name != "queue"}


class DecodeService:
    """The node: as many leases as receive slots, the first one's request has the engine.

    All methods belong to the event loop's thread.
    """

    def __init__(self, engine: Engine, receiver: Receiver, receive_slots: int = 1) -> None:
        self.engine = engine
        self.receiver = receiver
        self.receive_slots = receive_slots
        self._leases: list[Lease] = []

    @property
    def current_rid(self) -> str | None:
        return self._leases[0].rid if self._leases else None

    @property
    def queued_rids(self) -> list[str]:
        return [lease.rid for lease in self._leases[1:]]

    def try_lease(self, body: DecodeBody) -> Lease | None:
        """None if another request has the engine and this one will not, or can't, queue, or if its rid is here."""
        room = self.receive_slots if body.queue else 1
        if len(self._leases) >= room or any(lease.rid == body.rid for lease in self._leases):
            return None
        lease = Lease(body)
        self._leases.append(lease)
        self._call_first()
        return lease

    def cancel_all(self) -> None:
        for lease in self._leases:
            lease.cancel()

    def cancel(self, rid: str) -> bool:
        """Whether rid is here, current or queued; it is then cancelled."""
        found = [lease for lease in self._leases if lease.rid == rid]
        for lease in found:
            lease.cancel()
        return bool(found)

    def _call_first(self) -> None:
        if self._leases:
            self._leases[0].turn.set()

    async def release(self, lease: Lease) -> None:
        """Ends whatever still works on the request, frees the KV slot and the node. Harmless when repeated."""
        if lease not in self._leases:
            return
        try:
            await self._stop(lease)
        finally:
            if lease in self._leases:
                self._leases.remove(lease)
                self.receiver.release(lease.rid)
                self._call_first()

    async def begin(self, lease: Lease) -> "Decode":
        """Everything that can still be answered with an HTTP status: from validation until the engine has the KV.

        The KV slot is free again when this returns. Raises DecodeError.
        """
        sampling = self._validate(lease.body)
        self.receiver.expect(lease.rid)
        record = await self._wait_for_kv(lease)
        self._check_room(record)
        could_start = max(record.completed_at, lease.came)
        decode = Decode(lease, record, Timing(wire_wait=_ms_since(lease.started)), could_start)
        await self._wait_for_turn(decode)
        await self._inject(decode, sampling)
        self.receiver.release(lease.rid)
        return decode

    async def complete(self, lease: Lease) -> dict[str, Any]:
        """The whole request; returns the non-stream reply (http-api.md 1.6). Raises DecodeError."""
        decode = await self.begin(lease)
        lines = []
        while (line := await decode.step()) is not None:
            lines.append(line)
        reply = {"rid": lease.rid, "token_ids": _joined(lines, "t"), "seq_len": decode.record.seq_len}
        if lease.body.top_logprobs is not None:
            reply["logprobs"] = {"lp": _joined(lines, "lp"), "tp": _joined(lines, "tp")}
        return reply | {"timing_ms": decode.timing_ms()}

    def _validate(self, body: DecodeBody) -> SamplingParams:
        if self.engine.ready is None or self.engine.status.state != "ready":
            raise _unavailable(self.engine.status.reason, body.rid)
        return check_body(body, self.engine.ready.capabilities)

    async def _wait_for_kv(self, lease: Lease) -> Record:
        arguments = (lease.rid, lease.body.timeout_s, lease.cancelled, lease.body.announce_timeout_s)
        lease.wait = asyncio.get_running_loop().run_in_executor(None, self.receiver.wait, *arguments)
        try:
            return await asyncio.shield(lease.wait)
        except HandoffTimeout:
            raise DecodeError(504, "kv_transfer_timeout", rid=lease.rid) from None
        except HandoffCancelled:
            raise _cancelled("KV transfer", lease.rid) from None
        except HandoffFailed as error:
            raise DecodeError(502, str(error), "kv_transfer_failed", lease.rid) from None
        except HandoffError as error:
            raise DecodeError(503, str(error), "receiver_unavailable", lease.rid) from None

    def _check_room(self, record: Record) -> None:
        """The buffer holds max_seq_len tokens, but a sequence of that length has no room for the first new token."""
        limit = self.engine.ready.max_seq_len
        if record.seq_len >= limit:
            legal = f"legal are 1 to {limit - 1}, the engine's max_seq_len is {limit}"
            text = f"the prompt has {record.seq_len} tokens; {legal}"
            raise DecodeError(400, text, "invalid_parameter", record.rid)

    @staticmethod
    async def _wait_for_turn(decode: "Decode") -> None:
        lease = decode.lease
        if not lease.turn.is_set():
            began = time.perf_counter()
            await lease.turn.wait()
            decode.timing.queue = _ms_since(began)
            decode.could_start = time.monotonic()
        if lease.cancelled.is_set():
            raise _cancelled("the wait for its turn", lease.rid)

    async def _inject(self, decode: "Decode", sampling: SamplingParams) -> None:
        lease, body = decode.lease, decode.lease.body
        request = Generate(
            rid=lease.rid,
            seq_len=decode.record.seq_len,
            last_prompt_token=decode.record.last_prompt_token,
            first_token_id=body.first_token_id,
            max_tokens=body.max_tokens,
            sampling=sampling,
            top_logprobs=body.top_logprobs,
            slot=decode.record.slot,
        )
        try:
            lease.run = self.engine.generate(request)
        except EngineUnavailable as error:
            raise _unavailable(str(error), lease.rid) from None
        event = await decode.next_event()
        if not isinstance(event, Injected):  # Ended: the engine saw the cancel before it decoded
            raise _cancelled("inject", lease.rid)
        decode.timing.convert, decode.timing.inject = event.convert_ms, event.inject_ms
        decode.timing.first_step = 1000 * (event.at - decode.could_start)
        decode.started = time.perf_counter()

    @staticmethod
    async def _stop(lease: Lease) -> None:
        lease.cancel()
        if lease.wait:
            await asyncio.gather(lease.wait, return_exceptions=True)
        if lease.run:
            await lease.run.close()


Line = dict[str, list[Any]]
"""A stream's token line: `t` token ids; with logprobs also `lp` and `tp`, entry by entry (http-api.md 1.7)."""


@dataclass
class Decode:
    """A request whose KV the engine has. `step` gives its tokens; after the last, `end` and the totals are known.

    could_start: since when nothing but this node keeps the first step waiting, seconds of time.monotonic().
    """

    lease: Lease
    record: Record
    timing: Timing
    could_start: float
    started: float = 0.0
    sent: int = 0
    end: Ended | None = None

    async def step(self) -> Line | None:
        """The tokens of the next step, None at the end. Raises DecodeError."""
        event = await self.next_event()
        if isinstance(event, Stepped):
            line = self._line(event)
            self.sent += len(event.ids)
            return line
        self.end = event
        self.timing.decode = _ms_since(self.started)
        return None

    async def lines(self, poll_s: float) -> AsyncIterator[Line]:
        """The steps, merged for a stream: the first token alone, then a step with all that comes within poll_s of it.

        poll_s 0 still merges steps that are there already, which means that the client is slower than the engine.
        """
        if (line := await self.step()) is None:
            return
        yield {name: entries[:1] for name, entries in line.items()}
        if len(line["t"]) > 1:
            yield {name: entries[1:] for name, entries in line.items()}
        while self.end is None and (line := await self.step()) is not None:
            yield await self._followed(line, poll_s)

    async def _followed(self, line: Line, poll_s: float) -> Line:
        """line and the steps that come within poll_s."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(poll_s):
                while (more := await self.step()) is not None:
                    line = {name: line[name] + more[name] for name in line}
        return line

    async def next_event(self) -> RunEvent:
        """The engine's next event. Raises DecodeError for each of the ways in which it can fail."""
        try:
            event = await self.lease.run.next()
        except EngineClosed as error:
            raise _unavailable(str(error), self.lease.rid) from None
        except EngineStalled as error:
            raise DecodeError(502, str(error), "engine_stalled", self.lease.rid) from None
        except EngineCrashed as error:
            raise DecodeError(502, f"engine crashed: {error}", "engine_crashed", self.lease.rid) from None
        if isinstance(event, Failed):
            raise DecodeError(500, event.error, rid=self.lease.rid)
        return event

    def closing_line(self) -> dict[str, Any]:
        """The stream's terminal line. `n` is what `step` has handed out."""
        return {
            "done": True,
            "n": self.sent,
            "seq_len": self.record.seq_len,
            "finish_reason": self.end.reason,
            "timing_ms": self.timing_ms(),
        }

    def timing_ms(self) -> dict[str, float | int | str]:
        return self.timing.rounded() | self.end.stats | {"finish_reason": self.end.reason}

    def _line(self, event: Stepped) -> Line:
        if event.logprobs is None:
            return {"t": event.ids}
        logprobs = [self._logprob(value, self.sent + index) for index, value in enumerate(event.logprobs)]
        top = [[(token, max(value, LOWEST_LOGPROB)) for token, value in entry] for entry in event.top]
        return {"t": event.ids, "lp": logprobs, "tp": top}

    def _logprob(self, value: float | None, position: int) -> float | None:
        """Only the first token may come without: its logprob belongs to the prefill."""
        if value is not None and not math.isnan(value):
            return max(value, LOWEST_LOGPROB)
        if position:
            text = f"the engine gave no logprob for token {position}"
            raise DecodeError(501, text, "logprobs_unavailable", self.lease.rid)
        return None


def _joined(lines: list[Line], name: str) -> list[Any]:
    return [entry for line in lines for entry in line[name]]


def _ms_since(start: float) -> float:
    return 1000 * (time.perf_counter() - start)


def _cancelled(stage: str, rid: str) -> DecodeError:
    return DecodeError(499, f"cancelled during {stage}", "request_cancelled", rid)


def _unavailable(reason: str, rid: str) -> DecodeError:
    return DecodeError(503, reason, "engine_unavailable", rid)
