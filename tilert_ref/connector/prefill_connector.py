"""The vLLM plugin: the only file of this folder that imports vLLM.

    --kv-transfer-config '{"kv_connector": "TileRTConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "tilert_ref.connector.prefill_connector",
        "kv_connector_extra_config": {"tilert_transport": "nixl"}}'

Alone or as a child of MultiConnector. A pure producer: it offers no tokens, holds no blocks, and a request without
`kv_transfer_params.tilert_host` costs one look at its sampling parameters. vLLM makes two instances: one in the
scheduler (`ClaimTracker`), one in each worker (`Extractor`, `Sender`); `ClaimMetadata` goes from the first to the
second once a step.

Hook order of a step (vLLM 0.32): build_connector_meta | bind_connector_metadata, save_kv_layer per layer, [draft
model], wait_for_save, clear_connector_metadata. With a draft model wait_for_save comes after it; a vLLM whose V1
runner does not defer it would hand off draft rows that are not written yet, and is refused.

Source: protocol.md 6; vLLM distributed/kv_transfer/kv_connector/v1/base.py,
v1/worker/kv_connector_model_runner_mixin.py.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from tilert_ref.connector.caches import Group, ModelCaches, describe_caches
from tilert_ref.connector.claims import Claim, ClaimTracker
from tilert_ref.connector.extract import Extractor
from tilert_ref.connector.fingerprint import known_fingerprint
from tilert_ref.connector.layout import BufferLayout
from tilert_ref.connector.sender import Sender, SenderConfig
from tilert_ref.connector.settings import Settings, SettingsError, read_settings
from tilert_ref.connector.staging import StagingPool
from tilert_ref.connector.transport import make_transport
from tilert_ref.connector.transport.nixl import nixl_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClaimMetadata(KVConnectorMetadata):
    """The claims whose prompts the coming step completes."""

    claims: tuple[Claim, ...] = ()


_NOTHING = ClaimMetadata()


class TileRTConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Raises SettingsError, CacheError or LayoutError at start-up for what it cannot hand off."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig | None" = None
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = _settings(vllm_config)
        self._tracker: ClaimTracker | None = None
        self._extractor: Extractor | None = None
        self._sender: Sender | None = None
        self._extracting = False  # this step has claims
        if role is KVConnectorRole.SCHEDULER:
            settings = self._settings
            self._tracker = ClaimTracker(settings.ctrl_port, settings.max_seq_len, settings.allowed_hosts)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a claim has left the blocks when its step ends, so a preemption later on loses nothing."""
        return False

    # Scheduler half.

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ClaimMetadata:
        claims = self._tracker.step(scheduler_output)
        return ClaimMetadata(tuple(claims)) if claims else _NOTHING

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._outcome(request)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._outcome(request)

    def _outcome(self, request: "Request") -> dict[str, Any] | None:
        """Goes into the reply's kv_transfer_params: why the request was refused here. The router fails it by that.

        Beside another connector's parameters it would end the engine: MultiConnector takes one connector's only.
        """
        reason = self._tracker.finished(request.request_id)
        theirs = request.kv_transfer_params or {}
        if reason is None or theirs.get("do_remote_decode") or theirs.get("do_remote_prefill"):
            return None
        return {"tilert_error": reason}

    # Worker half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        caches = _describe(self._vllm_config, self._kv_cache_config, self._settings, kv_caches)
        rank, senders = get_tensor_model_parallel_rank(), self._settings.senders
        if caches.draft_names:
            _check_deferred_finalize()
        if rank < senders:
            self._start_worker(caches, rank)
        logger.info("%s, %d layers, rank %d of %d senders", caches.profile, len(caches.rows), rank, senders)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if connector_metadata.claims and self._extractor is not None:
            self._extractor.begin(connector_metadata.claims)
            self._extracting = True

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        if self._extracting:
            self._extractor.layer(layer_name)

    def wait_for_save(self) -> None:
        if self._extracting:
            self._extracting = False
            self._extractor.finish()

    def shutdown(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def _start_worker(self, caches: ModelCaches, rank: int) -> None:
        settings = self._settings
        layout = BufferLayout(
            caches.profile, caches.row_format, settings.max_seq_len, nshards=settings.senders, tiled=settings.tiled
        )
        config = SenderConfig(
            layout,
            layout.geometry(nixl_version() if settings.transport == "nixl" else None, _checkpoint(self._vllm_config)),
            senders=settings.senders,
            rank=rank,
            attempts=settings.admission_attempts,
            write_timeout_s=settings.write_timeout_s,
            allowed=settings.allowed_hosts,
            secret=settings.secret,
        )
        device, pinned = _staging_device(caches, settings)
        on_host = device.type == "cpu"
        self._sender = Sender(
            config,
            lambda: make_transport(settings.transport, "", receiver=False, from_host=on_host, network=settings.network),
        )
        pool = StagingPool(layout, rank, device, settings.max_staging_bytes, self._sender.forget, pinned)
        self._extractor = Extractor(
            caches,
            pool,
            range(rank, len(caches.rows), settings.senders),
            self._sender.submit,
            # Two micro-batches write a layer one after the other, and its hook fires after the first already.
            refuse=self._sender.report,
            layerwise=settings.pipeline and not getattr(self._vllm_config.parallel_config, "use_ubatching", False),
            tiled=settings.tiled,
        )
        if settings.eager_init:
            self._sender.start_transport()


def _settings(vllm_config: "VllmConfig") -> Settings:
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise SettingsError(f"{name} is {getattr(parallel, name)}; TileRTConnector supports 1")
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    if "tilert_host" in extra:
        logger.warning("tilert_host in the configuration has no effect: every request to hand off names its own")
    max_model_len = vllm_config.model_config.max_model_len
    return read_settings(extra, os.environ, max_model_len, parallel.tensor_parallel_size)


def _describe(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig | None",
    settings: Settings,
    kv_caches: Mapping[str, torch.Tensor],
) -> ModelCaches:
    model = vllm_config.model_config.hf_text_config
    latent, rope = (getattr(model, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    return describe_caches(
        kv_caches,
        _groups(kv_cache_config),
        model.num_hidden_layers,
        (latent, rope) if latent and rope else None,
        model=settings.model,
        no_mtp=settings.no_mtp,
    )


def _groups(kv_cache_config: "KVCacheConfig | None") -> dict[str, Group]:
    """KV cache group of every layer name; empty if vLLM did not say."""
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else []
    return {
        name: Group(index, group.kv_cache_spec.block_size)
        for index, group in enumerate(groups)
        for name in group.layer_names
    }


def _staging_device(caches: ModelCaches, settings: Settings) -> tuple[torch.device, bool]:
    """(device, pinned) of staging memory."""
    wanted = settings.buffer_device or caches.device.type
    if wanted == caches.device.type:
        return caches.device, False
    if wanted == "cpu":
        return torch.device("cpu"), True
    raise SettingsError(f"tilert_pd_buffer_device is {wanted!r}, but vLLM's caches are on {caches.device}; legal: cpu")


def _checkpoint(vllm_config: "VllmConfig") -> str | None:
    """Digest of what vLLM loaded, if that is a directory of weights."""
    made_up = vllm_config.load_config.load_format == "dummy"
    return known_fingerprint(vllm_config.model_config.model, "vLLM made up its weights" if made_up else "")


def _check_deferred_finalize() -> None:
    if not hasattr(KVConnectorModelRunnerMixin, "finalize_kv_connector"):
        raise SettingsError(
            "this vLLM calls wait_for_save before the draft model runs, so MTP KV would be stale; legal: vLLM 0.26 and "
            "newer, or no speculative decoding"
        )
