"""Commands of administration whose asker may be gone."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from hotspan.engine.answers import Answer, Refused, attempt, carry_out


def gone() -> "Future[Answer]":
    """The answer of a command whose asker has given up."""
    answer: Future[Answer] = Future()
    assert answer.cancel()
    return answer


@pytest.mark.parametrize(
    ("verb", "is_done"), [("trace", False), ("stats", False), ("invalidate", True), ("shred", True)]
)
def test_what_only_tells_is_left_when_nobody_waits(verb: str, is_done: bool) -> None:
    """Rows of a trace stay for who asks next; what was to be forgotten is forgotten."""
    done = []

    def do(command: Mapping[str, Any]) -> Answer:
        done.append(command["do"])
        return {}

    carry_out(do, {"do": verb}, gone())
    assert bool(done) is is_done


def test_a_failure_that_nobody_waits_for_is_no_other_s() -> None:
    """Neither an error nor a refusal escapes to the commands that come after it."""
    for error in (ValueError("wrong"), Refused("no")):

        def do(command: Mapping[str, Any], error: Exception = error) -> Answer:
            raise error

        answer = gone()
        attempt(lambda do=do, answer=answer: carry_out(do, {"do": "invalidate"}, answer), answer)  # type: ignore[misc]


def test_an_answer_that_is_being_made_can_not_be_given_up() -> None:
    """It comes, at once or later, to whoever still looks."""
    later: Future[Answer] = Future()
    for said in ({"a": 1}, later):
        answer: Future[Answer] = Future()
        carry_out(lambda command, said=said: said, {"do": "trace"}, answer)  # type: ignore[misc]
        assert not answer.cancel()
        later.done() or later.set_result({"a": 1})
        assert answer.result(0) == {"a": 1}
