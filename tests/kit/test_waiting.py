"""Waiting for a condition: it ends when the condition holds, and in words when it does not."""

import pytest

from kit.waiting import at_last, until, until_async


def test_it_ends_when_the_condition_holds() -> None:
    """The condition is asked again until it holds; one that never does is an AssertionError that names it."""
    asked = iter([False, False, True])
    until(lambda: next(asked))
    assert next(asked, None) is None
    with pytest.raises(AssertionError, match="the copy"):
        until(lambda: False, "the copy", within_s=0.0)


async def test_tasks_run_meanwhile() -> None:
    """What is to be done meanwhile is done before each nap, and never once the condition holds."""
    done: list[int] = []
    await until_async(lambda: len(done) == 3, meanwhile=lambda: done.append(1))
    await until_async(lambda: True, meanwhile=lambda: done.append(1))
    assert len(done) == 3
    with pytest.raises(TimeoutError):
        await until_async(lambda: False, within_s=0.0)


def test_an_answer_comes_at_last() -> None:
    """An OSError is asked again; what else is raised is raised."""
    answers = iter([OSError(), OSError(), 7])

    def ask() -> int:
        if isinstance(answer := next(answers), OSError):
            raise answer
        return answer

    assert at_last(ask) == 7
    with pytest.raises(ZeroDivisionError):
        at_last(lambda: 1 // 0)
