"""The published package's parts as a test sees them: what each does, and what can be asked of it."""

import queue
import sys
import threading
import time
import types
from typing import Any

import host_memory
import torch


class _Part:
    """device: "cpu" puts everything into host memory, "cuda" leaves the package as it is. shards: of its buffers."""

    def __init__(self, device: str, shards: int = 1) -> None:
        self.device = device
        host_memory.stay_on_loopback()
        if device == "cpu":
            host_memory.install(devices=shards)

    def _profile(self, model: str, kv_cache_dtype: str) -> Any:
        from tilert.pd_vllm.profiles import base

        if self.device == "cpu":
            host_memory.install_transport()
        return base.get_profile(model).configure(kv_cache_dtype)

    def facts(self) -> dict[str, Any]:
        import tilert

        return {"tilert": tilert.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}


class Receiver(_Part):
    """Its receive server."""

    def __init__(
        self, model: str, kv_cache_dtype: str, max_seq_len: int, port: int, device: str = "cpu", shards: int = 1
    ) -> None:
        super().__init__(device, shards)
        self.profile = self._profile(model, kv_cache_dtype)
        from tilert.pd_vllm.receive_server import ReceiveServer

        self.server = ReceiveServer(
            self.profile, max_seq_len=max_seq_len, ctrl_port=port, hostname="127.0.0.1", transport="nixl"
        )
        self.record: Any = None

    def facts(self) -> dict[str, Any]:
        bases = self.server.base_ptr
        return super().facts() | {
            "layout_version": self.profile.layout_version,
            "senders": len(self.profile.sender_ranks),
            "shards": len(bases) if isinstance(bases, list) else 1,
        }

    def wait(self, timeout: float) -> dict[str, Any] | None:
        """The next complete request; None if there is none in time."""
        try:
            self.record = record = self.server.completed.get(timeout=timeout)
        except queue.Empty:
            return None
        fields = ("rid", "seq_len", "last_prompt_token", "sampling", "prompt_token_ids", "generation")
        return {name: getattr(record, name) for name in fields} | {"ranks": sorted(record.done_ranks)}

    def dump(self, path: str) -> int:
        """Writes the buffer, shard after shard; returns its bytes."""
        buffers = self.server.buffer if isinstance(self.server.buffer, list) else [self.server.buffer]
        with open(path, "wb") as file:
            for buffer in buffers:
                buffer.cpu().numpy().tofile(file)
        return sum(buffer.numel() for buffer in buffers)

    def convert(self, path: str) -> int:
        """Saves what the package's engine would get of the last request: [(ki, kv, pe)] by layer."""
        server = self.server
        made = self.profile.convert(server.buffer, server.base_ptr, server.max_seq_len, self.record)
        torch.save([tuple(tensor.cpu() for tensor in layer) for layer in made.layers], path)
        return len(made.layers)

    def release(self, rid: str) -> None:
        self.server.release(rid)

    def snapshot(self) -> dict[str, Any]:
        return self.server.state_snapshot()


