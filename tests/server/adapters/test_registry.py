"""Adapters by name: loaded once at their first use, never anybody else's, gone only when nobody needs them."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from hotspan.http.errors import HttpError
from hotspan.server.adapters.loader import Adapter
from tests.operations import operations

from .rig import WEIGHTS, Rig, write_adapter


def shown(adapter: Adapter) -> dict[str, Any]:
    """What its owner may know of it, now."""
    names = ("name", "owner", "src", "preload", "pin", "is_loaded", "digest")
    return {name: getattr(adapter, name) for name in names}


async def status_of(work: object) -> tuple[int, str]:
    with pytest.raises(HttpError) as caught:
        await work  # type: ignore[misc]
    return caught.value.status, str(caught.value)


async def test_a_hundred_first_calls_load_once(tmp_path: Path) -> None:
    """A lazy registration loads nothing; a hundred first callers at once load once, and all get the same name."""
    rig = Rig(tmp_path)
    await rig.registry.register("a", rig.write("a"), preload=False)
    assert rig.engine.loads == [] and not rig.registry.describe("a").is_loaded
    rig.engine.open.clear()
    calls = [asyncio.create_task(rig.registry.resolve("a")) for _ in range(100)]
    await asyncio.sleep(0.01)
    assert not any(call.done() for call in calls)
    rig.engine.open.set()
    names = set(await asyncio.gather(*calls))
    assert names == {f"a@{rig.registry.describe('a').digest[:12]}"}
    assert len(rig.engine.loads) == 1 and rig.registry.describe("a").is_loaded


async def test_a_failed_load_is_told_to_all_and_tried_again(tmp_path: Path) -> None:
    """All who wait get an error that names the adapter and the cause; the next call loads anew."""
    rig = Rig(tmp_path)
    await rig.registry.register("a", rig.write("a"), preload=False)
    rig.engine.fails = "no q_proj here"
    outcomes = await asyncio.gather(*(rig.registry.resolve("a") for _ in range(10)), return_exceptions=True)
    assert len({id(outcome) for outcome in outcomes}) == 10 and len(rig.engine.loads) == 1
    for outcome in outcomes:
        assert isinstance(outcome, HttpError) and outcome.status == 500
        assert "'a'" in str(outcome) and "no q_proj here" in str(outcome)
    rig.engine.fails = None
    assert (await rig.registry.resolve("a")).startswith("a@")
    assert len(rig.engine.loads) == 2


async def test_a_caller_who_leaves_takes_nobody_along(tmp_path: Path) -> None:
    """A first call that is cancelled goes; the load goes on for those who wait."""
    rig = Rig(tmp_path)
    await rig.registry.register("a", rig.write("a"), preload=False)
    rig.engine.open.clear()
    first, second = (asyncio.create_task(rig.registry.resolve("a")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    assert first.cancelled() or first.cancelling()
    rig.engine.open.set()
    assert (await second).startswith("a@") and len(rig.engine.loads) == 1


async def test_a_dead_engine_is_503(tmp_path: Path) -> None:
    """Where the engine has stopped, an adapter that needs loading says so, and is not blamed."""
    rig = Rig(tmp_path)
    await rig.registry.register("a", rig.write("a"), preload=False)
    rig.engine.fails, rig.engine.is_dead = "gone", True
    assert (await status_of(rig.registry.resolve("a")))[0] == 503


async def test_preload(tmp_path: Path) -> None:
    """preload=true answers after loading; if that fails there is no such adapter, and nothing is left of it."""
    rig = Rig(tmp_path)
    assert (await rig.registry.register("a", rig.write("a"))).is_loaded and len(rig.engine.loads) == 1
    rig.engine.fails = "wrong modules"
    status, message = await status_of(rig.registry.register("b", rig.write("b", 1)))
    assert status == 400 and "wrong modules" in message
    assert (await status_of(rig.registry.resolve("b")))[0] == 404
    await rig.settle()
    assert rig.snapshots() == [rig.registry.describe("a").digest] and set(rig.formats.added) == {"a"}


async def test_never_the_base_model(tmp_path: Path) -> None:
    """A name that is no adapter's is an error; the names of the server's own models pass as they are."""
    rig = Rig(tmp_path)
    status, message = await status_of(rig.registry.resolve("unknown"))
    assert status == 404 and "unknown" in message
    assert await rig.registry.resolve("base") == "base" and await rig.registry.resolve("static") == "static"


async def test_duplicates(tmp_path: Path) -> None:
    """A name is given once, and the server's own names never."""
    rig = Rig(tmp_path)
    src = rig.write("a")
    await rig.registry.register("a", src, preload=False)
    assert (await status_of(rig.registry.register("a", src)))[0] == 409
    for taken in ("base", "static"):
        assert (await status_of(rig.registry.register(taken, src)))[0] == 409
    outcomes = await asyncio.gather(
        *(rig.registry.register("b", src, preload=False) for _ in range(5)), return_exceptions=True
    )
    assert sum(isinstance(outcome, HttpError) for outcome in outcomes) == 4


