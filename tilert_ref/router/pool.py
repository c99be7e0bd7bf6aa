"""The decode nodes: who is up, who is busy, who waits.

A node decodes one request at a time. Ours also take the next one meanwhile, as many as they have receive slots: it is
prefilled, its KV arrives, and it starts the moment the node is free. So a request leases an idle node, or, if there is
none, a further slot of a busy one. Three rules that TileRT's pool doesn't keep (http-api.md 7.15, 7.45): waiters are
served first come, first served; a dead node gets no request until its /health answers; a node whose request was given
up keeps that lease until the cancel has been delivered.

One event loop owns a pool; nothing here is thread-safe.
"""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from tilert_ref.router.errors import NodeLost, RouterError, too_long, unavailable

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 2.0
CLOSE_TIMEOUT_S = 6.0


@dataclass(frozen=True)
class Facts:
    """What a node says about itself.

    slots: how many requests it takes at a time, those in its queue counted; 1 without a queue. max_seq_len: tokens of
    prompt and answer together, None if it doesn't say (TileRT's don't).
    """

    capabilities: frozenset[str] = frozenset()
    slots: int = 1
    max_seq_len: int | None = None


@dataclass
class Node:
    """One decode node.

    down: why it gets no requests, None if it is up. leases: requests of this router that it is leased to. leased: a
    number that grows with every lease of the pool, of the last one. faults: how often it went down, which tells a probe
    that its answer is older than a fault.
    """

    host: str
    ctrl_port: int
    http_port: int
    leases: int = 0
    leased: int = 0
    down: str | None = "not asked yet"
    faults: int = 0
    facts: Facts = field(default_factory=Facts)

    @property
    def busy(self) -> bool:
        return self.leases > 0

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.http_port}"

    def suits(self, needs: frozenset[str], tokens: int) -> bool:
        """Could it ever take such a request? tokens: the prompt's, as far as they are known."""
        limit = self.facts.max_seq_len
        return needs <= self.facts.capabilities and (limit is None or tokens < limit)

    def __str__(self) -> str:
        return f"{self.host}:{self.ctrl_port}:{self.http_port}"


def parse_node(spec: str) -> Node:
    """`host:ctrl_port:http_port`, split from the right: IPv6 works with or without brackets. Raises ValueError."""
    host, _, http_port = spec.rpartition(":")
    host, _, ctrl_port = host.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not all(p.isascii() and p.isdigit() and 0 < int(p) < 65536 for p in (ctrl_port, http_port)):
        raise ValueError(f"a decode node is host:ctrl_port:http_port with ports 1 to 65535, got {spec!r}")
    return Node(host, int(ctrl_port), int(http_port))


class NodeApi(Protocol):
    """What the pool asks of a node; every call has a deadline of its own."""

    async def probe(self, node: Node) -> Facts:
        """Raises NodeLost if the node isn't healthy."""

    async def cancel(self, node: Node, rid: str) -> None:
        """Returns when the node works on rid no more; raises NodeLost if it can't be told."""


