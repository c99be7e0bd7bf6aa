"""The key under which router, prefill and decode meet.

Each side derives it from its own form of vLLM's request id (protocol.md 4). The rule is safe for ids like vLLM's own
and for nothing else: "order-2024" becomes "order" at the router and "order-2024" at the connector (case K6). So the
router always makes the id itself, with `new_request_id`, and the caller's id never reaches vLLM.
"""

import uuid
from collections.abc import Callable

_PREFIXES = ("chatcmpl-", "cmpl-")
_HEX = frozenset("0123456789abcdef")


def new_request_id() -> str:
    """32 hex digits, no dash: `derive_rid` maps every form that vLLM makes of it back to it."""
    return uuid.uuid4().hex


def derive_rid(request_id: str) -> str:
    """The rid in an id as vLLM shows it over HTTP or uses it inside: TileRT's published rule, to the letter."""
    rid = _strip_prefix(request_id)
    rid = _drop_tail(rid, lambda tail: len(tail) <= 8 and _HEX.issuperset(tail))  # vLLM's randomisation
    return _drop_tail(rid, lambda tail: len(tail) <= 3 and tail.isdigit())  # index of a completion prompt


def _strip_prefix(request_id: str) -> str:
    for prefix in _PREFIXES:
        if request_id.startswith(prefix):
            return request_id[len(prefix) :]
    return request_id


def _drop_tail(rid: str, is_suffix: Callable[[str], bool]) -> str:
    head, dash, tail = rid.rpartition("-")
    return head if dash and is_suffix(tail) else rid
