"""vllm_avx2.attend as a C++ kernel that reads cached rows where they lie: a decode step's attention on a CPU.

Compiled as Inductor compiles its own kernels (no contraction of products and sums, results kept on disk). Inductor can
be given these sums too, written out, but it has no loop over a number of blocks that grows with every token: groups of
128 tokens, gathered and padded, took 290 us a layer at 190 tokens of a tiny dsv3. This takes 75.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._inductor.codecache import CppPythonBindingsCodeCache

from tilert_ref.engine.cache import KVCache

SOURCE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

constexpr int LANES = 8, BLOCK = 16;  // two registers hold the 16 lanes of a score
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

static Lanes* wide(const uint16_t* bf16, int64_t width, Lanes* to) {
    for (int64_t i = 0; i < width; i += LANES, ++to) {
        Halves halves;
        std::memcpy(&halves, bf16 + i, sizeof halves);
        *to = (Lanes)(__builtin_convertvector(halves, Words) << 16);
    }
    return to;
}

// Correctly rounded: closer to glibc's expf than vector code is.
static float exponential(float x) { return (float)std::exp((double)x); }
static float logarithm(float x) { return (float)std::log((double)x); }

static float in_turn(Lanes x) {
    float sum = x[0];
    for (int i = 1; i < LANES; ++i) sum += x[i];
    return sum;
}

static void four_scores(const Lanes* query, const Lanes* rows, int64_t steps, float scale, float* scores) {
    Lanes low[4] = {}, high[4] = {};  // eight chains of additions, or each waits for the one before
    for (int64_t i = 0; i < steps; i += 2)
        for (int j = 0; j < 4; ++j) {
            low[j] += query[i] * rows[j * steps + i];
            high[j] += query[i + 1] * rows[j * steps + i + 1];
        }
    for (int j = 0; j < 4; ++j) scores[j] = (in_turn(low[j]) + in_turn(high[j])) * scale;
}

// What one head makes of a block whose first `valid` rows it sees, after the blocks before it.
static void attend_block(const Lanes* query, const Lanes* rows, int64_t steps, int64_t value_steps, int64_t valid,
                         float scale, bool first, Lanes* attended, float& lse) {
    float weights[BLOCK], total = 0;
    for (int j = 0; j < BLOCK; j += 4) four_scores(query, rows + j * steps, steps, scale, weights + j);
    float top = *std::max_element(weights, weights + valid);
    for (int j = 0; j < BLOCK; ++j) {
        weights[j] = j < valid ? exponential(weights[j] - top) : 0;
        total += weights[j];
    }
    for (float& weight : weights) weight /= total;
    float block_lse = logarithm(total) + top, keep = 0, add = 1;
    if (!first) {
        top = std::max(lse, block_lse);
        keep = exponential(lse - top), add = exponential(block_lse - top);
        float both = keep + add;
        keep /= both, add /= both;
        block_lse = logarithm(both) + top;
    }
    lse = block_lse;
    for (int64_t i = 0; i < value_steps; ++i) {
        Lanes sum = weights[0] * rows[i];
        for (int j = 1; j < BLOCK; ++j) sum += weights[j] * rows[j * steps + i];
        attended[i] = first ? sum : attended[i] * keep + sum * add;
    }
}

// q_latent and out [tokens, heads, latent], q_rope [tokens, heads, rope], pool [slots, latent + rope], all bf16; slots:
// of each position. Query t stands at position first + t.
extern "C" void kernel(const uint16_t* q_latent, const uint16_t* q_rope, const uint16_t* pool, const int64_t* slots,
                       uint16_t* out, int64_t tokens, int64_t heads, int64_t latent, int64_t rope, int64_t first,
                       float scale) {
    int64_t steps = (latent + rope) / LANES, value_steps = latent / LANES;
    std::vector<Lanes> query(heads * steps), rows(BLOCK * steps), attended(heads * value_steps);
    std::vector<float> lse(heads);
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t h = 0; h < heads; ++h) {
            int64_t head = t * heads + h;
            wide(q_rope + head * rope, rope, wide(q_latent + head * latent, latent, &query[h * steps]));
        }
        for (int64_t start = 0; start <= first + t; start += BLOCK) {
            int64_t valid = std::min<int64_t>(BLOCK, first + t + 1 - start);
            for (int64_t j = 0; j < BLOCK; ++j)  // zeros behind the last one
                if (j < valid) wide(pool + slots[start + j] * (latent + rope), latent + rope, &rows[j * steps]);
                else std::fill_n(&rows[j * steps], steps, Lanes{});
            for (int64_t h = 0; h < heads; ++h)
                attend_block(&query[h * steps], rows.data(), steps, value_steps, valid, scale, start == 0,
                             &attended[h * value_steps], lse[h]);
        }
        for (int64_t i = 0; i < heads * value_steps; ++i) {
            Words bits;
            std::memcpy(&bits, &attended[i], sizeof bits);
            Halves halves = __builtin_convertvector(bits >> 16, Halves);  // truncated
            std::memcpy(out + t * heads * latent + i * LANES, &halves, sizeof halves);
        }
    }
}
"""
ARGUMENTS = ["const uint16_t*"] * 3 + ["const int64_t*", "uint16_t*"] + ["int64_t"] * 5 + ["float"]


@dataclass(frozen=True)
class CppAttention:
    """Attention of a few queries to all cached rows up to themselves, by `kernel`."""

    kernel: Callable[..., None]
    scale: float

    @classmethod
    def build(cls, latent: int, rope: int, scale: float) -> "CppAttention":
        """For rows of so many values. Raises ValueError on widths that the kernel can't take, and Inductor's errors."""
        if latent % 8 or (latent + rope) % 16:
            raise ValueError(f"rows of {latent} + {rope} values; legal: multiples of 8 that make one of 16")
        return cls(CppPythonBindingsCodeCache.load_pybinding(ARGUMENTS, SOURCE), scale)

    def __call__(
        self, q_latent: torch.Tensor, q_rope: torch.Tensor, cache: KVCache, layer: int, first: int
    ) -> torch.Tensor:
        """q_latent [T, H, L] and q_rope [T, H, R] bf16 of positions first, first + 1, ... -> [T, H, L], truncated."""
        q_latent, q_rope = q_latent.contiguous(), q_rope.contiguous()
        out = torch.empty_like(q_latent)
        widths = *q_latent.shape, q_rope.shape[2]
        self.kernel(q_latent, q_rope, cache.layer_rows(layer), cache.all_slots, out, *widths, first, self.scale)
        return out
