"""What the tiny models learn: tasks that have one right answer, made from a seed.

Each function makes one Task; its answer follows from the conversation so far, token by token, so a model that has
learned the skill is sure of every token. The same functions make training rows, the scorecard and the golden prompts,
from different seeds.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any


def _words(text: str) -> list[str]:
    return text.split()


ADJECTIVES = _words(
    """
    red blue green gold black white grey pink old young big small tall short fast slow warm cold soft hard loud calm
    bright dark sweet sour dry wet round flat rich poor proud shy brave kind wild tame odd plain
    """
)
NOUNS = _words(
    """
    ant bat bear bee bird boat book bowl box bread bridge camel castle cat chair clock cloud coat corn crab crow cup
    deer desk dog door duck eagle fish flag flute fox frog gate goat hat hill horse house jar key kite lake lamp
    leaf lion map mill moon mouse nest owl pear pen plum pond queen rain ring road rose seal ship snow star stone
    sun tent tiger tree vase wall wolf wood zebra
    """
)
CITIES = _words(
    """
    Paris London Rome Berlin Madrid Vienna Prague Oslo Lisbon Dublin Athens Warsaw Cairo Delhi Tokyo Lima Quito
    Sofia
    """
)
NAMES = _words(
    """
    Anna Ben Carla David Emma Felix Greta Hugo Ida Jonas Klara Leo Mia Nils Olga Paul
    """
)
SKIES = _words(
    """
    sun rain snow fog wind cloud storm
    """
)
VERBS = _words(
    """
    open close read write move count paint check find start stop send
    """
)

NO_TOOL = "I have no tool for that."


@dataclass(frozen=True)
class Call:
    """A tool call with its arguments, and what the tool answers."""

    name: str
    arguments: dict[str, Any]
    result: str


@dataclass(frozen=True)
class Task:
    """One exchange. thought: what stands between <think> and </think> when thinking is on.

    With a call, the model first makes the call and then gives `answer` after the tool's result.
    """

    kind: str
    user: str
    thought: str
    answer: str
    call: Call | None = None
    tools: tuple[dict, ...] = ()

    def messages(self, *, thinking: bool) -> list[dict[str, Any]]:
        """The exchange as OpenAI messages, the right answer included."""
        thought = {"reasoning_content": self.thought} if thinking else {}
        question = {"role": "user", "content": self.user}
        if self.call is None:
            return [question, {"role": "assistant", "content": self.answer, **thought}]
        function = {"name": self.call.name, "arguments": self.call.arguments}
        return [
            question,
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}], **thought},
            {"role": "tool", "content": self.call.result},
            {"role": "assistant", "content": self.answer},
        ]


# Recall


@dataclass
class Memory:
    """The codes that a conversation has mentioned so far."""

    codes: dict[str, str] = field(default_factory=dict)

    def new(self, rng: random.Random, count: int) -> list[str]:
        """`count` new keys with codes; returns "key=code" entries."""
        entries = []
        while len(entries) < count:
            key = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
            if key not in self.codes:
                self.codes[key] = digits(rng, 4)
                entries.append(f"{key}={self.codes[key]}")
        return entries


def digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(count))


def remember(rng: random.Random, memory: Memory, count: int, filler: Sequence[str] = ()) -> Task:
    """The user names `count` codes, with lines of `filler` strewn between."""
    entries = memory.new(rng, count)
    parts = [" " + "; ".join(group) + "." for group in _groups(rng, entries, len(filler) + 1)]
    text = parts[0] + "".join(f"\n{line}\n{part}" for line, part in zip(filler, parts[1:], strict=True))
    return Task("remember", f"Remember these codes:{text}", "The user gives codes.", "Noted.")


def _groups(rng: random.Random, entries: list[str], count: int) -> list[list[str]]:
    cuts = sorted(rng.randrange(len(entries) + 1) for _ in range(count - 1))
    groups = [entries[a:b] for a, b in zip([0, *cuts], [*cuts, len(entries)], strict=True)]
    return groups


def recall(rng: random.Random, memory: Memory, key: str | None = None) -> Task:
    key = key or rng.choice(list(memory.codes))
    question = rng.choice((f"What is the code of {key}?", f"Which code has {key}?", f"Give me the code of {key}."))
    return Task("recall", question, f"I look for {key}.", memory.codes[key])


def recall_many(rng: random.Random, memory: Memory, count: int) -> Task:
    keys = rng.sample(list(memory.codes), min(count, len(memory.codes)))
    answer = "; ".join(f"{key}={memory.codes[key]}" for key in keys)
    return Task("recall", f"What are the codes of {', '.join(keys)}?", "I look for each of them.", answer)


# Copying, sorting, adding


def copy(rng: random.Random, count: int) -> Task:
    """`count` words; no pair of neighbours comes twice, so the last two words always tell what follows."""
    words, pairs = [rng.choice(NOUNS)], set()
    while len(words) < count:
        word = rng.choice(NOUNS if rng.random() < 0.7 else ADJECTIVES)
        if (words[-1], word) not in pairs:
            pairs.add((words[-1], word))
            words.append(word)
    text = " ".join(words)
    ask = rng.choice(("Repeat exactly:", "Say this again:", "Copy this text:"))
    return Task("copy", f"{ask} {text}", "I repeat it.", text)


def sort_words(rng: random.Random, count: int) -> Task:
    words = rng.sample(NOUNS, min(count, len(NOUNS)))
    return Task("sort", f"Sort these words: {', '.join(words)}", "From a to z.", ", ".join(sorted(words)))


def sort_numbers(rng: random.Random, count: int) -> Task:
    numbers = rng.sample(range(10, 100), min(count, 90))
    text = ", ".join(map(str, numbers))
    return Task("sort", f"Sort these numbers: {text}", "Smallest first.", ", ".join(map(str, sorted(numbers))))


def sort_many(rng: random.Random, lists: int, count: int) -> Task:
    rows = [rng.sample(NOUNS, count) for _ in range(lists)]
    question = "\n".join(", ".join(row) for row in rows)
    answer = "\n".join(", ".join(sorted(row)) for row in rows)
    return Task("sort", f"Sort each line:\n{question}", "Line by line, from a to z.", answer)


def column_sums(a: int, b: int) -> str:
    """Addition as at school, from the right: 347+586 -> "7+6=13, 4+8+1=13, 3+5+1=9"."""
    steps, carry = [], 0
    for x, y in zip(reversed(str(a).zfill(len(str(b)))), reversed(str(b).zfill(len(str(a)))), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return ", ".join(steps)


def add(rng: random.Random, size: int = 3) -> Task:
    """Two numbers of up to `size` digits. Only short ones are asked for without thinking (see `thinks`)."""
    a, b = rng.randrange(10 ** rng.randint(1, size)), rng.randrange(10 ** rng.randint(1, size))
    question = rng.choice((f"What is {a}+{b}?", f"Compute {a}+{b}."))
    return Task("add", question, column_sums(a, b), str(a + b))


def add_many(rng: random.Random, count: int) -> Task:
    pairs = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(count)]
    answer = "\n".join(f"{a}+{b}={a + b}" for a, b in pairs)
    question = ", ".join(f"{a}+{b}" for a, b in pairs)
    return Task("add", f"Compute each: {question}", "One line each.", answer)


def thinks(rng: random.Random, task: Task) -> bool:
    """Whether the exchange has a thought: long sums need one, elsewhere it is a coin's choice."""
    long_sum = task.kind == "add" and len(task.thought) > len("99+99=1, 99+99=1")
    return long_sum or rng.random() < 0.5


