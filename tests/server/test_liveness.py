"""Health checks of an engine that has work and makes no steps are 503; an idle or computing engine is well."""

import asyncio
from collections.abc import Sequence

import psutil
import pytest

from hotspan.server.liveness import COMPUTING, TICK_S, Liveness, ProcessorTime
from hotspan.testing.clock import SimulatedClock
from tests.server.lmi.fake_engine import FakeEngine
from tests.server.lmi.serving import client, front


class Engine:
    """Answers calls unless it hangs. turns: calls that were made. computes: whether each of its cores does."""

    def __init__(self) -> None:
        self.has_work = False
        self.turns = 0
        self.error: Exception | None = None
        self.steps = asyncio.Event()
        self.steps.set()
        self.computes = [True]
        self.done = [0]

    async def turn(self) -> Sequence[int | None]:
        self.turns += 1
        await self.steps.wait()
        if self.error is not None:
            raise self.error
        self.done = [done + computes for done, computes in zip(self.done, self.computes, strict=True)]
        return self.done


class World:
    """An engine that is watched, in simulated time."""

    def __init__(self, limit_s: float = 60.0, *, on_cpu: bool = False) -> None:
        self.engine = Engine()
        self.clock = SimulatedClock()
        self.computes = True
        self.liveness = Liveness(self.engine, limit_s, (lambda: self.computes) if on_cpu else None, self.clock)

    async def goes_on(self, seconds: float, tick_s: float = TICK_S) -> None:
        """Time passes, with a look at the engine every `tick_s`."""
        for _ in range(round(seconds / tick_s)):
            self.clock.advance(tick_s)
            self.liveness.tick()
            for _ in range(3):
                await asyncio.sleep(0)

    @property
    def is_ill(self) -> bool:
        return self.liveness.reason is not None


async def test_work_without_a_step_is_ill_and_a_step_heals() -> None:
    """After the limit, not before it; well again with the first answer, and ill again only after the limit."""
    world = World()
    world.engine.has_work = True
    await world.goes_on(600)
    assert not world.is_ill
    world.engine.steps.clear()
    await world.goes_on(60)
    assert not world.is_ill
    await world.goes_on(2)
    assert world.is_ill and "60 s" in str(world.liveness.reason)
    world.engine.steps.set()
    await world.goes_on(2)
    assert not world.is_ill
    world.engine.steps.clear()
    await world.goes_on(60)
    assert not world.is_ill


async def test_an_idle_engine_is_asked_nothing_and_is_never_ill() -> None:
    """Stopped for a day without work: well. Its time without work does not count once there is some."""
    world = World()
    world.engine.steps.clear()
    await world.goes_on(86400, tick_s=60)
    assert not world.is_ill and world.engine.turns == 0
    world.engine.has_work = True
    await world.goes_on(60)
    assert not world.is_ill and world.engine.turns == 1


async def test_clients_that_give_up_do_not_heal_it() -> None:
    """An engine that hangs stays ill when its last request was aborted: only an answer shows that it steps."""
    world = World()
    world.engine.has_work = True
    world.engine.steps.clear()
    await world.goes_on(70)
    world.engine.has_work = False
    await world.goes_on(600)
    assert world.is_ill and world.engine.turns == 1
    world.engine.steps.set()
    await world.goes_on(2)
    assert not world.is_ill


async def test_a_cpu_engine_that_computes_gets_ten_times_as_long() -> None:
    """A long prefill on CPUs is no hang; one that does not end is; one that stops computing is after the limit."""
    world = World(on_cpu=True)
    world.engine.has_work = True
    world.engine.steps.clear()
    await world.goes_on(60 / COMPUTING - 2)
    assert not world.is_ill
    await world.goes_on(4)
    assert world.is_ill
    other = World(on_cpu=True)
    other.engine.has_work, other.computes = True, False
    other.engine.steps.clear()
    await other.goes_on(62)
    assert other.is_ill


async def test_time_in_which_the_server_did_not_look_does_not_count() -> None:
    """A server that was suspended or busy for an hour does not take that for a hang of its engine."""
    world = World()
    world.engine.has_work = True
    world.engine.steps.clear()
    await world.goes_on(2)
    await world.goes_on(3600, tick_s=3600)
    assert not world.is_ill


