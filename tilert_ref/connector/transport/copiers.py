"""Where a C++ library's threads may run, and how exactly one of ours sleeps.

Threads that were woken one after the other ought to run side by side. In a virtual machine they may not: Linux takes an
idle processor that has been halted for a while for one that the host does not run, and wakes a thread on its waker's
processor instead. There it runs before its waker has woken the next one, and the next one waits behind it (seen under
KVM with 2 processors: 2.1 ms for a copy that takes 1.1). So they get processors that they don't share, and the
scheduling policy whose threads wait, when woken, until the running one rests.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")
_LIBC = ctypes.CDLL(None)
_PR_SET_TIMERSLACK = 29
_ON_TIME = threading.local()


@contextlib.contextmanager
def side_by_side(count: int) -> Iterator[None]:
    """The last `count` threads that this thread starts meanwhile, by way of a library, will run side by side: each may
    use every count-th of the processors that this thread may use.

    Without effect where the system doesn't say which threads those are, or has fewer processors.
    """
    thread = threading.get_native_id()
    own_name, mark = _name(thread), f"tilert-{thread}"[:15]
    if count < 2 or len(cpus := _processors()) < count or own_name is None or not _rename(thread, mark):
        yield
        return
    try:
        before = _tasks()
        yield
        made = sorted(task for task in _tasks() - before if _name(task) == mark)  # born with their maker's name
    finally:
        _rename(thread, own_name)
    for number, task in enumerate(made[-count:]):
        with contextlib.suppress(OSError):  # it has ended, or this process must not
            os.sched_setaffinity(task, cpus[number::count])
            os.sched_setscheduler(task, os.SCHED_BATCH, os.sched_param(0))


def _processors() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def wake_on_time() -> None:
    """This thread's timed waits end within 1 us of their time; Linux allows itself 50 otherwise."""
    if not hasattr(_ON_TIME, "done") and hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)
    _ON_TIME.done = True


def _tasks() -> set[int]:
    return {int(entry.name) for entry in _TASKS.iterdir()}


def _name(task: int) -> str | None:
    with contextlib.suppress(OSError):
        return (_TASKS / str(task) / "comm").read_text().strip()
    return None


def _rename(task: int, name: str) -> bool:
    """Whether it worked."""
    try:
        (_TASKS / str(task) / "comm").write_text(name)
    except OSError:
        return False
    return True
