"""FlashInfer as back end of decode's attention, without FlashInfer: doubles with its signatures (0.6.14), which compute
in torch what it documents, and read what the engine gives them where its kernels do. tests/gpu has the real one."""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilert_ref.connector.rounding import ScaleRule
from tilert_ref.decode_server.options import parse_options
from tilert_ref.decode_server.server import engine_spec
from tilert_ref.engine import flashinfer_mla
from tilert_ref.engine.api import SamplingParams
from tilert_ref.engine.attention import attend
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.config import load_config
from tilert_ref.engine.graph import GreedySteps
from tilert_ref.engine.numerics import Kernels
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.tiny import model_dir

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
TOPK = 256  # of tiny-glm5


class Wrapper:
    """BatchMLAPagedAttentionWrapper. The split is made from host tensors and copied, as plan() does."""

    made: list["Wrapper"]

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert use_cuda_graph and len(qo_indptr) == len(kv_indptr) == 2 and len(kv_len_arr) == 1
        self.kv_indices, self.splits = kv_indices, list[int]()
        self.made.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        (rows,) = kv_len_arr.tolist()
        assert {t.dtype for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)} == {torch.int32}
        assert (qo_indptr.tolist(), kv_indptr.tolist(), len(kv_indices)) == ([0, 1], [0, rows], rows)
        assert (num_heads, head_dim_ckv, head_dim_kpe, page_size, causal) == (4, 512, 64, 1, False)
        assert q_data_type is kv_data_type is torch.bfloat16
        self.scale = sm_scale
        self.splits.append(rows)

    def run(self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor):
        assert q_nope.shape == (1, 4, 512) and q_pe.shape == (1, 4, 64) and q_nope.dtype is torch.bfloat16
        assert ckv_cache.shape[1:] == (1, 512) and kpe_cache.shape[1:] == (1, 64)
        rows = torch.cat((ckv_cache, kpe_cache), -1)[:, 0].index_select(0, self.kv_indices[: self.splits[-1]])
        query = torch.cat((q_nope, q_pe), -1)[0]
        return attend(query.float(), rows.float(), 512, self.scale).to(torch.bfloat16)[None]


def trtllm(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    backend: str = "auto",
) -> torch.Tensor:
    """trtllm_batch_decode_with_kv_cache_mla, with the checks of _check_trtllm_gen_mla_shape."""
    assert query.shape == (1, 1, 4, 576) and kv_cache.shape[1:] == (64, 576) and kv_cache.dtype is torch.bfloat16
    assert not workspace_buffer.any() and (kv_lora_rank, qk_rope_head_dim) == (512, 64) and backend == "trtllm-gen"
    assert block_tables.dtype is seq_lens.dtype is torch.int32 and seq_lens.shape == (1,) and bmm2_scale == 1.0
    (length,) = seq_lens.tolist()
    if sparse_mla_top_k:
        assert block_tables.shape == (1, 1, sparse_mla_top_k) and max_seq_len == sparse_mla_top_k
        slots = block_tables[0, 0]
    else:
        assert block_tables.ndim == 2 and block_tables.shape[-1] % 2 == 0 and max_seq_len >= length
        slots = (block_tables[0, :, None] * 64 + torch.arange(64)).flatten()
    rows = kv_cache.view(-1, 576).index_select(0, slots[:length])
    return attend(query[0, 0].float(), rows.float(), 512, bmm1_scale).to(torch.bfloat16)[None, None]


Gpu = Callable[[int], None]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """gpu(major): from then on the back end takes the CPU for a GPU of that capability that has FlashInfer."""

    def pretend(major: int) -> None:
        Wrapper.made = []
        double = SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper, trtllm_batch_decode_with_kv_cache_mla=trtllm)
        monkeypatch.setitem(sys.modules, "flashinfer.mla", double)
        monkeypatch.setattr(flashinfer_mla, "_capability", lambda device: major)

    return pretend


def engine(directory, attention: str, num_mtp: int = 0, kv: str = "bf16") -> RefEngine:
    how = {"max_seq_len": 512, "num_mtp": num_mtp, "kv_cache_dtype": kv, "kernels": Kernels()}
    made = load_engine(directory, attention=attention, **how)
    made.cache.block_table = made.cache.block_table.flip(0)  # positions aren't slots
    return made


def answer(engine: RefEngine, length: int, tokens: int) -> list[list[int]]:
    first = engine.prefill([(7 * i + 3) % 480 for i in range(length)], GREEDY)
    return [[token.id for token in step] for step in list(engine.decode(first, tokens, GREEDY))[:-1]]


@pytest.mark.parametrize("major", [9, 10])
@pytest.mark.parametrize(("arch", "kv"), [("tiny-glm5", "bf16"), ("tiny-glm5", "fp8"), ("dsv3", "bf16")])
def test_it_attends_to_the_rows_that_the_engines_own_attention_sees(major: int, arch: str, kv: str, gpu: Gpu, tiny):
    """A prompt that grows beyond index_topk while it is decoded, and drafts, whose queries see different numbers."""
    directory = model_dir(arch) if arch.startswith("tiny") else tiny(arch)
    own = engine(directory, "auto", 2, kv)
    gpu(major)
    other = engine(directory, "flashinfer", 2, kv)
    assert answer(other, TOPK - 6, 16) == answer(own, TOPK - 6, 16)
    end = TOPK + 7
    for layer in range(len(own.cache.rows)):
        assert other.cache.read_rows(layer, end).equal(own.cache.read_rows(layer, end))
    assert other.facts["attention"] == {9: "flashinfer", 10: "trtllm-gen"}[major]
    assert "attention" not in own.facts


