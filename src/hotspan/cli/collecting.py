"""Collects what servers record of their requests (engine/traces.py), on one time axis.

    each second: all servers are asked at once --- rows, and how long ago the recording began --- shifted and kept

Each server is asked on a thread of its own, which also keeps what it answers: one that is slow costs the others no
time, so that their recordings go on, and Ctrl-C loses no answer that is on its way.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from hotspan.core.errors import MALFORMED, ConfigError, NoAnswerError, RefusedError
from hotspan.core.threads import start

Post = Callable[[str, dict[str, Any]], Any]

_FETCH_S: Final = 1.0
_SLACK_S: Final = 1.0
"""By which clocks of two machines may drift apart between two answers."""

_LAST_TRIES: Final = 2
"""How often a busy server is asked for its last rows."""


class Collected(NamedTuple):
    """The rows of all servers, by their time.

    lost:        how many requests are not among them. silent: who did not always answer.
    servers:     what the engines told of themselves at the end.
    interrupted: whose recording ended and began again, so that requests are missing.
    """

    rows: list[dict[str, Any]]
    lost: int
    silent: list[str]
    servers: list[dict[str, Any]]
    interrupted: list[str]


class _Told(NamedTuple):
    """What a server answered, or each replica behind a router, by name; and which replicas did not."""

    answers: dict[str, dict[str, Any]]
    silent: list[str]


@dataclass(slots=True)
class _Source:
    """The recording of one server or replica.

    shift_s: what its times lack. age_s: of the recording, in the last answer, which was there at `told_s`.
    unended: its requests without a row. missed: those of its recordings before this one. has_ended: it was the last.
    """

    shift_s: float
    age_s: float
    told_s: float
    unended: int = 0
    missed: int = 0
    has_ended: bool = False


def since_boot_s() -> float:
    """Seconds, those counted in which this machine slept."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def collect(
    posts: Mapping[str, Post],
    seconds: float,
    advance: Callable[[int], None] = lambda count: None,
    block_tokens: int | None = None,
    *,
    clock: Callable[[], float] = since_boot_s,
    sleep: Callable[[float], None] = time.sleep,
) -> Collected:
    """Record until the time is over, nobody is left who can be asked, or Ctrl-C; a second one ends the last fetch.

    posts:        ask each server, by its name. Called from other threads, all at once.
    block_tokens: of a hash; None is as each server has its chunks.
    A server that is busy is asked again. One that can't be asked any more is left out: what it has told is kept.
    Raises:       ConfigError if a server can't be asked at first, somebody else records, or servers have other chunks.
    """
    found = _Collection(posts, advance, block_tokens, clock)
    ends_s = clock() + seconds
    with contextlib.suppress(KeyboardInterrupt):
        while found.left and (left_s := ends_s - clock()) > 0:
            found.fetch()
            if found.left:
                sleep(min(_FETCH_S, left_s))
    with contextlib.suppress(KeyboardInterrupt):
        found.end(sleep)
    collected = found.collected()
    if len(sizes := {row["block_tokens"] for row in collected.rows if "block_tokens" in row}) > 1:
        raise ConfigError(f"the servers have chunks of {sorted(sizes)} tokens: give one size for all as --block-tokens")
    return collected


