"""How the tiny models speak: a chat template and a BPE tokenizer for each family, with the published special tokens.

A conversation is a list of OpenAI messages. The same Jinja template renders it here, for training and for the
scorecard, and in vLLM, for serving; so what is trained is what is served.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

Message = dict[str, Any]
HERE = Path(__file__).parent
VOCAB_SIZE = 768


@dataclass(frozen=True)
class Dialect:
    """The special tokens and the template of one family.

    tokens: (text, special) in the order of their ids; "special" ones are left out when ids become text, as in the
    published tokenizers. stops: the tokens that end an answer. assistant: the token after which the model speaks.
    """

    name: str
    tokens: tuple[tuple[str, bool], ...]
    stops: tuple[str, ...]
    pad: str
    assistant: str
    start: str

    @cached_property
    def template(self) -> str:
        return (HERE / "templates" / f"{self.name}.jinja").read_text(encoding="utf-8").rstrip("\n")

    def render(self, messages: Sequence[Message], tools: Sequence[dict] = (), **options: Any) -> str:
        """The text of a conversation. Options: add_generation_prompt, enable_thinking, clear_thinking."""
        return _compiled(self.template).render(messages=list(messages), tools=list(tools), **options)


GLM = Dialect(
    name="glm",
    tokens=(
        *((t, True) for t in ("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>")),
        *((t, True) for t in ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")),
        *((t, False) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")),
        *((t, False) for t in ("<tool_response>", "</tool_response>")),
        *((t, False) for t in ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    ),
    stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
    pad="<|endoftext|>",
    assistant="<|assistant|>",
    start="[gMASK]<sop>",
)
DEEPSEEK = Dialect(
    name="deepseek",
    tokens=(
        *((t, True) for t in ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")),
        *((t, True) for t in ("<｜User｜>", "<｜Assistant｜>")),
        *((t, False) for t in ("<think>", "</think>", "｜DSML｜")),
    ),
    stops=("<｜end▁of▁sentence｜>",),
    pad="<｜▁pad▁｜>",
    assistant="<｜Assistant｜>",
    start="<｜begin▁of▁sentence｜>",
)


@cache
def _compiled(template: str) -> jinja2.Template:
    """Compiled as transformers does it, so that vLLM renders the same text."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template)


def train_tokenizer(dialect: Dialect, texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE: 256 bytes, merges learned from `texts`, then the dialect's tokens. Same texts, same tokenizer.

    Digits stand alone: a number is read digit by digit.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(dialect.tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(t, special=special, normalized=False) for t, special in dialect.tokens])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts gave {tokenizer.get_vocab_size()} tokens, expected {vocab_size}: too little text")
    return tokenizer


def write_tokenizer(dialect: Dialect, tokenizer: Tokenizer, out: Path, max_length: int) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers and vLLM read them."""
    tokenizer.save(str(out / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "eos_token": dialect.stops[0],
        "pad_token": dialect.pad,
    }
    if dialect is DEEPSEEK:
        config["bos_token"] = dialect.start
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    (out / "chat_template.jinja").write_text(dialect.template + "\n", "utf-8")
