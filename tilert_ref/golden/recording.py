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
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from tilert_ref.connector.layout import INDEX_PAGE, INDEX_PAGE_BYTES, PAGE_TOKENS, page_count, row_format
from tilert_ref.connector.planes import CODE_BYTES, INDEX_TOKEN_BYTES, SCALE_BYTES
from tilert_ref.model_files import InputError

VERSION = 1
DIGEST = 16
"""Hexadecimal digits that are kept of a sha256."""
MOST_UNPACKED = 1 << 28
"""Bytes that a golden file may unpack to; the largest kept one does to 4 MB."""
XZ_MEMORY = 1 << 28  # what xz may take for itself: 65 MB with the preset that is used here

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

    whole: all KV of the prompt, all choices of the indexer, the first `lead` decode positions and `whole_samples` more.
    sampled: `samples` decode positions. The best logprobs of all prompts are kept at each `every`th position, the best
    two everywhere.
    """

    whole: Sequence[int] = ()
    sampled: Sequence[int] = ()
    lead: int = 8
    whole_samples: int = 16
    samples: int = 2
    every: int = 8


def recording_name(model: str, weights: str, kv: str, mtp: bool) -> str:
    return f"{model}.{weights}-weights.{kv}-kv{'.mtp' if mtp else ''}"


@dataclass(frozen=True)
class Golden:
    """One recording of vLLM with the facts that it depends on.

    weights: "bf16" or "fp8" (128x128 blocks). kv: "bf16" or "fp8_ds_mla". scale_rule: which rule wrote fp8_ds_mla rows
    (rounding.ScaleRule), None for bf16 rows. checkpoint: sha256 over the checkpoint's files (`checkpoint_digest`).
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
        return recording_name(self.model, self.weights, self.kv, self.mtp)


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
    """What save_whole wrote. Raises InputError if it is something else, OSError if there is nothing to read."""
    try:
        plain = torch.load(path, weights_only=True)
        return Golden(**plain | {"noise": [Noise(**n) for n in plain["noise"]]})
    except OSError:
        raise
    except Exception as error:  # torch.load has none of its own: whatever part of it meets the file first
        why = str(error).splitlines()[:1]
        raise InputError(f"{path}: not a whole recording ({type(error).__name__}: {', '.join(why)})") from error


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
        lead, count = (keep.lead, keep.whole_samples) if number in keep.whole else (0, keep.samples)
        answer = golden.answers[number]
        samples = answer.get("samples") or sample(answer, len(golden.prompts[number]), lead, count)
        tensors |= _named(f"samples.{number}", samples | {"positions": torch.tensor(samples["positions"])})
    meta = _meta(golden)
    meta |= {"version": VERSION, "every": keep.every}
    pairs = zip(golden.answers, golden.prompts, strict=True)
    meta["digests"] = [answer.get("digests") or digests(answer, len(prompt)) for answer, prompt in pairs]
    meta["handed_over"] = sum(answer.get("handed_over", False) for answer in golden.answers)
    data = save_tensors({k: v.contiguous() for k, v in tensors.items()}, {"golden": json.dumps(meta)})
    Path(path).write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))


def read_golden(path: str | Path) -> Golden:
    """Raises InputError, naming what is wrong, if this isn't a whole golden file of this version."""
    try:
        return _read(Path(path).read_bytes())
    except (ValueError, lzma.LZMAError, SafetensorError, msgspec.MsgspecError) as error:
        raise InputError(f"{path}: not a golden file of version {VERSION}: {error}") from error


