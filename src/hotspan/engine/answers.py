"""Answers to commands of cache administration that come later: Futures, whatever becomes of them."""

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger(__name__)

Answer = dict[str, Any]


class Refused(Exception):
    """An invalidation that names nothing which could be found: the message is for who asked."""


def attempt(function: Callable[[], None], answer: "Future[Answer]") -> None:
    """Call what answers; if it fails, that is the answer."""
    try:
        function()
    except Refused as error:
        answer.set_result({"refused": str(error)})
    except Exception as error:  # a Future that nobody answers would be waited for in vain
        logger.exception("cache_administration_failed")
        answer.set_exception(error)


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
