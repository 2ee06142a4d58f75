"""Cache administration on vLLM's real scheduler, without a model (harness/): what is taken back, by whom, and when."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from hotspan.engine import announcing, texts
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.pace import rest_s

from .harness.core import BLOCK, CHUNK, HANG_S, Core, core

pytestmark = pytest.mark.usefixtures("books_agree")

LENGTH = 900
OWN = LENGTH // BLOCK * BLOCK
WHOLE = LENGTH // CHUNK * CHUNK


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    with core(tiny_model, disk=tmp_path_factory.mktemp("admin") / "kv") as engine:
        yield engine


def test_what_is_read_is_what_was_computed(engine: Core) -> None:
    """From the engine's own cache, RAM and disk a text comes back as it was computed; nothing else is ever read."""
    prompt = engine.stored(engine.text(1, LENGTH))
    read = engine.runner.read
    assert engine.ask(prompt) == OWN
    engine.forget_gpu()
    assert engine.ask(prompt) == WHOLE
    engine.forget_gpu()
    engine.evict_ram()
    assert engine.ask(prompt) == WHOLE
    assert engine.runner.read == read + OWN + 2 * WHOLE and engine.runner.wrong == 0


def test_what_a_text_has_saved_is_known(engine: Core) -> None:
    """By its first chunk if it has no tags, until it is invalidated. What the engine itself had is not counted."""
    prompt = engine.stored(engine.text(2, LENGTH))
    assert engine.ask(prompt) == OWN
    before, hits = (engine.administer(do="stats")[part] for part in ("texts", "hit_tokens"))
    for _ in range(2):
        engine.forget_gpu()
        engine.ask(prompt)
    (text,) = [each for each in engine.administer(do="stats")["texts"] if each not in before]
    assert (text["tags"], text["hits"], text["tokens"]) == ([], 2, 2 * WHOLE) and text["seconds"] >= 0
    (tenant,) = engine.administer(do="stats")["hit_tokens"].items()
    assert tenant == (text["tenant"], hits[text["tenant"]] + 2 * WHOLE)
    engine.administer(do="invalidate", tenant="default", tokens=prompt)
    assert text["first_chunk"] not in [each["first_chunk"] for each in engine.administer(do="stats")["texts"]]


def test_a_request_of_another_text_goes_on_as_ever(engine: Core) -> None:
    """What shares no chunk with the text is stored and found, whether it ran or waited."""
    running, waiting, gone = (engine.text(10 + n, LENGTH) for n in range(3))
    engine.start("running", running, 20)
    engine.step()
    engine.start("waiting", waiting)
    assert engine.administer(do="invalidate", tenant="default", tokens=gone)["requests_in_flight"] == 0
    engine.finish()
    assert (engine.ask(running), engine.ask(waiting)) == (OWN, OWN)


