"""What the decode bench says of a step: its bytes, and that it runs on dummy weights of a published model's shape."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilert_ref import bench, bench_roof
from tilert_ref.bench_phases import HEAD, MTP, PHASES, REST, _split, split_step
from tilert_ref.engine.make_tiny import make_slice
from tilert_ref.engine.ref import load_engine
from tilert_ref.model_files import read_config

SPEC = importlib.util.spec_from_file_location("plot_bench", Path(__file__).parents[2] / "scripts" / "plot_bench.py")
plot_bench = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(plot_bench)
SMALL = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 16}
SMALL |= {"vocab_size": 500, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "index_n_heads": 4}


def small_slice(out: Path, name: str) -> Path:
    """The published structure in widths that a CPU runs."""
    make_slice(out, name, 4)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | SMALL | {"eos_token_id": 1}))
    return out


@pytest.mark.parametrize("context", [7, 8])
@pytest.mark.parametrize("name", ["glm5", "dsv32"])
def test_bytes_of_a_step_are_those_of_the_matrices_it_meets(name: str, context: int, tmp_path: Path) -> None:
    """A token that sees no more than index_topk, 8, others and itself ranks nothing."""
    directory = small_slice(tmp_path, name)
    (directory / "config.json").write_text(json.dumps(read_config(directory) | {"index_topk": 8}))
    engine = load_engine(directory, max_seq_len=64, kv_cache_dtype="fp8", load_format="dummy")
    c, layers = engine.model.config, 4
    moe = sum(c.is_moe(layer) for layer in range(layers))
    heads = c.num_attention_heads
    fp8 = 128 * 256 + heads * c.qk_head_dim * 128 + 576 * 256 + 256 * heads * c.v_head_dim + 4 * 128 * 128
    bf16 = heads * (c.qk_nope_head_dim + c.v_head_dim) * 512 + 128 * 256 + 4 * 256
    dense, expert = 3 * 256 * 256, 3 * 128 * 256
    matrices = layers * (fp8 + 2 * bf16) + (layers - moe) * dense
    matrices += moe * ((c.num_experts_per_tok + 1) * expert + 2 * 16 * 256) + 2 * 500 * 256
    cached = layers * context * (656 + 132)
    if context < 8:
        cached -= layers * context * 132
        matrices -= layers * (4 * 128 * 128 + 2 * 4 * 256)
    assert bench_roof.step_bytes(engine, context) == pytest.approx(matrices + cached, rel=0.01)  # norms, scales, biases
    one_more = bench_roof.step_bytes(engine, 7), bench_roof.step_bytes(engine, 6)
    assert one_more[0] - one_more[1] == layers * 656  # a row, and no key
    assert bench_roof.step_bytes(engine, 9) - bench_roof.step_bytes(engine, 8) == layers * 132  # a key, and no row


def test_the_bench_decodes_dummy_weights_at_a_filled_context(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    directory = small_slice(tmp_path, "glm5")
    arguments = ["--load-format", "dummy", "--kv-cache-dtype", "fp8", "--context", "20", "40", "--tokens", "12"]
    arguments += ["--repeats", "1", "--phases", "--json", str(tmp_path / "measured.json")]
    assert bench.main(["decode", str(directory), *arguments]) == 0
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("tilert_ref")]
    assert [line.split("draft(s), ")[1].split(" tokens")[0] for line in lines] == ["20", "40"]
    assert all("% of the copy" in line for line in lines)
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert [row["context"] for row in measured["measured"]] == [20, 40]
    for row in measured["measured"]:
        assert sum(row["phases_us"].values()) == pytest.approx(row["captured_step_us"])
        assert set(row["phases_us"]) == {phase for *_, phase in PHASES if phase != MTP} | {REST}
    page = plot_bench.svg(measured)
    assert "indexer" in page and page.count("<polyline") == 2


@pytest.mark.parametrize("delayed", range(6))
def test_what_delays_an_answer_is_not_measured(delayed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three short answers and three long ones in turn, 10 ms and then 2 ms a token; one takes 150 ms longer."""
    clock, answers = [0.0], list[int]()

    def generate(count: int) -> int:
        clock[0] += 0.01 + 0.002 * count + (0.15 if len(answers) == delayed else 0)
        answers.append(count)
        return count

    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])
    assert bench.decode_speed(generate, 108, 3) == pytest.approx(500)
    assert answers == [bench.SHORT, 108] * 3


@pytest.mark.parametrize(("flags", "eager"), [([], False), (["--vllm-eager"], True)])
def test_vllm_runs_at_its_best_unless_told_otherwise(flags: list[str], eager: bool, monkeypatch) -> None:
    """The flag reaches the other process, and vLLM there."""
    commands, engines = list[list[str]](), list[dict[str, Any]]()

    class Engine:
        def __init__(self, model: str, **arguments: Any):
            engines.append(arguments)
            raise ZeroDivisionError("no vLLM here")

    def run(command: list[str], *_: Any) -> list[float]:
        commands.append(command[command.index("decode") :])
        return [100.0]

    monkeypatch.setattr(bench, "_run_peer", run)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Engine, SamplingParams=dict))
    (measured,) = bench._vllm_in_own_process(bench._parser().parse_args(["decode", "x", *flags]))
    assert measured.name == f"vLLM {'eager' if eager else 'compiled'}, 128 tokens"
    with pytest.raises(ZeroDivisionError):
        bench._measure_vllm(bench._parser().parse_args(commands[0]))
    assert engines[0]["enforce_eager"] is eager


