"""One grammar on one model's tokenizer: which grammar it is, what the parser sees, and how an answer starts."""

from collections.abc import Mapping, Sequence
from typing import Any

from tilert_ref.router.detokenize import Detokenizer
from tilert_ref.router.grammars import GRAMMARS
from tilert_ref.router.parser import Grammar, Parser, State, Tools


class Parsing:
    """Makes parsers. `detokenizer` keeps the grammar's tokens in the text, also where the tokenizer calls them special;
    all other special tokens stay out of it."""

    def __init__(self, grammar: Grammar, detokenizer: Detokenizer) -> None:
        self.grammar = grammar
        self.detokenizer = detokenizer.keeping(grammar.tokens)
        begin, end = grammar.thinking_tags
        marks: dict[str, bool | None] = {begin: True, end: False} | dict.fromkeys(grammar.turn_tokens)
        ids = {detokenizer.tokenizer.token_to_id(token): thinks for token, thinks in marks.items()}
        self._marks = {i: thinks for i, thinks in ids.items() if i is not None}

    def parser(self, body: Mapping[str, Any], prompt_ids: Sequence[int]) -> Parser:
        """The parser for the answer to one checked chat body."""
        thinks = self._thinks_in(prompt_ids)
        if thinks is None:
            thinks = self._thinks_by(body.get("chat_template_kwargs", {}))
        return Parser(self.grammar, offered_tools(body), State.REASONING if thinks else State.CONTENT)

    def _thinks_in(self, prompt_ids: Sequence[int]) -> bool | None:
        """What the last turn of the rendered prompt says; None if it has neither tag.

        Better evidence than enable_thinking: vLLM's own default for it, or a template that ignores it, show here.
        """
        return next((self._marks[i] for i in reversed(prompt_ids) if i in self._marks), None)

    def _thinks_by(self, template_kwargs: Mapping[str, Any]) -> bool:
        given = [template_kwargs[name] for name in self.grammar.switches if template_kwargs.get(name) is not None]
        return any(given) if given else self.grammar.thinks


def offered_tools(body: Mapping[str, Any]) -> Tools | None:
    """The parameters' schemas of the tools that the answer may call; None if it may call none."""
    if "tools" not in body or body.get("tool_choice") == "none":
        return None
    functions = [tool["function"] for tool in body["tools"]]
    return {f["name"]: _properties(f.get("parameters")) for f in functions}


def _properties(parameters: Any) -> Mapping[str, Any]:
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def choose_parsing(name: str, detokenizer: Detokenizer | None) -> Parsing | None:
    """name: a grammar's, "none", or "auto" for the one whose tokens the tokenizer has. Raises ValueError."""
    if name == "none" or (name == "auto" and detokenizer is None):
        return None
    if detokenizer is None:
        raise ValueError(f"--parser {name} reads text: it needs --model-path, or give --parser none")
    grammar = _grammar_for(detokenizer) if name == "auto" else GRAMMARS[name]
    return Parsing(grammar, detokenizer) if grammar else None


def _grammar_for(detokenizer: Detokenizer) -> Grammar | None:
    known = detokenizer.tokenizer.token_to_id
    return next((g for g in GRAMMARS.values() if all(known(token) is not None for token in g.tokens)), None)
