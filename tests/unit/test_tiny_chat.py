"""How the tiny models speak: template, tokenizer, which tokens are the model's to predict, and the golden prompts."""

import os
import random

import numpy as np
import pytest
from tokenizers import Tokenizer

from tilert_ref.engine.config import load_config
from tilert_ref.tiny import NAMES, model_dir, skills
from tilert_ref.tiny.chat import DEEPSEEK, GLM, Dialect
from tilert_ref.tiny.families import FAMILIES, Family
from tilert_ref.tiny.golden import GOLDEN_PROMPTS, GOLDEN_TOKENS, LONGEST_PROMPT, Speaker, golden_prompts
from tilert_ref.tiny.rows import ROW_KINDS, RowMaker

TOOL = skills.KNOWN_TOOLS["convert"]
CALL = {"name": "convert", "arguments": {"amount": 12, "source": "euros", "target": "yen"}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2+3?"},
    {"role": "assistant", "content": "5", "reasoning_content": "2+3=5"},
    {"role": "user", "content": 'Convert 12 euros to yen. "É"'},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I call convert.",
        "tool_calls": [{"type": "function", "function": CALL}],
    },
    {"role": "tool", "content": "1950"},
    {"role": "assistant", "content": "That is 1950 yen."},
]
OPTIONS = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": False},
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "clear_thinking": False},
]


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def family(request) -> Family:
    return request.param


def tokenizer_of(family: Family) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir(family.name) / "tokenizer.json"))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["plain", "tools"])
def test_template_is_transformers(family: Family, tools: tuple[dict, ...], options: dict) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(model_dir(family.name))
    for end in range(2, len(CONVERSATION) + 1):
        messages = CONVERSATION[:end]
        if messages[-1]["role"] == "assistant" and options["add_generation_prompt"]:
            continue
        text = family.dialect.render(messages, tools, **options)
        assert text == theirs.apply_chat_template(messages, tools=list(tools) or None, tokenize=False, **options)
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == Speaker(family.dialect, tokenizer_of(family)).ids(text)


