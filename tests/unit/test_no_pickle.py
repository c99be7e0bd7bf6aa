"""Nothing that arrives from outside, or passes between our processes, is ever turned into code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilert_ref

PACKAGE = Path(tilert_ref.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing"}
CALLS = {"eval", "exec", "recv_pyobj", "send_pyobj", "Unpickler"}
# The trainer of the tiny models: two processes that it starts itself, over a pipe, on a developer's machine.
EXEMPT = {"tiny/train.py"}


def findings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (f"imports {n.name}" for n in names if n.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                yield f"imports from {module}"
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in CALLS:
                yield f"calls {name}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                safe = any(k.arg == "weights_only" and getattr(k.value, "value", None) is True for k in keywords)
                yield from () if safe else ("calls torch.load without weights_only=True",)


def test_no_source_unpickles_or_evaluates() -> None:
    names = {str(source.relative_to(PACKAGE)): source for source in SOURCES}
    assert names.keys() >= EXEMPT and len(names) > 60
    found = {name: list(findings(ast.parse(source.read_text()))) for name, source in names.items()}
    assert {name: what for name, what in found.items() if what and name not in EXEMPT} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "s.recv_pyobj()",
        "eval('1')",
        "import torch; torch.load(p)",
        "import torch; torch.load(p, weights_only=False)",
    ],
)
def test_the_search_finds(code: str) -> None:
    assert list(findings(ast.parse(code)))
