"""Texts of several tenants are named in turns, invalidations first, on one thread that outlives what fails."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from hotspan.engine.texts import Texts

HANG_S = 60.0


class Rig(Texts):
    """Names nothing: notes whose turn it is, and waits for `go_on` with the first."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self.go_on, self.is_begun = threading.Event(), threading.Event()
        super().__init__(None, dict)  # type: ignore[arg-type]

    def _begun(self, command: Mapping[str, Any]) -> Any:
        self.is_begun.set()
        assert self.go_on.wait(HANG_S)
        self.served.append(command["name"])
        if command.get("fails"):
            raise KeyError("a mistake")
        return command["name"]

    _named = _begun


@pytest.fixture
def texts() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.go_on.set()
    made.close()


def wait(ask: Callable[[Mapping[str, Any]], Any], *named: str, **more: Any) -> list[Any]:
    """Commands by name, whose first letter is their tenant."""
    return [ask({"name": name, "tenant": name[0], **more}) for name in named]


def test_invalidations_first_and_tenants_in_turns(texts: Rig) -> None:
    """A tenant's hundred announcements delay another's invalidation by the one that runs, and its text by one."""
    first = wait(texts.begin, "a0")
    assert texts.is_begun.wait(HANG_S)
    rest = wait(texts.begin, *(f"a{n}" for n in range(1, 101)), "b1", "b2")
    urgent = wait(texts.submit, "a-1", "a-2", "a-3", "c-1", "b-1")
    texts.go_on.set()
    for answer in (*first, *rest, *urgent):
        answer.result(HANG_S)
    assert texts.served[:6] == ["a0", "a-1", "c-1", "b-1", "a-2", "a-3"]
    assert texts.served[6:10] == ["a1", "b1", "a2", "b2"] and texts.served[10:] == [f"a{n}" for n in range(3, 101)]


def test_one_that_fails_is_told_and_the_next_is_named(texts: Rig) -> None:
    """The exception is the answer; the thread goes on."""
    texts.go_on.set()
    (failed,) = wait(texts.submit, "a1", fails=True)
    assert isinstance(failed.exception(HANG_S), KeyError)
    (named,) = wait(texts.submit, "a2")
    assert named.result(HANG_S) == "a2"


def test_one_that_nobody_waits_for_any_more_is_not_named(texts: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Who gave up takes no turn, and the thread goes on without a pause."""
    wait(texts.begin, "a0")
    assert texts.is_begun.wait(HANG_S)
    given_up, named = wait(texts.begin, "a1", "a2")
    assert given_up.cancel()
    texts.go_on.set()
    assert named.result(HANG_S) == "a2" and texts.served == ["a0", "a2"]
    assert "thread_failed" not in caplog.text


def test_what_waits_at_the_end_is_cancelled(texts: Rig) -> None:
    """An engine that ends answers what waits, and takes no more."""
    wait(texts.begin, "a0")
    assert texts.is_begun.wait(HANG_S)
    (waits,) = wait(texts.submit, "a1")
    texts.close()
    assert waits.cancelled()
    with pytest.raises(RuntimeError, match="ends"):
        texts.submit({"name": "a2"})


def test_one_that_is_given_up_leaves_nothing(texts: Rig) -> None:
    """While the thread waits for a tenant's keys, what its asker gives up is not kept with its tokens."""
    wait(texts.begin, "a0")
    assert texts.is_begun.wait(HANG_S)
    for answer in wait(texts.begin, *(f"a{n}" for n in range(1, 100))):
        assert answer.cancel()
    assert not texts._waiting
