"""Our two ends against protocol.md alone: every byte of the receive buffer, all profiles and layout versions.

Needs no published package, so it is what CI runs of this suite.
"""

import numpy as np
import ours
import pytest
import wire_case
from sweep import FORMATS, LENGTHS, SPREAD
from wire_case import Case


@pytest.mark.parametrize("case", [*FORMATS, *SPREAD, *LENGTHS], ids=str)
def test_buffer(case: Case) -> None:
    made = wire_case.caches(case)
    with ours.DecodeNode(case, "zmq") as node, ours.prefill_node(case, made, "zmq") as ranks:
        assert ours.layout_of(case).layout_version == case.layout_version
        for rank in ranks:
            rank.prefill(ours.claim(case, node.server.port))
        record = node.server.wait(case.rid, ours.LIMIT_S, ours.NEVER)
        assert (record.seq_len, record.last_prompt_token) == (case.seq_len, 4711)
        wrong = np.flatnonzero(node.buffer.numpy() != np.concatenate(wire_case.buffer(case, made)))
        assert wrong.size == 0, f"{wrong.size} bytes differ, the first at {wrong[0]}"