class Connector(_Part):
    """Its connector, both halves, driven as vLLM drives it: one tensor-parallel rank of a prefill node.

    caches: a file of {layer name: tensor}. Without a vLLM the three names that the package takes from it are doubles.
    """

    def __init__(
        self, model: str, caches: str, rank: int, stage_max: int, device: str = "cpu", shards: int = 1
    ) -> None:
        super().__init__(device, shards)
        _vllm_double(rank)
        self._profile(model, "auto")  # the connector itself finds the dtype in the caches
        from tilert.pd_vllm import prefill_connector

        self.caches = {name: tensor.to(_device(device)) for name, tensor in torch.load(caches).items()}
        extra = {"tilert_model": model, "tilert_max_seq_len": stage_max, "tilert_transport": "nixl"}
        config = types.SimpleNamespace(
            kv_transfer_config=types.SimpleNamespace(kv_connector_extra_config=extra),
            model_config=types.SimpleNamespace(max_model_len=stage_max),
            compilation_config=types.SimpleNamespace(static_forward_context={}),
        )
        groups = types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(layer_names=list(self.caches))])
        self.scheduler = prefill_connector.TileRTConnector(config, "scheduler", groups)
        self.worker = prefill_connector.TileRTConnector(config, "worker", groups)
        self.worker.register_kv_caches(self.caches)

    def prefill(
        self, request_id: str, prompt: list[int], blocks: list[int], port: int, chunk: int, layerwise: bool = True
    ) -> int:
        """One request, `chunk` tokens a step, as vLLM's scheduler hands it out. Returns the number of steps."""
        params = {"tilert_host": "127.0.0.1", "tilert_ctrl_port": port}
        steps = 0
        for first in range(0, len(prompt), chunk):
            computed = min(first + chunk, len(prompt))
            given = blocks[-(-first // 64) : -(-computed // 64)]
            self._step(_scheduled(request_id, prompt, params, first, computed - first, given), layerwise)
            steps += 1
        return steps

    def _step(self, output: Any, layerwise: bool) -> None:
        worker = self.worker
        worker._connector_metadata = self.scheduler.build_connector_meta(output)
        worker.start_load_kv(None)
        if layerwise:
            for name, cache in self.caches.items():
                if "indexer" not in name:
                    worker.save_kv_layer(name, cache, None)
        worker.wait_for_save()
        worker._connector_metadata = None


def _scheduled(
    request_id: str, prompt: list[int], params: dict[str, Any], first: int, count: int, blocks: list[int]
) -> Any:
    """vLLM's SchedulerOutput of one step, as far as a connector reads it."""
    new, cached = [], types.SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    if first == 0:
        sampling = types.SimpleNamespace(extra_args={"kv_transfer_params": params}, repetition_penalty=1.0)
        new = [
            types.SimpleNamespace(
                req_id=request_id,
                prompt_token_ids=prompt,
                block_ids=(blocks,),
                num_computed_tokens=0,
                sampling_params=sampling,
            )
        ]
    else:
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens = [request_id], [(blocks,)], [first]
    return types.SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={request_id: count},
        finished_req_ids=set(),
        preempted_req_ids=set(),
    )


def _vllm_double(rank: int) -> None:
    """The names of vLLM that the package's connector imports, with nothing behind them."""

    class Base:
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
            self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
            self._connector_metadata: Any = None

        def _get_connector_metadata(self) -> Any:
            return self._connector_metadata

    root = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    parts = root.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules[".".join(parts[:end])] = types.ModuleType(".".join(parts[:end]))
    base = sys.modules[root]
    base.KVConnectorBase_V1 = Base
    base.KVConnectorMetadata = type("KVConnectorMetadata", (), {})
    base.SupportsHMA = type("SupportsHMA", (), {})
    sys.modules["vllm.distributed"].get_tensor_model_parallel_rank = lambda: rank


def _device(device: str) -> str:
    return "cuda:0" if device == "cuda" else "cpu"


class DecodeServer(_Part):
    """Its whole decode server with the stub engine: HTTP and receive server."""

    def __init__(self, flags: list[str], device: str = "cpu", shards: int = 1) -> None:
        super().__init__(device, shards)
        if device == "cpu":
            import tilert.pd_vllm.profiles.base  # noqa: F401

            host_memory.install_transport()
        from tilert.pd_vllm import decode_server, engine_iface, wire

        wire.local_ip = lambda *_: "127.0.0.1"
        engine_iface.StubEngine.inject = lambda _, request: self._keep(request)
        _run_main(decode_server.main, ["decode_server", "--engine", "stub", "--transport", "nixl", *flags])

    def _keep(self, request: Any) -> None:
        """Stands for the stub engine's `inject`, which forgets what it is given."""
        self._injected = request

    def injected(self, path: str) -> dict[str, Any]:
        """Saves the last request's layers, [(ki, kv, pe)]; returns the rest of it."""
        request = self._injected
        torch.save([tuple(tensor.cpu() for tensor in layer) for layer in request.layers], path)
        return {name: getattr(request, name) for name in ("rid", "seq_len", "last_prompt_token", "sampling")}


class Router(_Part):
    """Its router."""

    def __init__(self, flags: list[str]) -> None:
        super().__init__("cpu")
        from tilert.pd_vllm import pd_router

        _run_main(pd_router.main, ["pd_router", "--host", "127.0.0.1", *flags])


def _run_main(main: Any, argv: list[str]) -> None:
    """A server's main on a thread. Its errors end the process, so that nobody waits for it in vain."""
    sys.argv = argv

    def serve() -> None:
        import os
        import traceback

        try:
            main()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    import uvicorn

    uvicorn.Server.install_signal_handlers = lambda *_: None
    threading.Thread(target=serve, daemon=True).start()
    time.sleep(0.05)


ROLES = {"receiver": Receiver, "connector": Connector, "decode_server": DecodeServer, "router": Router}