def _read(packed: bytes) -> Golden:
    data = _unpacked(packed)
    tensors = _Tensors(load_tensors(data))
    header = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])
    text = header.get("__metadata__", {}).get("golden")
    if text is None:
        raise ValueError('a safetensors file without metadata "golden"')
    if (version := msgspec.json.decode(text, type=_Version).version) != VERSION:
        raise ValueError(f"version {version}, legal: {VERSION}")
    meta = msgspec.json.decode(text, type=_Meta)
    if missing := {"vllm", "device", "cuda"} - meta.facts.keys():
        raise ValueError(f"facts without {sorted(missing)}")
    lengths = tensors.take("prompt_lengths", torch.int32, None).tolist()
    prompt_ids = tensors.take("prompt_ids", torch.int32, sum(lengths))
    if min(lengths, default=0) < 1 or len(meta.digests) != len(lengths):
        raise ValueError(
            f"{len(meta.digests)} digests for prompts of {lengths} tokens; legal: one each, no empty prompt"
        )
    ids = tensors.take("ids", torch.int32, len(lengths), None)
    twos = _unpack_top("top2", tensors, *ids.shape)
    tops = _unpack_top("top", tensors, len(ids), -(-ids.shape[1] // meta.every))
    answers = list[Answer]()
    for number, (answer, tokens) in enumerate(zip(ids.tolist(), lengths, strict=True)):
        top = [tops[number][i // meta.every] if i % meta.every == 0 else two for i, two in enumerate(twos[number])]
        answers.append({"ids": answer, "top": top, "digests": meta.digests[number]})
        answers[-1] |= _unpack_kv(tensors, number, meta.kv, tokens, len(answer))
    tensors.check_all_taken()
    known = {f.name: getattr(meta, f.name) for f in fields(Golden) if f.name not in ("prompts", "answers")}
    prompts = [prompt.tolist() for prompt in prompt_ids.split(lengths)]
    return Golden(prompts=prompts, answers=answers, **known | {"facts": meta.facts | {"handed_over": meta.handed_over}})


class _Version(msgspec.Struct):
    version: int


class _Meta(_Version, forbid_unknown_fields=True):
    """The JSON object of a golden file."""

    model: str
    weights: Literal["bf16", "fp8"]
    kv: Literal["bf16", "fp8_ds_mla"]
    mtp: bool
    scale_rule: Literal["plain", "power_of_two"] | None
    checkpoint: str
    facts: dict[str, Any]
    noise: list[Noise]
    every: Annotated[int, msgspec.Meta(ge=1)]
    digests: list[dict[str, str]]
    handed_over: int


class _Tensors:
    """The tensors of a golden file, each taken once; ValueErrors name what was got and what is legal."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.left = tensors

    def take(self, name: str, dtype: torch.dtype, *shape: int | None) -> torch.Tensor:
        """shape: None where any number will do."""
        tensor = self.left.pop(name, None)
        if tensor is None:
            raise ValueError(f"no tensor {name}")
        fits = tensor.dim() == len(shape) and all(b in (None, a) for a, b in zip(tensor.shape, shape, strict=True))
        if tensor.dtype != dtype or not fits:
            legal = ", ".join("any" if n is None else str(n) for n in shape)
            raise ValueError(f"{name}: {list(tensor.shape)} {tensor.dtype}, legal: [{legal}] {dtype}")
        return tensor

    def maybe(self, name: str, dtype: torch.dtype, *shape: int | None) -> torch.Tensor | None:
        return self.take(name, dtype, *shape) if name in self.left else None

    def check_all_taken(self) -> None:
        if self.left:
            raise ValueError(f"tensors without a meaning: {sorted(self.left)}")


def _unpacked(packed: bytes) -> bytes:
    decompressor = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
    data = decompressor.decompress(packed, MOST_UNPACKED)
    if not decompressor.eof:
        why = "cut off" if decompressor.needs_input else f"more than {MOST_UNPACKED:,} bytes unpacked"
        raise ValueError(f"{len(packed):,} bytes of xz, {why}")
    return data


def _unpack_kv(tensors: _Tensors, number: int, kv: str, tokens: int, made: int) -> dict[str, Any]:
    """Rows, index keys, choices and samples of one prompt, where they were kept."""
    kept, width, end = dict[str, Any](), row_format(kv).row_bytes, tokens + made - 1
    if f"whole.{number}.rows" in tensors.left:
        part = _unpack_part(tensors, f"whole.{number}", width, tokens, made - 1, end)
        kept |= {name: value for name, value in part.items() if name != "choices" or value is not None}
    if (positions := tensors.maybe(f"samples.{number}.positions", torch.int64, None)) is not None:
        places = positions.tolist()
        if not all(tokens <= place < end for place in places):
            raise ValueError(f"samples.{number}.positions: {places}, legal: {tokens} to {end - 1}")
        part = _unpack_part(tensors, f"samples.{number}", width, len(places), len(places), end)
        kept["samples"] = {"positions": places} | part
    return kept


def _unpack_part(
    tensors: _Tensors, name: str, width: int, tokens: int, queries: int, end: int
) -> dict[str, torch.Tensor | None]:
    """end: no query can choose this position."""
    rows = tensors.take(f"{name}.rows", torch.uint8, None, tokens, width)
    index = tensors.maybe(f"{name}.index", torch.uint8, len(rows), tokens, INDEX_TOKEN_BYTES)
    choices = tensors.maybe(f"{name}.choices", torch.int16, None, queries, None)
    if choices is not None and choices.numel() and (most := int(choices.max())) >= end:
        raise ValueError(f"{name}.choices: position {most}, legal: below {end}")
    return {"rows": rows, "index": index, "choices": choices}


def sample(answer: Answer, tokens: int, lead: int, count: int) -> Samples:
    """The first `lead` decode positions of a whole answer, and `count` evenly over it."""
    fed = len(answer["ids"]) - 1
    spread = {tokens + (2 * i + 1) * fed // (2 * count) for i in range(count)}
    picked = torch.tensor(sorted({*range(tokens, tokens + min(lead, fed)), *spread}))
    index, choices = answer.get("index"), answer.get("choices")
    return {
        "positions": picked.tolist(),
        "rows": answer["rows"][:, picked],
        "index": None if index is None else index[:, picked],
        "choices": None if choices is None else choices[:, picked - tokens].sort(-1).values,
    }


def beginning(answer: Answer, tokens: int, count: int) -> Answer:
    """The first `count` tokens of an answer to a prompt of `tokens`."""
    short: Answer = answer | {"ids": answer["ids"][:count], "top": answer["top"][:count]}
    end = tokens + count - 1
    if "choices" in answer:
        short["choices"] = answer["choices"][:, : count - 1]
    if samples := answer.get("samples"):
        within = [i for i, position in enumerate(samples["positions"]) if position < end]
        names = ("rows", "index", "choices")
        parts = {name: None if samples[name] is None else samples[name][:, within] for name in names}
        short["samples"] = {"positions": [samples["positions"][i] for i in within]} | parts
    elif "rows" in answer:
        short |= {name: None if answer[name] is None else answer[name][:, :end] for name in ("rows", "index")}
    return short


def recorded_rows(answer: Answer, tokens: int) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
    """Decode position -> vLLM's row [layers, row bytes] and index key [layers, 132], where they are known."""
    if samples := answer.get("samples"):
        places = {position: i for i, position in enumerate(samples["positions"])}
        rows, index = samples["rows"], samples["index"]
    elif "rows" in answer:
        rows, index = answer["rows"], answer.get("index")
        places = {position: position for position in range(tokens, rows.shape[1])}
    else:
        return {}
    return {p: (rows[:, i], None if index is None else index[:, i]) for p, i in places.items()}


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


def _unpack_top(name: str, tensors: _Tensors, prompts: int, positions: int) -> list[Top]:
    ids = tensors.take(f"{name}_ids", torch.int32, prompts, positions, None)
    logprobs = tensors.take(f"{name}_logprobs", torch.float32, *ids.shape)
    if ids.shape[2] < 2:
        raise ValueError(f"{name}_ids: the best {ids.shape[2]} tokens, legal: at least 2")
    return [
        [list(zip(i, lp, strict=True)) for i, lp in zip(at, values, strict=True)]
        for at, values in zip(ids.tolist(), logprobs.tolist(), strict=True)
    ]


def _named(prefix: str, parts: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": part for name, part in parts.items() if part is not None}
