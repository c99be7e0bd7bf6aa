"""Golden files: what is written is read back; bad files and wrong arguments are refused by name."""

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from tilert_ref.golden import recording, verify
from tilert_ref.golden.recording import Answer, Golden, Keep, Noise, checkpoint_digest, read_golden, write_golden

PROMPTS, MADE, LAYERS = [[5, 6, 7], [8] * 70], 9, 2
Tensors, Meta = dict[str, torch.Tensor], dict[str, Any]


def answer(prompt: list[int], seed: int) -> Answer:
    generator = torch.Generator().manual_seed(seed)
    tokens = len(prompt) + MADE - 1

    def draw(*shape: int, below: int = 256, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.randint(below, shape, generator=generator).to(dtype)

    top = [[(position + rank, -0.5 * rank) for rank in range(4)] for position in range(MADE)]
    return {
        "ids": list(range(MADE)),
        "top": top,
        "rows": draw(LAYERS, tokens, 656),
        "index": draw(LAYERS, tokens, 132),
        "choices": draw(LAYERS, MADE - 1, 4, below=len(prompt), dtype=torch.int16),
        "handed_over": True,
    }


@pytest.fixture(scope="module")
def whole() -> Golden:
    answers = [answer(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    noise, facts = [Noise("alone again", 18, 0, 0.0)], {"vllm": "0.26.0", "device": "some GPU", "cuda": "13.0"}
    return Golden("some", "bf16", "fp8_ds_mla", False, "plain", "abc", facts, noise, PROMPTS, answers)


@pytest.fixture
def path(whole: Golden, tmp_path: Path) -> Path:
    write_golden(
        tmp_path / "a.golden", whole, Keep(whole=[0], sampled=[0, 1], lead=2, whole_samples=3, samples=2, every=4)
    )
    return tmp_path / "a.golden"


def change(path: Path, edit: Callable[[Tensors, Meta], object]) -> None:
    """Writes the file again after `edit` changed its tensors and its JSON object."""
    data = lzma.decompress(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors, meta = load(data), json.loads(header["__metadata__"]["golden"])
    edit(tensors, meta)
    path.write_bytes(lzma.compress(save(tensors, {"golden": json.dumps(meta)})))


def test_what_is_kept_comes_back(whole: Golden, path: Path) -> None:
    read = read_golden(path)
    assert (read.name, read.noise, read.prompts) == (whole.name, whole.noise, PROMPTS)
    assert read.facts == whole.facts | {"handed_over": 2}
    for ours, theirs, prompt in zip(read.answers, whole.answers, PROMPTS, strict=True):
        assert ours["ids"] == theirs["ids"]
        assert ours["top"] == [at if i % 4 == 0 else at[:2] for i, at in enumerate(theirs["top"])]
        places = ours["samples"]["positions"]
        assert places == ([3, 4, 7, 9] if prompt is PROMPTS[0] else [72, 76])  # two that lead, and an even spread
        for name in ("rows", "index"):
            assert ours["samples"][name].equal(theirs[name][:, places])
        decoded = [place - len(prompt) for place in places]
        assert ours["samples"]["choices"].equal(theirs["choices"][:, decoded].sort(-1).values)
    assert read.answers[0]["rows"].equal(whole.answers[0]["rows"][:, :3])
    assert read.answers[0]["index"].equal(whole.answers[0]["index"][:, :3])
    assert read.answers[0]["choices"].equal(whole.answers[0]["choices"])
    assert "rows" not in read.answers[1]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t, m: m.update(version=2), r"version 2, legal: 1$"),
        (lambda t, m: m.pop("version"), "missing required field `version`"),
        (lambda t, m: m.pop("facts"), "missing required field `facts`"),
        (lambda t, m: m["facts"].pop("device"), r"facts without \['device'\]"),
        (lambda t, m: m.update(more=1), "unknown field `more`"),
        (lambda t, m: m.update(every=0), "`int` >= 1"),
        (lambda t, m: m.update(kv="fp8"), r"Invalid enum value 'fp8' - at `\$\.kv`"),
        (lambda t, m: m.update(digests=[{}]), "1 digests for prompts of"),
        (lambda t, m: t.pop("ids"), "no tensor ids"),
        (lambda t, m: t.update(junk=t["ids"].clone()), r"without a meaning: \['junk'\]"),
        (lambda t, m: t.update(prompt_lengths=torch.tensor([3, 71], dtype=torch.int32)), r"prompt_ids: \[73\]"),
        (lambda t, m: t.update(prompt_lengths=torch.tensor([0, 73], dtype=torch.int32)), "no empty prompt"),
        (lambda t, m: t.update(ids=t["ids"].long()), r"ids: \[2, 9\] torch.int64, legal: \[2, any\] torch.int32"),
        (lambda t, m: t.update(top_ids=t["top_ids"][:, :2].clone()), r"top_ids: .* legal: \[2, 3, any\]"),
        (lambda t, m: t.update({n: t[n][..., :1].clone() for n in ("top2_ids", "top2_logprobs")}), "legal: at least 2"),
        (lambda t, m: t.update({"whole.0.rows": t["whole.0.rows"][..., 1:].clone()}), r"legal: \[any, 3, 656\]"),
        (lambda t, m: t["samples.1.positions"].fill_(78), "positions: .* legal: 70 to 77"),
        (lambda t, m: t["samples.1.choices"].fill_(78), "choices: position 78, legal: below 78"),
    ],
)
def test_bad_files_are_refused(path: Path, edit: Callable[[Tensors, Meta], object], said: str) -> None:
    change(path, edit)
    with pytest.raises(ValueError, match=said) as refused:
        read_golden(path)
    assert str(path) in str(refused.value)


def test_bad_bytes_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = path.read_bytes()
    data = lzma.decompress(packed)
    for bad, said in (
        (b"", "0 bytes of xz, cut off"),
        (b"golden", "not a golden file"),
        (packed[:-100], "cut off"),
        (lzma.compress(b"golden"), "not a golden file"),
        (lzma.compress(data[:-1]), "not a golden file"),
        (lzma.compress(save({"a": torch.zeros(1)})), 'without metadata "golden"'),
    ):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=said):
            read_golden(path)
    path.write_bytes(packed)
    monkeypatch.setattr(recording, "MOST_UNPACKED", len(data) - 1)
    with pytest.raises(ValueError, match=f"more than {len(data) - 1:,} bytes unpacked"):
        read_golden(path)


