"""protocol.md section 4: every row of the table."""

import pytest

from tilert_ref.connector.rid import derive_rid

HEX32 = "0123456789abcdef0123456789abcdef"
UUID = "550e8400-e29b-41d4-a716-446655440000"


@pytest.mark.parametrize(
    ("request_id", "rid"),
    [
        (f"chatcmpl-{HEX32}", HEX32),
        (f"chatcmpl-{HEX32}-9f8e7d6c", HEX32),
        (f"cmpl-{HEX32}", HEX32),
        (f"cmpl-{HEX32}-0", HEX32),
        (f"cmpl-{HEX32}-0-9f8e7d6c", HEX32),
        (f"chatcmpl-{UUID}", UUID),
        (f"chatcmpl-{UUID}-0", UUID),
        (f"chatcmpl-{UUID}-9f8e7d6c", UUID),
        (f"chatcmpl-{UUID}-0-9f8e7d6c", UUID),
        ("chatcmpl-abc-123456789", "abc-123456789"),
        ("chatcmpl-ABC-DEF0", "ABC-DEF0"),
        ("chatcmpl-x-", "x"),
        ("req-123-4567", "req"),
        ("chatcmpl-cmpl-7", "cmpl"),
        ("12345678", "12345678"),
        # Not in the table, but in its text.
        ("chatcmpl-job-cafe", "job"),
        ("chatcmpl-job-cafe-9f8e7d6c", "job-cafe"),
        ("user-1-42", "user"),
        ("chatcmpl-a-٣٤-0", "a"),  # isdigit is Unicode-aware
        ("a-1-2-3", "a-1"),  # each rule once
        ("a-1234-0", "a-1234"),  # B takes at most three digits
        ("", ""),
    ],
)
def test_derive_rid(request_id: str, rid: str) -> None:
    assert derive_rid(request_id) == rid
