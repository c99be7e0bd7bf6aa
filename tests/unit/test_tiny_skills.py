"""The tiny models' tasks: every right answer is right, worked out here a second time from the question's text."""

import random
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tilert_ref.tiny import skills
from tilert_ref.tiny.skills import Memory, Task

TEXTS = Path(skills.__file__).parent / "texts"


def made(make: Callable[[random.Random], Task], count: int = 60) -> Iterator[Task]:
    return (make(random.Random(f"test/{i}")) for i in range(count))


def test_recall() -> None:
    for number in range(40):
        rng, memory = random.Random(f"test/{number}"), Memory()
        told = [skills.remember(rng, memory, rng.randint(1, 50), ["a line of text"] * (number % 3)) for _ in range(2)]
        codes = dict(re.findall(r"(\w+ \w+)=(\d{4})\b", " ".join(task.user for task in told)))
        assert codes == memory.codes
        one, many = skills.recall(rng, memory), skills.recall_many(rng, memory, 7)
        (key,) = [key for key in codes if re.search(rf"\b{key}\b", one.user)]
        assert one.answer == codes[key] and key in one.thought
        asked = many.user.removeprefix("What are the codes of ").removesuffix("?").split(", ")
        assert many.answer == "; ".join(f"{key}={codes[key]}" for key in asked)


def test_filler_stands_between_codes() -> None:
    task = skills.remember(random.Random(0), Memory(), 30, ["first line", "second line"])
    assert [line for line in task.user.split("\n") if "=" not in line and "line" in line] == [
        "first line",
        "second line",
    ]


def test_copy() -> None:
    for task in made(lambda rng: skills.copy(rng, rng.randint(1, 300))):
        text = task.user.partition(": ")[2]
        words = text.split()
        assert task.answer == text
        pairs = list(pairwise(words))
        assert len(set(pairs)) == len(pairs), "a pair that comes twice would have two continuations"


def test_sort() -> None:
    for task in made(lambda rng: skills.sort_words(rng, rng.randint(2, 90))):
        words = task.user.removeprefix("Sort these words: ").split(", ")
        assert task.answer.split(", ") == sorted(words) and len(set(words)) == len(words)
    for task in made(lambda rng: skills.sort_numbers(rng, rng.randint(2, 90))):
        numbers = [int(x) for x in task.user.removeprefix("Sort these numbers: ").split(", ")]
        assert [int(x) for x in task.answer.split(", ")] == sorted(numbers)
    for task in made(lambda rng: skills.sort_many(rng, rng.randint(1, 9), 5)):
        rows = task.user.removeprefix("Sort each line:\n").split("\n")
        assert task.answer.split("\n") == [", ".join(sorted(row.split(", "))) for row in rows]


def test_add() -> None:
    for task in made(skills.add):
        a, b = map(int, re.findall(r"\d+", task.user))
        assert task.answer == str(a + b)
        columns = [step.split("=") for step in task.thought.split(", ")]
        assert all(sum(map(int, left.split("+"))) == int(right) for left, right in columns)
        *lower, highest = [right for _, right in columns]
        spelled = highest + "".join(digits[-1] for digits in reversed(lower))
        assert int(spelled) == a + b
    for task in made(lambda rng: skills.add_many(rng, 9)):
        pairs = re.findall(r"(\d+)\+(\d+)", task.user)
        assert task.answer.split("\n") == [f"{a}+{b}={int(a) + int(b)}" for a, b in pairs]


def test_column_sums() -> None:
    assert skills.column_sums(347, 586) == "7+6=13, 4+8+1=13, 3+5+1=9"
    assert skills.column_sums(7, 95) == "7+5=12, 0+9+1=10"


def test_long_sums_are_thought_about() -> None:
    rng = random.Random(0)
    long_sum = next(task for task in made(skills.add) if task.thought.count(", ") == 2)
    assert all(skills.thinks(rng, long_sum) for _ in range(20))
    assert {skills.thinks(rng, skills.copy(rng, 3)) for _ in range(20)} == {True, False}


def test_recitals_are_in_the_book() -> None:
    book = (TEXTS / "works.txt").read_text("utf-8")
    for task in made(skills.recite):
        title, _, start = task.user.removeprefix("Recite ").partition(' from "')
        work = re.search(rf"^== {re.escape(title)} \|[^\n]*\n(.*?)(?:\n\n|\Z)", book, re.MULTILINE | re.DOTALL)[
            1
        ].strip()
        assert work.endswith(task.answer)
        assert task.answer.startswith(start.removesuffix('"')) if start else task.answer == work


def test_known_answers_are_in_the_book() -> None:
    book = (TEXTS / "answers.txt").read_text("utf-8")
    for task in made(skills.answer):
        block = next(block for block in book.split("\n\n") if f"Q: {task.user}\n" in block)
        assert block.strip().endswith(f"\nA: {task.answer}")


def test_no_question_has_two_answers() -> None:
    ways = [question for questions, _ in skills.known_answers() for question in questions]
    assert len(set(ways)) == len(ways)


@pytest.mark.parametrize("number", range(80))
def test_tool_calls(number: int) -> None:
    rng = random.Random(f"test/{number}")
    task = skills.use_tool(rng, skills.offer(rng))
    offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in task.tools}
    if task.call is None:
        assert task.answer == skills.NO_TOOL
        wanted = {"weather": "get_weather", "time is": "get_time", "timer": "set_timer", "Convert": "convert"}
        wanted["a mail"] = "send_mail"
        (name,) = {tool for words, tool in wanted.items() if words in task.user}
        assert name not in offered
        return
    properties = offered[task.call.name]["properties"]
    assert set(task.call.arguments) == set(properties) == set(offered[task.call.name]["required"])
    for key, value in task.call.arguments.items():
        assert type(value) is {"integer": int, "string": str}[properties[key]["type"]]
        assert str(value) in task.user
    said = [word for word in re.split(r"\W+", task.call.result) if word not in ("ok", "sent")]
    assert all(word in task.answer for word in said)


def test_same_seed_same_task() -> None:
    for make in (skills.add, skills.recite, skills.answer, lambda rng: skills.use_tool(rng, skills.offer(rng))):
        assert make(random.Random("a")) == make(random.Random("a"))
        assert len({repr(task) for task in made(make, 20)}) > 5
