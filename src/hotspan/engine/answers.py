"""Answers to commands of cache administration that come later: Futures, whatever becomes of them."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger(__name__)

Answer = dict[str, Any]

_TELLING = frozenset(("stats", "log", "lookup", "check", "explain", "trace"))


class Refused(Exception):
    """An invalidation that names nothing which could be found: the message is for who asked."""


def attempt(function: Callable[[], None], answer: "Future[Answer]") -> None:
    """Call what answers; if it fails, that is the answer, unless nobody waits for it any more."""
    try:
        function()
    except Refused as error:
        if not answer.done():
            answer.set_result({"refused": str(error)})
    except Exception as error:  # a Future that nobody answers would be waited for in vain
        logger.exception("cache_administration_failed")
        if not answer.done():
            answer.set_exception(error)


def carry_out(
    do: Callable[[Mapping[str, Any]], "Answer | Future[Answer]"], command: Mapping[str, Any], answer: "Future[Answer]"
) -> None:
    """Have a command carried out for who waits for the answer.

    Where nobody waits any more, what changes something is carried out all the same, since it may have been promised,
    and what only tells is not: what it would tell stays for who asks next.
    """
    is_awaited = answer.set_running_or_notify_cancel()
    if not is_awaited and command["do"] in _TELLING:
        return
    said = do(command)
    if not is_awaited:
        return
    if isinstance(said, Future):
        pass_on(said, answer)
    else:
        answer.set_result(said)


def pass_on(source: "Future[Answer]", target: "Future[Answer]") -> None:
    source.add_done_callback(lambda done: attempt(lambda: target.set_result(done.result()), target))


def both_of(first: "Future[Answer]", second: "Future[Answer]") -> Answer:
    """The receipt of two invalidations of the same."""
    one, other = first.result(), second.result()
    removed: Counter[str] = Counter(one["removed"])
    removed.update(other["removed"])
    return other | {
        "removed": dict(removed),
        "is_durable": one["is_durable"] and other["is_durable"],
        "requests_in_flight": one["requests_in_flight"] + other["requests_in_flight"],
    }