def test_drafts_are_one_phase_and_the_step_stays_as_it_was(tmp_path: Path) -> None:
    engine = load_engine(small_slice(tmp_path, "glm5"), max_seq_len=99, num_mtp=2, load_format="dummy")
    bench_roof.fill_cache(engine, 40)
    before = [getattr(module, name) for module, name, _ in PHASES]
    split = split_step(engine, 40, replays=2)
    assert [getattr(module, name) for module, name, _ in PHASES] == before
    assert set(split.us) == {REST, *(phase for *_, phase in PHASES)}
    assert split.us[MTP] > 0  # the longest of them; what is short may vanish beside other programs
    assert sum(split.us.values()) == pytest.approx(split.step_us)


def test_what_the_marks_cost_is_taken_off_by_their_number() -> None:
    """Three spans, 31 us with marks and 28 without: 1 us each."""
    split = _split([REST, HEAD, REST], [5.0, 20.0, 6.0], 28.0)
    assert split.us == pytest.approx({REST: 9.0, HEAD: 19.0}) and split.marks_us == pytest.approx(3.0)


def test_the_plot_of_a_made_up_measurement() -> None:
    """Two contexts, two lines: a step twice as long is twice as high, a phase's area has its colour in the legend."""
    rows = [
        {"who": "ours", "context": n, "num_mtp": 0, "step_us": us, "share_of_copy": 0.5, "phases_us": {"head": us}}
        for n, us in ((1000, 100.0), (8000, 200.0))
    ]
    rows += [{"who": "vLLM", "context": n, "num_mtp": 0, "step_us": 400.0} for n in (1000, 8000)]
    page = plot_bench.svg({"copy_gb_s": 4000.0, "measured": rows})
    assert page.count("<polygon") == 1 and page.count(plot_bench.AREAS[0]) == 2
    (ours, _, theirs, _) = re.findall(r'<polyline points="([^"]*)"', page)
    (_, low), (_, high) = (point.split(",") for point in ours.split())
    top, floor = (
        float(theirs.split()[0].split(",")[1]),
        float(high) + float(high) - float(theirs.split()[0].split(",")[1]),
    )
    assert float(low) == pytest.approx((float(high) + floor) / 2) and top < float(high) < float(low)
    with pytest.raises(ValueError, match="no measurement"):
        plot_bench.svg({"copy_gb_s": 1.0, "measured": []})


def test_a_filled_cache_is_legal_rows_and_keys(tmp_path: Path) -> None:
    engine = load_engine(small_slice(tmp_path, "glm5"), max_seq_len=200, kv_cache_dtype="fp8", load_format="dummy")
    bench_roof.fill_cache(engine, 130)
    codes, scales = engine.cache.read_index(3, 130)
    assert torch.isfinite(engine.cache.read(0, 130)).all()
    assert torch.isfinite(codes * scales[:, None]).all()
    assert (codes.abs().amax(1) > 0).all()


@pytest.mark.parametrize(("name", "layers", "said"), [("glm4", 4, "legal: glm5"), ("glm5", 0, "legal: 1 to 78")])
def test_slices_that_are_not_there(name: str, layers: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        make_slice(tmp_path, name, layers)


def test_a_peer_that_fails_or_takes_too_long_is_named_with_its_log() -> None:
    say = "import sys, time; print('engine started', file=sys.stderr, flush=True); "
    run = lambda code, seconds=60: bench._run_peer([sys.executable, "-c", say + code], {}, seconds)  # noqa: E731
    answer = f"print('{bench.ANSWER}[1.5, 2.5]'); "
    assert run(answer + "print('a process of the engine says good-bye')") == [1.5, 2.5]
    with pytest.raises(RuntimeError, match="failed with status 3.*\n(.*\n)*engine started"):
        run("sys.exit(3)")
    with pytest.raises(RuntimeError, match="ended without an answer.*\n(.*\n)*engine started"):
        run("pass")
    with pytest.raises(RuntimeError, match="had not ended after 2 s.*--timeout.*\n(.*\n)*engine started"):
        run("time.sleep(60)", 2)


def test_what_a_peer_started_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    engine = f"import subprocess; open({str(note)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid)); "
    assert bench._run_peer([sys.executable, "-c", engine + f"print('{bench.ANSWER}[1.0]')"], {}, 60) == [1.0]
    for _ in range(100):
        if (
            not Path(f"/proc/{note.read_text()}").exists()
            or ") Z " in Path(f"/proc/{note.read_text()}/stat").read_text()
        ):
            return
        time.sleep(0.05)
    pytest.fail("the engine process goes on")


def test_a_signal_ends_the_peer_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    peer = [sys.executable, "-c", f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"]
    code = f"from tilert_ref import bench; import os; bench._run_peer({peer!r}, dict(os.environ), 600)"
    half = subprocess.Popen([sys.executable, "-c", code])
    while not (note.exists() and note.read_text()):
        assert half.poll() is None
        time.sleep(0.05)
    half.terminate()
    assert half.wait(60) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{note.read_text()}").exists()


def test_settings_of_vllm_are_named() -> None:
    env = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_CACHE_ROOT": "x", "VLLM_API_KEY": "secret", "HOME": "y"}
    env |= {"VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD": "1"}
    named = ["VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD=1", "VLLM_USE_FLASHINFER_SAMPLER=0"]
    assert bench.vllm_settings(env, env) == named
