"""Sparse attention (DSA) for vLLM's CPU build, an out-of-tree plugin in plain torch: a live peer for the tests.

vLLM 0.32.0 refuses GLM-5 and DeepSeek-V3.2 on a CPU. With this directory on PYTHONPATH vLLM finds the package through
its entry points and runs them; vLLM's files stay as they are. The formulas are those of vLLM's CUDA path, written from
its sources and without a line of tilert_ref: this is the oracle that the engine is compared with.

What is hooked, and why (names are vLLM's, files are below vllm/):

platforms/cpu.py, CpuPlatform.get_attn_backend_cls: subclassed, the platform entry point.
    It raises "Sparse Attention is not supported on CPU".
platforms/cpu.py, CpuPlatform.check_and_update_config: the same subclass.
    It forces blocks of 16 tokens and whole prompts for the sake of a kernel that isn't used here.
model_executor/layers/sparse_attn_indexer.py, SparseAttnIndexer: replaced by register_oot.
    Its forward_cpu is DeepSeek-V4's: another cache, index_topk 512.
model_executor/layers/fused_moe/router/gate_linear.py, GateLinear: replaced by register_oot.
    On a CPU it rounds fp32 router logits to bf16, on CUDA it doesn't.
model_executor/models/deepseek_v2.py, DeepseekV32IndexerCache.get_attn_backend: set to another function.
    It names a back end whose metadata needs CUDA.
model_executor/models/deepseek_v2.py, per_token_group_quant_fp8: set to another function.
    It is a Triton kernel outside CUDA.

What is not CUDA's: RoPE of the index query, which vLLM rounds twice outside its fused CUDA kernel (deepseek_v2.py,
Indexer.forward); no dense attention for prompt chunks within index_topk (CUDA has none with sparse_mla_force_mqa);
probabilities stay fp32, tensor core kernels round them to bf16.
"""


def platform() -> str:
    return "vllm_cpu_sparse.platform.SparseCpuPlatform"


def operators() -> None:
    from vllm_cpu_sparse import indexer, router  # noqa: F401  registered by being imported
