#!/usr/bin/env python3
"""Times one write over each transport between two processes of this host, beside a memcpy of the same bytes.

    OMP_NUM_THREADS=1 python scripts/compare_transports.py [--transports nixl,mooncake,zmq] [--repeats 15]

Prints the median and the fastest of the writes, and each as a multiple of the memcpy's. The rounds take turns, so that
a busy machine slows all of them; the first round, which connects, is left out. UCX and Mooncake are kept on loopback
only where they can be: see the transports' own pages.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from tilert_ref.connector.layout import Copy
from tilert_ref.connector.transport import TRANSPORTS, TransferError, Transport, make_transport, write_tag

CASES = {"64 B": (1, 64), "1 MB": (1, 1 << 20), "64 MB": (1, 64 << 20), "240 x 1 MB": (240, 1 << 20)}
NBYTES = max(count * nbytes for count, nbytes in CASES.values())
TAG = write_tag("measured", 1)
LIMIT_S = 120.0


def receive(pipe: Connection, names: list[str]) -> None:
    """The other process: one buffer, registered with every transport."""
    buffer = torch.ones(NBYTES, dtype=torch.uint8)
    metas: dict[str, object] = {}
    transports = []
    for name in names:
        transport = make_transport(name, "127.0.0.1")
        transport.register(buffer.data_ptr(), buffer.nbytes, buffer)
        transport.admit(TAG)
        metas[name] = transport.local_meta("127.0.0.1")
        transports.append(transport)
    pipe.send((metas, buffer.data_ptr()))
    pipe.recv()  # until the other end has measured
    os._exit(0)


def writer(transport: Transport, meta: dict[str, object], copies: list[Copy]) -> Callable[[], None]:
    return lambda: transport.write(meta, copies, TAG, time.monotonic() + LIMIT_S)


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def usable(name: str) -> bool:
    try:
        make_transport(name, "", receiver=False).start()
    except TransferError as error:
        print(f"{name}: {error}")
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    names = [name for name in args.transports.split(",") if usable(name)]
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs, names))
    process.start()
    metas, target = ours.recv()
    source, other = torch.zeros(NBYTES, dtype=torch.uint8), torch.ones(NBYTES, dtype=torch.uint8)
    senders = {name: make_transport(name, "", receiver=False) for name in names}
    for sender in senders.values():
        sender.register(source.data_ptr(), source.nbytes, source)
    print(f"{'bytes':12} {'':9} {'median':>10} {'fastest':>10}   x memcpy")
    for label, (count, nbytes) in CASES.items():
        copies = [Copy(source.data_ptr() + i * nbytes, target + i * nbytes, nbytes, 0, "kv") for i in range(count)]
        size = count * nbytes
        calls: dict[str, Callable[[], object]] = {"memcpy": lambda size=size: other[:size].copy_(source[:size])}
        calls |= {name: writer(sender, metas[name], copies) for name, sender in senders.items()}
        rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(args.repeats + 1)][1:]
        report(label, {name: [times[name] for times in rounds] for name in calls})
    ours.send(None)
    process.join()
    os._exit(0)


def report(label: str, times: dict[str, list[float]]) -> None:
    base = statistics.median(times["memcpy"]), min(times["memcpy"])
    for name, taken in times.items():
        got = statistics.median(taken), min(taken)
        ratios = "" if name == "memcpy" else f"   {got[0] / base[0]:.1f} ({got[1] / base[1]:.1f})"
        print(f"{label:12} {name:9} {got[0] * 1e3:7.3f} ms {got[1] * 1e3:7.3f} ms{ratios}", flush=True)


if __name__ == "__main__":
    main()
