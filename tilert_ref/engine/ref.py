"""RefEngine: the reference DecodeEngine, one sequence at a time, over the functions of decode.py."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tilert_ref.connector.layout import FP8_DS_MLA, INDEX_PAGE_BYTES, RowFormat, bf16_row, page_count, row_format
from tilert_ref.connector.planes import index_tokens
from tilert_ref.connector.rounding import ScaleRule, check_scale_rule
from tilert_ref.engine import tensor_cores
from tilert_ref.engine.api import Capabilities, Finished, LayerKV, PromptKV, SamplingParams, Token
from tilert_ref.engine.batch import Pieces
from tilert_ref.engine.cache import KVCache, check_fp8_rows
from tilert_ref.engine.config import ConfigError, ModelConfig, load_config
from tilert_ref.engine.decode import DraftStats, Model, decode_mtp, decode_plain, prefill, prefill_mtp, until_stop
from tilert_ref.engine.dummy import DummyTensors
from tilert_ref.engine.flashinfer_mla import decode_attention
from tilert_ref.engine.graph import GreedySteps, SampledSteps
from tilert_ref.engine.model import logits
from tilert_ref.engine.numerics import Kernels, vllm_kernels
from tilert_ref.engine.rope import rope_table, table_dtype
from tilert_ref.engine.sampling import Sampler
from tilert_ref.engine.weights import load_weights, take_weights
from tilert_ref.model_files import InputError, shown

GREEDY = SamplingParams(temperature=0.0)
INJECTED_TOGETHER = 16  # layers; between them whoever made the planes may call it off
COMPILE_HELP = (
    "compile decode steps for this CPU (needs a C++ compiler, g++ or $CXX): the same bits in less than a third of the "
    "time, with the layers' matrices in memory twice, after some 30 seconds at the first start (60 with drafts) and 5 "
    "at later ones ($TORCHINDUCTOR_CACHE_DIR keeps the results). Default: plain torch"
)


class RefEngine:
    """Greedy or sampled decoding with num_mtp drafts a step (0: none) from an injected or self-made prompt KV."""

    name = "ref"
    capabilities = Capabilities(penalties=False, ignore_eos=True, logprobs=True)

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        num_mtp: int,
        max_seq_len: int,
        captured: GreedySteps | None = None,
        sampled: SampledSteps | None = None,
    ):
        """captured, sampled: what runs steps instead of decode.py, greedy ones and those that need a sampler."""
        self.model, self.cache, self.num_mtp, self.max_seq_len = model, cache, num_mtp, max_seq_len
        self.captured, self.sampled = captured, sampled
        self.seq_len, self.last_prompt_token = 0, 0

    @property
    def facts(self) -> dict[str, str]:
        """What a record of this engine's output has to say about how it was made."""
        kernels = self.model.kernels
        return (
            self.cache.facts
            | {
                "kernel_rounding": kernels.rounding.value,
                "sum_order": kernels.order.value,
                "pointwise": kernels.pointwise.value,
                "fp8_activations": kernels.fp8.value if self.model.config.block_fp8 else "none",
            }
            | ({"attention": kernels.attention.name} if kernels.attention else {})
        )

    def inject(self, kv: PromptKV) -> None:
        """Copies every layer's rows and index pages as they came. Raises ValueError where they don't fit this model.

        Of layers that share an indexer the pages are copies (protocol.md 8.5): they are compared and not stored.
        """
        self._check(kv)
        device, waiting = self.cache.rows.device, list[LayerKV]()
        try:
            for layer, planes in enumerate(kv.layers, 1):
                waiting.append(planes)
                if len(waiting) == INJECTED_TOGETHER or layer == len(kv.layers):
                    self._store(layer - len(waiting), waiting, kv.seq_len)
                    waiting.clear()
        finally:  # also when the caller's planes end the loop: no copy may go on when they are the caller's again
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        self.seq_len, self.last_prompt_token = kv.seq_len, kv.last_prompt_token

    def _store(self, first: int, layers: list[LayerKV], seq_len: int) -> None:
        self.cache.inject(first, [kv.latent for kv in layers], [kv.rope for kv in layers], seq_len)
        own = {i: kv.index_pages for i, kv in enumerate(layers, first) if self.model.config.has_indexer(i)}
        if own:
            self.cache.inject_index(list(own), list(own.values()), seq_len)

    def prefill(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> int:
        """The engine's own prefill: fills the cache from token ids and returns the first token."""
        if not 0 < len(prompt) < self.max_seq_len:
            raise InputError(f"prompt of {len(prompt)} tokens; legal are 1 to {self.max_seq_len - 1} (max_seq_len - 1)")
        for token in prompt:
            self._check_token(token)
        hidden = prefill(self.model, self.cache, prompt)
        first = Sampler(sampling)(logits(self.model.weights, hidden[-1:])[0]).id
        if self.num_mtp:
            prefill_mtp(self.model, self.cache, [*prompt[1:], first], hidden)
        self.seq_len, self.last_prompt_token = len(prompt), prompt[-1]
        return first

    def decode(
        self, first_token_id: int, max_tokens: int, sampling: SamplingParams, top_logprobs: int | None = None
    ) -> Iterator[list[Token] | Finished]:
        """See api.DecodeEngine.decode."""
        if not self.seq_len:
            raise RuntimeError("decode before inject or prefill: there is no prompt")
        self._check_token(first_token_id)
        stats = DraftStats()
        budget = min(max_tokens, self.max_seq_len - self.seq_len - 1)
        stop_ids = frozenset() if sampling.ignore_eos else frozenset(self.model.config.eos_token_ids)
        if self._replays and sampling.greedy and top_logprobs is None:
            steps = self._captured_steps(first_token_id, stats)
        elif self._replays and self.sampled is not None:
            steps = self._sampled_steps(first_token_id, Sampler(sampling, top_logprobs), stats)
        else:
            steps = self._steps(first_token_id, Sampler(sampling, top_logprobs), stats)
        for event in until_stop(steps, first_token_id, budget, stop_ids):
            yield event if isinstance(event, list) else Finished(event, self._stats(stats))

    def reset(self) -> None:
        self.seq_len, self.last_prompt_token = 0, 0

    @property
    def _replays(self) -> bool:
        attention = self.model.kernels.attention
        return self.captured is not None and (attention is None or attention.replays(self.seq_len))

    def _steps(self, first_token: int, sampler: Sampler, stats: DraftStats) -> Iterator[list[Token]]:
        if not self.num_mtp:
            return decode_plain(self.model, self.cache, self.seq_len, first_token, sampler)
        return decode_mtp(
            self.model, self.cache, self.seq_len, self.last_prompt_token, first_token, sampler, self.num_mtp, stats
        )

    def _captured_steps(self, first_token: int, stats: DraftStats) -> Iterator[list[Token]]:
        for ids in self.captured.run(self.seq_len, self.last_prompt_token, first_token):
            stats.calls, stats.emitted = stats.calls + 1, stats.emitted + len(ids)
            yield [Token(token) for token in ids]

    def _sampled_steps(self, first_token: int, sampler: Sampler, stats: DraftStats) -> Iterator[list[Token]]:
        for tokens in self.sampled.run(self.seq_len, self.last_prompt_token, first_token, sampler):
            stats.calls, stats.emitted = stats.calls + 1, stats.emitted + len(tokens)
            yield tokens

    def _stats(self, stats: DraftStats) -> dict[str, float | int | str]:
        if not self.num_mtp:
            return {}
        return {"mtp_accept_mean": round(stats.emitted / max(stats.calls, 1), 3), "mtp_verify_calls": stats.calls}

    def _check(self, kv: PromptKV) -> None:
        c, layers = self.model.config, len(self.cache.rows)
        if len(kv.layers) != layers:
            raise ValueError(f"{len(kv.layers)} layers of KV for an engine with {layers} (MTP layer counted)")
        if not 0 < kv.seq_len < self.max_seq_len:
            raise ValueError(f"prompt of {kv.seq_len} tokens; legal are 1 to {self.max_seq_len - 1} (max_seq_len - 1)")
        self._check_token(kv.last_prompt_token)
        row, dtype = self._row_format(), self.cache.rows.dtype
        for index, planes in enumerate(kv.layers):
            _check_rows(f"layer {index}", planes, row, dtype, kv.seq_len)
            if (planes.index_pages is None) != (c.index_topk is None):
                has = "no index pages" if planes.index_pages is None else "index pages"
                raise ValueError(f"layer {index}: {has} for a model with index_topk = {c.index_topk}")
            if planes.index_pages is not None:
                pages = page_count(kv.seq_len)
                _check_plane(f"layer {index} index_pages", planes.index_pages, torch.uint8, pages, INDEX_PAGE_BYTES)
        device = self.cache.rows.device
        if c.index_topk is not None:
            _check_shared(kv, [c.indexer_of(layer) for layer in range(layers)], device)
        if self.cache.scale_rule is not None:
            latent = kv.layers[0].latent.to(device)  # one layer: a sender has one rule
            codes, scales = (FP8_DS_MLA[name].view(latent) for name in ("latent", "latent_scale"))
            check_scale_rule(codes, scales, self.cache.scale_rule)

    def _row_format(self) -> RowFormat:
        c = self.model.config
        return FP8_DS_MLA if self.cache.scale_rule else bf16_row(c.kv_lora_rank, c.qk_rope_head_dim)

    def _check_token(self, token: int) -> None:
        if not 0 <= token < self.model.config.vocab_size:
            raise InputError(f"token id {token} is outside the vocabulary of {self.model.config.vocab_size}")


def _check_rows(name: str, planes: LayerKV, row: RowFormat, dtype: torch.dtype, tokens: int) -> None:
    """dtype: of the cache; the rope plane of fp8_ds_mla rows is bf16 all the same."""
    fp8 = dtype == torch.uint8
    if (planes.latent.dtype == torch.uint8) != fp8:
        came = f"latent plane {list(planes.latent.shape)} {planes.latent.dtype}"
        raise ValueError(
            f"{name}: {came} for a cache of {row.name} rows; legal: {row.name} planes of {row.kv_bytes} bytes"
        )
    _check_plane(f"{name} latent", planes.latent, dtype, tokens, row.kv_bytes if fp8 else row["latent"].count)
    _check_plane(f"{name} rope", planes.rope, torch.bfloat16 if fp8 else dtype, tokens, row["rope"].count)


def _check_shared(kv: PromptKV, sources: list[int], device: torch.device) -> None:
    """Raises ValueError if a layer's index keys differ from those of the layer whose indexer it shares, its source.

    A sender that gives it keys of its own has a model with other indexers in mind. Compared on the engine's device, and
    the host looks once for all layers.
    """
    sharing = [(layer, source) for layer, source in enumerate(sources) if layer != source]
    if not sharing:
        return

    def keys(layer: int) -> torch.Tensor:
        return index_tokens(kv.layers[layer].index_pages.to(device), kv.seq_len)

    differ = torch.stack([(keys(layer) != keys(source)).any() for layer, source in sharing]).tolist()
    for (layer, source), different in zip(sharing, differ, strict=True):
        if different:
            text = f"layer {layer}: index keys differ from layer {source}'s, whose indexer it shares"
            raise ValueError(f"{text}; legal: a copy of them")


def _check_plane(name: str, plane: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    if tuple(plane.shape) != shape or plane.dtype != dtype:
        raise ValueError(f"{name}: {list(plane.shape)} {plane.dtype}, expected {list(shape)} {dtype}")


def load_engine(
    model_dir: str | Path,
    *,
    device: str = "cpu",
    max_seq_len: int = 4096,
    num_mtp: int = 0,
    block_size: int = 64,
    kv_cache_dtype: str = "bf16",
    kv_scale_rule: ScaleRule | str = ScaleRule.POWER_OF_TWO,
    kernels: Kernels | None = None,
    capture: bool = True,
    attention: str = "auto",
    compile: bool = False,
    load_format: str = "auto",
    progress: Callable[[str], None] = lambda line: None,
) -> RefEngine:
    """Builds the engine from a Hugging Face checkpoint directory.

    kv_cache_dtype: bf16, or fp8 for fp8_ds_mla rows of a sparse model, and their other names (layout.row_format).
    kv_scale_rule: how fp8_ds_mla rows are quantised: the rule of the vLLM whose rows are injected.
    kernels: whose arithmetic is followed; None: that of the vLLM that would run on this device (numerics.py).
    load_format: auto, or dummy for random weights (dummy.py): only config.json is read.
    compile: decode steps on a CPU run as compiled pieces (compiled.py); where that can't be, progress says why.
    capture: greedy decoding runs as a CUDA graph where it can (graph.py).
    attention: auto, the engine's own for decode; triton, the same, but an error where it isn't our Hopper kernels;
        flashinfer (flashinfer_mla.py).
    Raises ConfigError or CheckpointError, both naming the key or tensor, and ValueError on an illegal option.
    """
    if load_format not in ("auto", "dummy"):
        raise InputError(f"load_format = {load_format!r}, legal: auto, dummy")
    check_device(device)
    config = load_config(model_dir)
    _check_options(config, num_mtp, max_seq_len)
    scale_rule = _scale_rule(config, kv_cache_dtype, kv_scale_rule)
    progress(f"{config.architecture}: {config.num_hidden_layers} layers, {num_mtp} drafts a step, on {device}")
    room = max_seq_len + num_mtp  # a verify window may reach past the last token that is kept
    backend = decode_attention(attention, config, device, room=room, block_size=block_size, progress=progress)
    kernels = kernels or vllm_kernels(device)
    if backend is not None:
        kernels = replace(kernels, attention=backend)
    how = {"with_mtp": num_mtp > 0, "device": device, "kernels": kernels}
    start = time.perf_counter()
    if load_format == "dummy":
        weights = take_weights(config, DummyTensors(config, device), **how)
    else:
        weights = load_weights(config, model_dir, progress=progress, **how)
    progress(f"weights: on {device} after {time.perf_counter() - start:.1f} s")
    layers = config.num_hidden_layers + (num_mtp > 0)
    cache = KVCache(config, layers, room, block_size=block_size, device=device, scale_rule=scale_rule)
    rope = rope_table(config, room, table_dtype(config, kernels.pointwise), device)
    size = f"{cache.nbytes / 1e6:.1f} MB for {max_seq_len} tokens in {layers} layers (MTP counted)"
    progress(f"KV cache: {size}, {', '.join(f'{name} {value}' for name, value in cache.facts.items())}")
    model = Model(config, weights, rope, kernels)
    if compile:
        model = replace(model, pieces=_pieces(model, {1, 1 + num_mtp}, progress))
    if not (capture and can_capture(model, cache)):
        return RefEngine(model, cache, num_mtp, max_seq_len)
    captured, sampled = _captured(model, cache, num_mtp, progress)
    return RefEngine(model, cache, num_mtp, max_seq_len, captured, sampled)


def _captured(
    model: Model, cache: KVCache, num_mtp: int, progress: Callable[[str], None]
) -> tuple[GreedySteps, SampledSteps]:
    start, kept = time.perf_counter(), tensor_cores.kept_kernels()
    captured = GreedySteps(model, cache, num_mtp, progress)
    progress("sampled step: capture")
    sampled = SampledSteps(captured)
    new, where = tensor_cores.kept_kernels() - kept, f"{tensor_cores.kernel_cache()} ($TRITON_CACHE_DIR)"
    seconds = time.perf_counter() - start
    progress(f"kernels and graphs: {seconds:.1f} s, {new} new entries beside {kept} in {where}")
    return captured, sampled


def _pieces(model: Model, tokens: set[int], progress: Callable[[str], None]) -> Pieces | None:
    """Compiled forms for steps of so many tokens, or None and a line that says why."""
    try:
        from tilert_ref.engine.compiled import compile_pieces  # Inductor takes a second to import

        return compile_pieces(model, tokens, progress)
    except Exception as error:  # a compiler, a cache directory, a torch with other internals: plain torch does without
        progress(f"decode steps run as plain torch: {str(error) or repr(error)}")
        return None


def can_capture(model: Model, cache: KVCache) -> bool:
    """Whether greedy steps can run as a CUDA graph: on a Hopper GPU, with vLLM's pages there."""
    widths = model.config.kv_lora_rank, model.config.qk_rope_head_dim
    powers_of_two = all(width & (width - 1) == 0 for width in widths)
    if model.kernels.attention is not None and not model.kernels.attention.replays(len(model.rope)):
        return False
    return model.kernels.on_tensor_cores(model.rope) and cache.block_size == 64 and powers_of_two


def _scale_rule(config: ModelConfig, kv_cache_dtype: str, kv_scale_rule: ScaleRule | str) -> ScaleRule | None:
    """The rule of an fp8_ds_mla cache, None for bf16. Raises ValueError naming what is legal."""
    rules = {rule.value: rule for rule in ScaleRule}
    rule = kv_scale_rule if isinstance(kv_scale_rule, ScaleRule) else rules.get(kv_scale_rule)
    if rule is None:
        raise InputError(f"kv_scale_rule = {kv_scale_rule!r}, legal: {', '.join(rules)}")
    if row_format(kv_cache_dtype) is not FP8_DS_MLA:
        return None
    check_fp8_rows(config)
    return rule


def check_device(name: str) -> None:
    """Raises InputError for what is no device that this engine runs on, and for one that isn't there."""
    if not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]{0,3}))?", name):
        raise InputError(f"device {shown(name)}, legal: cpu, cuda, cuda:N")
    gpus = torch.cuda.device_count()
    if name != "cpu" and int(name.partition(":")[2] or 0) >= gpus:
        raise InputError(f"device {name!r}: this torch sees {gpus} CUDA device(s); legal: cpu, or one that it sees")


def _check_options(config: ModelConfig, num_mtp: int, max_seq_len: int) -> None:
    if not 0 <= num_mtp <= 3:
        raise InputError(f"num_mtp = {num_mtp}, legal are 0 (no drafting) to 3")
    if num_mtp and not config.num_nextn_predict_layers:
        raise ConfigError("num_nextn_predict_layers = 0: this checkpoint has no MTP layer to draft with")
    if max_seq_len < 2:
        raise InputError(f"max_seq_len = {max_seq_len}, a prompt and one generated token need at least 2")
    if max_seq_len > config.max_position_embeddings:
        raise InputError(f"max_seq_len {max_seq_len} exceeds max_position_embeddings {config.max_position_embeddings}")
