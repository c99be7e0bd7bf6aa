"""The router's fake surroundings (router_stack.py), shared by the files that test it over sockets."""

from collections.abc import Iterator

import pytest
from router_fakes import Loop
from router_stack import Stack, stack


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.stop()


@pytest.fixture(scope="module")
def shared(loop: Loop) -> Iterator[Stack]:
    with stack(loop) as s:
        yield s


@pytest.fixture
def st(shared: Stack) -> Iterator[Stack]:
    """The shared stack in its healthy state."""
    yield shared
    shared.vllm.plan = shared.node.plan = None
    shared.await_free()
