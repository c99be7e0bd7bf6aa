"""What a recording of vLLM holds, and the small file that is kept of one.

A recording as record.py writes it has every KV row of every prompt: hundreds of megabytes. The golden file that is
kept of it (`write_golden`) has all prompts, tokens and best logprobs, the whole prompt KV of some prompts, and for the
others digests and sampled rows: enough to check another engine anywhere, and to tell where a device is there to record
again whether it still is the same vLLM.

The file is a safetensors file, compressed with xz; its metadata is one JSON object under the key "golden".
"""

import hashlib
import json
import lzma
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from tilert_ref.connector.layout import INDEX_PAGE, INDEX_PAGE_BYTES, PAGE_TOKENS, page_count
from tilert_ref.connector.planes import CODE_BYTES, SCALE_BYTES

VERSION = 1
DIGEST = 16
"""Hexadecimal digits that are kept of a sha256."""

Top = list[list[tuple[int, float]]]
"""Per position vLLM's best tokens as (id, logprob), best first."""


class Samples(TypedDict):
    """Some decode positions of one prompt (m of them): what vLLM wrote there, and what its indexer chose."""

    positions: list[int]
    rows: torch.Tensor  # uint8 [layers, m, row bytes]
    index: torch.Tensor | None  # uint8 [layers, m, 132]
    choices: torch.Tensor | None  # int16 [main layers, m, index_topk]


class Answer(TypedDict):
    """vLLM's answer to one prompt of T tokens, n tokens long."""

    ids: list[int]
    top: Top
    rows: NotRequired[torch.Tensor]  # uint8 [layers, T + n - 1, row bytes]; of a golden file: of the prompt only
    index: NotRequired[torch.Tensor | None]  # uint8 [layers, T + n - 1, 132], None for a dense model; likewise
    choices: NotRequired[torch.Tensor]  # int16 [main layers, n - 1, index_topk], -1 where fewer tokens are there,
    # in the order in which vLLM's attention takes them
    handed_over: NotRequired[bool]  # our connector sent the prompt's KV, and it arrived as it lies in vLLM's caches
    trace: NotRequired[list[dict[str, list[torch.Tensor]]]]  # vllm_spy.trace
    samples: NotRequired[Samples]  # golden files only
    digests: NotRequired[dict[str, str]]  # golden files only: see `digests`


def index_of_pages(pages: torch.Tensor, tokens: int) -> torch.Tensor:
    """Wire pages uint8 [ceil(tokens / 64), 8448] -> index keys token by token, uint8 [tokens, 132]."""
    split = INDEX_PAGE["scales"].offset
    codes, scales = pages[:, :split].reshape(-1, CODE_BYTES), pages[:, split:].reshape(-1, SCALE_BYTES)
    return torch.cat((codes[:tokens], scales[:tokens]), dim=1)


def pages_of_index(index: torch.Tensor) -> torch.Tensor:
    """The inverse of `index_of_pages`; what lies beyond the last token is zero."""
    pages = torch.zeros(page_count(len(index)), INDEX_PAGE_BYTES, dtype=torch.uint8)
    split, token = INDEX_PAGE["scales"].offset, torch.arange(len(index))
    page, place = token // PAGE_TOKENS, token % PAGE_TOKENS
    pages[:, :split].view(len(pages), PAGE_TOKENS, CODE_BYTES)[page, place] = index[:, :CODE_BYTES]
    pages[:, split:].view(len(pages), PAGE_TOKENS, SCALE_BYTES)[page, place] = index[:, CODE_BYTES:]
    return pages


def digests(answer: Answer, tokens: int) -> dict[str, str]:
    """Digests of a whole answer's bytes, by what they cover: the prompt's rows and index keys, those of decode."""
    parts = dict[str, torch.Tensor]()
    for name in ("rows", "index"):
        if (whole := answer.get(name)) is not None:
            parts |= {f"prompt {name}": whole[:, :tokens], f"decode {name}": whole[:, tokens:]}
    return {name: hashlib.sha256(part.contiguous().numpy()).hexdigest()[:DIGEST] for name, part in parts.items()}


