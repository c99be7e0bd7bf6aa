"""fp8_ds_mla planes through a decode server of its own process: zmq transport, MTP layer and index pages included."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from decode_node import LIMIT_S, Server
from handoff_sender import Sender
from sparse_planes import handed_over, stage
from tokenizers import Tokenizer

from tilert_ref.connector.codec import Accept, HandoffRefused
from tilert_ref.connector.layout import BF16, FP8_DS_MLA, BufferLayout, model_profile
from tilert_ref.connector.rounding import ScaleRule
from tilert_ref.engine.api import PromptKV, SamplingParams
from tilert_ref.engine.ref import load_engine
from tilert_ref.tiny import model_dir, skills
from tilert_ref.tiny.chat import GLM
from tilert_ref.tiny.golden import Golden, Speaker

ROOM = 1024
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
LAYOUT = BufferLayout(model_profile(4, has_mtp=True, has_index=True), FP8_DS_MLA, ROOM)


@dataclass
class Node:
    """A decode server with the trained GLM-5 on fp8 rows, and a prompt that a prefill node could hand to it."""

    server: Server
    golden: Golden

    def prefilled(self, rule: ScaleRule) -> tuple[int, PromptKV]:
        """(first token, planes) of the prompt, MTP layer last."""
        engine = load_engine(
            model_dir("tiny-glm5"), max_seq_len=ROOM, num_mtp=1, kv_cache_dtype="fp8", kv_scale_rule=rule
        )
        return engine.prefill(self.golden.prompt, GREEDY), handed_over(engine, self.golden.prompt)

    def answered(self, rid: str, first: int, kv: PromptKV) -> tuple[int, Any]:
        sender = self.server.sender
        stage(kv, LAYOUT, sender.staging)
        sender.last_prompt_token = kv.last_prompt_token
        assert isinstance(sender.offer(rid, kv.seq_len), Accept)
        sampling = {"temperature": 0.0, "ignore_eos": True}
        return self.server.decode(rid, first_token_id=first, max_tokens=len(self.golden.answer), sampling=sampling)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    directory = model_dir("tiny-glm5")
    flags = ["--model-weights-dir", str(directory), "--kv-cache-dtype", "fp8", "--with-mtp", "--num-mtp", "2"]
    server = Server(*flags, "--max-seq-len", str(ROOM))
    try:
        rng, memory = random.Random("fp8 handoff"), skills.Memory()
        told = skills.remember(rng, memory, 40)
        speaker = Speaker(GLM, Tokenizer.from_file(str(directory / "tokenizer.json")))
        yield Node(server.start(LAYOUT), speaker.ask([told], skills.recall(rng, memory), thinking=False))
    finally:
        server.stop()


def test_the_answer_comes_from_the_bytes_that_were_sent(node: Node) -> None:
    assert len(node.golden.prompt) > 256, "more than index_topk"
    assert any("kv_cache_dtype fp8_ds_mla, kv_scale_rule power_of_two" in line for line in node.server.lines)
    status, reply = node.answered("right", *node.prefilled(ScaleRule.POWER_OF_TWO))
    assert (status, reply["token_ids"]) == (200, node.golden.answer)
    timing = reply["timing_ms"]
    assert timing["mtp_accept_mean"] > 1
    assert timing["convert"] + timing["inject"] - 0.1 <= timing["first_step"] < 1000 * LIMIT_S


def test_rows_of_another_scale_rule_fail_the_request_by_name(node: Node) -> None:
    status, reply = node.answered("plain", *node.prefilled(ScaleRule.PLAIN))
    assert status == 500
    assert "not of scale rule 'power_of_two'; legal: " in reply["error"]


def test_a_sender_of_bf16_rows_is_refused_before_it_writes(node: Node) -> None:
    layout = BufferLayout(LAYOUT.profile, BF16, ROOM)
    sender = Sender(layout, node.server.sender.ctrl_port)
    with pytest.raises(HandoffRefused, match="decode has layout_version 2000, prefill has 2040"):
        sender.offer("bf16", 100)
    sender.close()