class _Collection:
    """What was collected, and who is left to be asked."""

    def __init__(
        self,
        posts: Mapping[str, Post],
        advance: Callable[[int], None],
        block_tokens: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.left = dict(posts)
        self._names = [*posts]
        self._asked = {"recording": secrets.token_hex(16)} | (
            {} if block_tokens is None else {"block_tokens": block_tokens}
        )
        self._advance, self._clock = advance, clock
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._has_begun = False
        self._refused: dict[str, ConfigError] = {}
        self._began_s: float | None = None
        self._sources: dict[str, _Source] = {}
        self._rows: list[dict[str, Any]] = []
        self._servers: list[dict[str, Any]] = []
        self._silent: set[str] = set()
        self._interrupted: set[str] = set()

    def fetch(self, *, is_last: bool = False) -> None:
        """Ask all at once, and wait for them. Raises: ConfigError if one can't be asked at first; then all ended."""
        self._wait()  # for those that an interrupt left
        self._ask_all(is_last=is_last)
        if not self._has_begun and self._refused:
            if not is_last:
                self._ask_all(is_last=True)
            raise next(self._refused[name] for name in self._names if name in self._refused)
        self._has_begun = True

    def end(self, sleep: Callable[[float], None]) -> None:
        """Fetch the last rows of all; those that are busy are asked again."""
        self.fetch(is_last=True)
        for _ in range(1, _LAST_TRIES):
            if self.left:
                sleep(_FETCH_S)
                self.fetch(is_last=True)

    def collected(self) -> Collected:
        """All until now. Who has not ended its recording is silent."""
        with self._lock:
            rows = sorted(self._rows, key=lambda row: row["timestamp"])
            lost = sum(each.missed + each.unended * each.has_ended for each in self._sources.values())
            silent = sorted({*self._silent, *self.left})
            return Collected(rows, lost, silent, [*self._servers], sorted(self._interrupted))

    def _ask_all(self, *, is_last: bool) -> None:
        asked = self._asked | {"is_last": is_last}
        for name, post in [*self.left.items()]:
            ask, failed = partial(self._ask, name, post, asked), partial(self._leave_out, name)
            self._threads.add(start("trace-fetch", ask, failed=failed))
        self._wait()

    def _wait(self) -> None:
        while self._threads:
            thread = next(iter(self._threads))
            thread.join()
            self._threads.discard(thread)

    def _ask(self, name: str, post: Post, asked: dict[str, Any]) -> None:
        """On a thread of its own."""
        self._threads.add(threading.current_thread())  # an interrupt may come before who starts it knows it
        sent_s = self._clock()
        try:
            told = _told(name, post, asked)
        except ConfigError as error:
            self._leave_out(name, error)
            return
        now = self._clock()
        with self._lock:
            self._silent.update(told.silent)
            for each, answer in told.answers.items():
                self._keep(each, answer, sent_s, now, is_last=asked["is_last"])
            if asked["is_last"]:
                del self.left[name]
        self._advance(sum(len(answer["rows"]) for answer in told.answers.values()))

    def _leave_out(self, name: str, error: Exception) -> None:
        """For good, unless the server only was busy."""
        is_busy = isinstance(error, NoAnswerError) or (isinstance(error, RefusedError) and _is_busy(error))
        with self._lock:
            if not self._has_begun:
                known = error if isinstance(error, ConfigError) else ConfigError(f"{name}: {error!r}")
                self._refused.setdefault(name, known)
            elif is_busy:
                self._silent.add(name)
            else:
                self._silent.add(str(error))
                self.left.pop(name, None)

    def _keep(self, name: str, answer: dict[str, Any], sent_s: float, now: float, *, is_last: bool) -> None:
        """An answer to what was sent at `sent_s`, all of it `now`."""
        age_s, source = answer.get("age_s"), self._sources.get(name)
        if source is None:
            source = self._sources[name] = _Source(self._shift_s(age_s, now), 0.0, sent_s)
        elif age_s is not None and _is_another(source, age_s, sent_s):
            self._interrupted.add(name)
            source.missed += source.unended
            source.shift_s = self._shift_s(age_s, now)
        source.age_s, source.told_s = age_s or 0.0, now
        source.unended, source.has_ended = answer["running"] + answer["dropped"], is_last
        shift_ms = round(source.shift_s * 1000)
        self._rows += [{**row, "timestamp": row["timestamp"] + shift_ms} for row in answer["rows"]]
        self._servers += answer.get("servers", ())

    def _shift_s(self, age_s: float | None, now: float) -> float:
        """How long after the first recording one began that has this age; 0 if its server does not say its age."""
        if age_s is None:
            return 0.0
        began_s = now - age_s
        self._began_s = began_s if self._began_s is None else self._began_s
        return began_s - self._began_s


def _is_another(source: _Source, age_s: float, sent_s: float) -> bool:
    """Whether a recording is younger than the one known would be."""
    return age_s < source.age_s or age_s < source.age_s + sent_s - source.told_s - _SLACK_S


def _is_busy(error: RefusedError) -> bool:
    """Whether a server may answer the next time, or a replica behind a router."""
    replicas = error.body.get("replicas") if isinstance(error.body, dict) else None
    statuses = [each.get("status") for each in replicas or () if isinstance(each, dict)]
    return HTTPStatus.SERVICE_UNAVAILABLE in (error.status, *statuses)


def _told(name: str, post: Post, asked: dict[str, Any]) -> _Told:
    """What a server answers, or the replicas behind a router. Raises: ConfigError."""
    refused: RefusedError | None = None
    try:
        answer = post("/hotspan/trace", asked)
    except RefusedError as error:
        refused, answer = error, error.body
    try:
        replicas = answer.get("replicas", ()) if isinstance(answer, dict) else ()
        told = {each["replica"]: each["body"] for each in replicas if each["status"] == HTTPStatus.OK}
        silent = [each["replica"] for each in replicas if each["status"] != HTTPStatus.OK]
        if refused is not None and not told:
            raise refused
        told = told if replicas else {name: answer}
        for each in told.values():
            _check(each)
    except MALFORMED as error:
        raise refused or ConfigError(f"{name} does not answer as hotspan does: is --server right?") from error
    return _Told(told, silent)


def _check(answer: Any) -> None:
    """Raise one of MALFORMED if a server's answer has not what is read of it."""
    numbers = [answer["running"], answer["dropped"], answer.get("age_s", 0)]
    for row in answer["rows"]:
        numbers += [row["timestamp"], row["input_length"], row["cached_length"], row.get("ttft_ms", 0)]
    servers = answer.get("servers", [])
    if not all(isinstance(each, (int, float)) for each in numbers) or not isinstance(servers, list):
        raise TypeError("no answer of hotspan's")
