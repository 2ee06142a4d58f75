"""Why a request was not a hit: each reason is caused and named rightly. Real scheduler, cache and tiers, no model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from hotspan.cache.entry import CutBy
from hotspan.cache.reasons import REASONS, Kind
from hotspan.cache.waits import Waits
from hotspan.core.directives import Directives, RetentionRule
from hotspan.core.types import GIB
from hotspan.engine.requests import SERVER_DIRECTIVES, Admission
from hotspan.testing.clock import SimulatedClock
from kit.engine import CHUNK

from .harness.core import BLOCK, STEP_TOKENS, Core, core
from .harness.simulated import simulated
from .test_weights import running
from .test_weights_adapters import adapter, load

WHOLE = 4 * CHUNK
TEXT = WHOLE + 30

Parts = list[tuple[str, int, int]]


@dataclass
class Stage:
    """Where a reason is caused. forget: whatever the engine's own pool has."""

    model: Path
    directory: Path

    @contextmanager
    def core(self, **options: Any) -> Iterator[Core]:
        with core(self.model, **options) as engine:
            yield engine
            engine.finish()
            engine.settle()
            engine.check()


def why(engine: Core, prompt: list[int], tokens: int = 1, **options: Any) -> Parts:
    """What was computed of a prompt, and why."""
    engine.ask(prompt, tokens, **options)
    return last(engine)


def last(engine: Core) -> Parts:
    (told,) = explained(engine)["requests"][:1]
    parts = [(part["reason"], part["from"], part["to"]) for part in told["computed"]]
    assert sum(end - start for _, start, end in parts) == told["prompt_tokens"] - told["cached_tokens"]
    return parts


def explained(engine: Core, **command: Any) -> dict[str, Any]:
    return engine.administer(do="explain", **command)


def small(stage: Stage, slots: int) -> float:
    """GiB of RAM for so many chunks."""
    with core(stage.model) as engine:
        slab = engine.cache.ram.slab
        gib: float = (slots + 0.01) * slab.bytes / slab.slots / GIB
        return gib


# -- nothing of the request can be a hit -------------------------------------------------------------------------------


def directives(stage: Stage) -> Parts:
    with stage.core(cache={"is_served": False}) as engine:
        text = engine.stored(engine.text(1, TEXT))
        engine.forget_gpu()
        return why(engine, text, ttl="soon")


def weights_unknown(stage: Stage) -> Parts:
    with running(stage.model) as engine:
        text = engine.stored(engine.text(1, TEXT))
        engine.rpc("start_weight_update")
        return why(engine, text)


def adapter_unknown(stage: Stage) -> Parts:
    with running(stage.model) as engine:
        lora = load(engine, adapter(stage.directory / "a"))
        text = engine.stored(engine.text(1, TEXT), lora=lora)
        load(engine, adapter(stage.directory / "a"))  # its files are others than those that the engine has
        return why(engine, text[:10] + text, lora=lora)


def media(stage: Stage) -> Parts:
    with stage.core() as engine, patch.object(Admission, "_has_unnamed_media", return_value=True):
        return why(engine, engine.text(1, TEXT))


def parts(stage: Stage) -> Parts:
    with stage.core() as engine:
        return why(engine, engine.text(1, TEXT), resumable=True)


def keys(stage: Stage) -> Parts:
    with stage.core() as engine, patch.object(Admission, "keyer", return_value=None):
        return why(engine, engine.text(1, TEXT))


def mistake(stage: Stage) -> Parts:
    with stage.core() as engine:
        with patch.object(engine.manager.prefixes, "arrive", side_effect=RuntimeError("a mistake")):
            engine.ask(engine.text(1, TEXT))
        return last(engine)


def prompt_logprobs(stage: Stage) -> Parts:
    with stage.core() as engine:
        text = engine.stored(engine.text(1, TEXT))
        request = engine.start("all-logprobs", text)
        request.skip_reading_prefix_cache = True  # as vLLM makes it of prompt_logprobs, which needs a model here
        engine.finish()
        return last(engine)


# -- known, and no hit -------------------------------------------------------------------------------------------------


def cut(why_cut: CutBy) -> Callable[[Stage], Parts]:
    """A disk that is slow, or has no room in RAM, by what `Waits` does then."""

    def way(stage: Stage) -> Parts:
        with stage.core(disk=stage.directory / "kv") as engine:
            text = engine.stored(engine.text(1, TEXT))
            engine.forget_gpu()
            engine.evict_ram()
            with patch.object(Waits, "await_landing", lambda self, reader: self._cut(reader, why_cut)):
                parts = why(engine, text)
            return parts

    return way