@dataclass(frozen=True)
class Noise:
    """vLLM in another arrangement against vLLM alone, up to each prompt's first flip."""

    arrangement: str
    positions: int
    flips: int
    largest_logprob_change: float

    def __str__(self) -> str:
        change = f"largest change of a logprob {self.largest_logprob_change:.4f}"
        return f"{self.arrangement}: {self.flips} of {self.positions} positions flip, {change}"


@dataclass(frozen=True)
class Keep:
    """What a golden file keeps of which prompts.

    whole: all KV of the prompt, all choices of the indexer, and whole_samples decode positions. sampled: `samples`
    decode positions. The best logprobs of all prompts are kept at each `every`th position, the best two at all.
    """

    whole: Sequence[int] = ()
    sampled: Sequence[int] = ()
    whole_samples: int = 16
    samples: int = 2
    every: int = 8


@dataclass(frozen=True)
class Golden:
    """One recording of vLLM with the facts that it depends on.

    weights: "bf16" or "fp8" (128x128 blocks). kv: "bf16" or "fp8_ds_mla". scale_rule: which rule wrote fp8_ds_mla rows
    (rounding.ScaleRule), None for bf16 rows. checkpoint: sha256 over the checkpoint's tensors (`checkpoint_digest`).
    """

    model: str
    weights: str
    kv: str
    mtp: bool
    scale_rule: str | None
    checkpoint: str
    facts: dict[str, Any]
    noise: list[Noise]
    prompts: list[list[int]]
    answers: list[Answer]

    @property
    def name(self) -> str:
        return f"{self.model}.{self.weights}-weights.{self.kv}-kv{'.mtp' if self.mtp else ''}"


def checkpoint_digest(directory: str | Path) -> str:
    """sha256 over config.json and the safetensors files, in the order of their names."""
    digest = hashlib.sha256()
    for path in [*sorted(Path(directory).glob("*.safetensors")), Path(directory) / "config.json"]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def save_whole(path: str | Path, golden: Golden) -> None:
    """All of a recording, some hundred MB; plain dicts, lists and tensors."""
    torch.save(_meta(golden) | {"prompts": golden.prompts, "answers": golden.answers}, path)


def load_whole(path: str | Path) -> Golden:
    plain = torch.load(path, weights_only=True)
    return Golden(**plain | {"noise": [Noise(**n) for n in plain["noise"]]})


def _meta(golden: Golden) -> dict[str, Any]:
    """Everything but prompts and answers, for JSON."""
    names = (f.name for f in fields(golden) if f.name not in ("prompts", "answers"))
    return {name: getattr(golden, name) for name in names} | {"noise": [asdict(noise) for noise in golden.noise]}