async def test_an_engine_that_fails_does_not_hang() -> None:
    """A call that raises counts as answered: who has died is seen elsewhere."""
    world = World()
    world.engine.has_work, world.engine.error = True, RuntimeError("dead")
    await world.goes_on(600)
    assert not world.is_ill and world.engine.turns > 1


async def test_steps_that_compute_nothing_are_ill(caplog: pytest.LogCaptureFixture) -> None:
    """After the limit, not before it, with words of its own; well again with the first token."""
    world = World()
    world.engine.has_work = True
    await world.goes_on(100)
    world.engine.computes = [False]
    await world.goes_on(60)
    assert not world.is_ill
    await world.goes_on(3)
    assert world.is_ill and "computed nothing in its steps for 60 s" in str(world.liveness.reason)
    await world.goes_on(100)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["engine_stalled"]
    world.engine.computes = [True]
    await world.goes_on(3)
    assert not world.is_ill


async def test_one_core_of_several_that_computes_nothing_is_ill() -> None:
    """The others' progress is not its own; two that take turns, each within the limit, are well."""
    world = World()
    world.engine.has_work, world.engine.done = True, [0, 0]
    for turn in range(10):
        world.engine.computes = [turn % 2 == 0, turn % 2 == 1]
        await world.goes_on(50)
        assert not world.is_ill
    world.engine.computes = [True, False]
    await world.goes_on(63)
    assert world.is_ill


async def test_a_core_without_work_or_word_is_well() -> None:
    """One that is paused, and one without hotspan's plugin, are not judged by what they compute."""
    world = World()
    world.engine.has_work = True
    for silent in ([None], []):

        async def turn(said: Sequence[int | None] = silent) -> Sequence[int | None]:
            return said

        world.engine.turn = turn  # type: ignore[method-assign]
        await world.goes_on(600)
        assert not world.is_ill


async def test_requests_that_are_given_up_heal_an_engine_that_answers() -> None:
    """Steps that computed nothing count while there is work: a request that comes later has all of the limit."""
    world = World()
    world.engine.has_work, world.engine.computes = True, [False]
    await world.goes_on(63)
    assert world.is_ill
    world.engine.has_work = False
    await world.goes_on(3)
    assert not world.is_ill
    world.engine.has_work = True
    await world.goes_on(60)
    assert not world.is_ill


async def test_watching_ends_with_its_task() -> None:
    """A server that stops leaves no call behind."""
    world = World()
    world.engine.has_work = True
    world.engine.steps.clear()
    watching = asyncio.create_task(world.liveness.watch())
    while not world.engine.turns:
        await asyncio.sleep(0)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("compat", ["none", "lmi"])
@pytest.mark.parametrize("path", ["/ping", "/health"])
async def test_health_checks_say_why(path: str, compat: str) -> None:
    """503 with the reason and Retry-After, also as LMI's users have it; requests are taken as before."""
    reason: list[str | None] = [None]
    app = front(FakeEngine(), plugs={"illness": lambda: reason[0]}, compat=compat)
    async with client(app) as http:
        if path == "/ping":
            assert (await http.get(path)).status_code == 200
        reason[0] = "no step for 60 s"
        ill = await http.get(path)
        assert (ill.status_code, ill.json()) == (503, {"status": "Stalled", "reason": "no step for 60 s"})
        assert ill.headers["retry-after"]
        reason[0] = None
        if path == "/ping":
            assert (await http.get(path)).status_code == 200


class Process:
    """A process in simulated time. used_s: CPU time."""

    def __init__(self) -> None:
        self.used_s, self.state, self.is_gone = 0.0, psutil.STATUS_RUNNING, False

    def cpu_times(self) -> object:
        if self.is_gone:
            raise psutil.NoSuchProcess(1)
        return type("Times", (), {"user": self.used_s / 2, "system": self.used_s / 2})()

    def status(self) -> str:
        return self.state


def test_processes_compute_if_none_is_stopped_and_cpu_time_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time of all processes below this one counts; with a stopped one among them the engine does not go on."""
    clock, core, worker, gone = SimulatedClock(), Process(), Process(), Process()
    gone.is_gone = True
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [core, worker, gone])
    computes = ProcessorTime(clock)
    computes()
    clock.advance(1)
    worker.used_s += 0.9
    assert computes()
    clock.advance(1)
    assert not computes()
    clock.advance(1)
    worker.used_s += 0.9
    core.state = psutil.STATUS_STOPPED
    assert not computes()
