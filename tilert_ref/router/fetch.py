"""Replies of vLLM and of decode nodes, read no further than a limit: a peer gone wrong must not fill our memory."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

# No peer is asked for compression, and none is unpacked: a few kilobytes of it can stand for gigabytes.
PLAIN = {"Accept-Encoding": "identity"}


class BadReply(Exception):
    """The reply is longer than its limit, or compressed."""


@dataclass(frozen=True)
class Fetched:
    status_code: int
    headers: httpx.Headers
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        return json.loads(self.content)


async def fetch(http: httpx.AsyncClient, method: str, url: str, limit: int, **request: Any) -> Fetched:
    """One whole call. Raises BadReply, and httpx.HTTPError as httpx does."""
    async with http.stream(method, url, **request) as response:
        return Fetched(response.status_code, response.headers, await read(response, limit))


async def read(response: httpx.Response, limit: int) -> bytes:
    """The rest of a reply's body. Raises BadReply, and httpx.HTTPError as httpx does."""
    if (coding := response.headers.get("content-encoding", "identity")) != "identity":
        raise BadReply(f"the reply is compressed ({coding[:50]!r}), which was not asked for")
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > limit:
            raise BadReply(f"the reply is over {limit} bytes")
    return bytes(content)
