"""The plugin in a real vLLM: what arrives over NIXL is what vLLM's caches hold, and unmarked requests leave no trace.

One start of vLLM per scenario. Prompts are synthetic token ids of the tiny checkpoint.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import CHILD, MTP, Node, Run

from tilert_ref.connector.fingerprint import checkpoint_fingerprint
from tilert_ref.connector.layout import BF16, BufferLayout, model_profile
from tilert_ref.connector.receiver import HandoffFailed
from tilert_ref.engine.make_tiny import make_tiny
from tilert_ref.native_pool import read_steps, strays
from tilert_ref.stack import free_port, multi_connector_config, nixl_config, side_channel, step_log_config

pytestmark = pytest.mark.vllm

MAX_SEQ_LEN = 640
MAIN_LAYERS = 3
SECOND_CHILD = {"kv_connector": "SecondChild", "kv_connector_module_path": "second_child", "kv_role": "kv_producer"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint")
    make_tiny(out, "dsv3")
    return out


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (length,), generator=generator).tolist()


@contextmanager
def nodes(count: int, mtp: bool, checkpoints: Sequence[str | None] = ()) -> Iterator[list[Node]]:
    layout = BufferLayout(model_profile(MAIN_LAYERS + mtp, mtp, False), BF16, MAX_SEQ_LEN)
    made = [Node(layout, checkpoint) for checkpoint in checkpoints or [None] * count]
    try:
        yield made
    finally:
        for node in made:
            node.server.close()


def start(tmp_path: Path, engine: dict[str, Any], batches: list[list[dict[str, Any]]], **env: str) -> Run:
    return Run(tmp_path, "run_vllm.py", {"engine": {"max_model_len": MAX_SEQ_LEN} | engine, "batches": batches}, **env)


def request(length: int, seed: int, node: Node | None = None) -> dict[str, Any]:
    return {"prompt": prompt(length, seed), "params": node.params if node else None}


def saved_rows(results: dict[str, Any], index: int) -> dict[int, torch.Tensor]:
    """Rows of the index-th request; vLLM appends a random suffix to its id."""
    (name,) = [name for name in results["rows"] if name.split("-")[0] == str(index)]
    return results["rows"][name]


def assert_handed_off(results: dict[str, Any], index: int, sent: dict[str, Any], node: Node) -> None:
    received = node.receive(str(index))
    assert (received.seq_len, received.last_prompt_token) == (len(sent["prompt"]), sent["prompt"][-1])
    expected = saved_rows(results, index)
    assert sorted(expected) == list(range(len(received.layers)))
    for layer, rows in expected.items():
        assert rows.any()
        assert torch.equal(received.rows(layer), rows), f"layer {layer} of request {index}"


def test_alone_unmarked_requests_leave_no_trace_and_marked_ones_arrive(checkpoint: Path, tmp_path: Path) -> None:
    digest = checkpoint_fingerprint(checkpoint)
    with nodes(4, mtp=False, checkpoints=[digest, None, None, "v1:other"]) as (a, b, c, other):
        unmarked = [request(length, length) for length in (5, 70, 200)]
        mixed = [request(1, 11, a), request(33, 12), request(200, 13, b), request(64, 14), request(500, 15, c)]
        mixed.append(request(20, 16, other))
        engine = {"model": str(checkpoint), "kv_transfer_config": CHILD}
        with start(tmp_path, engine, [unmarked, mixed]) as run:
            results = run.results()
            started, after_unmarked, after_marked = results["facts"]
            nothing = {"threads": [], "staging_bytes": 0, "transport": False, "nixl_imported": False}
            assert started == started | nothing
            assert after_unmarked == started
            assert after_marked["transport"] and after_marked["staging_bytes"] > 0 and after_marked["threads"]
            for index, node in ((3, a), (5, b), (7, c)):
                assert_handed_off(results, index, mixed[index - 3], node)
            with pytest.raises(HandoffFailed, match=f"the peer has checkpoint 'v1:other', we have '{digest}'"):
                other.receive("8")


def test_with_mtp_inside_multi_connector(checkpoint: Path, tmp_path: Path) -> None:
    """Beside vLLM's NixlConnector: requests for either in one forward batch, and neither is told of the other's."""
    log = tmp_path / "steps.jsonl"
    with nodes(3, mtp=True) as (a, b, c):
        native = request(70, 25) | {"params": {"do_remote_decode": True}}
        first = [request(130, 21, a), request(40, 22), request(17, 23, b), native]
        second = [request(40, 22), request(333, 24, c)]
        children = [CHILD, nixl_config("kv_producer"), step_log_config(log), SECOND_CHILD]
        engine = {
            "model": str(checkpoint),
            "speculative_config": MTP,
            "kv_transfer_config": multi_connector_config(*children),
        }
        with start(tmp_path, engine, [first, second], UCX_NET_DEVICES="lo", **side_channel(free_port())) as run:
            results = run.results()
            assert_handed_off(results, 0, first[0], a)
            assert_handed_off(results, 2, first[2], b)
            assert_handed_off(results, 5, second[1], c)
            calls = results["facts"][-1]["second_child"]
            assert calls["save_kv_layer"] >= 2 * MAIN_LAYERS and calls["request_finished_all_groups"] == 6
        steps = read_steps(log)
        (shared,) = [step for step in steps if step.feeds_both]
        assert [*shared.prefilled("tilert").values(), *shared.prefilled("native").values()] == [130, 17, 70]
        assert strays(steps) == []
        (reply,) = [params for params in results["replies"] if params is not None]
        assert reply == results["replies"][3], "only the native request is answered with a place to fetch from"
        assert reply["do_remote_prefill"] and reply["remote_num_tokens"] == 70 and reply["remote_host"] == "127.0.0.1"


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(),
    reason="vLLM switches chunked prefill and prefix caching off for MLA on a CPU without AMX",
)
def test_chunked_prefill_and_prefix_cache_hits(checkpoint: Path, tmp_path: Path) -> None:
    with nodes(2, mtp=True) as (a, b):
        long = request(600, 31, a)
        again = {"prompt": long["prompt"][:400] + prompt(100, 32), "params": b.params}
        engine = {
            "model": str(checkpoint),
            "speculative_config": MTP,
            "kv_transfer_config": CHILD,
            "max_num_batched_tokens": 128,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
        }
        with start(tmp_path, engine, [[long], [again]]) as run:
            results = run.results()
            assert results["chunked"]
            assert_handed_off(results, 0, long, a)
            assert_handed_off(results, 1, again, b)
