"""docs/protocol.md is what the structs and the transition table say, and its list of HTTP extensions is whole."""

from pathlib import Path

import msgspec
import pytest

from tilert_ref.connector import protocol_docs
from tilert_ref.connector.protocol_docs import HTTP_EXTENSIONS, TILERT_DECODE_FIELDS, render
from tilert_ref.decode_server.validation import DecodeBody


def test_the_docs_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "protocol.md"
    assert page.read_text() == render(), "run: python -m tilert_ref.connector.protocol_docs > docs/protocol.md"


def test_a_field_without_a_meaning_or_a_meaning_without_a_field_ends_the_rendering() -> None:
    class Done(msgspec.Struct):
        done: bool = False
        rid: str = ""
        rank: int = 0
        generation: int = 0
        error: str = ""
        tilert_auth: str = ""
        added: int = 0

    Done.__doc__ = "As codec's, and a field that nobody has described."
    with pytest.raises(KeyError, match="Done.added needs a meaning"):
        protocol_docs._message(Done)
    Auth = msgspec.defstruct("Auth", [("nonce", str)], namespace={"__doc__": "Two fields less."})
    with pytest.raises(KeyError, match=r"Auth has no fields \['proof', 'version'\]"):
        protocol_docs._message(Auth)


def test_fields_of_the_decode_body_that_tilert_does_not_have_are_listed() -> None:
    listed = {what for where, what, _ in HTTP_EXTENSIONS if where == "POST /pd/decode"}
    assert set(DecodeBody.model_fields) - TILERT_DECODE_FIELDS == listed
    assert set(DecodeBody.model_fields) > TILERT_DECODE_FIELDS
