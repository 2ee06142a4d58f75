"""What `hotspan cache explain` prints."""

from typing import Any

from hotspan.cli.explain import explained, shown

REQUEST: dict[str, Any] = {
    "request": "chatcmpl-1",
    "at": 20.0,
    "prompt_tokens": 1290,
    "cached_tokens": 256,
    "agreed_tokens": 256,
    "nearest": {"request": "chatcmpl-0", "seconds_before": 12.34},
    "computed": [
        {
            "from": 256,
            "to": 1290,
            "tokens": 1034,
            "reason": "differs_early",
            "says": "the text differs",
            "todo": "move the date",
            "differs_within": [256, 384],
            "place": "system prompt",
        }
    ],
}


def test_a_request_is_told_in_words() -> None:
    """How much was cached, with whom it agrees, where the difference is, and what helps."""
    assert shown(REQUEST).splitlines() == [
        "chatcmpl-1: 256 of 1,290 prompt tokens were cached",
        "  agrees in 256 tokens with chatcmpl-0, 12.3 s before",
        "  1,034 computed (tokens 256 to 1,289): the text differs",
        "    the first difference is within tokens 256 to 383, in the system prompt",
        "    move the date",
    ]


def test_the_line_that_changes_is_named() -> None:
    """Where the server knows of a line of the system prompt that the session has changed."""
    line = "  line 3 of its system prompt is not that of its session's request before"
    assert line in shown(REQUEST | {"changed_line": 3}).splitlines()
    assert shown(REQUEST | {"changed_line": None}) == shown(REQUEST)


def test_requests_of_all_cores_are_shown() -> None:
    """The latest first."""
    older = REQUEST | {"at": 10.0}
    assert explained([{"requests": [older]}, {"requests": [REQUEST]}]) == [REQUEST, older]
