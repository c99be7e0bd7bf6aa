"""The shared secret of the control plane: who knows it may hand off, who doesn't is refused by name.

An extension (protocol.md 3.2 has no authentication), off unless both ends are given the same secret:

    TILERT_REF_SECRET_FILE   a file with the secret, at least 16 bytes; a line end after it does not count
    TILERT_REF_SECRET        the secret itself, for where files are harder than variables

Never on a command line, which every user of the machine can read. With a secret the connection begins like this, and
everything up to its end carries a proof in the extension field `tilert_auth`:

    server -> client   hello       nonce S, all bases 0, nothing about memory: enough for TileRT to refuse itself
    client -> server   challenge   nonce C, proof
    server -> client   hello       proof; bases and the transport's metadata
                                   (reject `secret_required` or `wrong_secret`, if the challenge is none)
    client -> server   announce    proof
    server -> client   accept      proof
    client -> server   done        proof

So each end has proved itself before the other says anything that matters: addresses, or a prompt. A proof is
HMAC-SHA256 over the kind of message, both nonces and every byte of the message, with 64 zeros where the proof goes.
It can't be replayed on another connection (other nonces), nor sent back (another kind), nor moved to a message with
another rid, rank, generation or base.

What it does not do: nothing is encrypted, so whoever reads the network learns addresses, prompt ids and the KV itself.
NIXL's and Mooncake's data plane has no part in it: who learns the metadata that hello carries, and reaches that port,
can write. zmq's write tags are made with the secret, but pass in clear. The HTTP ports are not covered.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from tilert_ref.connector.codec import HEADER_BYTES, Auth, Message, ProtocolError, encode

FILE_VARIABLE, VALUE_VARIABLE = "TILERT_REF_SECRET_FILE", "TILERT_REF_SECRET"
MIN_BYTES, MAX_BYTES = 16, 4096
_UNSIGNED = "0" * 64
_DOMAIN = b"tilert_ref control plane 1"

_M = TypeVar("_M", bound=Message)


class ProofError(ProtocolError):
    """A message's proof is missing or wrong."""


class Secret:
    """A shared secret. Its repr says nothing, so that no log does."""

    def __init__(self, key: bytes) -> None:
        if not MIN_BYTES <= len(key) <= MAX_BYTES:
            raise ValueError(f"a shared secret has {MIN_BYTES} to {MAX_BYTES} bytes, got {len(key)}")
        self._key = key

    def digest(self, *parts: bytes) -> str:
        """HMAC-SHA256 over the parts, each with its length, as 64 hex digits."""
        framed = b"".join(len(part).to_bytes(8, "big") + part for part in (_DOMAIN, *parts))
        return hmac.new(self._key, framed, hashlib.sha256).hexdigest()


def read_secret(env: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret that the environment names, None if it names none. Raises ValueError, which never quotes it."""
    path, value = env.get(FILE_VARIABLE), env.get(VALUE_VARIABLE)
    if path and value:
        raise ValueError(f"{FILE_VARIABLE} and {VALUE_VARIABLE} are both set; legal: one of them")
    if not path and not value:
        return None
    try:
        key = Path(path).read_bytes().rstrip(b"\r\n") if path else value.encode()
        return Secret(key)
    except (OSError, ValueError) as error:
        raise ValueError(f"{FILE_VARIABLE if path else VALUE_VARIABLE}: {error}") from None


def new_nonce() -> str:
    return secrets.token_hex(32)


class Session:
    """One connection's proofs."""

    def __init__(self, secret: Secret, server_nonce: str, client_nonce: str) -> None:
        self._secret = secret
        self._nonces = bytes.fromhex(server_nonce), bytes.fromhex(client_nonce)
        self._client_nonce = client_nonce

    def sign(self, message: Message) -> bytes:
        """The message's frame, with a proof. A challenge keeps the nonce that it brings."""
        auth = Auth(nonce=message.tilert_auth.nonce if message.tilert_auth else None, proof=_UNSIGNED)
        frame = encode(msgspec.structs.replace(message, tilert_auth=auth))
        header, payload = frame[:HEADER_BYTES], frame[HEADER_BYTES:]
        before, _, after = payload.rpartition(_UNSIGNED.encode())  # the last one: `tilert_auth` is the last field
        return header + before + self._proof(message, payload).encode() + after

    def check(self, message: _M, payload: bytes) -> _M:
        """The message, if `payload`, which it was decoded from, proves itself. Raises ProofError."""
        proof = message.tilert_auth.proof if message.tilert_auth else None
        if proof is None:
            raise ProofError(f"{_kind(message)} has no proof of the shared secret")
        if payload.count(proof.encode()) != 1:
            raise ProofError(f"{_kind(message)} has its proof more than once")
        wanted = self._proof(message, payload.replace(proof.encode(), _UNSIGNED.encode()))
        if not hmac.compare_digest(wanted, proof):
            raise ProofError(f"the proof of {_kind(message)} is wrong: another secret, or not of this connection")
        return message

    def _proof(self, message: Message, payload: bytes) -> str:
        return self._secret.digest(_kind(message).encode(), *self._nonces, payload)


def _kind(message: Message) -> str:
    return type(message).__name__.lower()