@pytest.mark.parametrize("name", ["", "a b", "../a", "a/b", "-a", ".a", "a@0123456789ab", "ä", "a\n", "a" * 129])
async def test_names(tmp_path: Path, name: str) -> None:
    """What can't stand in a path, a header or the engine's own names is refused."""
    rig = Rig(tmp_path)
    assert (await status_of(rig.registry.register(name, rig.write("x"))))[0] == 400
    assert rig.snapshots() == []


async def test_two_adapters_of_one_content(tmp_path: Path) -> None:
    """They share a copy and nothing else: one goes, the other's files stay."""
    rig = Rig(tmp_path)
    src = rig.write("a")
    first = await rig.registry.register("a", src)
    second = await rig.registry.register("b", src)
    assert first.digest == second.digest and rig.engine.loads[0] != rig.engine.loads[1]
    await rig.registry.delete("a")
    await rig.settle()
    assert rig.snapshots() == [second.digest] and list(rig.engine.loaded) == [await rig.registry.resolve("b")]


async def test_update_gives_new_requests_the_new_content(tmp_path: Path) -> None:
    """From the answer on the name means the new files; the old ones stay until the engine has let go of them."""
    rig = Rig(tmp_path)
    await rig.registry.register("a", rig.write("a"))
    old, old_digest = await rig.registry.resolve("a"), rig.registry.describe("a").digest
    rig.write("a", 1)
    assert await rig.registry.resolve("a") == old, "files changed, and nobody asked for an update"
    rig.engine.idle.clear()
    updated = await rig.registry.update("a")
    assert await rig.registry.resolve("a") == f"a@{updated.digest[:12]}" != old
    assert set(rig.snapshots()) == {old_digest, updated.digest}
    rig.engine.idle.set()
    await rig.settle()
    assert rig.snapshots() == [updated.digest] and old not in rig.engine.loaded


async def test_lazy_update(tmp_path: Path) -> None:
    """An update of a lazy adapter loads at its next use, and what it replaces is unloaded."""
    rig = Rig(tmp_path)
    await rig.registry.register("a", rig.write("a"), preload=False)
    old = await rig.registry.resolve("a")
    rig.write("b", 1)
    assert not (await rig.registry.update("a", src="b")).is_loaded
    await rig.settle()
    assert rig.engine.loaded == {}
    assert await rig.registry.resolve("a") != old


async def test_a_failed_update_changes_nothing(tmp_path: Path) -> None:
    """Files that are refused, or do not load, leave the adapter as it was, its formatters too."""
    rig = Rig(tmp_path)
    before = shown(await rig.registry.register("a", rig.write("a")))
    assert (await status_of(rig.registry.update("a", src="nowhere")))[0] == 400
    assert (await status_of(rig.registry.update("a", src=rig.write("b", 1, r=64))))[0] == 400
    rig.engine.fails = "no room"
    assert (await status_of(rig.registry.update("a", src=rig.write("c", 2))))[0] == 400
    rig.engine.fails = None
    (write_adapter(rig.root / "d", 3) / "broken").touch()
    assert (await status_of(rig.registry.update("a", src="d")))[0] == 400
    await rig.settle()
    assert shown(rig.registry.describe("a")) == before and rig.snapshots() == [before["digest"]]
    assert rig.formats.added == {"a": rig.root / "a"} and list(rig.engine.loaded) == [await rig.registry.resolve("a")]


