"""The pool of decode nodes, on a fake node interface and without a network."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tilert_ref.router.errors import NodeLost, RouterError
from tilert_ref.router.pool import Facts, Lease, Node, Pool, parse_node

WAIT_S = 5.0


class FakeApi:
    """Nodes in `dead` don't answer. A cancel waits until `may_cancel` is set."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.facts: dict[str, Facts] = {}
        self.may_cancel = asyncio.Event()
        self.may_cancel.set()
        self.cancels: list[tuple[str, str]] = []
        self.probes = 0

    async def probe(self, node: Node) -> Facts:
        self.probes += 1
        if node.host in self.dead:
            raise NodeLost(503, "connection refused", code="no_decode_node")
        return self.facts.get(node.host, Facts())

    async def cancel(self, node: Node, rid: str) -> None:
        self.cancels.append((node.host, rid))
        await self.may_cancel.wait()
        if node.host in self.dead:
            raise NodeLost(503, "connection refused", code="no_decode_node")


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), WAIT_S))


def make(count: int = 1, queue_timeout_s: float = 0.0) -> tuple[Pool, FakeApi]:
    api = FakeApi()
    return Pool([Node(f"n{i}", 1, 2) for i in range(count)], api, queue_timeout_s), api


async def refusal(work: Awaitable[Lease]) -> RouterError:
    with pytest.raises(RouterError) as info:
        await work
    return info.value


