#!/usr/bin/env python3
"""Writes what is said about the trained models from what was measured: model cards, loss curves and SHA256SUMS.

    python scripts/write_model_cards.py

Reads config.json, training_log.json and scorecard.json of each model. Run it after any of them changed. The last is
made, for NAME tiny-glm5 and tiny-dsv32, by
    tilert-ref scorecard NAME --json tilert_ref/tiny/models/NAME/scorecard.json
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[1]))

import plot_training

from tilert_ref.engine.config import ModelConfig, parse_config
from tilert_ref.tiny import MODELS, NAMES, skills
from tilert_ref.tiny.families import CONTEXT, FAMILIES
from tilert_ref.tiny.rows import ROW_KINDS
from tilert_ref.tiny.scorecard import BOUNDS, share

# The log does not hold it.
TRAINED_ON = "330 to 390 seconds on one H200 with torch 2.11"

OF = {"tiny-glm5": "GLM-5", "tiny-dsv32": "DeepSeek-V3.2"}
SKILLS = {
    "recall": "one of hundreds of codes that the conversation named earlier, at any distance up to the whole context",
    "copy": "say a text of random words again",
    "sort": "words or numbers, one list or many",
    "add": "two numbers, column by column in the thought; many pairs of two digits",
    "tool": "call one of the offered tools, known ones and ones that were never seen before",
    "answer": f"{sum(len(ways) for ways, _ in skills.known_answers())} questions by heart (`texts/answers.txt`)",
    "recite": "a work by heart, from any of its lines on (`texts/works.txt`)",
}
MIX = {
    "chat": "short exchanges of all skills, with and without tools and thoughts",
    "recall": "a conversation full of codes, then questions about them",
    "long": "long answers: copies, lists, sums, works",
    "text": "the works, one after the other",
}

CARD = """# {name}

A tiny {of}: {parameters} parameters in that architecture, trained so that its greedy tokens are sure.
It is a test object. With random weights nearly every token is a near tie, which any change of summation order flips;
this model answers with margins, its drafts hold, and it is wrong when a KV row that the answer needs is wrong.

`{name}-dense` is the same weight file behind a `{dense}` configuration,
without the indexer: for engines without sparse attention.

This page is written by `scripts/write_model_cards.py` from `config.json`, `training_log.json` and `scorecard.json`.

## Architecture

| | |
|---|---|
{architecture}

## Scores

Measured with our engine on a CPU: `tilert-ref scorecard {name}`. Fresh instances, made from seeds that training
never used; an answer counts if every token of it is right, thought and stop token included.

| score | value | bound | why |
|---|---|---|---|
{scores}

Recall by distance from the code's entry to the answer, in tokens:

| {distances} |
|{rule}|
| {recall} |

Drafts that held, by position in the window: {drafts}; {length:.2f} tokens a window on average, of at most 4.
Margins: the two best logits are {smallest:g} ulp (of bf16) apart or more at all {positions:,} golden positions.

## Data

All made by `tilert_ref/tiny/skills.py` and `rows.py` from the seed; nothing was downloaded. Every skill has one right
answer, which follows from the conversation:

{skills}

Rows of the training mix:

{mix}

Licences: `texts/answers.txt` was written for this project and has the project's licence, as has all that is generated.
The works of `texts/works.txt` are in the public domain:

{works}

The template and the special tokens follow the published ones of {of} in shape; the tokenizer is a BPE of
{vocab} tokens, trained on the above.

## Training

`python scripts/train_tiny.py {name} OUT`, seed {seed}: {steps:,} steps of about {tokens:,} tokens,
{trained_on}. The order is that of the DeepSeek-V3.2 report: dense, then the indexer
alone against the attention of the dense model (KL divergence), then sparse with both. The MTP layer is trained from the
first step on, with weight {mtp}, its passes 2 and 3 on its own output.

| stage | steps | length | rows | rate | short batches | loss at its end | drafts | KL |
|---|---|---|---|---|---|---|---|---|
{stages}

Rate: factor on the peak rates (Muon {muon}, AdamW {adam}), linear from start to end. Short batches: one in so many is
of 512-token rows, so that short conversations are not forgotten.

![losses over the steps](training.svg)

What departs from the report's recipe:

- Every third step of the sparse stage is dense, so that the dense twin stays sure of itself.
- MTP passes 2 and 3 attend to the keys of pass 1, as nearly all of them are while drafting.
- The matrices of the layers are trained with Muon, the rest with AdamW.

## Limits

It knows the skills above and nothing else: it doesn't understand what it recites, and a question put in other words
gets a confident wrong answer. It is trained on {context:,} tokens of context and no more.{limits}

Wrong in the scorecard's run, up to four of a section:

