"""`python -m tilert_ref.decode_server`: see --help."""

import asyncio
import logging
import os
import sys

import torch

from tilert_ref.connector.transport import TransferError
from tilert_ref.decode_server.options import parse_options
from tilert_ref.decode_server.server import run


def main(argv: list[str] | None = None) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = parse_options(argv)
    try:
        return asyncio.run(run(options))
    except (OSError, TransferError) as error:  # a port that is taken, an address that isn't ours, no NIXL
        print(f"decode server: {error}", file=sys.stderr)
    except torch.OutOfMemoryError as error:
        less = "--pd-buffer-device cpu, fewer --receive-slots or a smaller --max-seq-len take less of it"
        print(f"decode server: no room for the receive slots on the GPU ({less}): {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # all is closed by now; torch's own teardown would take another 0.7 s