async def settle() -> None:
    """Lets every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_parse_node() -> None:
    assert (parse_node("h:5556:5557").host, parse_node("h:5556:5557").ctrl_port) == ("h", 5556)
    assert parse_node("[::1]:1:2").url == "http://[::1]:2"
    assert parse_node("::1:1:2").host == "::1"
    for bad in ("", "h", "h:1", ":1:2", "h:1:0", "h:a:2", "h:1:65536", "h:-1:2", "h:1:２"):
        with pytest.raises(ValueError, match="host:ctrl_port:http_port"):
            parse_node(bad)


def test_busy_nodes_are_429_at_once_without_a_queue() -> None:
    async def test() -> None:
        pool, _ = make()
        with await pool.acquire():
            error = await refusal(pool.acquire())
            assert (error.status, error.code) == (429, "decode_busy") and error.headers() == {"Retry-After": "1"}
        assert pool.free_count() == 1
        with await pool.acquire():
            assert pool.free_count() == 0

    run(test)


def test_waiters_are_served_first_come_first_served() -> None:
    async def test() -> None:
        pool, _ = make(queue_timeout_s=WAIT_S)
        order: list[int] = []

        async def use(i: int) -> None:
            with await pool.acquire():
                order.append(i)
                await asyncio.sleep(0)

        first = await pool.acquire()
        users = []
        for i in range(20):
            users.append(asyncio.create_task(use(i)))
            await settle()
        assert pool.snapshot()["waiting"] == 20
        first.release()
        await asyncio.gather(*users)
        assert order == list(range(20))

    run(test)


def test_a_wait_ends_with_429_and_leaves_no_trace() -> None:
    async def test() -> None:
        pool, _ = make(queue_timeout_s=0.05)
        with await pool.acquire():
            assert "after waiting 0.05 s" in (await refusal(pool.acquire())).message
            assert pool.snapshot()["waiting"] == 0
        assert pool.free_count() == 1

    run(test)


def test_a_waiter_that_leaves_is_skipped_and_loses_no_node() -> None:
    async def test() -> None:
        pool, _ = make(queue_timeout_s=WAIT_S)
        lease = await pool.acquire()
        gone, stays = asyncio.create_task(pool.acquire()), asyncio.create_task(pool.acquire())
        await settle()
        gone.cancel()
        await settle()
        lease.release()
        (await stays).release()
        assert pool.free_count() == 1 and gone.cancelled()

    run(test)


def test_a_node_given_to_a_waiter_that_leaves_in_the_same_step_is_not_lost() -> None:
    async def test() -> None:
        pool, _ = make(queue_timeout_s=WAIT_S)
        lease = await pool.acquire()
        gone = asyncio.create_task(pool.acquire())
        await settle()
        lease.release()  # the waiter has the node now, but has not run since
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        if not gone.cancelled():
            gone.result().release()
        assert pool.free_count() == 1

    run(test)


def test_release_is_idempotent() -> None:
    async def test() -> None:
        pool, api = make()
        lease = await pool.acquire()
        lease.dispatched("r1")
        lease.release()
        lease.release()
        await settle()
        second = await pool.acquire()
        lease.release()  # must not free the node under its new user
        assert pool.free_count() == 0 and api.cancels == [("n0", "r1")]
        second.release()

    run(test)


def test_a_node_stays_busy_until_the_cancel_is_delivered() -> None:
    async def test() -> None:
        pool, api = make(queue_timeout_s=WAIT_S)
        api.may_cancel.clear()
        with await pool.acquire() as lease:
            lease.dispatched("r1")
        waiter = asyncio.create_task(pool.acquire())
        await settle()
        assert api.cancels == [("n0", "r1")] and not waiter.done() and pool.free_count() == 0
        api.may_cancel.set()
        (await waiter).release()

    run(test)


def test_no_cancel_for_what_was_not_dispatched_or_has_ended() -> None:
    async def test() -> None:
        pool, api = make()
        (await pool.acquire()).release()
        with await pool.acquire() as lease:
            lease.dispatched("r1")
            lease.terminated()
        await settle()
        assert api.cancels == [] and pool.free_count() == 1

    run(test)


def test_a_cancel_that_cannot_be_delivered_takes_the_node_out() -> None:
    async def test() -> None:
        pool, api = make()
        with await pool.acquire() as lease:
            lease.dispatched("r1")
            api.dead.add("n0")
        await settle()
        error = await refusal(pool.acquire())
        assert error.status == 503 and "connection refused" in error.message
        assert pool.nodes[0].busy is False

    run(test)


def test_dead_nodes_are_skipped_and_come_back() -> None:
    async def test() -> None:
        pool, api = make(2)
        api.dead.add("n0")
        await pool.ask_all()
        with await pool.acquire() as lease:
            assert lease.node.host == "n1"
        api.dead.clear()
        await pool.ask_all()
        with await pool.acquire() as lease:
            assert lease.node.host == "n0"

    run(test)


def test_a_node_marked_down_in_use_is_not_handed_out_again() -> None:
    async def test() -> None:
        pool, api = make(2)
        with await pool.acquire() as lease:
            assert lease.node.host == "n0"
            pool.mark_down(lease.node, "went away")
            api.dead.add("n0")
        with await pool.acquire() as lease:
            assert lease.node.host == "n1"
            assert (await refusal(pool.acquire())).status == 429

    run(test)


def test_a_probe_from_before_a_fault_does_not_revive_a_node() -> None:
    async def test() -> None:
        pool, api = make()
        await pool.ask_all()
        answered = asyncio.Event()

        async def slow_probe(node: Node) -> Facts:
            await answered.wait()
            return Facts()

        quick, api.probe = api.probe, slow_probe
        asking = asyncio.create_task(pool.ask_all())
        await settle()
        pool.mark_down(pool.nodes[0], "went away")
        answered.set()
        await asking
        assert pool.free_count() == 0
        api.probe = quick
        await pool.ask_all()
        assert pool.free_count() == 1

    run(test)


def test_all_down_is_503_with_reasons_and_a_revived_node_serves_at_once() -> None:
    async def test() -> None:
        pool, api = make(2)
        api.dead |= {"n0", "n1"}
        await pool.ask_all()
        error = await refusal(pool.acquire())
        assert (error.status, error.code) == (503, "no_decode_node")
        assert "n0:1:2" in error.message and "n1:1:2" in error.message and "refused" in error.message
        api.dead.discard("n1")
        with await pool.acquire() as lease:
            assert lease.node.host == "n1"

    run(test)


def test_a_waiter_gets_a_node_that_comes_back() -> None:
    async def test() -> None:
        pool, api = make(queue_timeout_s=WAIT_S)
        api.dead.add("n0")
        waiter = asyncio.create_task(pool.acquire())
        await settle()
        assert not waiter.done()
        api.dead.clear()
        await pool.ask_all()
        (await waiter).release()

    run(test)


def test_watch_probes_again_and_again() -> None:
    async def test() -> None:
        pool, api = make()
        api.dead.add("n0")
        watch = asyncio.create_task(pool.watch(interval_s=0))
        while api.probes < 3:
            await asyncio.sleep(0)
        api.dead.clear()
        while pool.free_count() == 0:
            await asyncio.sleep(0)
        watch.cancel()

    run(test)


def test_capabilities_choose_the_node_or_refuse() -> None:
    async def test() -> None:
        pool, api = make(2)
        api.facts["n1"] = Facts(frozenset({"ignore_eos"}))
        await pool.ask_all()
        needs = frozenset({"ignore_eos"})
        with await pool.acquire(needs) as lease:
            assert lease.node.host == "n1"
            assert (await refusal(pool.acquire(needs))).status == 429
        api.facts.clear()
        await pool.ask_all()
        error = await refusal(pool.acquire(needs))
        assert (error.status, error.param) == (501, "ignore_eos")

    run(test)


def test_a_waiter_for_a_rare_capability_does_not_block_the_others() -> None:
    async def test() -> None:
        pool, api = make(2, queue_timeout_s=WAIT_S)
        api.facts["n1"] = Facts(frozenset({"ignore_eos"}))
        await pool.ask_all()
        plain, rare = await pool.acquire(), await pool.acquire()
        picky = asyncio.create_task(pool.acquire(frozenset({"ignore_eos"})))
        await settle()
        modest = asyncio.create_task(pool.acquire())
        await settle()
        plain.release()
        assert (await modest).node.host == "n0" and not picky.done()
        rare.release()
        assert (await picky).node.host == "n1"

    run(test)


# Further slots of a busy node


async def asked(count: int, slots: int, queue_timeout_s: float = 0.0) -> tuple[Pool, FakeApi]:
    pool, api = make(count, queue_timeout_s)
    api.facts = {f"n{i}": Facts(slots=slots) for i in range(count)}
    await pool.ask_all()
    return pool, api


def test_idle_nodes_first_then_the_spare_slot_of_the_node_that_is_busy_longest() -> None:
    async def test() -> None:
        pool, _ = await asked(2, slots=2)
        leases = [await pool.acquire() for _ in range(4)]
        assert [lease.node.host for lease in leases] == ["n0", "n1", "n0", "n1"]
        assert (await refusal(pool.acquire())).status == 429
        assert pool.free_count() == 0 and [n["leases"] for n in pool.snapshot()["nodes"]] == [2, 2]
        leases[0].release()
        assert pool.free_count() == 0, "its second request goes on"
        leases[2].release()
        assert pool.free_count() == 1
        again = await pool.acquire()
        assert again.node.host == "n0"
        for lease in (again, *leases):
            lease.release()
        assert pool.free_count() == 2

    run(test)


def test_a_router_without_prefetch_waits_for_an_idle_node() -> None:
    async def test() -> None:
        api = FakeApi()
        api.facts["n0"] = Facts(slots=2)
        pool = Pool([Node("n0", 1, 2)], api, prefetch=False)
        with await pool.acquire():
            assert (await refusal(pool.acquire())).status == 429

    run(test)


def test_a_slot_is_kept_until_the_cancel_is_delivered() -> None:
    async def test() -> None:
        pool, api = await asked(1, slots=2, queue_timeout_s=WAIT_S)
        first, second = await pool.acquire(), await pool.acquire()
        api.may_cancel.clear()
        second.dispatched("r2")
        second.release()
        waiter = asyncio.create_task(pool.acquire())
        await settle()
        assert api.cancels == [("n0", "r2")] and not waiter.done()
        api.may_cancel.set()
        (await waiter).release()
        first.release()
        assert pool.nodes[0].leases == 0

    run(test)


def test_waiters_for_slots_are_served_first_come_first_served() -> None:
    async def test() -> None:
        pool, _ = await asked(1, slots=2, queue_timeout_s=WAIT_S)
        held = [await pool.acquire(), await pool.acquire()]
        waiters = []
        for _ in range(4):
            waiters.append(asyncio.create_task(pool.acquire()))
            await settle()
        for i in range(4):
            held.pop(0).release()
            held.append(await waiters[i])
            await settle()
            assert [waiter.done() for waiter in waiters] == [True] * (i + 1) + [False] * (3 - i)

    run(test)


def test_a_prompt_goes_to_a_node_with_room_for_it_and_a_new_token() -> None:
    async def test() -> None:
        pool, api = make(3)
        api.facts = {"n0": Facts(max_seq_len=100), "n1": Facts(max_seq_len=200)}
        api.dead.add("n2")
        await pool.ask_all()
        with await pool.acquire(tokens=100) as lease:
            assert lease.node.host == "n1"
            assert (await refusal(pool.acquire(tokens=100))).status == 429, "it could be served later"
        error = await refusal(pool.acquire(tokens=200))
        assert (error.status, error.code) == (400, "context_length_exceeded")
        assert "has 200 tokens; legal are 1 to 199" in error.message
        api.dead.clear()
        await pool.ask_all()
        with await pool.acquire(tokens=10**6) as lease:
            assert lease.node.host == "n2", "it doesn't say"

    run(test)


def test_close_waits_for_cancels() -> None:
    async def test() -> None:
        pool, api = make()
        api.may_cancel.clear()
        with await pool.acquire() as lease:
            lease.dispatched("r1")
        closing = asyncio.create_task(pool.close())
        await settle()
        assert not closing.done()
        api.may_cancel.set()
        await closing
        assert pool.free_count() == 1

    run(test)