def test_work_is_split_anew_only_where_the_number_of_rows_changes(gpu: Gpu, tiny) -> None:
    """One split serves all layers, and all steps once index_topk rows are seen; the first is the compilation's."""
    gpu(9)
    answer(engine(model_dir("tiny-glm5"), "flashinfer"), TOPK - 3, 9)
    assert [wrapper.splits for wrapper in Wrapper.made] == [[1, TOPK - 2, TOPK - 1, TOPK]]
    gpu(8)
    answer(engine(tiny("dsv3"), "flashinfer"), 40, 4)
    assert [wrapper.splits for wrapper in Wrapper.made] == [[1, 41, 42, 43]]


@pytest.mark.parametrize(("kv", "num_mtp"), [("bf16", 2), ("fp8", 0)])
def test_a_captured_step_has_one_split_for_every_replay(kv: str, num_mtp: int, gpu: Gpu) -> None:
    """The step that a GPU captures, run as plain torch; eager steps in between don't touch its wrapper."""
    eager = engine(model_dir("tiny-glm5"), "auto", num_mtp, kv)
    gpu(9)
    captured = engine(model_dir("tiny-glm5"), "flashinfer", num_mtp, kv)
    captured.captured = GreedySteps(captured.model, captured.cache, num_mtp, capture=lambda run: run)
    for length in (TOPK, 20, TOPK + 14):
        assert answer(captured, length, 5) == answer(eager, length, 5)
    assert [wrapper.splits for wrapper in Wrapper.made].count([TOPK]) == 1
    assert len(Wrapper.made) == 1 + 1 + num_mtp
    with pytest.raises(ValueError, match="captured steps of flashinfer at 255 tokens; legal: eager steps there"):
        next(captured.captured.run(TOPK - 1, 3, 4))


def test_rows_of_fp8_are_gathered_as_the_cache_reads_them() -> None:
    cache = KVCache(load_config(model_dir("tiny-glm5")), 1, 200, scale_rule=ScaleRule.PLAIN)
    cache.block_table = torch.tensor([2, 0, 3, 1])
    generator = torch.Generator().manual_seed(0)
    latent, rope = (torch.randn(200, n, generator=generator).bfloat16() for n in (512, 64))
    cache.write(0, torch.arange(200), latent, rope)
    chosen = torch.randperm(200, generator=generator)[:70]
    values = flashinfer_mla.gathered(cache.layer_rows(0), cache.slots(chosen).int())
    assert values.shape == (70, 576)
    assert values.equal(cache.read(0, 200)[chosen])


def test_slots_behind_the_count_are_not_read() -> None:
    slots = torch.tensor([7, 5, 1 << 30, -9], dtype=torch.int32)
    assert flashinfer_mla.used_slots(slots, 2).tolist() == [7, 5]
    assert flashinfer_mla.used_slots(slots, torch.tensor(2)).tolist() == [7, 5, 0, 0]
    assert flashinfer_mla.used_slots(slots, torch.tensor(4)).equal(slots)


@pytest.mark.parametrize(
    ("name", "major", "options", "refusal"),
    [
        ("fa3", 9, {}, r"attention = 'fa3', legal: auto, triton, flashinfer"),
        ("triton", 0, {}, r"'triton' on cpu, which is no CUDA GPU here: our kernels are for capability 9; legal here"),
        ("triton", 10, {}, r"'triton' on cpu \(compute capability 10\): our kernels are for capability 9"),
        ("flashinfer", 0, {}, r"'flashinfer' on cpu, which is no CUDA GPU here: .* 8 and 9 \(fa2, fa3\) and 10 .*auto"),
        ("flashinfer", 12, {}, r"'flashinfer' on cpu \(compute capability 12\): FlashInfer runs on CUDA GPUs of"),
        (
            "flashinfer",
            10,
            {"block_size": 16},
            r"block_size = 16 with attention = 'flashinfer', legal: multiples of 64",
        ),
    ],
)
def test_refusals(name: str, major: int, options: dict[str, int], refusal: str, gpu: Gpu) -> None:
    gpu(major)
    with pytest.raises(ValueError, match=refusal):
        load_engine(model_dir("tiny-glm5"), attention=name, **options)


def test_a_missing_package_and_other_widths_are_named(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(9)
    config = load_config(model_dir("tiny-glm5"))
    how = {"room": 512, "block_size": 64, "progress": print}
    with pytest.raises(
        ValueError, match=r"qk_rope_head_dim \(256, 64\) .* its kernels are for \(512, 64\); legal here"
    ):
        flashinfer_mla.decode_attention("flashinfer", replace(config, kv_lora_rank=256), "cpu", **how)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", None)
    with pytest.raises(
        ValueError, match=r"\(compute capability 9\) needs the package flashinfer-python .*without it: auto"
    ):
        flashinfer_mla.decode_attention("flashinfer", config, "cpu", **how)


def test_compilation_is_announced(gpu: Gpu) -> None:
    gpu(9)
    said = list[str]()
    load_engine(model_dir("tiny-glm5"), attention="flashinfer", progress=said.append)
    assert any("nvcc compiles its kernel at first use, for minutes" in line for line in said)


def test_the_decode_server_hands_the_choice_to_its_engine(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model-weights-dir", str(model_dir("tiny-glm5"))]
    buffer = SimpleNamespace(fd=7, remote=None)
    assert engine_spec(parse_options(flags, {}), buffer).attention == "auto"
    spec = engine_spec(parse_options([*flags, "--attention-backend", "flashinfer"], {}), buffer)
    assert spec.attention == "flashinfer"
    with pytest.raises(SystemExit):
        parse_options(["--engine", "stub", "--attention-backend", "flashinfer"], {})
    assert "--attention-backend flashinfer with --engine stub: for --engine ref; legal: auto" in capsys.readouterr().err
