"""A prefill node's sending half, written against the codec: hello, announce, write, done. Used by tests."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilert_ref.connector import codec, wire
from tilert_ref.connector.layout import BufferLayout, plane_views, write_plan
from tilert_ref.connector.transport import make_transport, write_tag

LIMIT_S = 20.0


@dataclass
class Sender:
    """One rank with a staging buffer full of recognisable bytes."""

    layout: BufferLayout
    ctrl_port: int
    last_prompt_token: int = 7
    transport_name: str = "zmq"
    seed: int | None = None  # of the bytes; None: the layout's size
    device: str = "cpu"  # of the staging buffer

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.layout.total_bytes if self.seed is None else self.seed)
        staging = torch.randint(0, 100, (self.layout.total_bytes,), dtype=torch.uint8, generator=generator)
        self.staging = staging.to(self.device)
        self.transport = make_transport(self.transport_name, "", receiver=False)
        self.transport.register(self.staging.data_ptr(), self.staging.nbytes, self.staging)

    def planes(self, seq_len: int, layers: int) -> list[torch.Tensor]:
        views = [view for layer in range(layers) for view in plane_views(self.layout, self.staging, layer, seq_len)]
        return [view for view in views if view is not None]

    def offer(self, rid: str, seq_len: int = 70) -> codec.Accept | codec.Reject:
        """The whole handoff; returns the reply to the announce."""
        with self.announced(rid, seq_len) as (connection, hello, reply):
            if isinstance(reply, codec.Accept):
                self.write(hello, reply, seq_len)
                connection.send(codec.Done(done=True, rid=rid, rank=0, generation=reply.generation), deadline())
                with contextlib.suppress(wire.ConnectionLost):
                    connection.receive(deadline())  # the server closes: it has seen done
        return reply

    @contextlib.contextmanager
    def announced(
        self, rid: str, seq_len: int
    ) -> Iterator[tuple[wire.Connection, codec.Hello, codec.Accept | codec.Reject]]:
        connection = wire.connect("127.0.0.1", self.ctrl_port, deadline())
        try:
            hello = codec.decode_hello(connection.receive(deadline()))
            codec.check_hello(hello, self.layout, 1, self.transport_name, seq_len)
            geometry = self.layout.geometry()
            token = self.last_prompt_token
            announce = codec.Announce(rid=rid, rank=0, seq_len=seq_len, last_prompt_token=token, tilert_ref=geometry)
            connection.send(announce, deadline())
            yield connection, hello, codec.decode_reply(connection.receive(deadline()))
        finally:
            connection.close()

    def report(self, rid: str, reason: str) -> None:
        """Tells that the handoff of rid will not come."""
        connection = wire.connect("127.0.0.1", self.ctrl_port, deadline())
        connection.receive(deadline())
        connection.send(codec.Announce(rid=rid, rank=0, failed=reason), deadline())
        connection.close()

    def write(self, hello: codec.Hello, accept: codec.Accept, seq_len: int) -> None:
        layers = range(self.layout.profile.num_layers)
        bases = [self.staging.data_ptr()]
        copies = write_plan(self.layout, bases, self.layout, hello.plane_bases(), seq_len, layers)
        self.transport.write(hello.meta(), copies, write_tag(accept.rid, accept.generation), deadline())

    def close(self) -> None:
        self.transport.close()


def deadline() -> float:
    return time.monotonic() + LIMIT_S