def late(stage: Stage) -> Parts:
    with simulated(stage.model, disk=stage.directory / "kv") as engine:
        text = engine.stored(engine.text(1, TEXT))
        engine.forget()
        engine.disk.hang()
        engine.start("late", text)
        engine.finish()
        parts = last(engine)
        engine.disk.heal()
        return parts


def cheaper_to_compute(stage: Stage) -> Parts:
    with simulated(stage.model, disk=stage.directory / "kv") as engine:
        engine.disk.slow(0.0005)
        texts = [engine.stored(engine.text(seed, TEXT)) for seed in range(6)]
        engine.disk.slow(1.0)
        for text in texts * 4:
            engine.time(text)
        return last(engine)


def fault(stage: Stage) -> Parts:
    with simulated(stage.model, disk=stage.directory / "kv") as engine:
        text = engine.stored(engine.text(1, TEXT))
        engine.forget()
        engine.disk.fail()
        engine.start("faulty", text)
        engine.finish()
        engine.disk.heal()
        return last(engine)


def in_flight(stage: Stage) -> Parts:
    with stage.core(enable_prefix_caching=False) as engine:  # vLLM's own cache has a block once it is scheduled
        text = engine.text(1, 2 * CHUNK)
        engine.start("first", text)
        engine.start("second", text)
        engine.finish()
        told = {each["request"]: each for each in explained(engine)["requests"]}
        assert [part["reason"] for part in told["first"]["computed"]] == ["first"]
        return [(part["reason"], part["from"], part["to"]) for part in told["second"]["computed"]]


def no_store(stage: Stage) -> Parts:
    with stage.core(cache={"retention": (RetentionRule(tag="secret", no_store=True),)}) as engine:
        server = {SERVER_DIRECTIVES: Directives(tags=("secret",)).to_json()}
        text = engine.stored(engine.text(1, TEXT), **server)
        return why(engine, text)


def withdrawn(stage: Stage) -> Parts:
    with stage.core() as engine:
        text = engine.text(1, TEXT)
        engine.start("running", text, 20, tags=["doc"])
        engine.step(3)
        engine.administer(do="invalidate", tags=["doc"])
        engine.finish()
        engine.settle()
        return why(engine, text)


def other_request_failed(stage: Stage) -> Parts:
    with stage.core() as engine:
        text = engine.text(1, 3000)
        engine.start("left out in the middle", text)
        engine.step()
        engine.manager.leave_out("left out in the middle")
        engine.finish()
        engine.settle()
        engine.forget_gpu()
        return why(engine, text)


def no_room(stage: Stage) -> Parts:
    with stage.core(ram_gib=small(stage, 3)) as engine:
        text = engine.stored(engine.text(1, TEXT))
        engine.forget_gpu()
        return why(engine, text)


def answer_not_stored(stage: Stage) -> Parts:
    with stage.core(cache={"prompts_only": True}) as engine:
        text = engine.text(1, WHOLE)
        engine.ask(text, 2 * CHUNK + 1)
        (answer,) = engine.answers.values()
        engine.settle()
        engine.forget_gpu()
        return why(engine, text + answer)


def aborted(stage: Stage) -> Parts:
    with stage.core() as engine:
        text = engine.text(1, 3000)
        engine.start("aborted", text)
        engine.step()
        engine.core.abort_requests(["aborted"])
        engine.settle()
        engine.forget_gpu()
        return why(engine, text)


def expired(stage: Stage) -> Parts:
    clock = SimulatedClock(unix_s=1e9)
    with stage.core(clock=clock) as engine:
        text = engine.stored(engine.text(1, TEXT), ttl=60)
        clock.advance(61)
        return why(engine, text)


def invalidated(stage: Stage) -> Parts:
    with stage.core() as engine:
        text = engine.stored(engine.text(1, TEXT), tags=["doc"])
        engine.ask(text)  # without the tag
        engine.settle()
        engine.administer(do="invalidate", tags=["doc"])
        return why(engine, text)


def cleared(stage: Stage) -> Parts:
    with stage.core() as engine:
        text = engine.stored(engine.text(1, TEXT))
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        return why(engine, text)


def tier_down(stage: Stage) -> Parts:
    with stage.core(disk=stage.directory / "kv") as engine:
        text = engine.stored(engine.text(1, TEXT))
        engine.forget_gpu()
        engine.evict_ram()
        (tier,) = engine.cache._lower.tiers
        tier._trip("faults")
        with patch.object(tier, "_heal"):
            return why(engine, text)


def evicted(stage: Stage) -> Parts:
    with stage.core(ram_gib=small(stage, 5)) as engine:
        text = engine.stored(engine.text(1, TEXT))
        for seed in (2, 3):
            engine.stored(engine.text(seed, TEXT))
        engine.forget_gpu()
        return why(engine, text)