async def test_a_pin_that_fails(tmp_path: Path) -> None:
    """A pin for which the engine finds no slot in time is 503: no adapter is added by it, and none is changed."""
    rig = Rig(tmp_path)
    before = shown(await rig.registry.register("a", rig.write("a")))
    rig.engine.pin_fails = "all slots were held"
    for src in (rig.write("copy"), rig.write("b", 1)):
        status, message = await status_of(rig.registry.update("a", src=src, pin=True))
        assert status == 503 and "all slots were held" in message
        assert rig.formats.added == {"a": rig.root / "a"}
    assert (await status_of(rig.registry.register("b", "b", pin=True)))[0] == 503
    await rig.settle()
    assert [shown(adapter) for adapter in rig.registry.seen_by("")] == [before]
    assert rig.snapshots() == [before["digest"]] and list(rig.engine.loaded) == [await rig.registry.resolve("a")]


async def test_an_update_to_the_same_content_loads_nothing(tmp_path: Path) -> None:
    """Where the files hold what they held, only what is said of the adapter changes."""
    rig = Rig(tmp_path)
    await rig.registry.register("a", rig.write("a"), preload=False)
    name = await rig.registry.resolve("a")
    updated = await rig.registry.update("a", src=rig.write("copy"), preload=True)
    await rig.settle()
    assert (updated.src, updated.preload, updated.is_loaded) == ("copy", True, True)
    assert rig.engine.loads == [name] and rig.snapshots() == [updated.digest]
    await rig.registry.delete("a")
    await rig.settle()
    assert rig.snapshots() == []


async def test_an_update_while_the_old_one_loads(tmp_path: Path) -> None:
    """Who waits for the old content gets it; who comes later gets the new one; the old one goes."""
    rig = Rig(tmp_path)
    await rig.registry.register("a", rig.write("a"), preload=False)
    rig.engine.open.clear()
    early = asyncio.create_task(rig.registry.resolve("a"))
    await asyncio.sleep(0)
    old = rig.registry.describe("a").digest
    rig.write("a", 1)
    new = (await rig.registry.update("a")).digest
    late = asyncio.create_task(rig.registry.resolve("a"))
    await asyncio.sleep(0)
    rig.engine.open.set()
    assert await early == f"a@{old[:12]}" and await late == f"a@{new[:12]}"
    await rig.settle()
    assert rig.snapshots() == [new] and list(rig.engine.loaded) == [f"a@{new[:12]}"]


async def test_delete(tmp_path: Path) -> None:
    """A deleted adapter is not found from then on; its copy goes once its requests have ended; it may come again."""
    rig = Rig(tmp_path)
    await rig.registry.register("a", rig.write("a"))
    rig.engine.idle.clear()
    await rig.registry.delete("a")
    for gone in (rig.registry.resolve("a"), rig.registry.delete("a"), rig.registry.update("a")):
        assert (await status_of(gone))[0] == 404
    assert len(rig.snapshots()) == 1
    rig.engine.idle.set()
    await rig.settle()
    assert rig.snapshots() == [] and rig.engine.loaded == {} and rig.formats.added == {}
    assert (await rig.registry.register("a", "a")).is_loaded


async def test_a_change_goes_to_its_end(tmp_path: Path) -> None:
    """Who asks for a change and leaves has still asked for it: it is made, whole."""
    rig = Rig(tmp_path)
    rig.engine.open.clear()
    asking = asyncio.create_task(rig.registry.register("a", rig.write("a")))
    while not rig.engine.loads:
        await asyncio.sleep(0.001)
    asking.cancel()
    rig.engine.open.set()
    await rig.settle()
    assert rig.registry.describe("a").is_loaded and len(rig.snapshots()) == 1