def test_an_announced_text_is_read_from_ram(engine: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its tokens, its session or its tag: the disk is read before the request comes, and not again."""
    for n, named in enumerate(({"tokens": None}, {"session": "chat"}, {"tags": ["manual"]})):
        prompt = engine.text(400 + n, LENGTH)
        engine.stored(prompt, **({} if "tokens" in named else named))
        engine.forget_gpu()
        engine.evict_ram()
        asked = {"tokens": prompt} if "tokens" in named else named
        told = engine.administer(do="prefetch", tenant="default", hold_s=60.0, **asked)
        chunks = LENGTH // CHUNK
        amount = {"chunks": chunks, "tokens": WHOLE}
        assert told["found"] == {"disk": amount} and told["started"].items() >= amount.items()
        engine.until(lambda: not engine.cache.prefetches.is_moving, engine.cache.step)
        disk, loads = engine.cache._lower.tiers[0].storage, list[Any]()
        with monkeypatch.context() as patched:
            patched.setattr(disk, "submit_load", lambda *load, to=loads: to.append(load))
            assert engine.ask(prompt) == WHOLE and engine.runner.wrong == 0 and not loads
        assert engine.cache.prefetches.ends_s is None, "used, and held still"
        engine.settle()
    others = engine.administer(do="prefetch", tenant="other", hold_s=60.0, tokens=prompt)
    assert others["found"] == {} and others["started"]["chunks"] == 0


def test_announced_texts_are_hashed_between_steps(engine: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the scheduler's thread, a slice in each turn; beside requests it rests in between, while idle it does not."""
    announcer, now_s, threads = engine.administrator._announcer, itertools.count(), list[int]()
    clock = SimulatedClock()
    monkeypatch.setattr(announcer, "_clock", clock)
    timer = SimpleNamespace(thread_time=lambda: next(now_s) * 0.001, sleep=time.sleep)
    monkeypatch.setattr(announcing, "time", timer)
    go_on = texts.Naming.go_on
    monkeypatch.setattr(texts.Naming, "go_on", lambda self: threads.append(threading.get_ident()) or go_on(self))
    prompt = engine.text(410, LENGTH)

    def turns() -> int:
        """Turns of an announcement until its text is named, each followed by a rest."""
        threads.clear()
        answer = engine.begin(do="prefetch", tenant="default", tokens=prompt, hold_s=1.0)
        engine.until(lambda: announcer._namings.look().is_ready, lambda: None)
        while not answer.done():
            before = len(threads)
            engine.administrator.run_waiting()
            assert len(threads) - before <= 1
            clock.advance(announcing._HASH_RESTS * rest_s(0.001) / 2)
        return len(threads)

    idle = turns()
    assert idle > LENGTH // 256 and set(threads) == {threading.get_ident()}
    engine.start("beside", engine.text(411, LENGTH), 2)
    rests: list[float] = []
    advance = clock.advance
    monkeypatch.setattr(clock, "advance", lambda seconds: rests.append(seconds) or advance(seconds))
    assert turns() == idle and len(rests) >= 2 * (idle - 2)
    engine.finish()


def test_announcements_delay_no_invalidation(engine: Core) -> None:
    """However many texts a tenant announces, another's invalidation by text is the next that is carried out."""
    prompt = engine.stored(engine.text(412, LENGTH))
    begin, waiting = engine.administrator._texts.begin, engine.administrator._waiting
    begun: list[Any] = []

    def noted(command: Any) -> Any:
        begun.append(begin(command))
        return begun[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.administrator._texts, "begin", noted)
        answers = [engine.begin(do="prefetch", tenant="a", tokens=prompt, hold_s=1.0) for _ in range(12)]
    invalidated = engine.begin(do="invalidate", tenant="default", tokens=prompt)
    engine.until(lambda: all(each.done() for each in begun) and len(waiting) > 0, lambda: None)
    assert len(waiting) == 1
    engine.administrator.run_waiting()
    engine.until(invalidated.done, lambda: None)
    assert not any(answer.done() for answer in answers[1:])
    for answer in answers:
        engine.answer(answer)


def test_prefetches_are_looked_at_seldom_beside_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that no step asked for delays one: with requests there are at most 20 a second, without them hundreds."""
    prefetches = SimpleNamespace(is_moving=True, is_busy=True, ends_s=None)
    looks: list[bool] = []
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        prefetches.is_busy = len(pauses) < 3
        if len(pauses) == 5:
            announcer.close()

    manager: Any = SimpleNamespace(cache=SimpleNamespace(prefetches=prefetches), rhythm=None)
    announcer = announcing.Announcer(manager, "replica", lambda: looks.append(prefetches.is_busy), SimulatedClock())
    monkeypatch.setattr(announcing, "time", SimpleNamespace(sleep=sleep))
    announcer._pace()
    assert len(looks) == 5 and min(pauses[:3]) >= 1 / 20 and max(pauses[3:]) <= 1 / 200


def test_a_pin_is_of_what_has_its_tag(engine: Core) -> None:
    """Requests with the tag, in any version, store what the pin takes; those of another tag or tenant do not."""
    said = engine.administer(do="pin", tenant="default", tags=["pinned"], bytes=1 << 20, hold_s=60.0)
    assert said["bytes"] == 1 << 20
    (pin,) = engine.cache.pins.live()
    for seed, tag, is_pinned in ((500, "pinned@3", True), (501, "other", False)):
        known = set(engine.cache.ram.entries)
        engine.ask(engine.text(seed, LENGTH), tags=[tag])
        engine.settle()
        fresh = [entry for key, entry in engine.cache.ram.entries.items() if key not in known]
        assert fresh and all(pin.takes(entry.terms) is is_pinned for entry in fresh)
    engine.administer(do="pin", tenant="default", tags=["pinned"], bytes=0, hold_s=60.0)
    assert not engine.cache.pins.live()


def test_what_comes_before_the_first_token_stays(engine: Core) -> None:
    """`tokens_from` spares the chunks before it, also those that a running request is using."""
    prompt = engine.stored(engine.text(20, LENGTH))
    engine.start("running", prompt + engine.text(21, 1500), 30)
    engine.step()
    engine.administer(do="invalidate", tenant="default", tokens=prompt, tokens_from=2 * CHUNK)
    assert engine.ask(prompt) == 2 * CHUNK
    engine.finish()


def test_the_end_of_a_text_goes_with_the_chunk_that_it_lies_in(engine: Core) -> None:
    """A text ends within a chunk, whose name depends on what follows: from there on everything goes."""
    prompt = engine.text(22, 2000)
    engine.stored(prompt)
    engine.administer(do="invalidate", tenant="default", tokens=prompt[: 2 * CHUNK + 40], tokens_from=2 * CHUNK + 10)
    assert engine.ask(prompt) <= CHUNK


def test_a_text_shorter_than_a_chunk_is_refused(engine: Core) -> None:
    """What is stored of it has names that its tokens don't tell: it is said so, and nothing is acknowledged."""
    prompt = engine.stored(engine.text(23, LENGTH))
    answer = engine.administer(do="invalidate", tenant="default", tokens=prompt[:200])
    assert set(answer) == {"refused"} and "shorter than a chunk" in answer["refused"]
    assert engine.ask(prompt) == OWN


@pytest.fixture
def keyless(engine: Core, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """While it holds True, the keys of no tenant can be had, as when the key-management service is away."""
    is_away = [False]
    keyer = engine.manager._admission.keyer
    monkeypatch.setattr(engine.manager._admission, "keyer", lambda *whose: None if is_away[0] else keyer(*whose))
    yield is_away


def test_a_text_whose_names_can_t_be_told_takes_its_tenant_s(engine: Core, keyless: list[bool]) -> None:
    """While a tenant's keys are not to be had its text has no names: all that the tenant has goes, on every tier, and
    the receipt says that it was more than was asked for; another tenant's stays."""
    own, others = engine.text(30, LENGTH), engine.text(31, LENGTH)
    engine.stored(own, hotspan={"tenant": "acme"})
    engine.stored(others, hotspan={"tenant": "globex"})
    keyless[0] = True
    receipt = engine.administer(do="invalidate", tenant="acme", tokens=own)
    keyless[0] = False
    assert receipt["is_durable"] and receipt["widened"] == ["acme"]
    assert receipt["removed"]["disk_chunks"] >= 3
    assert engine.ask(own, hotspan={"tenant": "acme"}) == 0
    assert engine.ask(others, hotspan={"tenant": "globex"}) == OWN


def test_what_was_computed_while_there_were_no_names_goes_by_its_tokens_later(
    engine: Core, keyless: list[bool]
) -> None:
    """A request that ran while the keys were away left its text in the engine's own cache: an invalidation by tokens
    finds it once they are back, whether the request has ended or runs."""
    ended, running = engine.text(32, LENGTH), engine.text(33, LENGTH)
    keyless[0] = True
    engine.ask(ended, hotspan={"tenant": "acme"})
    engine.start("running", running, 30, hotspan={"tenant": "acme"})
    engine.step()
    keyless[0] = False
    for text in (ended, running):
        engine.administer(do="invalidate", tenant="acme", tokens=text)
    engine.finish()
    assert [engine.ask(text, hotspan={"tenant": "acme"}) for text in (ended, running)] == [0, 0]


def test_an_adapter_that_can_t_be_read_takes_what_the_tenant_has_of_it(engine: Core, tmp_path: Path) -> None:
    """The files of an adapter are gone: its text has no names any more, and all that the tenant computed with it goes;
    what the tenant has of the base model stays."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "weights").write_bytes(b"weights")
    lora = LoRARequest("legal@0123456789ab", 1, str(tmp_path / "adapter"))
    prompt, base = engine.text(34, LENGTH), engine.text(35, LENGTH)
    engine.stored(prompt, lora=lora)
    engine.stored(base)
    (tmp_path / "adapter" / "weights").unlink()
    named = {"tokens": prompt, "adapter": "legal", "adapter_name": lora.lora_name, "adapter_path": lora.lora_path}
    receipt = engine.administer(do="invalidate", tenant="default", **named)
    assert receipt["widened"] == ["default"] and receipt["removed"]["disk_chunks"] == 3
    (tmp_path / "adapter" / "weights").write_bytes(b"weights")
    assert engine.ask(prompt, lora=lora) == 0
    assert engine.ask(base) == OWN


def test_an_adapter_s_text_goes_by_its_tokens(engine: Core, tmp_path: Path) -> None:
    """With the adapter's files there, its text goes and the base model's of the same tokens stays."""
    (tmp_path / "weights").write_bytes(b"weights")
    lora = LoRARequest("tax@0123456789ab", 1, str(tmp_path))
    prompt = engine.text(36, LENGTH)
    engine.stored(prompt, lora=lora)
    engine.stored(prompt)
    named = {"tokens": prompt, "adapter": "tax", "adapter_name": lora.lora_name, "adapter_path": lora.lora_path}
    assert engine.administer(do="invalidate", tenant="default", **named)["widened"] == []
    assert (engine.ask(prompt, lora=lora), engine.ask(prompt)) == (0, OWN)


def test_a_long_text_is_hashed_beside_the_scheduler(engine: Core) -> None:
    """While a text's hashes are computed the engine runs other requests; what is admitted meanwhile is taken, too."""
    prompt, other = engine.text(40, 4000), engine.text(41, LENGTH)
    begun, go_on = threading.Event(), threading.Event()
    keyer = engine.manager.keyer

    def slow(*tenant: Any) -> object:
        begun.set()
        assert go_on.wait(HANG_S)
        return keyer(*tenant)

    engine.manager.keyer = slow
    try:
        receipt = engine.begin(do="invalidate", tenant="default", tokens=prompt)
        assert begun.wait(HANG_S) and engine.ask(other) == 0 and engine.ask(other) == OWN
        engine.start("meanwhile", prompt)
        engine.finish()
        assert not receipt.done()
    finally:
        go_on.set()
        engine.manager.keyer = keyer
    assert engine.answer(receipt)["removed"]["gpu_blocks"] >= 4000 // CHUNK * CHUNK // BLOCK
    assert engine.ask(prompt) == 0 and engine.ask(other) >= WHOLE


def test_a_batch_is_one_invalidation(engine: Core) -> None:
    """Documents, a session and a text together: one receipt, one entry of the disk's log; others' stay."""
    texts = [engine.text(50 + n, LENGTH) for n in range(4)]
    for n, text in enumerate(texts[:2]):
        engine.stored(text, tags=[f"batch-{n}"])
    engine.stored(texts[2], session="batch")
    engine.stored(texts[3])
    kept = engine.stored(engine.text(54, LENGTH), tags=["kept"])
    batch: list[dict[str, Any]] = [{"tenant": "default", "tags": [f"batch-{n}"]} for n in range(2)]
    batch += [{"tenant": "default", "session": "batch"}, {"tenant": "default", "tokens": texts[3]}]
    entries = engine.logged()
    receipt = engine.administer(do="invalidate", batch=batch)
    assert receipt["is_durable"] and receipt["removed"]["disk_chunks"] == 4 * 3
    assert engine.logged() == entries + 1
    assert [engine.ask(text) for text in texts] == [0] * 4 and engine.ask(kept) == OWN


def test_a_request_that_takes_the_name_of_one_that_ended_is_another(engine: Core) -> None:
    """Names come again: what a request was called says nothing of one that was called so before."""
    first, second = engine.text(60, LENGTH), engine.text(61, LENGTH)
    engine.start("again", first, 1, tags=["first"])
    engine.finish()
    engine.settle()
    engine.start("again", second, 20, tags=["second"])
    engine.step()
    assert engine.administer(do="invalidate", tags=["first"])["requests_in_flight"] == 0
    engine.finish()
    engine.settle()
    assert (engine.ask(first), engine.ask(second)) == (0, OWN)


def test_metrics_are_reported_once_a_second_and_when_a_request_ends(
    engine: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that only computes costs no report; what a request did is reported with its last step."""
    clock, reports = SimulatedClock(), list[int]()
    report = engine.manager._metrics.report
    monkeypatch.setattr(engine.manager, "_clock", clock)
    monkeypatch.setattr(engine.manager, "_report_s", 0.0)
    monkeypatch.setattr(
        engine.manager._metrics, "report", lambda size: reports.append(engine.runner.steps) or report(size)
    )
    first = engine.runner.steps
    engine.start("reported", engine.text(4900, CHUNK), 20)
    engine.step(8)
    clock.advance(1.0)
    engine.step(8)
    assert engine.finish() == {"reported": 0}
    assert reports == [first + 1, first + 9, first + 20]


def test_an_id_that_is_used_again_names_another_request(engine: Core) -> None:
    """Both texts are stored, each goes with its own tag, and nothing of either request is left. (While copies of the
    one before are under way vLLM would mix them up, which is why it gives each request a name of its own.)"""
    first, second = engine.text(9101, LENGTH), engine.text(9102, LENGTH)
    for text, tag in ((first, "first"), (second, "second")):
        engine.start("same", text, tags=[tag])
        assert engine.finish() == {"same": 0}
        engine.settle()
    engine.forget_gpu()
    assert (engine.ask(first), engine.ask(second)) == (WHOLE, WHOLE)
    engine.administer(do="invalidate", tags=["first"])
    assert (engine.ask(first, no_store=True), engine.ask(second)) == (0, OWN)
    engine.start("same", first, tags=["third"], no_store=True)  # what it may not do binds no other one
    engine.finish()
    engine.settle()
    engine.start("same", first, tags=["fourth"])
    engine.finish()
    engine.administer(do="invalidate", tags=["second"])
    assert (engine.ask(first), engine.ask(second, no_store=True)) == (OWN, 0)
    engine.settle()
    engine.step()
    assert not engine.manager._records and not engine.manager._ended