def group_missing(stage: Stage) -> Parts:
    with stage.core() as engine:
        text = engine.stored(engine.text(1, TEXT))
        engine.forget_gpu()
        request = engine.start("hybrid", text)
        record = engine.manager._records["hybrid"]
        record.groups = (*record.groups, record.groups[0]._replace(index=7, is_chain=False))  # nothing is there of it
        with patch.object(engine.manager, "lookup", return_value=0):
            engine.finish()
        assert request.is_finished()
        return last(engine)


# -- no earlier request had them there ---------------------------------------------------------------------------------


def first(stage: Stage) -> Parts:
    with stage.core() as engine:
        return why(engine, engine.text(1, TEXT))


def weights_changed(stage: Stage) -> Parts:
    with running(stage.model) as engine:
        text = engine.stored(engine.text(1, TEXT))
        engine.rpc("start_weight_update")
        engine.rpc("finish_weight_update")
        engine.until_named()
        return why(engine, text)


def other_adapter(stage: Stage) -> Parts:
    with running(stage.model) as engine:
        text = engine.stored(engine.text(1, TEXT))
        return why(engine, text, lora=load(engine, adapter(stage.directory / "a")))


def other_salt(stage: Stage) -> Parts:
    with stage.core() as engine:
        text = engine.stored(engine.text(1, TEXT), salt="one")
        return why(engine, text, salt="two")


def other_media(stage: Stage) -> Parts:
    with stage.core() as engine:
        text = engine.stored(engine.text(1, TEXT))
        hasher = engine.core.request_block_hasher

        def hashed(request: Any) -> Any:  # as if an image stood in the first block
            return [bytes(31) + b"x" + name[32:] for name in hasher(request)] if request.request_id else []

        with patch.object(engine.core, "request_block_hasher", hashed):
            return why(engine, text)


def new_text(stage: Stage) -> Parts:
    with stage.core() as engine:
        text = engine.stored(engine.text(1, WHOLE))
        return why(engine, text + engine.text(2, 2 * CHUNK))


def other_answer(stage: Stage) -> Parts:
    with stage.core() as engine:
        text = engine.text(1, WHOLE)
        engine.ask(text, 2 * CHUNK + 1)
        engine.settle()
        return why(engine, text + engine.text(2, 3 * CHUNK))


def other_options(stage: Stage) -> Parts:
    with stage.core() as engine:
        server: dict[str, Any] = {SERVER_DIRECTIVES: Directives(form=7).to_json()}
        text = engine.text(1, CHUNK)
        engine.stored(text + engine.text(2, WHOLE))
        return why(engine, text + engine.text(3, WHOLE), **server)


def other_text(stage: Stage) -> Parts:
    with stage.core() as engine:
        text = engine.stored(engine.text(1, TEXT))
        return why(engine, text[: 2 * CHUNK + 10] + engine.text(2, WHOLE))


def differs_early(stage: Stage) -> Parts:
    with stage.core() as engine:
        text = engine.stored(engine.text(1, TEXT))
        return why(engine, text[: CHUNK + 10] + engine.text(2, WHOLE))


def tail(stage: Stage) -> Parts:
    with stage.core() as engine:
        text = engine.stored(engine.text(1, TEXT))
        return why(engine, text)


ALL: list[Callable[[Stage], Parts]] = [
    *(directives, weights_unknown, adapter_unknown, media, parts, keys, mistake, prompt_logprobs),
    *(fault, late, cheaper_to_compute, group_missing, in_flight, no_store, withdrawn, other_request_failed, no_room),
    *(answer_not_stored, aborted, expired, invalidated, cleared, tier_down, evicted),
    *(first, weights_changed, other_adapter, other_salt, other_media, new_text, other_answer, other_options),
    *(differs_early, other_text, tail),
]
WAYS = {way.__name__: way for way in ALL} | {"no_slot": cut("room"), "unanswered": cut("unanswered")}


UNUSUAL = {
    "adapter_unknown": [("adapter_unknown", 0, TEXT + 10)],
    "in_flight": [("in_flight", 0, 2 * CHUNK)],
    "no_room": [("no_room", 3 * CHUNK, WHOLE), ("tail", WHOLE, TEXT)],
    "answer_not_stored": [
        ("answer_not_stored", WHOLE, WHOLE + 2 * CHUNK),
        ("tail", WHOLE + 2 * CHUNK, WHOLE + 2 * CHUNK + 1),
    ],
    "aborted": [("aborted", STEP_TOKENS, 11 * CHUNK), ("tail", 11 * CHUNK, 3000)],
    "other_request_failed": [("other_request_failed", STEP_TOKENS, 11 * CHUNK), ("tail", 11 * CHUNK, 3000)],
    "new_text": [("new_text", WHOLE, WHOLE + 2 * CHUNK)],
    "other_answer": [("other_answer", WHOLE, WHOLE + 3 * CHUNK)],
    "other_options": [("other_options", CHUNK, CHUNK + WHOLE)],
    "differs_early": [("differs_early", CHUNK, CHUNK + 10 + WHOLE)],
    "other_text": [("other_text", 2 * CHUNK, 2 * CHUNK + 10 + WHOLE)],
    "tail": [("tail", WHOLE, TEXT)],
}
"""What is computed where it is not the whole text, or what it has in common with an earlier one."""