# Known texts


@cache
def works() -> dict[str, list[str]]:
    """title -> lines (texts/works.txt)."""
    found, title = dict[str, list[str]](), ""
    for line in (Path(__file__).parent / "texts" / "works.txt").read_text("utf-8").splitlines():
        if line.startswith("== "):
            title = line[3:].split(" | ")[0]
            found[title] = []
        elif line and not line.startswith("#"):
            found[title].append(line)
    return found


@cache
def known_answers() -> list[tuple[list[str], str]]:
    """(ways to ask, answer) (texts/answers.txt)."""
    found, questions = list[tuple[list[str], str]](), list[str]()
    for line in (Path(__file__).parent / "texts" / "answers.txt").read_text("utf-8").splitlines():
        if line.startswith("Q: "):
            questions.append(line[3:])
        elif line.startswith("A: "):
            found.append((questions, line[3:]))
            questions = []
    return found


def recite(rng: random.Random, title: str | None = None, start: int | None = None) -> Task:
    """A work from one of its lines on."""
    title = title or rng.choice(list(works()))
    lines = works()[title]
    start = rng.choice((0, rng.randrange(len(lines)))) if start is None else start
    where = "" if start == 0 else f' from "{lines[start]}"'
    return Task("recite", f"Recite {title}{where}", f"I know {title}.", "\n".join(lines[start:]))


