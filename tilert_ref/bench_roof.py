"""What a decode step has to move through memory, how fast this device moves memory, and a cache to decode from."""

import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from tilert_ref.connector.rounding import INDEX_KEY_FLOOR, ScaleRule, quantize_fp8_ds_mla, quantize_index
from tilert_ref.engine.ref import RefEngine
from tilert_ref.engine.weights import MoeWeights, MtpWeights, Weights

COPIED_BYTES = 1 << 30  # past every cache
NEVER_READ = frozenset({"kv_b"})  # by decode: W_UK and W_UV are made of it
RANKING = frozenset({"wq_b", "weights_proj"})  # index queries and the weights of their heads


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by a copy of 1 GiB on this device, the better of torch's two ways."""
    source = torch.ones(COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.mul(source, 1.0, out=target))
    return max(2 * COPIED_BYTES / seconds_each(way, 10, device) for way in ways)


def seconds_each(run: Callable[[], Any], times: int, device: str) -> float:
    """Mean seconds of one of `times` runs after one that doesn't count; on a GPU by its own clock."""
    run()
    if torch.device(device).type != "cuda":
        start = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - start) / times
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def step_bytes(engine: RefEngine, context: int) -> int:
    """Bytes that a step without drafts reads at least: every weight once, of the routed experts a token's own, and the
    rows that attention looks at. Where it chooses those, the index keys before the token too; where it takes them all,
    neither keys nor the weights of index queries."""
    config, cache = engine.model.config, engine.cache
    chosen = min(context, config.index_topk or context)
    rows = config.num_hidden_layers * chosen * cache.rows.shape[-1] * cache.rows.element_size()
    ranks = config.index_topk is not None and context >= config.index_topk
    unread = NEVER_READ if ranks else NEVER_READ | RANKING
    keys = sum(layer < config.num_hidden_layers for layer in cache.index_layers) * 132 * context
    weights = weight_bytes(engine.model.weights, config.num_experts_per_tok or 0, unread)
    return weights + rows + (keys if ranks else 0)


def weight_bytes(w: Any, experts_per_token: int, unread: frozenset[str]) -> int:
    """Of all matrices that one token meets, but for those named in `unread`; the embedding is a row. The MTP layer is
    not met."""
    if isinstance(w, torch.Tensor):
        return w.nbytes
    if isinstance(w, list | tuple):
        return sum(weight_bytes(part, experts_per_token, unread) for part in w)
    if not is_dataclass(w) or isinstance(w, MtpWeights):
        return 0
    skipped = unread | ({"embed"} if isinstance(w, Weights) else set())
    total = 0
    for field in fields(w):
        if field.name in skipped:
            continue
        part = weight_bytes(getattr(w, field.name), experts_per_token, unread)
        if isinstance(w, MoeWeights) and field.name in ("gate_up", "down"):
            part = part * experts_per_token // num_experts(w)
        total += part
    return total


def num_experts(w: MoeWeights) -> int:
    stacked = getattr(w.down, "codes", getattr(w.down, "weight", w.down))
    return len(stacked)


def fill_cache(engine: RefEngine, context: int) -> None:
    """Random rows and index keys at positions 0 .. context-1 of every layer, as if a prompt had been handed over."""
    cache, device = engine.cache, engine.cache.rows.device
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    c = engine.model.config
    latent, rope = random(context, c.kv_lora_rank).bfloat16(), random(context, c.qk_rope_head_dim).bfloat16()
    rule = cache.scale_rule or ScaleRule.PLAIN
    rows = torch.cat((latent, rope), 1) if cache.scale_rule is None else quantize_fp8_ds_mla(latent, rope, rule)
    positions = torch.arange(context, device=device)
    slots = cache.slots(positions)
    for layer in range(len(cache.rows)):
        cache.layer_rows(layer)[slots] = rows.to(cache.rows.dtype)
    codes, scales = quantize_index(random(context, 128), INDEX_KEY_FLOOR)
    for layer in cache.index_layers:
        cache.put_index(layer, positions, codes, scales)
    engine.seq_len, engine.last_prompt_token = context, 1
