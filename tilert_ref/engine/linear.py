"""One product for all kinds of weight: y = x W^T with W in bf16, in bf16 on Hopper, or in block fp8 as vLLM has it."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F

from tilert_ref.engine import tensor_cores, vllm_avx2, vllm_hopper
from tilert_ref.engine.block_fp8 import BLOCK, ActivationScale, dequantize_blocks, quantize_activations
from tilert_ref.engine.numerics import SumOrder

DOT_TOKENS = 32
"""Products of more tokens, so of prompts, are summed exactly: the tensor core's sums cost thirty times as much here."""

KEPT_VALUES = 2**20
"""Matrices up to this size keep what the emulated sums need of them, at six times their size."""


@dataclass(frozen=True)
class Fp8Matrix:
    """A block-fp8 matrix or a stack of them, and the rule for the activations that it is multiplied with.

    The rule stands here because the loader knows it: the matrices of DeepGEMM's linear layers are stored recast. order:
    how the products within a block are summed.
    """

    codes: torch.Tensor  # [..., out, in] e4m3
    scales: torch.Tensor  # [..., ceil(out / 128), in / 128] fp32
    rule: ActivationScale
    order: SumOrder = SumOrder.TORCH

    def __getitem__(self, index: int) -> "Fp8Matrix":
        """One matrix of a stack."""
        return self._each[index]

    @cached_property
    def _each(self) -> list["Fp8Matrix"]:
        return [
            replace(self, codes=codes, scales=scales) for codes, scales in zip(self.codes, self.scales, strict=True)
        ]

    def operand(self) -> vllm_hopper.Operand:
        """The codes of one matrix as Hopper's dot product takes them."""
        return self._kept_operand if self.codes.numel() <= KEPT_VALUES else vllm_hopper.operand(self.codes)

    @cached_property
    def _kept_operand(self) -> vllm_hopper.Operand:
        return vllm_hopper.operand(self.codes)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """code * scale in fp32, rounded to dtype, [out, in]."""
        return dequantize_blocks(self.codes, self.scales).to(dtype)


@dataclass(frozen=True)
class HopperMatrix:
    """A bf16 matrix or a stack of them whose products are summed as Hopper's tensor cores do: on a Hopper GPU by its
    own, elsewhere by vllm_hopper.py, for up to DOT_TOKENS tokens."""

    weight: torch.Tensor  # [..., out, in] bf16

    def __getitem__(self, index: int) -> "HopperMatrix":
        """One matrix of a stack."""
        return self._each[index]

    @cached_property
    def _each(self) -> list["HopperMatrix"]:
        return [HopperMatrix(weight) for weight in self.weight]

    def operand(self) -> vllm_hopper.Operand:
        """The values of one matrix as the emulated dot product takes them."""
        return self._kept_operand if self.weight.numel() <= KEPT_VALUES else vllm_hopper.bf16_operand(self.weight)

    @cached_property
    def _kept_operand(self) -> vllm_hopper.Operand:
        return vllm_hopper.bf16_operand(self.weight)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out] fp32."""
        if tensor_cores.there(x):
            return tensor_cores.products().bf16_product(x, self.weight, torch.float32)
        if len(x) > DOT_TOKENS:
            return F.linear(x.float(), self.weight.float())
        return vllm_hopper.bf16_operand_dot(vllm_hopper.bf16_operand(x), self.operand())

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out] bf16."""
        if tensor_cores.there(x):
            return tensor_cores.products().bf16_product(x, self.weight, x.dtype)
        return F.linear(x, self.weight) if len(x) > DOT_TOKENS else self.product(x).to(x.dtype)


