"""Text assembly: every cut of the ids gives the same text, and what is complete goes out at once."""

import itertools
import random

import pytest
from router_fakes import byte_tokenizer, ids_of
from tokenizers import AddedToken, Tokenizer, decoders, models

from tilert_ref.router.detokenize import Detokenizer, byte_level_bytes, load_detokenizer

TEXT = "aé€😀 \ufffd\n你好"


@pytest.fixture(scope="module")
def byte_level() -> Detokenizer:
    return Detokenizer(byte_tokenizer())


@pytest.fixture(scope="module")
def byte_fallback() -> Detokenizer:
    """LLaMA's kind: pieces with ▁ for a space, and <0xNN> for bytes that no piece covers."""
    names = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁Hello", "▁world", "▁", "lo", "\ufffd", "你"]
    tokenizer = Tokenizer(
        models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return Detokenizer(tokenizer)


def streamed(detokenizer: Detokenizer, ids: list[int], cuts: list[int], prompt: list[int] | None = None) -> str:
    stream = detokenizer.stream(prompt or [])
    bounds = [0, *sorted(cuts), len(ids)]
    pieces = [stream.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return "".join(pieces) + stream.finish()


def test_every_single_cut_gives_the_whole_text(byte_level: Detokenizer) -> None:
    ids = ids_of(byte_level.tokenizer, TEXT)
    assert len(ids) == len(TEXT.encode())
    assert all(streamed(byte_level, ids, [cut]) == TEXT for cut in range(len(ids) + 1))
    assert streamed(byte_level, ids, list(range(len(ids)))) == TEXT


def test_any_ids_equal_the_librarys_own_text(byte_level: Detokenizer) -> None:
    """Also for bytes that are no UTF-8 at all: the number of replacement characters agrees."""
    rng = random.Random(5)
    high = [i for i in range(byte_level.tokenizer.get_vocab_size()) if (byte_level.token_bytes(i) or b"a")[0] >= 0x80]
    for _ in range(3000):
        pool = high if rng.random() < 0.7 else range(byte_level.tokenizer.get_vocab_size() + 3)
        ids = [rng.choice(pool) for _ in range(rng.randrange(12))]
        assert streamed(byte_level, ids, list(range(len(ids)))) == byte_level.decode(ids)


def test_a_genuine_replacement_character_goes_out_at_once(byte_level: Detokenizer) -> None:
    assert byte_level.stream().push(ids_of(byte_level.tokenizer, "\ufffd")) == "\ufffd"


def test_part_of_a_character_waits(byte_level: Detokenizer) -> None:
    stream = byte_level.stream()
    ids = ids_of(byte_level.tokenizer, "😀!")
    assert [stream.push([i]) for i in ids] == ["", "", "", "😀", "!"]


def test_an_end_inside_a_character_shows_as_a_replacement(byte_level: Detokenizer) -> None:
    stream = byte_level.stream()
    assert stream.push(ids_of(byte_level.tokenizer, "a😀")[:-1]) == "a"
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_left_out_and_unknown_ids_are_nothing(byte_level: Detokenizer) -> None:
    ids = ids_of(byte_level.tokenizer, "a<|end|><think>b")
    assert len(ids) == 4
    assert byte_level.stream().push([*ids, 100_000]) == "a<think>b"


def test_a_special_token_inside_a_character_does_not_break_it(byte_level: Detokenizer) -> None:
    first, *rest = ids_of(byte_level.tokenizer, "é")
    assert byte_level.stream().push([first, 0, *rest]) == "é"


def test_added_tokens_outside_the_alphabet_are_their_own_utf8() -> None:
    assert byte_level_bytes("<｜end▁of▁sentence｜>") == "<｜end▁of▁sentence｜>".encode()
    assert byte_level_bytes("Ġa") == b" a"


def test_byte_tokens_form_characters(byte_fallback: Detokenizer) -> None:
    ids = [byte_fallback.tokenizer.token_to_id(f"<0x{b:02X}>") for b in "é😀\ufffd".encode()]
    ids.insert(2, byte_fallback.tokenizer.token_to_id("lo"))
    stream = byte_fallback.stream()
    assert [stream.push([i]) for i in ids] == ["", "é", "lo", "", "", "", "😀", "", "", "\ufffd"]


def test_a_broken_byte_run_does_not_take_back_text(byte_fallback: Detokenizer) -> None:
    """The library turns the whole run into replacement characters once its last byte doesn't fit."""
    ids = [byte_fallback.tokenizer.token_to_id(f"<0x{b:02X}>") for b in "é".encode() + b"\xff\xe4"]
    ids.append(byte_fallback.tokenizer.token_to_id("lo"))
    assert streamed(byte_fallback, ids, list(range(len(ids)))) == "é\ufffd\ufffdlo"


@pytest.mark.parametrize("prompt", [["<s>", "▁Hello"], ["▁Hello", "<0xE4>", "<s>"]])
def test_the_first_token_keeps_its_space_behind_a_prompt(byte_fallback: Detokenizer, prompt: list[str]) -> None:
    of = byte_fallback.tokenizer.token_to_id
    ids = [of("▁world"), of("▁"), of("你")]
    assert streamed(byte_fallback, ids, [1, 2], [of(p) for p in prompt]) == " world 你"
    assert streamed(byte_fallback, ids, [1, 2]) == "world 你"


def test_long_sequences_keep_their_context(byte_fallback: Detokenizer) -> None:
    of = byte_fallback.tokenizer.token_to_id
    ids = [of("▁Hello"), of("▁world")] * 400
    assert streamed(byte_fallback, ids, list(range(800))) == byte_fallback.decode(ids)


def test_load_names_what_is_missing(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json doesn't exist"):
        load_detokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="can't read"):
        load_detokenizer(str(tmp_path))
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert load_detokenizer(str(tmp_path)).stream().push([2]) != ""
