"""Weights that change while the engine runs: real scheduler, cache and tiers, known bytes, no model."""

import json
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from hotspan.core.directives import Directives
from hotspan.core.terms import DEFAULT_TENANT
from hotspan.engine import identity
from hotspan.testing.clock import SimulatedClock
from kit.simulated.memory_store import MemoryServer

from .harness.core import Core, core
from .weights_sequences import run

TEXT = 1100


def settled() -> SimulatedClock:
    """A clock by which no file of a test changed just now."""
    return SimulatedClock(unix_s=time.time() + 3600.0)


def other(model: Path, directory: Path, number: int) -> Path:
    """A checkpoint of the same shape with other weights."""
    shutil.copytree(model, directory, dirs_exist_ok=True)
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    data[start::9973] = bytes([number]) * len(data[start::9973])
    file.write_bytes(data)
    return directory


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three checkpoints of one shape."""
    return [tiny_model, *(other(tiny_model, tmp_path_factory.mktemp("others") / f"w{n}", n) for n in (1, 2))]


@contextmanager
def running(model: Path, disk: Path | None = None, **options: Any) -> Iterator[Core]:
    """An engine whose workers reload files as a start loads them."""
    with (
        patch.object(identity, "RELOADS_AS_A_START", {"cpu"}),
        core(model, disk=disk, clock=settled(), **options) as engine,
    ):
        yield engine


@pytest.fixture
def engine(models: list[Path], tmp_path: Path) -> Iterator[Core]:
    with running(models[0], tmp_path / "disk") as engine:
        yield engine
        engine.finish()
        engine.settle()
        engine.check()


def reload(engine: Core, model: Path | None = None) -> str:
    """Reload weights as vLLM does; what names them then."""
    engine.rpc("reload_weights", **({} if model is None else {"weights_path": str(model)}))
    return engine.until_named()


def cached_below(engine: Core, text: list[int]) -> int:
    """Tokens of a text that only lower tiers have."""
    engine.forget_gpu()
    engine.evict_ram()
    return engine.ask(text)


# -- the two programs --------------------------------------------------------------------------------------------------


def test_kv_of_other_weights_is_not_found(engine: Core, models: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    """After `reload_weights` a text is computed anew, in spite of what engine, RAM and disk have of it. Logged."""
    caplog.set_level("INFO", "hotspan")
    text = engine.stored(engine.text(1, TEXT))
    assert reload(engine, models[1]) == "files"
    assert "weights_may_change method=reload_weights" in caplog.text and "weights_named method=reload" in caplog.text
    assert engine.ask(text) == 0
    assert engine.ask(text) > 0
    assert cached_below(engine, text) > 0
    assert engine.runner.wrong == 0


def test_kv_of_new_weights_is_not_stored_under_the_old_files(models: list[Path], tmp_path: Path) -> None:
    """After a restart with the old files, what was computed with others is not found; with those it is."""
    with running(models[0], tmp_path) as engine:
        first = engine.stored(engine.text(1, TEXT))
        reload(engine, models[1])
        second = engine.stored(engine.text(2, TEXT))
        again = engine.stored(first)
    with running(models[0], tmp_path) as engine:
        assert cached_below(engine, second) == 0
        assert cached_below(engine, first) > 0
        assert engine.runner.wrong == 0
    with running(models[1], tmp_path) as engine:
        assert cached_below(engine, second) > 0
        assert cached_below(engine, again) > 0
        assert engine.runner.wrong == 0


def test_going_back_finds_what_the_disk_has(engine: Core, models: list[Path]) -> None:
    """The namespace of files is that of every engine that has loaded them, before or after."""
    text = engine.stored(engine.text(1, TEXT))
    before = engine.manager.namespace
    reload(engine, models[1])
    assert reload(engine, models[0]) == "files"
    assert engine.manager.namespace == before
    assert cached_below(engine, text) > 0


def test_replicas_with_other_weights_share_nothing(models: list[Path]) -> None:
    """Over one L2: a replica that reloads finds nothing of the others', stores nothing that they find, and finds what
    a replica with the same files has stored."""
    server = MemoryServer()
    with running(models[0], l2=server) as one:
        text, more = one.stored(one.text(1, TEXT)), one.text(2, TEXT)
        with running(models[0], l2=server) as two:
            reload(two, models[1])
            assert cached_below(two, text) == 0
            two.stored(more)
            with running(models[1], l2=server) as three:
                assert cached_below(three, more) > 0
                assert three.runner.wrong == 0
            assert two.runner.wrong == 0
        assert cached_below(one, more) == 0
        assert cached_below(one, text) > 0
        assert one.runner.wrong == 0


# -- what ends a namespace, and what names the next --------------------------------------------------------------------


def change(worker: Any) -> None:
    """What a program may run in the workers."""
    worker.weights = 77


CHANGES: dict[str, Callable[[Core], Any]] = {
    "update_weights": lambda engine: engine.rpc("update_weights", update_info=5),
    "reset_weights": lambda engine: engine.rpc("reset_weights"),
    "a method that nobody knows": lambda engine: engine.rpc("my_own_method", 1, two=2),
    "a function": lambda engine: engine.rpc(change),
    "an iterator": lambda engine: engine.rpc("reload_weights", weights_iterator=iter(())),
    "another format": lambda engine: engine.rpc("reload_weights", is_checkpoint_format=False),
    "arguments that nobody knows": lambda engine: engine.rpc("reload_weights", shards=1),
    "the executor itself": lambda engine: engine.runner.collective_rpc("my_own_method"),
    "sleep and wake": lambda engine: (engine.core.sleep(2), engine.core.wake_up()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_files_do_not_tell_has_a_name_of_its_own(models: list[Path], tmp_path: Path, what: str) -> None:
    """Whatever may change weights ends the namespace; the next is found until it ends, and never again."""
    with running(models[0], tmp_path) as engine:
        text = engine.stored(engine.text(1, TEXT))
        before = engine.manager.namespace
        CHANGES[what](engine)
        assert engine.until_named() == "random"
        second = engine.stored(engine.text(2, TEXT))
        assert cached_below(engine, second) > 0
        assert cached_below(engine, text) == 0
        CHANGES[what](engine)
        assert engine.until_named() == "random"
        assert cached_below(engine, second) == 0
        assert engine.manager.namespace != before
        assert engine.runner.wrong == 0
    with running(models[0], tmp_path) as engine:
        assert cached_below(engine, second) == 0
        assert cached_below(engine, text) == 4 * 256


@pytest.mark.parametrize(
    "harmless",
    [
        lambda engine: engine.core.sleep(1),
        lambda engine: engine.core.list_loras(),
        lambda engine: engine.core.profile(),
        lambda engine: engine.core.reset_encoder_cache(),
        lambda engine: engine.rpc("discard", ("kv_cache",)),
        lambda engine: engine.rpc("compute_weight_checksums"),
    ],
)
def test_what_leaves_weights_alone_ends_nothing(engine: Core, harmless: Callable[[Core], Any]) -> None:
    """The methods that vLLM itself uses while it serves, and those that read."""
    before = engine.manager.namespace
    harmless(engine)
    engine.core.wake_up()
    assert engine.manager.namespace == before
    assert engine.connector.weights.state.changes == 0


def test_an_update_in_parts_is_cached_when_it_has_ended(engine: Core) -> None:
    """Between its parts nothing is found or stored, and its last part begins a namespace."""
    text = engine.stored(engine.text(1, TEXT))
    engine.rpc("start_weight_update")
    for part in (5, 6):
        engine.rpc("update_weights", update_info=part)
        assert engine.connector.weights.state.source is None
        assert engine.ask(text) == 0
        engine.settle()
        assert not engine.cache.ram.entries
    engine.rpc("finish_weight_update")
    assert engine.connector.weights.state.source == "random"
    assert engine.ask(text) == 0, "what was computed between the parts is not of these weights"
    assert engine.ask(text) > 0


def test_an_engine_that_sleeps_deeply_has_no_name(engine: Core, models: list[Path]) -> None:
    """Level 2 drops the weights: only when they are back, by files or others, is there a namespace."""
    text = engine.stored(engine.text(1, TEXT))
    engine.core.sleep(2)
    engine.runner.mix(engine.scheduler.requests)
    assert engine.connector.weights.state.source is None
    engine.core.wake_up(["weights"])
    assert reload(engine, models[0]) == "files"
    engine.core.wake_up(["kv_cache"])
    assert engine.connector.weights.state.source == "files"
    assert cached_below(engine, text) > 0, (
        "the reset before it sleeps empties RAM, and these are the files' weights again"
    )


def test_a_call_that_fails_is_one_that_changed_something(engine: Core) -> None:
    """Nobody knows how far it came: who asked is told, and a name that nobody else has begins."""
    text = engine.stored(engine.text(1, TEXT))
    with pytest.raises(KeyError):
        engine.rpc(lambda worker: {}["x"])
    assert engine.connector.weights.state.source == "random"
    assert engine.ask(text) == 0


def test_a_call_that_does_not_wait_ends_when_it_is_done(engine: Core) -> None:
    """While workers still change weights, beside steps, nothing is cached; nor is anything of those steps."""
    done: Future[Any] = Future()
    with patch.object(type(engine.runner), "_slow", lambda self: done, create=True):
        watch = engine.connector.weights
        watch.call("slow", (), {}, lambda: done)
        assert watch.state.source is None
        text = engine.text(1, TEXT)
        engine.ask(text)
        engine.runner.weights = 99
        done.set_result(None)
        assert engine.until_named() == "random"
        assert engine.ask(text) == 0
        assert engine.ask(text) > 0


def test_an_engine_that_is_not_followed_caches_nothing(engine: Core) -> None:
    """Where hotspan was not told of the executor, weights may change unseen."""
    text = engine.stored(engine.text(1, TEXT))
    engine.connector.weights.is_bound = False
    assert engine.ask(text) == engine.ask(text) == 0 or not engine.cache.ram.entries
    engine.settle()
    assert not engine.cache.ram.entries
    assert engine.connector.weights.state.source is None


# -- requests that are there meanwhile ---------------------------------------------------------------------------------


def test_a_running_request_leaves_nothing(engine: Core, models: list[Path]) -> None:
    """Part of its KV is of the old weights, part of the new: only what was stored before is found, by its own name."""
    text = engine.text(1, 3000)
    engine.start("running", text, 300)
    engine.step(2)
    reload(engine, models[1])
    assert "running" in engine.finish()
    engine.settle()
    assert not engine.cache.ram.entries
    assert engine.ask(text) == 0
    reload(engine, models[0])
    assert engine.ask(text) <= 1024, "of the first step, which had ended"
    assert engine.runner.wrong == 0


def test_one_that_has_just_ended_leaves_nothing(engine: Core, models: list[Path]) -> None:
    """vLLM stores its last chunks in the step after."""
    text = engine.text(1, TEXT)
    engine.start("ended", text)
    while not engine.step():
        pass
    reload(engine, models[1])
    engine.settle()
    assert engine.ask(text) == 0


def test_a_waiting_request_finds_nothing(engine: Core, models: list[Path]) -> None:
    """One that waits for a promotion from the disk goes on without."""
    text = engine.stored(engine.text(1, TEXT))
    engine.forget_gpu()
    engine.evict_ram()
    engine.start("waiting", text)
    engine.connector.get_num_new_matched_tokens(engine.scheduler.requests["waiting"], 0)
    reload(engine, models[1])
    assert engine.finish() == {"waiting": 0}
    engine.settle()
    assert engine.ask(text) == 0


def test_stores_in_flight_are_dropped(engine: Core, models: list[Path]) -> None:
    """What the worker copies, and what waits for the disk, is not found after the change, nor written."""
    texts = [engine.text(n, TEXT) for n in range(3)]
    for n, text in enumerate(texts):
        engine.start(f"r{n}", text)
    engine.finish()
    engine.step()
    reload(engine, models[1])
    engine.settle()
    assert [engine.ask(text) for text in texts] == [0, 0, 0]


def test_a_text_that_was_held_over_a_change_leaves_nothing(engine: Core, models: list[Path]) -> None:
    """It may have been invalidated under the names of before, while somebody held it."""
    held_s = engine.manager._clock.monotonic()
    reload(engine, models[1])
    text, directives = engine.text(1, TEXT), Directives(tenant=DEFAULT_TENANT, held_since_s=held_s)
    engine.start("held", text, hotspan=directives.to_json())
    engine.finish()
    engine.settle()
    assert not engine.cache.ram.entries


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own(models: list[Path], tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return other(models[0], tmp_path / "own", 9)


def edit_header(model: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change what a safetensors file says that it has."""
    file = model / "model.safetensors"
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    edit(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def test_files_that_are_edited_in_place_have_their_own_name(models: list[Path], own: Path, tmp_path: Path) -> None:
    """A call without a path reads the same directory: it is named by what is there now."""
    with running(own, tmp_path / "disk") as engine:
        before = engine.manager.namespace
        text = engine.stored(engine.text(1, TEXT))
        other(models[1], own, 3)
        assert reload(engine) == "files"
        assert engine.manager.namespace != before
        second = engine.stored(engine.text(2, TEXT))
        assert engine.ask(text) == 0
    with running(own, tmp_path / "disk") as engine:
        assert cached_below(engine, second) > 0
        assert cached_below(engine, text) == 4 * 256, "asked with these weights above"
        assert engine.runner.wrong == 0


def test_a_call_without_a_path_reads_what_the_last_one_read(engine: Core, models: list[Path]) -> None:
    """vLLM keeps the path."""
    reload(engine, models[1])
    named = engine.manager.namespace
    assert reload(engine) == "files"
    assert engine.manager.namespace == named


@pytest.mark.parametrize(
    "edit",
    [
        lambda header: header.pop(next(name for name in header if name != "__metadata__")),
        lambda header: header.update(more=header[next(name for name in header if name != "__metadata__")]),
    ],
)
def test_files_that_do_not_hold_all_tensors_name_nothing(
    engine: Core, own: Path, edit: Callable[[dict[str, Any]], None]
) -> None:
    """What they leave out stays as it was: the engine has weights of two places."""
    edit_header(own, edit)
    assert reload(engine, own) == "random"


def test_other_formats_name_nothing(engine: Core, own: Path) -> None:
    """What a pickle holds is not looked into; an index may leave tensors out."""
    (own / "more.bin").write_bytes(b"x")
    assert reload(engine, own) == "random"
    (own / "more.bin").unlink()
    (own / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert reload(engine, own) == "random"
    assert reload(engine, own / "nowhere") == "random"


def test_files_that_change_meanwhile_name_nothing(engine: Core, models: list[Path], own: Path) -> None:
    """Before, while or after the workers read them: nobody can say what they have."""
    read = type(engine.runner)._reload_weights

    def reload_and_edit(runner: Any, **named: Any) -> None:
        read(runner, **named)
        other(models[0], own, 11)

    with patch.object(type(engine.runner), "_reload_weights", reload_and_edit):
        assert reload(engine, own) == "random"
    engine.manager._clock._unix_s = time.time()  # type: ignore[attr-defined]
    other(models[0], own, 12)
    assert reload(engine, own) == "random", "it may change again under the same times"


def test_behind_an_unknown_method_files_name_nothing(engine: Core, models: list[Path]) -> None:
    """It may have changed how the model is made, not only its weights."""
    engine.rpc("my_own_method")
    assert reload(engine, models[1]) == "random"


def test_weights_change_while_files_are_read(engine: Core, models: list[Path]) -> None:
    """A digest that comes late names nothing any more."""
    engine.rpc("reload_weights", weights_path=str(models[1]))
    engine.rpc("update_weights", update_info=3)
    named = engine.manager.namespace
    assert engine.connector.weights.state.source == "random"
    engine.until(lambda: engine.administrator._waiting or True, lambda: None)
    for _ in range(50):
        engine.administrator.run_waiting()
        time.sleep(0.002)
    assert engine.manager.namespace == named


# -- what else goes by the namespace -----------------------------------------------------------------------------------


def test_an_invalidation_by_tokens_takes_all_names(engine: Core, models: list[Path]) -> None:
    """The text goes with the old weights' KV, too, so that going back to them finds nothing."""
    text = engine.stored(engine.text(1, TEXT))
    reload(engine, models[1])
    engine.stored(text)
    engine.administer(do="invalidate", tenant=DEFAULT_TENANT, tokens=text)
    assert engine.ask(text) == 0
    reload(engine, models[0])
    assert cached_below(engine, text) == 0


def test_an_invalidation_of_the_model_takes_all_names(engine: Core, models: list[Path]) -> None:
    """The model goes with all weights that it had."""
    text = engine.stored(engine.text(1, TEXT))
    reload(engine, models[1])
    engine.administer(do="invalidate", model=True)
    reload(engine, models[0])
    assert cached_below(engine, text) == 0


def test_it_is_told(engine: Core, models: list[Path]) -> None:
    """In the administrator's figures and in the metrics."""
    told = engine.administer(do="stats")["weights"]
    assert told["source"] == "start" and told["changes"] == 0
    engine.rpc("update_weights", update_info=3)
    told = engine.administer(do="stats")["weights"]
    assert told | {"at": 0} == {
        "source": "random",
        "changes": 1,
        "last": "update_weights",
        "at": 0,
        "namespace": engine.manager.namespace.hex()[:16],
    }
    assert engine.cache.stats.namespaces == {"random": 1}
    assert engine.cache.stats.weights_known is True
    engine.rpc("start_weight_update")
    assert engine.administer(do="stats")["weights"]["namespace"] is None
    assert engine.cache.stats.weights_known is False


def test_what_nobody_will_look_for_leaves_the_disk(engine: Core) -> None:
    """Chunks under a name that nobody else has go when it ends; those of files stay."""
    engine.stored(engine.text(1, TEXT))
    disk = engine.cache._lower.tiers[0].storage
    files = len(disk)
    engine.rpc("update_weights", update_info=3)
    engine.stored(engine.text(2, TEXT))
    assert len(disk) > files
    engine.rpc("update_weights", update_info=4)
    assert len(disk) == files > 0


# -- anything, in any order --------------------------------------------------------------------------------------------


def test_no_sequence_reads_kv_of_other_weights() -> None:
    """Requests, changes of weights, resets, sleep, restarts and edits of files, on two engines over one L2 and a disk:
    no step reads KV of other weights than the engine has (10,000: `python -m tests.engine.weights_sequences`)."""
    world = run(12, seed=1)
    assert world.hits > 0 and len(world.counts) > 10
