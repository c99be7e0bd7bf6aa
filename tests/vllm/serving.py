"""A real vLLM in a subprocess on one side of a handoff, a decode node in this process on the other."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tilert_ref.connector.layout import BufferLayout, plane_views
from tilert_ref.connector.receiver import ReceiveServer
from tilert_ref.connector.transport import make_transport
from tilert_ref.engine.api import LayerKV, PromptKV

HERE = Path(__file__).parent
START_TIMEOUT_S = 500  # 40 s on an idle machine
HANDOFF_TIMEOUT_S = 60
MODULE = "tilert_ref.connector.prefill_connector"
CHILD = {"kv_connector": "TileRTConnector", "kv_connector_module_path": MODULE, "kv_role": "kv_producer"}
MTP = {"method": "mtp", "num_speculative_tokens": 1}


class Received(PromptKV):
    def rows(self, layer: int) -> torch.Tensor:
        """Both planes put together again, uint8 [seq_len, row bytes]."""
        planes = self.layers[layer]
        return torch.cat([planes.latent, planes.rope], dim=1).view(torch.uint8)


@dataclass
class Node:
    """One decode node: a receive server in this process."""

    layout: BufferLayout
    checkpoint: str | None = None
    transport: str = "nixl"
    buffer: torch.Tensor = field(init=False)
    server: ReceiveServer = field(init=False)

    def __post_init__(self) -> None:
        self.buffer = torch.zeros(self.layout.total_bytes, dtype=torch.uint8)
        transport = make_transport(self.transport, "127.0.0.1")
        self.server = ReceiveServer(self.layout, self.buffer, transport, "127.0.0.1", 0, checkpoint=self.checkpoint)
        self.server.start()

    @property
    def params(self) -> dict[str, Any]:
        return {"tilert_host": "127.0.0.1", "tilert_ctrl_port": self.server.port}

    def receive(self, rid: str, timeout_s: float = HANDOFF_TIMEOUT_S) -> Received:
        """What arrived for a request, copied; releases the node."""
        record = self.server.wait(rid, timeout_s, threading.Event())
        layers = [self._layer(index, record.seq_len) for index in range(self.layout.profile.num_layers)]
        self.server.release(rid)
        return Received(rid, record.seq_len, record.last_prompt_token, layers)

    def _layer(self, index: int, seq_len: int) -> LayerKV:
        kv, pe, pages = (
            plane if plane is None else plane.clone() for plane in plane_views(self.layout, self.buffer, index, seq_len)
        )
        return LayerKV(kv.view(torch.bfloat16), pe.view(torch.bfloat16), pages)


class Run:
    """vLLM in a subprocess: a script of this directory that reads a plan, saves its results and says "saved"."""

    def __init__(
        self, tmp_path: Path, script: str, written: dict[str, Any], path: Sequence[Path] = (), **env: str
    ) -> None:
        self._out = tmp_path / "out.pt"
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps(written))
        self._log = (tmp_path / "vllm.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script), str(plan), str(self._out)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | env | {"PYTHONPATH": os.pathsep.join([*map(str, path), str(HERE), *sys.path])},
        )

    def results(self) -> dict[str, Any]:
        """Waits for the batches. The process goes on, and with it its background senders."""
        watchdog = threading.Timer(START_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            lines = iter(self._process.stdout.readline, "")
            if not any(line.startswith("saved") for line in lines):
                raise AssertionError(f"vLLM failed:\n{self.log()[-4000:]}")
        finally:
            watchdog.cancel()
        return torch.load(self._out)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate("\n", timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