@dataclass(frozen=True)
class InOrderMatrix:
    """A stack of bf16 matrices whose products are summed over the inputs one after the other, in fp32: the experts of
    vLLM's AVX2 kernel (vllm_avx2.py)."""

    weight: torch.Tensor  # [n, out, in]

    def product(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Row p is row p of x [P, in] fp32 times matrix ids[p], [P, out] fp32."""
        columns = x.shape[1]
        if self.weight[0].numel() <= KEPT_VALUES:
            table = self._kept_table
        else:
            chosen, ids = ids.unique(return_inverse=True)
            table = _columns(self.weight[chosen])
        rows = ids[:, None] * columns + torch.arange(columns)
        return vllm_avx2.weighted_rows(table, rows, x)

    @cached_property
    def _kept_table(self) -> torch.Tensor:
        return _columns(self.weight)


@dataclass(frozen=True)
class LanesMatrix:
    """A bf16 matrix for each head whose products have the bits of torch.bmm on a CPU without bf16 instructions, in a
    fifth of its time (vllm_avx2.in_four_lanes says whether it is such a CPU)."""

    weight: torch.Tensor  # [H, K, N], K a multiple of four

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H, K] -> [T, H, N] in x's dtype."""
        lanes = x.float().unflatten(2, (-1, vllm_avx2.BMM_LANES)).transpose(2, 3)  # [T, H, 4, K / 4]
        rows = self._rows.expand(lanes.shape).reshape(-1, lanes.shape[3])
        sums = vllm_avx2.weighted_rows(self._table, rows, lanes.reshape(rows.shape))  # [T * H * 4, N]
        first, *others = sums.unflatten(0, lanes.shape[:3]).unbind(2)  # [T, H, N] each
        return sum(others, start=first).to(x.dtype)

    @cached_property
    def _table(self) -> torch.Tensor:
        return self.weight.float().flatten(0, 1)

    @cached_property
    def _rows(self) -> torch.Tensor:
        """Row numbers in the table, [H, 4, K / 4]: lane l takes every fourth from l on."""
        heads, width, _ = self.weight.shape
        return torch.arange(heads * width).view(heads, -1, vllm_avx2.BMM_LANES).transpose(1, 2)


@dataclass(frozen=True)
class OpenMatrix:
    """A bf16 matrix or a stack of them, laid out so that a compiler sees in which order products are summed and makes
    one loop nest of them (compiled.py). Not compiled, torch.sum takes another order.

    Lane l adds up the inputs l, l + lanes, l + 2 * lanes, ... one after the other. Then lanes are added one after the
    other (in_turn), or the upper half of them to the lower until one is left.
    """

    weight: torch.Tensor  # [..., in / lanes, lanes, out]
    in_turn: bool

    @classmethod
    def of(cls, weight: torch.Tensor, lanes: int, in_turn: bool) -> "OpenMatrix":
        """weight [..., in, out]; lanes divide its inputs."""
        return cls(weight.contiguous().unflatten(-2, (-1, lanes)), in_turn)

    def product(self, x: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in] -> [..., out] fp32; with ids row p takes the matrix ids[p] of the stack."""
        weight = self.weight if ids is None else self.weight[ids]
        lanes = x.float().unflatten(-1, weight.shape[-3:-1])[..., None]  # [..., in / lanes, lanes, 1]
        sums = (lanes * weight.float()).sum(-3)  # [..., lanes, out]
        if self.in_turn:
            first, *others = sums.unbind(-2)
            return sum(others, start=first)
        while sums.shape[-2] > 1:
            low, high = sums.chunk(2, dim=-2)
            sums = low + high
        return sums.squeeze(-2)


def _columns(weight: torch.Tensor) -> torch.Tensor:
    """[n, out, in] -> the columns of all matrices one below the other, [n * in, out] fp32."""
    return weight.transpose(1, 2).contiguous().float().flatten(0, 1)


Matrix = torch.Tensor | HopperMatrix | Fp8Matrix | InOrderMatrix | OpenMatrix


def linear(x: torch.Tensor, w: Matrix) -> torch.Tensor:
    """x [T, in], w [out, in] -> [T, out] in x's dtype; the result is rounded once."""
    if isinstance(w, HopperMatrix):
        return w.linear(x)
    if isinstance(w, OpenMatrix):
        return w.product(x).to(x.dtype)
    return fp8_product(x, w, x.dtype) if isinstance(w, Fp8Matrix) else F.linear(x, w)


def product(x: torch.Tensor, w: Matrix) -> torch.Tensor:
    """linear without the rounding at the end, [T, out] fp32."""
    if isinstance(w, HopperMatrix):
        return w.product(x)
    return fp8_product(x, w, torch.float32) if isinstance(w, Fp8Matrix) else F.linear(x.float(), w.float())


def experts_product(x: torch.Tensor, w: Matrix, expert_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Row p of the result is token p // (P / T) of x times the matrix of expert_ids[p]; x [T, in] -> [P, out].

    On a Hopper GPU only (tensor_cores.py): the matrices are looked up on the device.
    """
    if isinstance(w, HopperMatrix):
        return tensor_cores.products().bf16_product(x, w.weight, dtype, expert_ids)
    codes, scales = quantize_activations(x, w.rule)
    return tensor_cores.products().fp8_product(codes.flatten(1), scales, w.codes, w.scales, dtype, expert_ids)


def heads_product(x: torch.Tensor, w: torch.Tensor | LanesMatrix | OpenMatrix, order: SumOrder) -> torch.Tensor:
    """Every head's vector times its matrix: x [T, H, K], w [H, K, N] -> [T, H, N] in x's dtype."""
    if isinstance(w, OpenMatrix):
        return w.product(x).to(x.dtype)
    if isinstance(w, LanesMatrix):
        return w.product(x)
    if order is SumOrder.VLLM_HOPPER and tensor_cores.there(x):
        return tensor_cores.products().heads_product(x, w.transpose(1, 2).contiguous())
    if order is SumOrder.VLLM_HOPPER and len(x) <= DOT_TOKENS:
        heads = [vllm_hopper.bf16_dot(vectors, matrix.T) for vectors, matrix in zip(x.unbind(1), w, strict=True)]
        return torch.stack(heads, dim=1).to(x.dtype)
    return torch.bmm(x.transpose(0, 1), w).transpose(0, 1)


def fp8_product(x: torch.Tensor, w: Fp8Matrix, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """sum over blocks b of K: (a_b . w_b) * a_scale_b * w_scale_b, rounded once to dtype, [T, out], a the quantised x
    [T, K].

    DeepGEMM, sm90_fp8_gemm_1d2d.cuh, and vLLM's fused_moe_kernel: a product per block of 128, scaled, added up in fp32.
    Within a block the sum is either Hopper's (vllm_hopper.py) or exact (float64 holds every sum of 128 products), then
    rounded to fp32. A token's result doesn't depend on how many others stand beside it, except that with Hopper's order
    only up to DOT_TOKENS of them, in a prompt or of those that an expert gets of it, have Hopper's sums.
    """
    a, a_scales = quantize_activations(x, w.rule)  # [T, B, 128], [T, B]
    if w.order is SumOrder.VLLM_HOPPER and tensor_cores.there(x):
        return tensor_cores.products().fp8_product(a.flatten(1), a_scales, w.codes, w.scales, dtype)
    out = x.new_zeros(len(x), w.codes.shape[0], dtype=torch.float32)
    w_scales = w.scales.repeat_interleave(BLOCK, dim=0)[: out.shape[1]]  # [out, B]
    for b in range(a.shape[1]):
        out += fp8_dots(a[:, b], w, b) * a_scales[:, b, None] * w_scales[:, b]
    return out.to(dtype)


def fp8_dots(a: torch.Tensor, w: Fp8Matrix, block: int) -> torch.Tensor:
    """Codes a [T, 128] times the codes of one block of w's columns, [T, out] fp32."""
    if w.order is SumOrder.VLLM_HOPPER and len(a) <= DOT_TOKENS:
        return vllm_hopper.fp8_dot(vllm_hopper.operand(a), w.operand().rows(block * BLOCK, BLOCK))
    columns = w.codes[:, block * BLOCK : (block + 1) * BLOCK]
    return (a.double() @ columns.double().T).float()


def concat_rows(parts: list[Matrix]) -> Matrix:
    """Matrices of one kind above each other: [out_1 + out_2 + ..., in].

    ValueError if some are fp8 and others are not, or if a part but the last has rows beyond its last whole block: the
    scales of the next one couldn't follow (vLLM refuses those too: fp8_utils.py, validate_fp8_block_shape).
    """
    fp8 = [part for part in parts if isinstance(part, Fp8Matrix)]
    if 0 < len(fp8) < len(parts):
        raise ValueError("some are fp8 and some are not; legal: all or none")
    if any(part.codes.shape[0] % BLOCK for part in fp8[:-1]):
        raise ValueError(f"rows {[part.codes.shape[0] for part in fp8]}, legal: multiples of {BLOCK} but for the last")
    return _with_tensors(parts[0], [torch.cat(each) for each in zip(*map(_tensors, parts), strict=True)])


def room_for(count: int, w: Matrix) -> Matrix:
    """An empty stack of `count` matrices like w, [count, out, in], where w lies."""
    return _with_tensors(w, [part.new_empty(count, *part.shape) for part in _tensors(w)])


def place(stacked: Matrix, index: int, w: Matrix) -> None:
    """Copies w to its place in a stack. ValueError if one is fp8 and the other is not."""
    if type(stacked) is not type(w):
        raise ValueError("some are fp8 and some are not; legal: all or none")
    for whole, part in zip(_tensors(stacked), _tensors(w), strict=True):
        whole[index].copy_(part)


def _tensors(w: Matrix) -> list[torch.Tensor]:
    """What a matrix is made of; `_with_tensors` makes one of the same kind of others."""
    if isinstance(w, Fp8Matrix):
        return [w.codes, w.scales]
    return [w.weight if isinstance(w, HopperMatrix) else w]


def _with_tensors(w: Matrix, tensors: list[torch.Tensor]) -> Matrix:
    if isinstance(w, Fp8Matrix):
        return replace(w, codes=tensors[0], scales=tensors[1])
    return HopperMatrix(tensors[0]) if isinstance(w, HopperMatrix) else tensors[0]