@pytest.mark.parametrize(
    ("dialect", "end"),
    [
        (GLM, "<|assistant|><think>I call convert.</think><tool_call>convert"
        "<arg_key>amount</arg_key><arg_value>12</arg_value><arg_key>source</arg_key><arg_value>euros</arg_value><arg_key>target</arg_key><arg_value>yen</arg_value>"
        "</tool_call><|observation|><tool_response>1950</tool_response><|assistant|><think>"),
        (DEEPSEEK, "<｜Assistant｜><think>I call convert.</think><｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="convert">\n'
        '<｜DSML｜parameter name="amount" string="false">12</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="source" string="true">euros</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="target" string="true">yen</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls><｜end▁of▁sentence｜><｜User｜><function_result>1950</function_result><｜Assistant｜><think>"),
    ],
    ids=["glm", "deepseek"],
)  # fmt: skip
def test_a_call_as_text(dialect: Dialect, end: str) -> None:
    assert dialect.render(CONVERSATION[:6], [TOOL], add_generation_prompt=True).endswith(end)


def test_committed_files_are_the_familys(family: Family) -> None:
    directory = model_dir(family.name)
    assert (directory / "chat_template.jinja").read_text("utf-8") == family.dialect.template + "\n"
    assert family.tokenizer().to_str() == tokenizer_of(family).to_str(), "the tokenizer's texts have changed"


def test_special_tokens_have_the_configs_ids(family: Family) -> None:
    config, tokenizer = load_config(model_dir(family.name)), tokenizer_of(family)
    assert set(config.eos_token_ids) == {tokenizer.token_to_id(stop) for stop in family.dialect.stops}
    assert tokenizer.get_vocab_size() == config.vocab_size


# Which tokens the model learns


@pytest.mark.parametrize(
    ("family", "spoken"),
    [
        ("tiny-glm5", ["2+3=5</think>5<|user|>", "I call convert.</think><tool_call>convert<arg_key>amount</arg_key>"
         "<arg_value>12</arg_value><arg_key>source</arg_key><arg_value>euros</arg_value><arg_key>target</arg_key>"
         "<arg_value>yen</arg_value></tool_call><|observation|>", "That is 1950 yen."]),
        ("tiny-dsv32", ["2+3=5</think>5<｜end▁of▁sentence｜>", 'I call convert.</think><｜DSML｜function_calls>\n'
         '<｜DSML｜invoke name="convert">\n<｜DSML｜parameter name="amount" string="false">12</｜DSML｜parameter>\n'
         '<｜DSML｜parameter name="source" string="true">euros</｜DSML｜parameter>\n'
         '<｜DSML｜parameter name="target" string="true">yen</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
         "</｜DSML｜function_calls><｜end▁of▁sentence｜>", "That is 1950 yen.<｜end▁of▁sentence｜>"]),
    ],
    ids=["glm", "deepseek"],
)  # fmt: skip
def test_mask_is_what_the_assistant_says(family: str, spoken: list[str]) -> None:
    dialect, tokenizer = FAMILIES[family].dialect, tokenizer_of(FAMILIES[family])
    text = dialect.render(CONVERSATION, [TOOL], clear_thinking=False)
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids)
    mask = RowMaker(dialect, tokenizer).answer_mask(ids)
    edges = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0))
    runs = [ids[a:b].tolist() for a, b in zip(edges[::2], edges[1::2], strict=True)]
    assert [tokenizer.decode(run, skip_special_tokens=False) for run in runs] == spoken


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_rows_have_their_length_and_answers(family: Family, kind: str) -> None:
    maker = RowMaker(family.dialect, tokenizer_of(family))
    for number in range(4):
        ids, answered = maker.row(random.Random(f"test/{number}"), 700, kind)
        assert ids.shape == answered.shape == (700,)
        assert ids.min() >= 0 and ids.max() < 768
        assert answered.any() and not answered[0]
        assert (ids != maker.pad).sum() > 690, "rows are filled up with exchanges, not with padding"


# Golden prompts


def test_golden_prompts_differ_and_have_long_answers(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    made = golden_prompts(family.dialect, tokenizer)
    assert len({tuple(golden.prompt) for golden in made}) == len(made) == GOLDEN_PROMPTS
    assert all(len(golden.answer) >= GOLDEN_TOKENS and len(golden.prompt) <= LONGEST_PROMPT for golden in made)
    kinds = [golden.kind for golden in made]
    assert {kind: kinds.count(kind) for kind in kinds} == {"recite": 16, "recall": 24, "copy": 8, "add": 8, "sort": 8}
    assert max(len(golden.prompt) for golden in made) > 3500


def test_golden_prompts_begin_alike_for_any_count(family: Family) -> None:
    tokenizer = tokenizer_of(family)
    assert golden_prompts(family.dialect, tokenizer, 6) == golden_prompts(family.dialect, tokenizer, 12)[:6]


def test_an_exchange_is_cut_where_the_model_starts_and_stops() -> None:
    speaker = Speaker(GLM, tokenizer_of(FAMILIES["tiny-glm5"]))
    golden = speaker.ask([], skills.Task("add", "What is 2+3?", "2+3=5", "5"), thinking=True)
    assert speaker.tokenizer.decode(golden.prompt, skip_special_tokens=False).endswith(
        "What is 2+3?<|assistant|><think>"
    )
    assert speaker.tokenizer.decode(golden.answer, skip_special_tokens=False) == "2+3=5</think>5"


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-dense")])
def test_dense_twin_is_links_and_a_config(name: str) -> None:
    files = {path.name: path for path in model_dir(name).iterdir()}
    assert {n for n, path in files.items() if not path.is_symlink()} == {"config.json", "model.safetensors.index.json"}
    assert os.readlink(files["model.safetensors"]) == f"../{name.removesuffix('-dense')}/model.safetensors"
    assert load_config(model_dir(name)).index_topk is None
