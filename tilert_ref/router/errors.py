"""Errors of the router, all in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

`code` holds TileRT's `error_type` words (http-api.md 1.5, 4.7), so that a script that looked for them still finds them.
"""

from typing import Any


class RouterError(Exception):
    """A failure that the client is told about.

    status is the HTTP status; retry_after_s, if given, becomes a Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": error_type(self.status), "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


class NodeLost(RouterError):
    """The decode node can't be reached, went away, or fell silent: it gets no request until its /health answers."""


class UpstreamReply(Exception):
    """A 4xx of vLLM, which goes to the client with its status and its body as they are."""

    def __init__(self, status: int, content: bytes, content_type: str) -> None:
        super().__init__(f"vLLM answered {status}")
        self.status = status
        self.content = content
        self.content_type = content_type


def error_type(status: int) -> str:
    """OpenAI's word for a class of HTTP status."""
    if status == 429:
        return "rate_limit_error"
    if status < 500 or status == 501:
        return "invalid_request_error"
    return "server_error"


def bad_field(param: str, message: str) -> RouterError:
    """400: the value is wrong in any system of this kind."""
    return RouterError(400, message, code="invalid_parameter", param=param)


def too_long(tokens: int, max_seq_len: int) -> RouterError:
    """400: no decode node has room for the prompt and one new token."""
    text = f"the prompt has {tokens} tokens; legal are 1 to {max_seq_len - 1}: the decode node holds {max_seq_len}"
    return RouterError(400, text, code="context_length_exceeded", param="prompt")


def unavailable(param: str, message: str) -> RouterError:
    """501: the value is legal, but nothing here can do what it asks for."""
    return RouterError(501, message, code="capability_unavailable", param=param)