async def test_pins(tmp_path: Path) -> None:
    """A pin needs preload and a slot, one of which stays for the others; an unpin, a delete or an update frees it."""
    rig = Rig(tmp_path, slots=3)
    for n, name in enumerate("abcd"):
        rig.write(name, n)
    assert (await status_of(rig.registry.register("a", "a", preload=False, pin=True)))[0] == 400
    await rig.registry.register("a", "a", pin=True)
    await rig.registry.register("b", "b", pin=True)
    status, message = await status_of(rig.registry.register("c", "c", pin=True))
    assert status == 507 and "--max-loras" in message
    assert (await status_of(rig.registry.resolve("c")))[0] == 404
    await rig.registry.register("c", "c", preload=False)
    assert (await status_of(rig.registry.update("c", pin=True)))[0] == 400
    assert (await status_of(rig.registry.update("c", preload=True, pin=True)))[0] == 507
    rig.engine.idle.clear()  # requests of what goes are still in flight
    assert not (await rig.registry.update("a", pin=False)).pin
    assert (await rig.registry.update("c", preload=True, pin=True)).pin
    await rig.registry.delete("b")
    assert (await rig.registry.register("d", "d", pin=True)).pin
    rig.write("c", 9)
    assert (await rig.registry.update("c")).pin
    assert rig.engine.pinned == {await rig.registry.resolve("c"), await rig.registry.resolve("d")}


async def test_autoload(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every adapter of a directory is registered, none loaded; a bad one keeps nobody, and its callers hear why."""
    rig = Rig(tmp_path)
    rig.write("a"), rig.write("b", 1), rig.write("big", 2, r=64)
    (rig.root / ".git").mkdir()
    (rig.root / "README").touch()
    await rig.registry.autoload(rig.root)
    assert [adapter.name for adapter in rig.registry.seen_by("")] == ["a", "b"] and rig.engine.loads == []
    assert [record.message.split(":")[0] for record in caplog.records] == ["adapter_refused name=big"]
    status, message = await status_of(rig.registry.resolve("big"))
    assert status == 404 and "--max-lora-rank 64" in message
    rig.write("big", 2)
    await rig.registry.register("big", "big", preload=False)
    assert await rig.registry.resolve("big")
    await rig.registry.delete("big")
    assert "refused" not in (await status_of(rig.registry.resolve("big")))[1]
    await rig.registry.autoload(tmp_path / "nothing")


async def test_close_leaves_nothing(tmp_path: Path) -> None:
    """A server that stops removes its copies, those too of adapters that were on their way out."""
    rig = Rig(tmp_path)
    await rig.registry.register("a", rig.write("a"))
    await rig.registry.register("b", rig.write("b", 1))
    rig.engine.idle.clear()
    await rig.registry.delete("a")
    await asyncio.sleep(0)
    await rig.registry.close()
    assert rig.snapshots() == []


async def test_kv_is_named_by_content(tmp_path: Path) -> None:
    """What the engine folds into the names of KV differs with the content, loaded or not."""
    rig = Rig(tmp_path)
    await rig.registry.register("a", rig.write("a"), preload=False)
    before = rig.registry.engine_adapter("a")
    rig.write("a", 1)
    await rig.registry.update("a")
    after = rig.registry.engine_adapter("a")
    assert before and after and before.name != after.name and before.path != after.path
    assert (Path(after.path) / WEIGHTS).read_bytes() == (rig.root / "a" / WEIGHTS).read_bytes()
    assert rig.registry.engine_adapter("b") is None


async def test_a_loaded_adapter_is_found_at_once(tmp_path: Path) -> None:
    """To find one of thirty that are loaded takes thirty operations, as to find the only one."""
    rig = Rig(tmp_path, slots=40)

    def finding(name: str) -> int:
        def find() -> None:
            with contextlib.suppress(StopIteration):
                rig.registry.resolve(name).send(None)
                raise AssertionError("it waits")

        return operations(find)

    await rig.registry.register("a", rig.write("a"))
    alone = finding("a")
    for n in range(30):
        await rig.registry.register(f"b{n}", rig.write(f"b{n}", n))
    assert finding("a") == alone < 30
