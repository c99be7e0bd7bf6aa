"""How a control connection begins: hello, and before its addresses the shared secret if there is one.

The protocol itself is in secret.py. Deadlines are values of `time.monotonic()`.
"""

from msgspec.structs import replace

from tilert_ref.connector import codec
from tilert_ref.connector.codec import Auth, Challenge, HandoffRefused, Hello, ProtocolError, Reject
from tilert_ref.connector.secret import FILE_VARIABLE, ProofError, Secret, Session, new_nonce
from tilert_ref.connector.wire import Connection, ConnectionLost, describe

_PRIVATE = ("nshards", "session_id", "nixl_meta", "nixl_dev", "zmq_endpoint", "takes_failures", "tilert_ref")


def greet(connection: Connection, hello: Hello, secret: Secret | None, deadline: float) -> None:
    """Decode side: sends hello, its addresses only to who proves to know the secret.

    Raises ProtocolError for everybody else, who has then been told why.
    """
    if secret is None:
        connection.send(hello, deadline)
        return
    nonce = new_nonce()
    hidden = dict.fromkeys(_PRIVATE) | dict.fromkeys(("kv_base", "pe_base", "ki_base"), 0)
    connection.send(replace(hello, **hidden, tilert_auth=Auth(nonce=nonce)), deadline)
    try:
        connection.session = _answered(connection, secret, nonce, deadline)
    except ProtocolError as error:
        reason = "wrong_secret" if isinstance(error, ProofError) else "secret_required"
        detail = f"this decode node has a shared secret ({FILE_VARIABLE}): {error}"
        connection.send(Reject(error=reason, detail=detail[:500]), deadline)
        raise ProtocolError(f"refused {connection.peer}: {reason}: {error}") from error
    connection.send(hello, deadline)


def _answered(connection: Connection, secret: Secret, nonce: str, deadline: float) -> Session:
    payload = connection.receive(deadline, codec.MAX_SMALL)
    challenge = codec.decode_challenge(payload)
    if challenge.tilert_auth.nonce is None:
        raise ProtocolError("the challenge has no nonce")
    session = Session(secret, nonce, challenge.tilert_auth.nonce)
    session.check(challenge, payload)
    return session


def read_hello(connection: Connection, secret: Secret | None, deadline: float) -> Hello:
    """Prefill side: the hello with the addresses, from a node that has proved to know the secret if we have one.

    Raises HandoffRefused, naming the setting, if only one end has a secret or they are different; OSError and
    ProtocolError as the connection does.
    """
    try:
        hello = connection.hello(deadline)
    except ConnectionError as error:
        raise ConnectionLost(f"{error} before its hello: is this machine on the node's --allow-peers?") from error
    if secret is None:
        if hello.withheld:
            raise HandoffRefused(f"the decode node asks for a shared secret; set {FILE_VARIABLE} for vLLM too")
        return hello
    if not hello.withheld:
        raise HandoffRefused(f"the decode node does not ask for the shared secret; set {FILE_VARIABLE} there too")
    nonce = new_nonce()
    session = Session(secret, hello.tilert_auth.nonce, nonce)
    connection.session = session
    connection.send(Challenge(tilert_auth=Auth(nonce=nonce)), deadline)
    return _proven(connection.receive(deadline, codec.MAX_HELLO), session)


def _proven(payload: bytes, session: Session) -> Hello:
    try:
        hello = session.check(codec.decode_hello(payload), payload)
    except ProtocolError as error:
        raise HandoffRefused(_why(payload) or f"the decode node does not know the shared secret: {error}") from error
    if hello.withheld:
        raise HandoffRefused("the decode node proved to know the shared secret and still keeps its addresses back")
    return hello


def _why(payload: bytes) -> str | None:
    """What a node that refuses us says."""
    try:
        reply = codec.decode_reply(payload)
    except ProtocolError:
        return None
    return f"refused: {describe(reply)}" if isinstance(reply, Reject) else None