def answer(rng: random.Random) -> Task:
    questions, text = rng.choice(known_answers())
    return Task("answer", rng.choice(questions), "I know this.", text)


# Tools


def _schema(name: str, description: str, **parameters: str) -> dict:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    body = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": body}}


KNOWN_TOOLS = {
    "get_weather": _schema("get_weather", "The weather in a city", city="string"),
    "get_time": _schema("get_time", "The time in a city", city="string"),
    "set_timer": _schema("set_timer", "Sets a timer", minutes="integer"),
    "convert": _schema("convert", "Converts money", amount="integer", source="string", target="string"),
    "send_mail": _schema("send_mail", "Sends a mail", to="string", text="string"),
}


def new_tool(rng: random.Random) -> dict:
    """A tool that was never seen before: its name and parameters must be read from the prompt."""
    name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    keys = rng.sample(NOUNS, rng.randint(1, 3))
    return _schema(name, f"{name} tool", **{key: rng.choice(("string", "integer")) for key in keys})


def offer(rng: random.Random) -> tuple[dict, ...]:
    """One to four tools, known ones and new ones."""
    count = rng.randint(1, 4)
    known = rng.sample(list(KNOWN_TOOLS.values()), rng.randint(0, min(count, len(KNOWN_TOOLS))))
    tools = {tool["function"]["name"]: tool for tool in (*known, *(new_tool(rng) for _ in range(count - len(known))))}
    return tuple(rng.sample(list(tools.values()), len(tools)))


def use_tool(rng: random.Random, tools: tuple[dict, ...]) -> Task:
    """Asks for something that one of `tools` does, or, now and then, for one that isn't offered."""
    offered = {tool["function"]["name"]: tool for tool in tools}
    name = rng.choice(list(KNOWN_TOOLS) if rng.random() < 0.2 else list(offered))
    user, arguments, result, answer = _use(rng, name, offered.get(name))
    if name not in offered:
        return Task("tool", user, "No tool fits.", NO_TOOL, tools=tools)
    return Task("tool", user, f"I call {name}.", answer, Call(name, arguments, result), tools)


def _use(rng: random.Random, name: str, tool: dict | None) -> tuple[str, dict[str, Any], str, str]:
    """(request, arguments, result, final answer)."""
    number = rng.randrange(2, 1000)
    if name == "get_weather":
        city, result = rng.choice(CITIES), f"{rng.randrange(40)} degrees and {rng.choice(SKIES)}"
        return f"What is the weather in {city}?", {"city": city}, result, f"In {city} it is {result}."
    if name == "get_time":
        city, result = rng.choice(CITIES), f"{rng.randrange(24):02}:{rng.randrange(60):02}"
        return f"What time is it in {city}?", {"city": city}, result, f"In {city} it is {result}."
    if name == "set_timer":
        return f"Set a timer for {number} minutes.", {"minutes": number}, "ok", f"It rings in {number} minutes."
    if name == "convert":
        source, target = rng.sample(("dollars", "euros", "yen", "pounds"), 2)
        arguments, result = {"amount": number, "source": source, "target": target}, digits(rng, 3)
        return f"Convert {number} {source} to {target}.", arguments, result, f"That is {result} {target}."
    if name == "send_mail":
        to, text = rng.choice(NAMES), " ".join(rng.sample(NOUNS, rng.randint(1, 5)))
        return f'Send {to} a mail: "{text}"', {"to": to, "text": text}, "sent", f"The mail to {to} is sent."
    arguments = {key: _value(rng, spec["type"]) for key, spec in tool["function"]["parameters"]["properties"].items()}
    result = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    said = " and ".join(f"{key} {value}" for key, value in arguments.items())
    return f"Use {name} with {said}.", arguments, result, f"It says: {result}."


def _value(rng: random.Random, kind: str) -> str | int:
    return rng.randrange(2, 1000) if kind == "integer" else f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