def test_each_reason_has_a_way() -> None:
    """A reason that nobody causes here is none."""
    assert WAYS.keys() == REASONS.keys()


@pytest.mark.parametrize("name", WAYS)
def test_each_reason_is_named_rightly(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """Whoever causes a reason is told it, of the tokens that it is true of, and no other."""
    usual = [(name, 0, WHOLE), ("tail", WHOLE, TEXT)] if REASONS[name].kind is Kind.KNOWN else [(name, 0, TEXT)]
    assert WAYS[name](Stage(tiny_model, tmp_path)) == UNUSUAL.get(name, usual)


# -- who is told what --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Core]:
    with core(tiny_model) as engine:
        yield engine


def test_an_answer_that_asks_for_it_has_it(engine: Core) -> None:
    """Its kv_transfer_params have it, with the place that the server knows; no other answer's have."""
    text = engine.stored(engine.text(10, TEXT))
    places = (("system prompt", CHUNK + 100), ("message 2 (user)", TEXT))
    server: dict[str, Any] = {SERVER_DIRECTIVES: Directives(explain=True, places=places).to_json()}
    request = engine.start("asks", text[: CHUNK + 70] + engine.text(11, WHOLE), **server)
    told, report = list[Any](), engine.connector._report
    with patch.object(engine.connector, "_report", lambda ended: told.append(report(ended))):
        engine.finish()
        engine.ask(text)
    assert request.is_finished() and told[1] is None
    (part,) = told[0]["explain"]["computed"]
    assert (part["reason"], part["place"]) == ("differs_early", "system prompt to message 2 (user)")
    assert part["differs_within"] == [CHUNK + BLOCK, 2 * CHUNK]
    assert told[0]["explain"]["agreed_tokens"] == CHUNK + BLOCK


def test_a_client_learns_nothing_of_other_salts(engine: Core) -> None:
    """Whether a text was sent under another salt is the administrator's to know, not the client's."""
    text = engine.stored(engine.text(20, TEXT), salt="its own")
    engine.start("under another", text, salt="another")
    engine.finish()
    as_admin, as_client = (
        explained(engine, request="under another", is_client=is_client)["requests"][0] for is_client in (False, True)
    )
    assert [part["reason"] for part in as_admin["computed"]] == ["other_salt"]
    assert [part["reason"] for part in as_client["computed"]] == ["first"]


def test_a_tenant_finds_its_own_requests_only(engine: Core) -> None:
    """By the name that the engine, an answer, or X-Request-Id has; of another tenant it finds nothing."""
    server: dict[str, Any] = {SERVER_DIRECTIVES: Directives(tenant="acme").to_json()}
    engine.start("chatcmpl-my-request-1a2b3c4d", engine.text(30, TEXT), **server)
    engine.finish()
    for asked in ("chatcmpl-my-request-1a2b3c4d", "chatcmpl-my-request", "my-request"):
        assert len(explained(engine, request=asked, tenant="acme")["requests"]) == 1
    assert not explained(engine, request="my-request", tenant="other")["requests"]
    assert not explained(engine, request="request")["requests"]
    assert len(explained(engine, tenant="acme")["requests"]) == 1


def test_computed_tokens_are_counted_by_reason(engine: Core) -> None:
    """All prompt tokens that were not cached have one reason each."""
    engine.cache.take_stats()
    with patch.object(engine.manager._metrics, "report", return_value=None):  # it would take the counts
        text = engine.stored(engine.text(40, TEXT), salt="counted")
        engine.ask(text, salt="counted")
    counts = engine.cache.take_stats()
    assert counts.computed_tokens == {"first": TEXT, "tail": TEXT - WHOLE}


def test_it_can_be_turned_off(tiny_model: Path) -> None:
    """With 0 requests nothing is kept, and whoever asks is told so."""
    with core(tiny_model, cache={"explain_requests": 0}) as off:
        off.ask(off.text(1, TEXT))
        assert off.manager.explainer is None and not off.cache.take_stats().computed_tokens
        assert "--explain-requests" in explained(off)["refused"]