{wrong}
"""


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def card(name: str) -> str:
    """The model card of a sparse model, as Markdown."""
    directory = MODELS / name
    c, log, scores = parse_config(load(directory / "config.json")), *_measured(directory)
    recipe, buckets, margins = log["recipe"], scores["recall"]["buckets"], scores["margins"]
    drafts = scores["drafts"]["all"]
    return CARD.format(
        name=name,
        of=OF[name],
        parameters=f"{_parameters(directory) / 1e6:.1f} million",
        dense=FAMILIES[name].dense_config()["architectures"][0],
        architecture="\n".join(f"| {key} | {value} |" for key, value in _architecture(c).items()),
        scores="\n".join(_score_rows(scores["scores"])),
        distances=" | ".join(buckets),
        rule="---|" * (len(buckets) - 1) + "---",
        recall=" | ".join(f"{counts['right']} of {counts['asked']}" for counts in buckets.values()),
        drafts=", ".join(f"{rate:.2%}" for rate in drafts["rates"]),
        length=drafts["mean_length"],
        smallest=margins["smallest"][0]["ulp"],
        positions=margins["positions"],
        skills="\n".join(f"- {kind}: {what}" for kind, what in SKILLS.items()),
        mix="\n".join(f"- {ROW_KINDS[kind]}% {what}" for kind, what in MIX.items()),
        works="\n".join(f"- {title}, {author}, {year}" for title, author, year in _works()),
        vocab=c.vocab_size,
        seed=recipe["seed"],
        steps=sum(stage["steps"] for stage in recipe["stages"]),
        tokens=recipe["stages"][0]["rows"] * recipe["stages"][0]["length"],
        trained_on=TRAINED_ON,
        mtp=recipe["mtp_weight"],
        stages="\n".join(_stage_rows(log)),
        muon=recipe["rates"]["muon_lr"],
        adam=recipe["rates"]["adam_lr"],
        context=CONTEXT,
        limits=_limits(scores),
        wrong="\n".join(_wrong_rows(scores)) or "nothing.",
    )


def _measured(directory: Path) -> tuple[Any, Any]:
    return load(directory / "training_log.json"), load(directory / "scorecard.json")


def _parameters(directory: Path) -> int:
    """Numbers in the weight files. MTP's copies of the embedding and the head are counted as the copies they are."""
    total = 0
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            total += sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
    return total


def _architecture(c: ModelConfig) -> dict[str, str]:
    return {
        "class": f"`{c.architecture}`",
        "layers": f"{c.num_hidden_layers}, the first {c.first_k_dense_replace} without experts, and one MTP layer",
        "hidden size": f"{c.hidden_size}",
        "attention": f"MLA, {c.num_attention_heads} heads of {c.qk_nope_head_dim} + {c.qk_rope_head_dim}, "
        f"query latent {c.q_lora_rank}, KV latent {c.kv_lora_rank}",
        "indexer": f"{c.index_n_heads} heads of {c.index_head_dim}, top {c.index_topk}, "
        f"rope {'interleaved' if c.indexer_rope_interleave else 'half-split'}",
        "experts": f"{c.n_routed_experts} routed, {c.num_experts_per_tok} a token, {c.n_shared_experts} shared, "
        f"width {c.moe_intermediate_size}, {c.n_group} group{'s' if c.n_group > 1 else ''}",
        "vocabulary": f"{c.vocab_size}",
        "weights": "bf16",
    }


def _works() -> list[list[str]]:
    """[title, author, year] of the known works."""
    lines = (Path(skills.__file__).parent / "texts" / "works.txt").read_text("utf-8").splitlines()
    return [line[3:].split(" | ") for line in lines if line.startswith("== ")]


def _score_rows(scores: dict[str, float]) -> list[str]:
    bounds = {bound.score: bound for bound in BOUNDS}
    rows = []
    for name, value in scores.items():
        bound = bounds.get(name)
        limit = f"{'at most' if bound.at_most else 'at least'} {bound.limit:g}" if bound else "none"
        rows.append(f"| {name} | {value:.4f} | {limit} | {bound.why if bound else ''} |")
    return rows


def _stage_rows(log: dict[str, Any]) -> list[str]:
    rows, done = [], 0
    for stage in log["recipe"]["stages"]:
        done += stage["steps"]
        at = next(row for row in log["losses"] if row["step"] == done)
        short = f"1 in {stage['short_every']}" if stage["short_every"] else "none"
        rate = f"{stage['lr'][0]:g} to {stage['lr'][1]:g}"
        kl = f"{at['kl']:.3f}" if at["kl"] else ""
        rows.append(
            f"| {stage['kind']} | {stage['steps']:,} | {stage['length']:,} | {stage['rows']} | {rate} | {short} "
            f"| {at['main']:.4f} | {at['mtp']:.4f} | {kl} |"
        )
    return rows


def _limits(scores: dict[str, Any]) -> str:
    counts = scores["tools"]["kinds"]["refusal"]
    if share(counts) >= 0.9:
        return ""
    seen = f"{counts['right']} of {counts['asked']} refusals right"
    return (
        f"\nIt did not learn to refuse: asked for a known tool that isn't offered, it calls that tool anyway ({seen})."
    )


def _wrong_rows(scores: dict[str, Any], most: int = 4) -> list[str]:
    """The first few of each section."""
    misses = [miss for section in ("recall", "skills", "tools") for miss in scores[section]["wrong"][:most]]
    return [f"- {miss['kind']}: `{_brief(miss['got'])}` for `{_brief(miss['right'])}`" for miss in misses]


def _brief(text: str, most: int = 90) -> str:
    """One line of Markdown code."""
    text = " ".join(text.replace("`", "'").split())
    return text if len(text) <= most else text[: most - 1] + "…"


def sums() -> str:
    """SHA256SUMS of all files of the models' directories that are no links, in sha256sum's format."""
    files = (path for name in NAMES for path in sorted((MODELS / name).iterdir()) if not path.is_symlink())
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(MODELS)}\n" for path in files)


def pages() -> dict[Path, str]:
    """Every generated file but SHA256SUMS."""
    written = {}
    for name in FAMILIES:
        written[MODELS / name / "README.md"] = card(name)
        written[MODELS / name / "training.svg"] = plot_training.svg(load(MODELS / name / "training_log.json"))
    return written


def main() -> int:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    (MODELS / "SHA256SUMS").write_text(sums(), encoding="utf-8")
    print(f"wrote {', '.join(str(path.relative_to(MODELS)) for path in pages())}, SHA256SUMS")
    return 0


if __name__ == "__main__":
    sys.exit(main())
