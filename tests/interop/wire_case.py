"""What a handoff must leave behind, computed from protocol.md with numpy and none of the project's code.

A `Case` is one point of the sweep. `caches` makes the KV caches that a vLLM of that model would register, filled with
recognisable bytes; `buffer` says every byte of the receive buffer after the prompt has arrived; `converted` the bf16
tensors that TileRT's engine gets.

Source: protocol.md sections 8.1 to 8.6 (layout, versions), 9 (conversion), 10 (vLLM's caches).
"""

from dataclasses import dataclass

import numpy as np
import torch

PAGE, INDEX_PAGE_BYTES = 64, 8448
KV_BYTES = {"fp8_ds_mla": 528, "bf16": 1024}
PE_BYTES = 128
LAYERS = {"glm5": 79, "glm5_no_mtp": 78, "glm5_2": 79, "dsv32": 61}
BASE_VERSION = {"glm5": 10, "glm5_no_mtp": 1010, "glm5_2": 12, "dsv32": 11}
GLM5_2_INDEXERS = [0, 1, *range(2, 75, 4), 78]
BLOCKS = [7, 3, 9, 1, 5, 2]
"""Cache blocks of the prompt, in its order."""


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


@dataclass(frozen=True)
class Case:
    """max_seq_len is the receiver's, stage_max the sender's; shards those of the receive buffer."""

    profile: str = "glm5"
    kv_cache_dtype: str = "fp8_ds_mla"
    tiled: bool = False
    senders: int = 1
    shards: int = 1
    seq_len: int = 70
    max_seq_len: int = 128
    stage_max: int = 192

    def __str__(self) -> str:
        tiled = "tiled" if self.tiled else "linear"
        return (
            f"{self.profile}-{self.kv_cache_dtype}-{tiled}-{self.senders}senders-{self.shards}shards"
            f"-{self.seq_len}of{self.max_seq_len}"
        )

    @property
    def rid(self) -> str:
        return f"{self.profile}{self.senders}{self.shards}{self.seq_len}"

    @property
    def layers(self) -> int:
        return LAYERS[self.profile]

    @property
    def layout_version(self) -> int:
        return BASE_VERSION[self.profile] + 40 * (self.kv_cache_dtype == "bf16") + 100 * self.tiled

    @property
    def has_mtp(self) -> bool:
        return self.profile in ("glm5", "glm5_2")

    @property
    def indexers(self) -> list[int]:
        return GLM5_2_INDEXERS if self.profile == "glm5_2" else list(range(self.layers))

    @property
    def shard_bytes(self) -> int:
        slots = -(-self.layers // self.shards)
        per_token = KV_BYTES[self.kv_cache_dtype] + PE_BYTES
        return slots * (self.max_seq_len * per_token + pages(self.max_seq_len) * INDEX_PAGE_BYTES)

    @property
    def moved_bytes(self) -> int:
        """Bytes that one handoff writes."""
        per_token = KV_BYTES[self.kv_cache_dtype] + PE_BYTES
        return self.layers * (self.seq_len * per_token + pages(self.seq_len) * INDEX_PAGE_BYTES)

    def layer_name(self, layer: int) -> str:
        return f"model.layers.{layer}.self_attn.attn"

    def index_name(self, layer: int) -> str:
        return f"model.layers.{layer}.self_attn.indexer.k_cache"


Caches = dict[str, torch.Tensor]


def caches(case: Case, seed: int = 0) -> Caches:
    """By layer name: rows [10, 64, 656] uint8 or [10, 64, 576] bf16; index pages [10, 64, 132] uint8, linear order."""
    rng = np.random.default_rng(seed)
    made: Caches = {}
    for layer in range(case.layers):
        made[case.layer_name(layer)] = _rows(rng, case.kv_cache_dtype)
    for layer in case.indexers:
        made[case.index_name(layer)] = _index_pages(rng)
    return made


def _codes(rng: np.random.Generator, count: int) -> np.ndarray:
    """e4m3fn codes of either sign without the two NaNs. uint8 [count]."""
    return (rng.integers(0, 127, count, dtype=np.uint8) | (rng.integers(0, 2, count, dtype=np.uint8) << 7)).astype("u1")


def _scales(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.uniform(0.001, 2.0, count).astype("<f4")


def _bf16(rng: np.random.Generator, count: int) -> np.ndarray:
    """The upper halves of finite fp32 numbers. uint16 [count]."""
    return (rng.standard_normal(count).astype("<f4").view("<u4") >> 16).astype("<u2")


def _rows(rng: np.random.Generator, dtype: str, blocks: int = 10) -> torch.Tensor:
    tokens = blocks * PAGE
    if dtype == "bf16":
        values = _bf16(rng, tokens * 576).view("u1").reshape(blocks, PAGE, 1152)
        return torch.from_numpy(values).view(torch.bfloat16)
    rows = np.empty((tokens, 656), dtype="u1")
    rows[:, :512] = _codes(rng, tokens * 512).reshape(tokens, 512)
    rows[:, 512:528] = _scales(rng, tokens * 4).view("u1").reshape(tokens, 16)
    rows[:, 528:] = _bf16(rng, tokens * 64).view("u1").reshape(tokens, 128)
    return torch.from_numpy(rows.reshape(blocks, PAGE, 656))


def _index_pages(rng: np.random.Generator, blocks: int = 10) -> torch.Tensor:
    made = np.empty((blocks, INDEX_PAGE_BYTES), dtype="u1")
    made[:, :8192] = _codes(rng, blocks * 8192).reshape(blocks, 8192)
    made[:, 8192:] = _scales(rng, blocks * PAGE).view("u1").reshape(blocks, 256)
    return torch.from_numpy(made.reshape(blocks, PAGE, 132))


def tile(linear: np.ndarray) -> np.ndarray:
    """uint8 [n, 8448] with linear codes -> the same pages in the tiled order of protocol.md 8.3."""
    token, dim = np.divmod(np.arange(8192), 128)
    target = token // 16 * 2048 + dim // 16 * 256 + token % 16 * 16 + dim % 16
    tiled = linear.copy()
    tiled[:, target] = linear[:, :8192]
    return tiled


def tiled_caches(made: Caches) -> Caches:
    """The same caches as a vLLM build has them that stores index pages in tiled order."""
    return {
        name: torch.from_numpy(tile(cache.numpy().reshape(-1, INDEX_PAGE_BYTES)).reshape(cache.shape))
        if "indexer" in name
        else cache
        for name, cache in made.items()
    }


def prompt_rows(case: Case, made: Caches, layer: int) -> np.ndarray:
    """A layer's cache rows of the prompt, uint8 [seq_len, row bytes]."""
    cache = made[case.layer_name(layer)].view(torch.uint8).numpy()
    flat = cache.reshape(-1, cache.shape[-1])
    slots = [BLOCKS[token // PAGE] * PAGE + token % PAGE for token in range(case.seq_len)]
    return flat[slots]


def prompt_pages(case: Case, made: Caches, layer: int) -> np.ndarray:
    """Index pages that go with a layer, linear: its own or the nearest lower layer's. uint8 [pages, 8448]."""
    source = max(index for index in case.indexers if index <= layer)
    cache = made[case.index_name(source)].numpy().reshape(-1, INDEX_PAGE_BYTES)
    return cache[BLOCKS[: pages(case.seq_len)]]


def buffer(case: Case, made: Caches) -> list[np.ndarray]:
    """Every byte of each shard of a receive buffer that was zero before: uint8 [shard_bytes] each."""
    kv_bytes, room = KV_BYTES[case.kv_cache_dtype], case.max_seq_len
    slots = -(-case.layers // case.shards)
    shards = [np.zeros(case.shard_bytes, dtype="u1") for _ in range(case.shards)]
    for layer in range(case.layers):
        shard, slot = shards[layer % case.shards], layer // case.shards
        rows = prompt_rows(case, made, layer)
        linear = prompt_pages(case, made, layer)
        index = tile(linear) if case.tiled else linear
        planes = [
            (slot * room * kv_bytes, rows[:, :kv_bytes]),
            (slots * room * kv_bytes + slot * room * PE_BYTES, rows[:, kv_bytes:]),
            (slots * room * (kv_bytes + PE_BYTES) + slot * pages(room) * INDEX_PAGE_BYTES, index),
        ]
        for start, values in planes:
            shard[start : start + values.size] = values.reshape(-1)
    return shards


Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def converted(case: Case, made: Caches, layer: int) -> Layer:
    """(ki [seq, 128], kv [seq, 512], pe [seq, 64]) bf16 of protocol.md 9. ki is rounded from float64."""
    rows = torch.from_numpy(prompt_rows(case, made, layer))
    pages = torch.from_numpy(prompt_pages(case, made, layer))
    return rotated_index(pages, case.seq_len), *converted_rows(rows)


def converted_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [n, 1152] or [n, 656] -> kv [n, 512] and pe [n, 64], bf16."""
    if rows.shape[1] == 1152:
        return rows[:, :1024].contiguous().view(torch.bfloat16), rows[:, 1024:].contiguous().view(torch.bfloat16)
    codes = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    kv = (codes * scales.repeat_interleave(128, dim=1)).bfloat16()
    return kv, rows[:, 528:].contiguous().view(torch.bfloat16)


def rotated_index(linear: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Index pages uint8 [n, 8448], linear -> the keys as the package's engine keeps them, bf16 [seq_len, 128]."""
    codes = linear[:, :8192].reshape(-1, 128)[:seq_len].contiguous().view(torch.float8_e4m3fn).float()
    scales = linear[:, 8192:].contiguous().view(torch.float32).reshape(-1, 1)[:seq_len]
    return ((codes * scales).bfloat16().double() @ _hadamard()).bfloat16()


def check_converted(got: Layer, want: Layer) -> int:
    """kv and pe bit for bit; ki, which the package rotates in fp32, within one bf16 step. Counts those steps."""
    for name, left, right in zip(("kv", "pe"), got[1:], want[1:], strict=True):
        assert left.shape == right.shape and torch.equal(left.view(torch.int16), right.view(torch.int16)), name
    ki, want_ki = got[0], want[0]
    assert ki.shape == want_ki.shape
    away = bf16_steps(ki, want_ki)
    # Where the sum cancels, its rounding error is relative to its terms: 128 of at most 448 * 2, in fp32.
    far = (away > 1) & ((ki.double() - want_ki.double()).abs() > 1e-3)
    assert not far.any(), f"ki is up to {int(away.max())} bf16 steps off"
    return int((away > 0).sum())


def bf16_steps(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """How many bf16 numbers lie between two, element by element."""

    def ordered(values: torch.Tensor) -> torch.Tensor:
        bits = values.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordered(left) - ordered(right)).abs()


def _hadamard() -> torch.Tensor:
    """H[i][j] = (-1)^popcount(i & j) / sqrt(128), float64 [128, 128]."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)]
    return torch.tensor(signs, dtype=torch.float64) / 128**0.5
