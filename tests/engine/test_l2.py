"""Replicas of a real engine over a real L2: what one computed the next one loads, and forgetting reaches both."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotspan.cli.cache import cache
from hotspan.config.settings import L2Settings
from hotspan.core.types import Tier
from kit.redis_server import RedisServer
from tests.daemon.rig import DaemonProcess

from .harness.core import CHUNK, Core, core

TOKENS = 3000
WHOLE = TOKENS // CHUNK * CHUNK


@pytest.fixture(scope="module", params=["redis", "file", "daemon"])
def l2(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[L2Settings]:
    """An L2 that outlives the engines."""
    directory = tmp_path_factory.mktemp("l2")
    if request.param == "file":
        yield L2Settings(directory.as_uri())
        return
    if request.param == "daemon":
        daemon = DaemonProcess(size_gib=0.25)
        daemon.start()
        url = f"sagemaker-hyperpod://127.0.0.1:{daemon.port}"
        yield L2Settings(url, {"sagemaker_hyperpod_shared_memory_name": daemon.name})
        daemon.close()
        return
    server = RedisServer(directory)
    server.start()
    yield L2Settings(server.url)
    server.stop()


@pytest.fixture
def start(l2: L2Settings, tiny_model: Path) -> Iterator[Callable[..., Core]]:
    """Starts engines one after the other: each ends the one before it."""
    running = ExitStack()

    def replica(disk: Path | None = None) -> Core:
        running.close()
        return running.enter_context(core(tiny_model, disk=disk, cache={"l2": l2}))

    yield replica
    running.close()


def test_a_fresh_replica_loads_what_another_computed(start: Callable[..., Core]) -> None:
    """A replica with empty RAM and no disk hits all whole chunks of a text that another computed, byte for byte."""
    first = start()
    text = first.text(1, TOKENS)
    first.stored(text)
    second = start()
    assert second.ask(text) == WHOLE
    assert second.runner.read >= WHOLE
    second.check()


def test_what_was_invalidated_is_not_loaded_by_a_fresh_replica(start: Callable[..., Core]) -> None:
    """A tagged text that was invalidated is computed anew by the next replica, and one with another tag is loaded."""
    first = start()
    gone, kept = first.text(2, TOKENS), first.text(3, TOKENS)
    first.ask(gone, tags=["doc:1"])
    first.ask(kept, tags=["doc:2"])
    first.settle()
    receipt = first.administer(do="invalidate", tenant="default", tags=["doc:1"])
    assert receipt["is_durable"] and receipt["removed"]["l2_chunks"] == TOKENS // CHUNK
    assert len(receipt["replicas"]) == 1 and receipt["replicas_missing"] == []
    second = start()
    assert second.ask(gone, tags=["doc:1"]) == 0
    assert second.ask(kept, tags=["doc:2"]) == WHOLE


def test_a_restarted_replica_forgets_what_others_invalidated_meanwhile(
    start: Callable[..., Core], tmp_path: Path
) -> None:
    """What lies on a replica's disk and was invalidated while it was down is computed anew; the rest is still there."""
    first = start(disk=tmp_path / "kv")
    gone, kept = first.text(5, TOKENS), first.text(6, TOKENS)
    first.ask(gone, tags=["doc:5"])
    first.ask(kept, tags=["doc:6"])
    first.settle()
    start().administer(do="invalidate", tenant="default", tags=["doc:5"])
    again = start(disk=tmp_path / "kv")
    assert again.cache.usage()[Tier.DISK].chunks == 2 * (TOKENS // CHUNK)
    assert again.ask(gone, tags=["doc:5"]) == 0
    assert again.ask(kept, tags=["doc:6"]) == WHOLE


def test_the_command_line_writes_to_the_log_that_replicas_follow(
    start: Callable[..., Core], l2: L2Settings, tmp_path: Path
) -> None:
    """`hotspan cache invalidate --l2` asks no server: a replica that runs finds nothing of it, nor does a later one."""
    words = ["--l2", l2.url, *(f"--l2-option={name}={value}" for name, value in l2.options.items())]
    first = start(disk=tmp_path / "kv")
    gone, kept = first.text(7, TOKENS), first.text(8, TOKENS)
    first.ask(gone, tags=["doc:7"])
    first.ask(kept, tags=["doc:8"])
    first.settle()
    done = CliRunner().invoke(cache, ["invalidate", *words, "--tag", "doc:7", "--tenant", "default", "--json"])
    assert done.exit_code == 0, done.output
    receipt = json.loads(done.output)
    assert receipt["is_durable"] and receipt["replicas"] == [first.follower.replica], receipt
    assert first.ask(gone, tags=["doc:7"]) == 0
    assert first.ask(kept, tags=["doc:8"]) >= WHOLE
    again = start(disk=tmp_path / "kv")
    assert again.ask(kept, tags=["doc:8"]) == WHOLE
    refused = CliRunner().invoke(cache, ["invalidate", *words, "--this-model"])
    assert refused.exit_code == 2 and "running engine alone" in refused.output


def test_a_lookup_asks_the_l2_and_changes_nothing(start: Callable[..., Core]) -> None:
    """What another replica stored is found there, chunk by chunk, and stays there; nothing of another text is."""
    first = start()
    text = first.stored(first.text(9, TOKENS))
    second = start()
    told = second.administer(do="lookup", tokens=text)
    assert told["found"] == {"l2": {"chunks": TOKENS // CHUNK, "tokens": WHOLE}}, told
    assert told["asked"]["tokens"] == WHOLE
    assert second.cache.usage()[Tier.RAM].chunks == 0 and not second.cache.prefetches.is_moving
    assert second.administer(do="lookup", tokens=second.text(10, TOKENS))["found"] == {}
    assert second.administer(do="lookup", tokens=text, tenant="another")["found"] == {}
    second.check()


def test_another_tenants_chunks_are_not_found(start: Callable[..., Core]) -> None:
    """In an L2 that all share, a tenant's text is another tenant's miss."""
    first = start()
    text = first.text(4, TOKENS)
    first.ask(text, hotspan={"tenant": "a"})
    first.settle()
    second = start()
    assert second.ask(text, hotspan={"tenant": "b"}) == 0
