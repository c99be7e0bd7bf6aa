"""docs/deviations.md has a line for each of TileRT's 53 sharp edges, and every test that it names is there."""

import ast
import re
from functools import cache
from pathlib import Path

import tilert_ref

PACKAGE = Path(tilert_ref.__file__).parent
TESTS = Path(__file__).parents[1]
SECTION = "## TileRT's 53 sharp edges"


def lines() -> list[list[str]]:
    """The cells of the section's table: number, edge, what covers it."""
    page = (TESTS.parent / "docs" / "deviations.md").read_text()
    section = page.split(f"{SECTION}\n")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if re.match(r"\| \d", line)
    ]


@cache
def names_in(path: Path) -> set[str]:
    """Test functions, methods and names that a test module defines."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    assigned = {t.id for node in nodes if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)}
    return assigned | {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def missing(cell: str) -> list[str]:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
    return [f"{path}::{name}" for path, name in named if name not in names_in(TESTS / path)]


def test_every_edge_has_a_line_with_a_test_or_a_reason() -> None:
    table = lines()
    assert [cells[0] for cells in table] == [str(number) for number in range(1, 54)]
    for number, edge, covered in table:
        assert edge and ("::test_" in covered or covered.startswith(("can't occur: ", "open: "))), number


def test_every_test_that_is_named_exists() -> None:
    assert [name for _, _, covered in lines() for name in missing(covered)] == []
    assert missing("`unit/test_edges.py::test_that_is_not_there`") == ["unit/test_edges.py::test_that_is_not_there"]


def test_no_check_of_connector_and_decode_server_vanishes_with_o() -> None:
    """Edge 34: `python -O` drops assert statements."""
    sources = [path for name in ("connector", "decode_server") for path in (PACKAGE / name).rglob("*.py")]
    assert len(sources) > 30
    guarded = [
        path.name for path in sources for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Assert)
    ]
    assert guarded == []
