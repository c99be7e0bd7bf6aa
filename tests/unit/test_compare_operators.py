"""The comparison of operators with traces, on a trace of our own engine under vLLM's names: it agrees with itself."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tilert_ref.engine import indexer, model, moe
from tilert_ref.engine.cache import KVCache
from tilert_ref.engine.decode import step
from tilert_ref.engine.numerics import HOPPER
from tilert_ref.engine.ref import RefEngine, load_engine
from tilert_ref.engine.weights import LayerWeights, MlpWeights
from tilert_ref.golden.recording import Answer
from tilert_ref.golden.replay import index_of, rows_of

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "compare_operators.py"))
TOPK, LENGTH = 128, 140  # two blocks of chosen rows: in one, the kernels of fp8 and bf16 rows agree
TAPS = {  # the engine's functions, and which of their arguments tells their calls apart
    **{(model, "linear"): 1, (indexer, "linear"): 1, (moe, "linear"): 1, (model, "mlp"): 0, (moe, "mlp"): 0},
    **{(model, "rms_norm"): 1, (model, "add_rms_norm"): 2, (F, "layer_norm"): 2, (moe, "router_logits"): 2},
    **{(model, "moe"): 0, (model, "lightning_index"): 0, (indexer, "index_weights"): 0},
    **{(KVCache, "write"): 1, (KVCache, "write_index"): 1, (indexer, "round_index"): 2},
    **{(model, "heads_product"): 1, (model, "_absorbed"): 2},
}


def recorded(engine: RefEngine) -> Answer:
    """One token decoded behind a prompt."""
    first, calls, w = engine.prefill([3 + 7 * i % 400 for i in range(LENGTH)]), [], engine.model.weights

    def tap(name: str, function, telling: int):
        def tapped(*args, **kwargs):
            result = function(*args, **kwargs)
            calls.append((name, args[telling], args, result))
            return result

        return tapped

    with pytest.MonkeyPatch.context() as patch:
        for (where, name), telling in TAPS.items():
            patch.setattr(where, name, tap(name, getattr(where, name), telling))
        hidden, logits = step(engine.model, engine.cache, LENGTH, [first])

    def call(name: str, told: object):
        return next(values for called, telling, *values in calls if called == name and telling is told)

    seen = {"model.embed_tokens": w.embed[first][None], "model.norm": hidden, "logits_processor": logits.bfloat16()}
    queries = [result[0] for name, _, _, result in calls if name == "round_index"]
    for number, layer in enumerate(w.layers):
        seen |= decoder_layer(call, queries[number], number, layer)
    trace = {name: list(got) if isinstance(got, tuple) else [got.clone()] for name, got in seen.items()}
    rows, index = rows_of(engine, 0, LENGTH + 1), index_of(engine, 0, LENGTH + 1)
    return {"ids": [first], "top": [], "rows": rows, "index": index, "trace": [trace]}


def decoder_layer(call, codes: torch.Tensor, number: int, w: LayerWeights) -> dict[str, torch.Tensor | tuple]:
    """call(function, what tells the call apart) -> (arguments, result)."""
    a, i, p, s = w.attention, w.attention.indexer, f"model.layers.{number}", f"model.layers.{number}.self_attn."
    outs = {name: call("linear", getattr(a, name))[1] for name in ("q_a", "kv_a", "q_b", "o")}
    q_nope, q_rope = call("heads_product", a.w_uk)[0][0], call("_absorbed", number)[0][4].q_rope
    latent, k_rope = call("write", number)[0][3:]
    x = call("linear", a.q_a)[0][0]
    op_in = x, codes, call("write_index", number)[0][3], call("index_weights", i)[1]
    dense = isinstance(w.mlp, MlpWeights)
    out, inner, m = call("mlp" if dense else "moe", w.mlp)[1], w.mlp if dense else w.mlp.shared, f"{p}.mlp."
    post = call("add_rms_norm", w.post_attention_norm)[1]
    seen = {f"{p}.input_layernorm": call("add_rms_norm", w.input_norm)[1], f"{p}.post_attention_layernorm": post}
    seen |= {f"{s}mla_attn:in": (torch.tensor([LENGTH]), x), f"{s}q_b_proj": outs["q_b"], f"{s}o_proj": outs["o"]}
    seen |= {f"{s}fused_qkv_a_proj": torch.cat((outs["q_a"], outs["kv_a"]), -1), f"{p}.self_attn": outs["o"]}
    seen |= {f"{s}{name}_layernorm": call("rms_norm", getattr(a, f"{name}_norm"))[1] for name in ("q_a", "kv_a")}
    seen |= {f"{s}mla_attn.mla_attn:in": (torch.cat((q_nope, q_rope), -1), latent, k_rope[:, None])}
    seen |= {f"{s}mla_attn.mla_attn": call("linear", a.o)[0][0], f"{s}indexer.wq_b": call("linear", i.wq_b)[1]}
    parts = [call("linear", part)[1] for part in (i.wk, i.weights_proj)]
    seen |= {f"{s}indexer.wk_weights_proj": torch.cat(parts, -1), f"{s}indexer.indexer_op:in": op_in}
    seen |= {f"{s}indexer.indexer_op": torch.stack(call("lightning_index", i)[1])}
    seen |= {f"{s}indexer.k_norm": call("layer_norm", i.k_norm)[1].bfloat16(), f"{p}.mlp": out, p: (out, post[1])}
    if not dense:
        seen |= {f"{m}gate": call("router_logits", w.mlp.gate)[1], f"{m}shared_experts": call("mlp", inner)[1]}
    m = m if dense else f"{m}shared_experts."
    seen |= {f"{m}{name}_proj": call("linear", getattr(inner, name))[1] for name in ("gate_up", "down")}
    return seen | {f"{m}act_fn": call("linear", inner.down)[0][0]}


@pytest.mark.parametrize(("arch", "rows"), [("glm5", "fp8"), ("dsv32", "bf16")])
def test_finds_no_difference_from_itself_and_a_single_bit(arch: str, rows: str, tiny, tmp_path: Path) -> None:
    directory = tiny(arch, index_topk=TOPK)
    engine = load_engine(directory, max_seq_len=160, kv_cache_dtype=rows, kv_scale_rule="plain", kernels=HOPPER)
    torch.save({0: recorded(engine)}, tmp_path / "0.trace.pt")
    (answer,) = SCRIPT["read_answers"](tmp_path / "0.trace.pt")
    table = SCRIPT["compare"](engine.model, [answer])
    assert len(table) == 29
    assert {name: count for name, count in table.items() if count.values_off or count.calls_equal < count.calls} == {}
    assert table["indexer choice"].calls == 3 and table["indexer choice"].values == 3 * (LENGTH + 1)

    answer["trace"][0]["model.layers.1.self_attn.o_proj"][0].view(torch.int16)[0, 5] ^= 1
    again = SCRIPT["compare"](engine.model, [answer])
    changed = again.pop("o_proj")
    assert (changed.calls_equal, changed.calls, changed.values_off) == (2, 3, 1)
    assert again == {name: count for name, count in table.items() if name != "o_proj"}