class Lease:
    """The right to use one node, or one slot of it. Leaving the `with` block, or `release`, gives it back; again does
    nothing."""

    def __init__(self, pool: "Pool", node: Node) -> None:
        self._pool = pool
        self.node = node
        self._rid: str | None = None
        self._released = False

    def dispatched(self, rid: str) -> None:
        """A decode of rid is about to be posted: from here on the node has to be told if we give up."""
        self._rid = rid

    def terminated(self) -> None:
        """The node's last message or its refusal was seen: nothing is left to cancel."""
        self._rid = None

    def release(self) -> None:
        """Doesn't block: a cancel goes out in the background and the node counts as busy until it is delivered."""
        if not self._released:
            self._released = True
            self._pool.take_back(self.node, self._rid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


@dataclass(eq=False)
class _Waiter:
    needs: frozenset[str]
    tokens: int
    lease: asyncio.Future[Lease]


class Pool:
    """Leases nodes, in command-line order.

    queue_timeout_s: how long a request may wait for one; 0 fails at once. prefetch: lease a busy node's further slots.
    """

    def __init__(
        self, nodes: Sequence[Node], api: NodeApi, queue_timeout_s: float = 0.0, prefetch: bool = True
    ) -> None:
        self.nodes = list(nodes)
        self._api = api
        self._queue_timeout_s = queue_timeout_s
        self._prefetch = prefetch
        self._leased = itertools.count(1)
        self._waiters: list[_Waiter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[None] | None = None

    # Leasing

    async def acquire(self, needs: frozenset[str] = frozenset(), tokens: int = 0) -> Lease:
        """A lease on a healthy node with these capabilities and room for these many prompt tokens.

        Raises RouterError: 429 if all are busy, 501 if none has the capabilities, 400 if none has the room, 503 if all
        are down.
        """
        waiter = _Waiter(needs, tokens, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        handed_over = False
        try:
            self._serve_waiters()
            if not waiter.lease.done():
                await self._wait(waiter)
            if not waiter.lease.done():
                raise self._refusal(needs)
            handed_over = True
            return waiter.lease.result()
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            # The client may have left in the very step in which a node was given to it.
            if waiter.lease.done() and not handed_over:
                waiter.lease.result().release()

    async def _wait(self, waiter: _Waiter) -> None:
        if not self._up():
            await self.ask_all()  # a node that came back a moment ago shouldn't cost this request an error
        if up := self._up():
            if not any(waiter.needs <= node.facts.capabilities for node in up):
                raise self._lacking(waiter.needs)
            if not any(node.suits(waiter.needs, waiter.tokens) for node in up):
                raise too_long(waiter.tokens, max(node.facts.max_seq_len or 0 for node in up))
        if self._queue_timeout_s > 0:
            await asyncio.wait({waiter.lease}, timeout=self._queue_timeout_s)

    def _serve_waiters(self) -> None:
        for waiter in list(self._waiters):
            node = self._choose(waiter)
            if node is not None and not waiter.lease.done():
                node.leases += 1
                node.leased = next(self._leased)
                self._waiters.remove(waiter)
                waiter.lease.set_result(Lease(self, node))

    def _choose(self, waiter: _Waiter) -> Node | None:
        """The first idle node; else, of those with a slot left, the one that was leased the longest time ago."""
        nodes = [n for n in self._up() if n.suits(waiter.needs, waiter.tokens)]
        idle = [n for n in nodes if not n.busy]
        if idle or not self._prefetch:
            return next(iter(idle), None)
        spare = [n for n in nodes if n.leases < n.facts.slots]
        return min(spare, key=lambda n: (n.leases, n.leased), default=None)

    def _refusal(self, needs: frozenset[str]) -> RouterError:
        if not self._up():
            return RouterError(
                503, "no decode node is up: " + "; ".join(self.problems()), code="no_decode_node", retry_after_s=1
            )
        waited = f" after waiting {self._queue_timeout_s:g} s" if self._queue_timeout_s > 0 else ""
        return RouterError(429, f"all decode nodes are busy{waited}", code="decode_busy", retry_after_s=1)

    def _lacking(self, needs: frozenset[str]) -> RouterError:
        names = ", ".join(sorted(needs))
        return unavailable(names, f"no decode node that is up has the capability {names}")

    # Giving back

    def take_back(self, node: Node, rid: str | None) -> None:
        """Ends one lease; if rid is given, only after the node has been told to drop it."""
        if rid is None:
            self._free(node)
        else:
            task = asyncio.create_task(self._cancel_and_free(node, rid))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _cancel_and_free(self, node: Node, rid: str) -> None:
        try:
            await self._api.cancel(node, rid)
        except NodeLost as e:
            self.mark_down(node, e.message)
        finally:
            self._free(node)

    def _free(self, node: Node) -> None:
        node.leases -= 1
        self._serve_waiters()

    # Health

    def mark_down(self, node: Node, reason: str) -> None:
        """Takes the node out until its next good /health."""
        if node.down is None:
            log.warning("decode node %s is down: %s", node, reason)
        node.down = reason
        node.faults += 1

    async def ask(self, node: Node) -> None:
        """Probes one node and notes the result."""
        faults = node.faults
        try:
            facts = await self._api.probe(node)
        except NodeLost as e:
            self.mark_down(node, e.message)
            return
        if node.faults != faults:
            return  # it failed while it was being asked; the next round knows more
        node.facts = facts
        if node.down is not None:
            log.info("decode node %s is up", node)
        node.down = None
        self._serve_waiters()

    async def ask_all(self) -> None:
        """Probes every node at once; callers at the same time share one round."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_round())
        await asyncio.shield(self._asking)

    async def _ask_round(self) -> None:
        await asyncio.gather(*(self.ask(node) for node in self.nodes))

    async def watch(self, interval_s: float = PROBE_INTERVAL_S) -> None:
        """Probes all nodes for ever."""
        while True:
            await self.ask_all()
            await asyncio.sleep(interval_s)

    # State

    def _up(self) -> list[Node]:
        return [n for n in self.nodes if n.down is None]

    def free_count(self) -> int:
        return sum(not n.busy for n in self._up())

    def problems(self) -> list[str]:
        """One line for each node that is down."""
        return [f"decode node {n}: {n.down}" for n in self.nodes if n.down is not None]

    def snapshot(self) -> dict[str, Any]:
        """The body of /pool_status: TileRT's keys `host` and `busy`, and ours."""
        return {
            "nodes": [
                {
                    "host": n.host,
                    "busy": n.busy,
                    "ctrl_port": n.ctrl_port,
                    "http_port": n.http_port,
                    "down": n.down,
                    "leases": n.leases,
                    "slots": n.facts.slots,
                }
                for n in self.nodes
            ],
            "waiting": len(self._waiters),
        }

    async def close(self) -> None:
        """Waits a few seconds for cancels that are on their way."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
