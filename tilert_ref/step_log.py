"""A vLLM connector that moves nothing: it writes down each forward batch and what its siblings were told to do with it.

    {"kv_connector": "StepLog", "kv_connector_module_path": "tilert_ref.step_log", "kv_role": "kv_producer",
     "kv_connector_extra_config": {"path": FILE}}

As a child of MultiConnector, whose children all see every step. A line of FILE is a JSON object (native_pool.Step reads
it), written by the worker just before the forward pass of that step, so what stands in one line is in one batch:

    {"step": n, "requests": {request id: {"tokens": scheduled now, "computed": before, "prompt": length,
     "pool": who gets its KV: "tilert", "native" or null}},
     "told": {sibling's class: [request ids in its metadata]}, "held": {request id: pool}}

Steps without any of them are left out. One worker writes: tensor parallel rank 0.

A demo and a test need two requests in one batch, however late one of them comes on a busy machine. So while the file
FILE.gate exists the scheduler is told to ask again later for every new request that is meant for a pool: those are
`held`, named once. What waited is scheduled together when the gate is gone.

Source: vLLM 0.32 v1/core/sched/scheduler.py (None of get_num_new_matched_tokens), v1/core/sched/output.py
(SchedulerOutput), kv_connector/v1/multi_connector.py.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Attributes of the siblings' metadata that hold requests: ids, or mappings by id, or objects with a request_id.
_OF_REQUESTS = ("claims", "reqs_to_recv", "reqs_to_save", "reqs_to_send", "reqs_in_batch", "reqs_not_processed")


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):
    """As in a line of the file; told is added by the worker."""

    step: int
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)


class StepLog(KVConnectorBase_V1, SupportsHMA):
    """See the module. Raises ValueError without a path."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig | None" = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        path = (vllm_config.kv_transfer_config.kv_connector_extra_config or {}).get("path")
        if not isinstance(path, str):
            raise ValueError(f"StepLog: kv_connector_extra_config.path is {path!r}; legal: a file's name")
        self._path, self._gate, self._steps = Path(path), Path(f"{path}.gate"), 0
        self._holding = False
        self._held: dict[str, str] = {}  # pool of the requests that were held and still run
        self._named: set[str] = set()  # those of them that the file names
        self._known: dict[str, dict[str, Any]] = {}  # prompt and pool of the requests that still run

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler half.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        # It shuts at once and opens between two steps: the requests of one step are all held or all let through.
        self._holding = self._holding or self._gate.exists()
        pool = pool_of(request.sampling_params)
        if not self._holding or pool is None:
            return 0, False
        self._held[request.request_id] = pool
        return None, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        self._steps += 1
        for request in scheduler_output.scheduled_new_reqs:
            prompt = len(request.prompt_token_ids or ())
            self._known[request.req_id] = {"prompt": prompt, "pool": pool_of(request.sampling_params)}
        cached = scheduler_output.scheduled_cached_reqs
        computed = {request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        requests = {
            name: {"tokens": tokens, "computed": computed[name]} | self._known[name]
            for name, tokens in scheduler_output.num_scheduled_tokens.items()
        }
        self._holding = self._gate.exists()
        return StepMetadata(self._steps, requests, self._newly_held())

    def _newly_held(self) -> dict[str, str]:
        new = {name: pool for name, pool in self._held.items() if name not in self._named}
        self._named.update(new)
        return new

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._known.pop(request.request_id, None)
        self._held.pop(request.request_id, None)
        self._named.discard(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return self.request_finished(request, [])

    # Worker half.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        told = {type(child).__name__: requests_in(child) for child in self._siblings()}
        if get_tensor_model_parallel_rank() != 0 or not (metadata.requests or metadata.held or any(told.values())):
            return
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(metadata) | {"told": told}) + "\n")

    def _siblings(self) -> list[KVConnectorBase_V1]:
        return [child for child in getattr(get_kv_transfer_group(), "sub_connectors", []) if child is not self]

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def pool_of(sampling_params: Any) -> str | None:
    """Who a request says its KV is for."""
    params = (getattr(sampling_params, "extra_args", None) or {}).get("kv_transfer_params") or {}
    return "tilert" if params.get("tilert_host") else "native" if params.get("do_remote_decode") else None


def requests_in(child: KVConnectorBase_V1) -> list[str]:
    """The requests that a sibling's metadata of this step speaks of, sorted."""
    metadata = child._get_connector_metadata()
    return sorted({name for key in _OF_REQUESTS for name in _ids(getattr(metadata, key, ()))})


def _ids(entries: Iterable[Any]) -> set[str]:
    return {entry if isinstance(entry, str) else entry.request_id for entry in entries}
