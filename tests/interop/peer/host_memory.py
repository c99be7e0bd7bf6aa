"""Lets the published code run where there is no GPU: what it asks of CUDA happens in host memory.

Nothing of the package's files is touched. What changes, for this process only:

- torch.cuda: devices, streams and events that do nothing; the number of devices is the caller's.
- allocations and moves to "cuda:N" go to host memory; page-locked huge pages become plain memory.
- its NIXL transport registers host memory, as it does itself for a buffer that it knows to be on the host.
- listening sockets: every interface becomes the loopback one.
"""

import contextlib
import socket
from typing import Any

import torch


class _Nothing:
    """A stream or event of a device that computes at once."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def wait_event(self, *_: object) -> None: ...


def install(devices: int) -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: devices
    cuda.synchronize = lambda *_: None
    cuda.current_stream = _Nothing
    cuda.Stream = cuda.Event = _Nothing
    cuda.stream = cuda.device = lambda *_: contextlib.nullcontext()
    for name in ("zeros", "empty"):
        setattr(torch, name, _on_host(getattr(torch, name)))
    torch.Tensor.to = _moves_nowhere(torch.Tensor.to)


def install_transport() -> None:
    """To be called once the package can be imported."""
    from tilert.pd_vllm import transport

    register = transport.NixlTransport.register

    def on_host(self: Any, ptr: int, nbytes: int, dev_id: int, location: str | None = None, host: bool = False) -> None:
        register(self, ptr, nbytes, 0, location, host=True)

    transport.NixlTransport.register = on_host
    transport.alloc_pinned_huge = lambda total: torch.zeros(total, dtype=torch.uint8)


def stay_on_loopback() -> None:
    """A wildcard address to listen on becomes 127.0.0.1 (which an IPv6 socket knows as ::ffff:127.0.0.1)."""
    bind = socket.socket.bind

    def local(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] in ("::", "", "0.0.0.0"):
            host = "::ffff:127.0.0.1" if self.family == socket.AF_INET6 else "127.0.0.1"
            address = (host, *address[1:])
        bind(self, address)

    socket.socket.bind = local


def _on_host(make: Any) -> Any:
    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return make(*args, device="cpu" if _is_cuda(device) else device, **kwargs)

    return made


def _moves_nowhere(move: Any) -> Any:
    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = ("cpu", *args[1:])
        return move(self, *args, **kwargs)

    return moved


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda") if isinstance(device, str | torch.device) else False
