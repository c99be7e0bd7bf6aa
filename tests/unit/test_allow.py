"""Allow-lists: legal entries, what they let through, and that a name is connected at the address that was checked."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilert_ref.connector import wire
from tilert_ref.connector.allow import LOOPBACK_HOSTS, LOOPBACK_PEERS, AllowList, endpoint_host, peers
from tilert_ref.connector.wire import HostRefused


def listed(*entries: str) -> AllowList:
    return AllowList.parse("tilert_allowed_hosts", entries)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LocalHost.", "::ffff:127.0.0.1"])
def test_the_default_is_this_machine(host: str) -> None:
    assert LOOPBACK_HOSTS.refusal(host) is None


@pytest.mark.parametrize(
    "host",
    [
        *("10.0.0.1", "decode-1", "", "127.1", "0x7f000001", "2130706433", "0.0.0.0", "::", "::ffff:10.0.0.1"),
        *("169.254.169.254", "fe80::1%lo", "localhost.evil.example", "127.0.0.1.evil.example", "[::1]", "127.0.0.1 "),
    ],
)
def test_other_hosts_are_refused_by_the_key_and_what_is_legal(host: str) -> None:
    assert LOOPBACK_HOSTS.refusal(host) == (
        f"{host!r} is not in tilert_allowed_hosts (localhost, 127.0.0.0/8, ::1/128); list it there, or '*' for no limit"
    )


def test_networks_names_and_the_explicit_word() -> None:
    some = listed("10.2.0.0/16", "decode-1", "fd00::/8", "::ffff:192.168.0.0/112")
    for host in ("10.2.3.4", "::ffff:10.2.3.4", "Decode-1", "fd12::1", "192.168.7.7"):
        assert some.refusal(host) is None
    for host in ("10.3.0.1", "decode-2", "fe80::1", "127.0.0.1", "192.169.0.1"):
        assert some.refusal(host)
    assert listed("*").refusal("anything at all") is None
    assert peers(["any"]).refusal_of_address("203.0.113.9") is None
    assert peers(None) is LOOPBACK_PEERS


@pytest.mark.parametrize(
    "entry", ["10.0.0.0/33", "10.0.0.1/8", "", "a b", "http://d", "-", "d:5556", "*", "127.1", "a..b"]
)
def test_entries_that_are_no_host_are_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"tilert_allowed_hosts (has|is) .*legal: addresses, CIDR networks and host"):
        listed("::1", entry)


@pytest.mark.parametrize("entries", [["decode-1"], ["any", "::1"], ["*"], [], ["10.0.0.0/99"]])
def test_peers_have_addresses_only(entries: list[str]) -> None:
    with pytest.raises(ValueError, match=r"--allow-peers .*legal: addresses and CIDR networks, or 'any' alone"):
        peers(entries)


@given(st.integers(0, 2**32 - 1), st.integers(0, 32), st.integers(0, 2**32 - 1))
def test_a_network_holds_what_shares_its_prefix(base: int, length: int, address: int) -> None:
    mask = (2**32 - 1) << (32 - length) & (2**32 - 1)
    text = [socket.inet_ntoa(value.to_bytes(4, "big")) for value in (base & mask, address)]
    allowed = listed(f"{text[0]}/{length}")
    assert (allowed.refusal(text[1]) is None) == (base & mask == address & mask)
    assert (allowed.refusal_of_address("::ffff:" + text[1]) is None) == (base & mask == address & mask)


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("tcp://10.0.0.1:5", "10.0.0.1"),
        ("tcp://[::1]:65535", "::1"),
        ("tcp://10.0.0.1", None),
        ("tcp://10.0.0.1:0", None),
        ("tcp://10.0.0.1:65536", None),
        ("tcp://10.0.0.1:1;tcp://10.0.0.2:1", None),
        ("tcp://evil.example:5", None),
        ("ipc:///tmp/x", None),
        ("inproc://x", None),
        ("TCP://10.0.0.1:5", None),
        ("tcp://eth0:5", None),
        ("tcp://*:5", None),
    ],
)
def test_endpoints_are_an_address_and_a_port(endpoint: str, host: str | None) -> None:
    assert endpoint_host(endpoint, "tcp://") == host


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """getaddrinfo gives these addresses, one list a call; returns the names that were asked for."""
    asked, given_ = [], iter(answers)

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in next(given_)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asked


def soon() -> float:
    return time.monotonic() + 10


def test_the_address_that_was_checked_is_the_one_connected(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look-up, which DNS rebinding answers differently, would raise StopIteration here."""
    asked = resolving(monkeypatch, ["127.0.0.1"])
    wire.connect("decode-1", port, soon(), listed("decode-1", "127.0.0.1")).close()
    assert asked == ["decode-1"]


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "0.0.0.0", "224.0.0.1"])
def test_a_listed_name_does_not_vouch_for_special_addresses(
    address: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, [address])
    with pytest.raises(HostRefused, match=rf"'{address}' is not in tilert_allowed_hosts .*'decode-1' resolved to it"):
        wire.connect("decode-1", port, soon(), listed("decode-1", "10.0.0.0/8"))


def test_allowed_addresses_of_a_name_are_tried_and_others_left_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, ["169.254.169.254", "127.0.0.1"])
    connection = wire.connect("decode-1", port, soon(), listed("decode-1", "127.0.0.0/8"))
    assert connection.peer_address == "127.0.0.1"
    connection.close()


def test_an_unlisted_name_is_not_even_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolving(monkeypatch)
    with pytest.raises(HostRefused, match="'evil.example' is not in tilert_allowed_hosts"):
        wire.connect("evil.example", 1, soon())
    assert asked == []


def test_a_silent_address_does_not_outlast_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full leaves connects hanging."""
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for sock in (first, second):
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        threading.Event().wait(0.05)
        began = time.monotonic()
        with pytest.raises(OSError):
            wire.connect("127.0.0.1", full.getsockname()[1], time.monotonic() + 0.3)
        assert time.monotonic() - began < 5
