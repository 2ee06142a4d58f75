"""How long a store's answers take, as requests are told it before they wait for one."""

import pytest

from hotspan.l2.questions import Questions
from hotspan.testing.clock import SimulatedClock

A, B, C = (bytes([number]) * 16 for number in range(3))


def test_an_answer_takes_as_long_as_of_late_or_as_the_oldest_question_is_old() -> None:
    """Nothing at first; then a mean in which the last answer is a fourth, or the age of an open question."""
    clock = SimulatedClock()
    questions = Questions(clock)
    assert questions.answer_s == 0 and not questions
    began_s = questions.begin([A, B])
    clock.advance(0.5)
    questions.begin([C])
    assert questions.answer_s == 0.5 and questions.keys == {A, B, C}, "the oldest is not answered yet"
    questions.end([A, B], clock.monotonic() - began_s)
    assert questions.answer_s == 0.5 and C in questions and A not in questions
    questions.end([C], 0.1)
    assert questions.answer_s == pytest.approx(0.4) and len(questions) == 0
    questions.begin([A])
    clock.advance(3.0)
    assert questions.answer_s == 3.0, "a store that hangs is not waited for"