def write_golden(path: str | Path, golden: Golden, keep: Keep) -> None:
    """Writes what `keep` says of a whole recording."""
    tensors = {
        "prompt_ids": torch.tensor([i for prompt in golden.prompts for i in prompt], dtype=torch.int32),
        "prompt_lengths": torch.tensor([len(prompt) for prompt in golden.prompts], dtype=torch.int32),
        "ids": torch.tensor([answer["ids"] for answer in golden.answers], dtype=torch.int32),
    }
    tops = [answer["top"] for answer in golden.answers]
    tensors |= _pack_top("top2", [[at[:2] for at in top] for top in tops])
    tensors |= _pack_top("top", [top[:: keep.every] for top in tops])
    for number in keep.whole:
        tensors |= _named(f"whole.{number}", _prompt_part(golden.answers[number], len(golden.prompts[number])))
    for number in {*keep.whole, *keep.sampled}:
        count = keep.whole_samples if number in keep.whole else keep.samples
        answer = golden.answers[number]
        samples = answer.get("samples") or sample(answer, len(golden.prompts[number]), count)
        tensors |= _named(f"samples.{number}", samples | {"positions": torch.tensor(samples["positions"])})
    meta = _meta(golden)
    meta |= {"version": VERSION, "every": keep.every}
    pairs = zip(golden.answers, golden.prompts, strict=True)
    meta["digests"] = [answer.get("digests") or digests(answer, len(prompt)) for answer, prompt in pairs]
    meta["handed_over"] = sum(answer.get("handed_over", False) for answer in golden.answers)
    data = save_tensors({k: v.contiguous() for k, v in tensors.items()}, {"golden": json.dumps(meta)})
    Path(path).write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def read_golden(path: str | Path) -> Golden:
    """Raises ValueError if the file is of another version."""
    data = lzma.decompress(Path(path).read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    meta, tensors = json.loads(header["__metadata__"]["golden"]), load_tensors(data)
    if (version := meta.pop("version")) != VERSION:
        raise ValueError(f"{path}: golden file of version {version}, legal: {VERSION}")
    every, handed_over, all_digests = meta.pop("every"), meta.pop("handed_over"), meta.pop("digests")
    prompts = [ids.tolist() for ids in tensors["prompt_ids"].split(tensors["prompt_lengths"].tolist())]
    twos, tops = _unpack_top("top2", tensors), _unpack_top("top", tensors)
    answers = list[Answer]()
    for number, ids in enumerate(tensors["ids"].tolist()):
        top = [tops[number][i // every] if i % every == 0 else two for i, two in enumerate(twos[number])]
        answers.append({"ids": ids, "top": top, "digests": all_digests[number]})
        if whole := _under(f"whole.{number}.", tensors):
            answers[-1] |= {"index": None} | whole
        if samples := _under(f"samples.{number}.", tensors):
            positions = samples.pop("positions").tolist()
            answers[-1]["samples"] = {"positions": positions, "index": None, "choices": None} | samples
    meta["facts"]["handed_over"] = handed_over
    return Golden(prompts=prompts, answers=answers, **meta | {"noise": [Noise(**n) for n in meta["noise"]]})


def sample(answer: Answer, tokens: int, count: int) -> Samples:
    """`count` decode positions of a whole answer, evenly over it."""
    fed = len(answer["ids"]) - 1
    picked = torch.tensor([tokens + (2 * i + 1) * fed // (2 * count) for i in range(count)])
    index, choices = answer.get("index"), answer.get("choices")
    return {
        "positions": picked.tolist(),
        "rows": answer["rows"][:, picked],
        "index": None if index is None else index[:, picked],
        "choices": None if choices is None else choices[:, picked - tokens].sort(-1).values,
    }


def _prompt_part(answer: Answer, tokens: int) -> dict[str, torch.Tensor | None]:
    index = answer.get("index")
    cut = {"rows": answer["rows"][:, :tokens], "index": None if index is None else index[:, :tokens]}
    return cut | {"choices": answer.get("choices")}


def _pack_top(name: str, tops: list[Top]) -> dict[str, torch.Tensor]:
    """Ids [prompts, positions, k] and logprobs; vLLM adds the sampled token if it isn't among the best, which greedy
    sampling never needs."""
    k = min(len(at) for top in tops for at in top)
    ids = [[[i for i, _ in at[:k]] for at in top] for top in tops]
    logprobs = [[[lp for _, lp in at[:k]] for at in top] for top in tops]
    return {
        f"{name}_ids": torch.tensor(ids, dtype=torch.int32),
        f"{name}_logprobs": torch.tensor(logprobs, dtype=torch.float32),
    }


def _unpack_top(name: str, tensors: dict[str, torch.Tensor]) -> list[Top]:
    ids, logprobs = tensors[f"{name}_ids"].tolist(), tensors[f"{name}_logprobs"].tolist()
    return [
        [list(zip(i, lp, strict=True)) for i, lp in zip(at, values, strict=True)]
        for at, values in zip(ids, logprobs, strict=True)
    ]


def _named(prefix: str, parts: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": part for name, part in parts.items() if part is not None}


def _under(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
