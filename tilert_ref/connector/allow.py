"""Allow-lists of hosts and peers. Pure: nothing here looks a name up.

Both ends have one. The prefill side's (`tilert_allowed_hosts`) says where a prompt's KV may be sent, since whoever
reaches vLLM's API may name a host. The decode side's (`--allow-peers`) says who may talk to a node at all: its hello
holds raw addresses of its memory, and its HTTP port gives out tokens.

    AllowList.parse("tilert_allowed_hosts", ["decode-1", "10.0.0.0/8", "::1"])
    LOOPBACK_HOSTS, LOOPBACK_PEERS   what holds unless something else is said

A host name is legal if it is listed itself: an unlisted one is refused without a look-up, which would tell a stranger's
name server that it was asked for. What a listed name resolves to is checked too, when the connection is made, and the
connection goes to the very address that was checked. A name vouches for ordinary addresses only; one that resolves to
a loopback, link-local, multicast or unspecified address (the aims of DNS rebinding) needs that address listed as well.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class AllowList:
    """key: the setting that it came from, and everything: its word for no limit; both for error texts."""

    key: str
    names: frozenset[str] = frozenset()
    networks: tuple[IPNetwork, ...] = ()
    everything: str = "*"
    open: bool = False

    @classmethod
    def parse(cls, key: str, entries: Iterable[str], everything: str = "*", names: bool = True) -> "AllowList":
        """Raises ValueError, which names the key and what is legal.

        Args:
            entries: addresses, networks in CIDR notation, host names; or only `everything`.
            names: False if host names are not legal (peers have addresses only).
        """
        wanted = [entry.strip() for entry in entries]
        if wanted == [everything]:
            return cls(key, everything=everything, open=True)
        what = "addresses, CIDR networks and host names" if names else "addresses and CIDR networks"
        legal = f"legal: {what}, or {everything!r} alone for no limit"
        if not wanted or everything in wanted:
            raise ValueError(f"{key} is {wanted!r}; {legal}")
        networks, hosts = [], set()
        for entry in wanted:
            if (network := _network(entry)) is not None:
                networks.append(network)
            elif names and _is_name(entry):
                hosts.add(_plain_name(entry))
            else:
                raise ValueError(f"{key} has {entry!r}; {legal}")
        return cls(key, frozenset(hosts), tuple(networks), everything)

    def refusal(self, host: str) -> str | None:
        """Why a host that somebody named is refused before anything is looked up; None if it is not."""
        if self.open or _plain_name(host) in self.names:
            return None
        address = parse_address(host)
        return None if address is not None and self.has(address) else self._refused(host)

    def refusal_of_address(self, address: str, name: str | None = None) -> str | None:
        """Why a peer's address is refused; None if it is not. name: the listed name that resolved to it, if one did."""
        if self.open:
            return None
        parsed = parse_address(address)
        if parsed is not None and self.has(parsed):
            return None
        if parsed is None or name is None or _plain_name(name) not in self.names:
            return self._refused(address)
        return f"{self._refused(address)} ({name!r} resolved to it)" if _is_special(parsed) else None

    def has(self, address: IPAddress) -> bool:
        """Whether a network of the list holds the address."""
        return any(address.version == network.version and address in network for network in self.networks)

    def __str__(self) -> str:
        return self.everything if self.open else ", ".join([*sorted(self.names), *map(str, self.networks)])

    def _refused(self, host: str) -> str:
        return f"{host[:256]!r} is not in {self.key} ({self}); list it there, or {self.everything!r} for no limit"


def parse_address(text: str) -> IPAddress | None:
    """An address literal. IPv4 behind IPv6's mapping (::ffff:1.2.3.4) is that IPv4 address; a scope (%eth0) is cut."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def endpoint_host(endpoint: str, scheme: str = "") -> str | None:
    """The address in `HOST:PORT`, brackets taken off, after `scheme`; None if the text is anything else."""
    if not endpoint.startswith(scheme):
        return None
    host, colon, port = endpoint.removeprefix(scheme).rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    legal = colon and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536
    return host if legal and parse_address(host) is not None else None


def _network(entry: str) -> IPNetwork | None:
    try:
        network = ipaddress.ip_network(entry)
    except ValueError:
        return None
    mapped = getattr(network.network_address, "ipv4_mapped", None)
    if mapped is not None and network.prefixlen >= 96:
        return ipaddress.IPv4Network((int(mapped), network.prefixlen - 96))
    return network


def _is_name(entry: str) -> bool:
    """Letters, digits, dots, hyphens and underscores, and not a number in disguise (127.1, 0x7f000001, 10.0.0.1/33)."""
    labels = _plain_name(entry).split(".")
    legal = all(label and label.isascii() and label.replace("-", "").replace("_", "").isalnum() for label in labels)
    return legal and len(entry) <= 253 and not labels[-1][0].isdigit()


def _plain_name(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_special(address: IPAddress) -> bool:
    return address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified


LOOPBACK_HOSTS = AllowList.parse("tilert_allowed_hosts", ["localhost", "127.0.0.0/8", "::1"])
LOOPBACK_PEERS = AllowList.parse("--allow-peers", ["127.0.0.0/8", "::1"], "any", names=False)
EVERYBODY = AllowList("no list", open=True)


def peers(entries: Sequence[str] | None) -> AllowList:
    """The decode side's list, as its command line gives it; None: loopback. Raises ValueError as `parse` does."""
    return LOOPBACK_PEERS if entries is None else AllowList.parse("--allow-peers", entries, "any", names=False)