def test_verify_refuses_by_name(tiny: Callable[[str], Path], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny("glm5")

    def said(*arguments: str) -> str:
        assert verify.main([*arguments, "--model-dir", str(directory)]) == 2
        return capsys.readouterr().err

    assert f"checkpoint {checkpoint_digest(directory)}, recorded was abc (some with bf16 weights)" in said(str(path))
    assert "no prompts [2], legal: 0 to 1" in said(str(path), "--prompts", "1,2")
    assert "No such file" in said(str(path.with_name("b.golden")))
    path.write_bytes(b"")
    assert "not a golden file" in said(str(path))
    for arguments in (["--follow", "0"], ["--prompts", "a"]):
        with pytest.raises(SystemExit):
            verify.main([str(path), "--model-dir", str(directory), *arguments])
        assert arguments[0] in capsys.readouterr().err


def test_a_report_counts_and_names_every_kind_of_step() -> None:
    """A difference in captured steps or in vLLM's order fails it too, and says where."""
    answer = {"ids": [5, 6, 7], "top": [[(5, -0.1), (9, -2.0)], [(6, -0.5), (8, -0.5)], [(7, -0.1), (3, -0.6)]]}
    report, other = verify.Report(), verify.Report()
    verify.compare_tokens(report, "tokens", 4, [5, 6, 7], answer, first=0)
    verify.compare_tokens(report, "captured", 4, [0, 8, 7], answer)  # the first is the prompt's
    assert not report.failed
    verify.compare_tokens(other, "followed_tokens", 2, [5, 6, 3], answer)
    assert other.failed
    report.merge(other)
    assert report.failed and report.tokens["identical"] == 3
    assert report.captured == report.captured | {"identical": 1, "tie": 1, "diverged": 0}
    lines = list(report.lines())
    assert "tokens in vLLM's order over vLLM's rows: 1 identical, 0 tie, 1 diverged" in lines
    assert [line.strip() for line in lines[-2:]] == [
        "captured: prompt 4 position 1: tie, 8 for 6, gap 0.0000",
        "followed_tokens: prompt 2 position 2: diverged, 3 for 7, gap 0.5000",
    ]


def test_a_prompt_that_differs_is_followed_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third prompt is, from the first on; the second differs. The last has no choices on record."""
    answers = [{"ids": [5, 6], "choices": torch.zeros(0)} for _ in range(4)] + [{"ids": [5, 6]}]
    golden = SimpleNamespace(name="some", prompts=[[1, 2]] * 5, answers=answers)
    followed = list[int]()

    def compare(report: verify.Report, engine: None, number: int, prompt: list[int], answer: dict) -> None:
        if number in (1, 4):
            report.differences.append(verify.Difference("tokens", number, 1, "diverged", 7, 6, 0.5))

    def compare_tokens(report: verify.Report, steps: str, number: int, ours: list[int], answer: dict) -> None:
        assert steps == "followed_tokens"
        followed.append(number)

    monkeypatch.setattr(verify, "compare", compare)
    monkeypatch.setattr(verify, "compare_tokens", compare_tokens)
    monkeypatch.setattr(verify, "compare_decoded", lambda *_, leading: 0)
    monkeypatch.setattr(verify, "compare_choices", lambda *_: None)
    monkeypatch.setattr(verify, "replay_followed", lambda *_: SimpleNamespace(ids=[5, 6]))
    verify.verify(None, golden, range(5), follow=3)
    assert followed == [0, 1, 3]
