"""Who is connected to the control port, and who has to go when it is full. Pure: no sockets, no clock.

A connection is idle until it has announced. Idle ones are worth nothing to us and cost a stranger nothing, so the
oldest of them goes when a new one needs its place: first of the peer that has the most connections. Connections that
have announced are never closed for others; a peer that fills its own share with those is refused.
"""

from collections import Counter
from collections.abc import Hashable

Guest = Hashable


class Full(Exception):
    """No place: the text says whose limit is reached."""


class Guests:
    """At most `total` connections, `per_peer` of them from one address. Not thread-safe."""

    def __init__(self, total: int, per_peer: int) -> None:
        self.total = total
        self.per_peer = per_peer
        self._peers: dict[Guest, str] = {}  # oldest first
        self._idle: dict[Guest, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._peers)

    def enter(self, guest: Guest, peer: str) -> Guest | None:
        """Takes a guest in; returns the idle one that has to be closed for it, if any. Raises Full."""
        leaver = None
        counts = Counter(self._peers.values())
        if counts[peer] >= self.per_peer:
            leaver = self._oldest_idle(peer)
            if leaver is None:
                raise Full(f"{counts[peer]} connections of {peer} are open, the limit is {self.per_peer}")
        elif len(self) >= self.total:
            busiest = Counter(self._peers[guest] for guest in self._idle).most_common(1)
            if not busiest:
                raise Full(f"{len(self)} connections are open, the limit is {self.total}")
            leaver = self._oldest_idle(busiest[0][0])
        if leaver is not None:
            self.leave(leaver)
        self._peers[guest] = peer
        self._idle[guest] = None
        return leaver

    def announced(self, guest: Guest) -> bool:
        """The guest has business here. False if it was given up for another one meanwhile."""
        self._idle.pop(guest, None)
        return guest in self._peers

    def leave(self, guest: Guest) -> None:
        """Harmless if repeated."""
        self._peers.pop(guest, None)
        self._idle.pop(guest, None)

    def _oldest_idle(self, peer: str) -> Guest | None:
        return next((guest for guest in self._idle if self._peers[guest] == peer), None)
