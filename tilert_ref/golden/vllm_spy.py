"""Looks into a vLLM that runs in this process: who has which blocks, what lies in them, what its indexer chose.

Needs VLLM_ENABLE_V1_MULTIPROCESSING=0, so that scheduler, worker and this code share one process. Nothing of vLLM's
behaviour changes: methods are wrapped, modules get forward hooks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm import LLM
from vllm.v1.core.sched.scheduler import Scheduler

from tilert_ref.connector.planes import CODE_BYTES, INDEX_TOKEN_BYTES, SCALE_BYTES


class BlockSpy:
    """Per request since the last `clear`: the block ids of each cache group, steps, and cached prompt tokens."""

    def __init__(self) -> None:
        self.blocks = dict[str, list[list[int]]]()
        self.prompts = dict[str, int]()
        self.steps = dict[str, int]()
        self.hits = dict[str, int]()

    def clear(self) -> None:
        for table in (self.blocks, self.prompts, self.steps, self.hits):
            table.clear()

    def install(self) -> None:
        schedule = Scheduler.schedule

        def spied(scheduler: Scheduler, *args: Any, **kwargs: Any) -> Any:
            output = schedule(scheduler, *args, **kwargs)
            self._look(output)
            return output

        Scheduler.schedule = spied

    def _look(self, output: Any) -> None:
        for request in output.scheduled_new_reqs:
            self.blocks[request.req_id] = [list(group) for group in request.block_ids]
            self.prompts[request.req_id] = len(request.prompt_token_ids)
            self.hits[request.req_id] = request.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for group, new in zip(self.blocks[name], added or [], strict=False):
                group += new
        for name in output.num_scheduled_tokens:
            self.steps[name] = self.steps.get(name, 0) + 1


class Caches:
    """vLLM's caches by layer index, the MTP layer's last. All layers share group 0's blocks in these models."""

    def __init__(self, llm: LLM) -> None:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        found = {name: layer.kv_cache for name, layer in layers.items() if hasattr(layer, "kv_cache")}
        tensors = {name: cache[0] if isinstance(cache, list) else cache for name, cache in found.items()}
        names = sorted(tensors, key=lambda name: int(name.split("layers.")[1].split(".")[0]))
        self.rows = [tensors[name] for name in names if "indexer" not in name]
        self.index = [tensors[name] for name in names if "indexer" in name]

    def read_rows(self, blocks: list[int], tokens: int) -> torch.Tensor:
        """Rows of tokens 0 .. tokens-1, uint8 [layers, tokens, row bytes]."""
        return torch.stack([token_rows(cache, blocks, tokens).cpu() for cache in self.rows])

    def read_index(self, blocks: list[int], tokens: int) -> torch.Tensor | None:
        """Index keys, uint8 [layers, tokens, 132]; None for a dense model."""
        return torch.stack([index_tokens(cache, blocks, tokens).cpu() for cache in self.index]) if self.index else None


def token_rows(cache: torch.Tensor, blocks: list[int], tokens: int) -> torch.Tensor:
    """Rows of a request in a cache [num_blocks, ..., block, width]: uint8 [tokens, row bytes]."""
    block, place = _places(cache, blocks, tokens)
    return cache.view(torch.uint8).reshape(cache.shape[0], cache.shape[-2], -1)[block, place]


def index_tokens(cache: torch.Tensor, blocks: list[int], tokens: int) -> torch.Tensor:
    """Index keys of a request in a cache [num_blocks, ..., block, 132]: uint8 [tokens, 128 code + 4 scale bytes].

    A block holds all its codes, then all its scales (case K2).
    """
    block, place = _places(cache, blocks, tokens)
    width = cache.shape[-2]
    flat = cache.view(torch.uint8).reshape(cache.shape[0], width * INDEX_TOKEN_BYTES)
    codes, scales = flat.split([width * CODE_BYTES, width * SCALE_BYTES], dim=1)
    return torch.cat([part.unflatten(1, (width, -1))[block, place] for part in (codes, scales)], dim=1)


def _places(cache: torch.Tensor, blocks: list[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(block, row within the block) of every token. The manager's block may span several of the kernel's."""
    ids, size = torch.tensor(blocks), cache.shape[-2]
    spanned = max(1, -(-tokens // (len(blocks) * size)))
    token = torch.arange(tokens)
    at = ids[token // (size * spanned)] * spanned + token % (size * spanned) // size, token % size
    return at[0].to(cache.device), at[1].to(cache.device)


@contextmanager
def watch_choices(llm: LLM) -> Iterator[list[list[torch.Tensor]]]:
    """While open: positions that each layer's indexer chose for the first token of each pass, int16 [index_topk] (-1:
    none), in the order of the passes; a list per layer."""
    kept: list[list[torch.Tensor]] = []
    with _hooks() as hooks:

        def attach(model: torch.nn.Module) -> None:
            for name, module in model.named_modules():
                if name.endswith("indexer_op"):
                    kept.append([])
                    hooks.append(module.register_forward_hook(_keeper(kept[-1], module.topk_tokens)))

        llm.apply_model(attach)
        yield kept


def _keeper(kept: list[torch.Tensor], topk: int) -> Any:
    def keep(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        kept.append(output[0, :topk].to("cpu", torch.int16))

    return keep


TRACED_ROWS = 512  # some buffers have a row for every token that a batch could have
TRACED_INPUTS = ("indexer_op", "mla_attn", "experts")


@contextmanager
def trace(llm: LLM) -> Iterator[list[dict[str, list[torch.Tensor]]]]:
    """While open: per pass of the main model, what every module returned (NAME) and what some got (NAME:in)."""
    passes: list[dict[str, list[torch.Tensor]]] = []
    with _hooks() as hooks:

        def attach(model: torch.nn.Module) -> None:
            hooks.append(model.register_forward_pre_hook(lambda module, inputs: passes.append({})))
            for name, module in model.named_modules():
                hooks.append(module.register_forward_hook(_recorder(passes, name)))
                if name.endswith(TRACED_INPUTS):
                    hooks.append(module.register_forward_pre_hook(_input_recorder(passes, name), with_kwargs=True))

        llm.apply_model(attach)
        yield passes


def _recorder(passes: list[dict], name: str) -> Any:
    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if passes and name not in passes[-1]:  # called once a pass, or only the first time counts
            passes[-1][name] = _tensors(output)

    return keep


def _input_recorder(passes: list[dict], name: str) -> Any:
    def keep(module: torch.nn.Module, inputs: Any, kwargs: dict[str, Any]) -> None:
        if passes:
            passes[-1][f"{name}:in"] = _tensors([*inputs, *kwargs.values()])

    return keep


def _tensors(values: Any) -> list[torch.Tensor]:
    values = values if isinstance(values, list | tuple) else [values]
    rows = (
        value.detach()[:TRACED_ROWS] if value.dim() else value for value in values if isinstance(value, torch.Tensor)
    )
    return [value.to("cpu", copy=True) for value in rows]


@contextmanager
def _hooks() -> Iterator[list[Any]]:
    hooks: list[Any] = []
    try:
        yield hooks
    finally:
        for hook in hooks:
            hook.remove()
