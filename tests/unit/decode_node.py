"""A decode server in a process of its own, with a client on its HTTP port and a sender of KV on the other."""

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from handoff_sender import Sender

from tilert_ref.connector.layout import BF16, BufferLayout, model_profile

TESTS = Path(__file__).parent
ROOT = TESTS.parents[1]
LIMIT_S = 120.0  # the machine may be busy; nothing here takes a second when it is not
LOCAL = ["--host", "127.0.0.1", "--http-port", "0", "--ctrl-port", "0"]
COMMON = [*LOCAL, "--transport", "zmq", "--senders", "1", "--max-seq-len", "256"]

# The engine of decode_doubles.py.
DOUBLE = ["--engine", "decode_doubles:load_engine", "--kv-cache-dtype", "bf16", "--engine-cancel-timeout-s", "1"]
CONFIG = """{
    "architectures": ["DeepseekV32ForCausalLM"],
    "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "n_routed_experts": null,
    "num_attention_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "v_head_dim": 32, "intermediate_size": 64, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 128
}"""
DOUBLE_LAYOUT = BufferLayout(model_profile(3, False, True), BF16, 256)


class Server:
    """A decode server process. `lines` is what it has printed."""

    def __init__(self, *flags: str, **env: str) -> None:
        path = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tilert_ref.decode_server", *COMMON, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": path} | env,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, layout: BufferLayout, transport: str = "zmq", device: str = "cpu") -> "Server":
        http, ctrl = self.expect(r"http on (\S+), prefill nodes on port (\d+)").groups()
        self.expect("ready: engine")
        self.client = httpx.Client(base_url=f"http://{http}", timeout=LIMIT_S)
        self.ctrl_port = int(ctrl)
        self.sender = Sender(layout, self.ctrl_port, transport_name=transport, device=device)
        return self

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line.rstrip())
        self._lines.put(None)

    def expect(self, pattern: str) -> re.Match[str]:
        while (line := self._lines.get(timeout=LIMIT_S)) is not None:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"the server ended without {pattern!r}: {self.lines}")

    def get(self, path: str) -> tuple[int, Any]:
        reply = self.client.get(path)
        return reply.status_code, reply.json()

    def decode(self, rid: str, **fields: Any) -> tuple[int, Any]:
        reply = self.client.post("/pd/decode", json={"rid": rid, "first_token_id": 42} | fields)
        return reply.status_code, reply.json()

    def cancel(self, rid: str) -> bool:
        return self.client.post("/pd/cancel", json={"rid": rid}).status_code == 200

    def stream(self, rid: str, **fields: Any) -> list[dict[str, Any]]:
        with self.opened(rid, **fields) as lines:
            return list(lines)

    @contextlib.contextmanager
    def opened(self, rid: str, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        body = {"rid": rid, "first_token_id": 42, "stream": True} | fields
        with self.client.stream("POST", "/pd/decode", json=body) as reply:
            assert (reply.status_code, reply.headers["content-type"]) == (200, "application/x-ndjson")
            yield (json.loads(line) for line in reply.iter_lines())

    def idle(self) -> bool:
        return self.get("/decode_status") == (200, {"status": "idle", "current_rid": None})

    def free(self) -> bool:
        """Node idle, engine ready, buffer free."""
        status, health = self.get("/health")
        return status == 200 and health["receiver"]["slot"]["state"] == "FREE" and self.idle()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
