"""FlashInfer's kernels for decode's attention, where an operator chooses them: load_engine(attention="flashinfer").

The default stays the engine's own kernels, whose sums have vLLM's order. This back end is another implementation of the
same formula, to measure against and to run on GPUs for which there are no kernels of ours. Prompts, index scores and
everything else are computed as before. FlashInfer 0.6.14, which was read for this (flashinfer/mla/_core.py,
include/flashinfer/attention/{scheduler,mla,mla_hopper}.cuh), has

    capability  kernel      rows that it reads
    8, 9        fa2, fa3    bf16, any page size; of fp8 one scale for the whole cache (fa3)
    10          trtllm-gen  bf16, pages of 32 or 64, single rows with sparse_mla_top_k; of fp8 one scale as well
    12          sparse      the 656 bytes of fp8_ds_mla: on no other device, and not used here

so a slot of a bf16 cache is a page of one row and is read in place, and rows of fp8_ds_mla are dequantised into a tile
of their own first, in plain torch, with the scales as read by vLLM's kernel on Hopper (cache.SCALE_READ).

Each query is a call of its own. The wrapper splits rows over multiprocessors by the batch, so that beside drafts a
query's sums would be taken in another order than alone, and MTP is lossless only if they aren't.

Graphs: plan() works that split out on the host and copies it to the device, kv_len with it; run() reads that copy and
never kv_len_arr, and there is no mask that could hide a padded tail. So a plan holds for one number of rows, and for
every replay that has as many. A sparse model's queries attend to index_topk rows as soon as that many are cached, and
captured steps run from there on; shorter prompts, and dense models, whose rows grow with each step, run eager steps
with a new plan for each. trtllm-gen has no plan and reads lengths on the device.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tilert_ref.connector.rounding import dequantize_fp8_ds_mla
from tilert_ref.engine import tensor_cores
from tilert_ref.engine.cache import SCALE_READ
from tilert_ref.engine.config import ModelConfig
from tilert_ref.engine.numerics import DecodeAttention
from tilert_ref.model_files import InputError

ATTENTION = ("auto", "triton", "flashinfer")
PACKAGE = "flashinfer-python"
LATENT, ROPE = 512, 64  # the widths that its MLA kernels are built for
WRAPPER_CAPABILITIES, BLACKWELL = (8, 9), 10
DEVICES = "CUDA GPUs of compute capability 8 and 9 (fa2, fa3) and 10 (trtllm-gen)"
WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer's documentation recommends
PAGE = 64  # rows in a page of trtllm-gen


def decode_attention(
    name: str, config: ModelConfig, device: str, *, room: int, block_size: int, progress: Callable[[str], None]
) -> DecodeAttention | None:
    """The back end of that name; None: the engine's own kernels. room: rows that a query may attend to.

    Raises InputError if it can't run here, naming what is missing and what is legal.
    """
    if name not in ATTENTION:
        raise InputError(f"attention = {name!r}, legal: {', '.join(ATTENTION)}")
    if name == "auto":
        return None
    at = torch.device(device)
    major = _capability(at)
    if name == "triton" and major != tensor_cores.HOPPER_CAPABILITY:
        raise InputError(f"attention = 'triton' on {_named(at)}: our kernels are for capability 9; legal here: auto")
    if name == "triton":
        return None
    _check_widths(config)
    if major not in (*WRAPPER_CAPABILITIES, BLACKWELL):
        raise InputError(f"attention = 'flashinfer' on {_named(at)}: FlashInfer runs on {DEVICES}; legal here: auto")
    mla = _import_mla(at)
    if major == BLACKWELL:
        if block_size % PAGE:
            raise InputError(f"block_size = {block_size} with attention = 'flashinfer', legal: multiples of {PAGE}")
        return TrtllmGenMLA(mla, config, at)
    backend = WrapperMLA(mla, config, at, config.index_topk or room)
    progress("FlashInfer MLA: nvcc compiles its kernel at first use, for minutes ($FLASHINFER_WORKSPACE_BASE keeps it)")
    backend.compile()
    return backend


@dataclass
class Plan:
    """A wrapper with the buffers that it was given, and the number of rows for which its work is split (0: none yet).

    copied: when the split has left its staging buffer, which the next plan overwrites.
    """

    wrapper: Any
    indices: torch.Tensor  # int32 [room]
    rows: int = 0
    copied: torch.cuda.Event | None = None


class WrapperMLA:
    """BatchMLAPagedAttentionWrapper, with fa3 on Hopper and fa2 on Ampere and Ada, one query a call."""

    name = "flashinfer"

    def __init__(self, mla: ModuleType, config: ModelConfig, device: torch.device, room: int):
        self._mla, self._device, self._room = mla, device, room
        self._heads, self._scale, self._topk = config.num_attention_heads, config.softmax_scale, config.index_topk
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._eager = list[Plan]()  # by place in the window: its queries see different numbers of rows
        self._replayed = dict[int, Plan]()  # by number of rows; planned once, since captured graphs read them

    def compile(self) -> None:
        self._eager_plan(0, 1)

    def replays(self, length: int) -> bool:
        return self._topk is not None and length >= self._topk

    def __call__(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        counts: list[int] | torch.Tensor,
    ) -> torch.Tensor:
        """Where only the device knows the counts, the result is right if they equal n (`replays`)."""
        out = []
        for t in range(len(q_latent)):
            on_device = isinstance(counts, torch.Tensor)
            plan = self._replayed_plan(slots.shape[1]) if on_device else self._eager_plan(t, counts[t])
            chosen = used_slots(slots[t], counts[t])
            values = rows
            if rows.dtype == torch.uint8:
                values, chosen = gathered(rows, chosen), torch.arange(len(chosen), device=rows.device)
            plan.indices[: len(chosen)].copy_(chosen)
            latent, rope = values[:, None].split([LATENT, ROPE], dim=-1)  # pages of one row
            out.append(plan.wrapper.run(q_latent[t : t + 1], q_rope[t : t + 1], latent, rope))
        return torch.cat(out)

    def _eager_plan(self, t: int, rows: int) -> Plan:
        while len(self._eager) <= t:
            self._eager.append(self._new_plan(self._room))
        plan = self._eager[t]
        if plan.rows != rows:
            self._split(plan, rows)
        return plan

    def _replayed_plan(self, rows: int) -> Plan:
        if rows not in self._replayed:
            self._replayed[rows] = self._new_plan(rows)
            self._split(self._replayed[rows], rows)
        return self._replayed[rows]

    @torch.inference_mode(False)  # else nothing could write the buffers outside of it
    def _new_plan(self, room: int) -> Plan:
        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._device)

        indices = buffer(room)
        buffers = {"qo_indptr": buffer(2), "kv_indptr": buffer(2), "kv_indices": indices, "kv_len_arr": buffer(1)}
        wrapper = self._mla.BatchMLAPagedAttentionWrapper(
            self._workspace, use_cuda_graph=True, backend="auto", **buffers
        )
        return Plan(wrapper, indices)

    def _split(self, plan: Plan, rows: int) -> None:
        if plan.copied is not None:
            plan.copied.synchronize()
        plan.wrapper.plan(
            qo_indptr=torch.tensor([0, 1], dtype=torch.int32),  # on the host, where they are read
            kv_indptr=torch.tensor([0, rows], dtype=torch.int32),
            kv_indices=plan.indices[:rows],
            kv_len_arr=torch.tensor([rows], dtype=torch.int32),
            num_heads=self._heads,
            head_dim_ckv=LATENT,
            head_dim_kpe=ROPE,
            page_size=1,
            causal=False,
            sm_scale=self._scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        plan.rows = rows
        if self._device.type == "cuda":
            plan.copied = torch.cuda.Event()
            plan.copied.record()


class TrtllmGenMLA:
    """trtllm_batch_decode_with_kv_cache_mla on Blackwell. UNTESTED: written against FlashInfer 0.6.14's documentation
    and vLLM's use of it (v1/attention/backends/mla/flashinfer_mla_sparse.py), and never run on such a GPU.

    Sparse: block_tables are slots, always index_topk of them, and seq_lens how many of these are used. Dense:
    block_tables are pages of 64 rows, whose number has to be even. Steps on such a GPU are eager, since the other
    kernels of a captured one are Hopper's.
    """

    name = "trtllm-gen"

    def __init__(self, mla: ModuleType, config: ModelConfig, device: torch.device):
        self._mla, self._scale, self._topk = mla, config.softmax_scale, config.index_topk
        self._nope = config.qk_nope_head_dim
        self._width = -(-(config.index_topk or 0) // PAGE) * PAGE
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)  # zeros: it has semaphores

    def replays(self, length: int) -> bool:
        return True

    def __call__(
        self,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        counts: list[int] | torch.Tensor,
    ) -> torch.Tensor:
        query = torch.cat((q_latent, q_rope), dim=-1)[:, None, None]  # [T, 1, 1, H, 576]
        lengths = torch.as_tensor(counts, dtype=torch.int32, device=query.device)
        form = self._dense if self._topk is None else self._sparse
        out = []
        for q, row, length in zip(query, slots, lengths.split(1), strict=True):
            out.append(form(q, rows, used_slots(row, length), length))
        return torch.cat(out)

    def _dense(
        self, query: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, length: torch.Tensor
    ) -> torch.Tensor:
        pages = padded(slots[::PAGE] // PAGE, 2)
        return self._run(query, rows, pages[None], length, max_seq_len=PAGE * len(pages), sparse_mla_top_k=0)

    def _sparse(
        self, query: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, length: torch.Tensor
    ) -> torch.Tensor:
        slots = padded(slots, self._width)
        if rows.dtype == torch.uint8:
            rows, slots = gathered(rows, slots), torch.arange(len(slots), dtype=torch.int32, device=rows.device)
        return self._run(query, rows, slots[None, None], length, max_seq_len=len(slots), sparse_mla_top_k=len(slots))

    def _run(
        self, query: torch.Tensor, rows: torch.Tensor, tables: torch.Tensor, length: torch.Tensor, **sizes: int
    ) -> torch.Tensor:
        return self._mla.trtllm_batch_decode_with_kv_cache_mla(
            query=query,
            kv_cache=rows.view(-1, PAGE, LATENT + ROPE),
            workspace_buffer=self._workspace,
            qk_nope_head_dim=self._nope,
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE,
            block_tables=tables,
            seq_lens=length,
            bmm1_scale=self._scale,
            bmm2_scale=1.0,
            backend="trtllm-gen",
            **sizes,
        )[0]  # [1, H, 512]


def used_slots(slots: torch.Tensor, count: int | torch.Tensor) -> torch.Tensor:
    """Of slots [n] the first `count`; where only the device knows it, all n, and slot 0 for those behind it: what
    stands there is undefined, and is read."""
    if isinstance(count, int):
        return slots[:count]
    return torch.where(torch.arange(len(slots), device=slots.device) < count, slots, 0)


def gathered(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """fp8_ds_mla rows, uint8 [S, 656], at slots [n] -> their values, bf16 [n, 576]. No look from the host."""
    return torch.cat(dequantize_fp8_ds_mla(rows.index_select(0, slots), SCALE_READ), dim=-1)


def padded(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """int32 [n] with zeros behind it, up to a multiple."""
    return torch.nn.functional.pad(x, (0, -len(x) % multiple)).int()


def _check_widths(config: ModelConfig) -> None:
    widths = config.kv_lora_rank, config.qk_rope_head_dim
    if widths != (LATENT, ROPE):
        raise InputError(
            f"kv_lora_rank and qk_rope_head_dim {widths} with attention = 'flashinfer': its kernels are for "
            f"{(LATENT, ROPE)}; legal here: auto"
        )


def _capability(device: torch.device) -> int:
    """Major compute capability, 0 where there is no CUDA."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_capability(device)[0]


def _named(device: torch.device) -> str:
    major = _capability(device)
    return f"{device} (compute capability {major})" if major else f"{device}, which is no CUDA GPU here"


def _import_mla(device: torch.device) -> ModuleType:
    try:
        return importlib.import_module("flashinfer.mla")
    except ImportError as error:
        raise InputError(
            f"attention = 'flashinfer' on {_named(device)} needs the package {PACKAGE} (0.6.14 was read for it): "
            f"{error}; legal without it: auto"
        ) from error
