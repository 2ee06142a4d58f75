"""One model of a store: its process, which is restarted whenever it ends, and its state."""

import asyncio
import contextlib
import logging
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from typing import Final

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import EngineError
from hotspan.core.threads import go_on
from hotspan.http.errors import MODEL, HttpError
from hotspan.http.upstream import UnreachedError, Upstream, UpstreamResponse
from hotspan.server.principal import Link

logger = logging.getLogger(__name__)

LOADING_RETRY_S: Final = 5
_POLL_S = 0.2
_CHECK_S = 1.0
"""Between two questions whether a model that was loaded is well."""

_CONNECT_S = 5.0
_LEAST_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0
_STEADY_S = 60.0
"""After so long a life, the next end counts as the first."""


class ModelState(Enum):
    """The state of a model, as /ping shows it."""

    LOADING = "Loading"
    READY = "Healthy"
    STALLED = "Stalled"
    RESTARTING = "Restarting"
    STOPPED = "Stopped"


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """How a model's server is started.

    told:      what it reads on its standard input, which stays open as long as it is wanted.
    variables: its environment.
    reason:    the file in which it leaves why it could not start.
    """

    words: tuple[str, ...]
    told: bytes = field(repr=False)
    variables: Mapping[str, str] = field(repr=False)
    reason: Path


class Pauses:
    """The pause before the next start: doubles until a process has run for a while."""

    def __init__(self) -> None:
        self._next_s = _LEAST_PAUSE_S

    def after(self, lived_s: float) -> float:
        """Seconds to wait after a life of `lived_s`."""
        if lived_s >= _STEADY_S:
            self._next_s = _LEAST_PAUSE_S
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, _MAX_PAUSE_S)
        return pause_s


class ServedModel:
    """One model.

    names:    by which requests mean it; the first is its own.
    starts:   how often its process was started.
    on_start: called with the process id of each.

    answer_s: how long its server may take to say whether it is well.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        link: Link,
        command: ChildCommand,
        *,
        startup_timeout_s: float,
        answer_s: float = 60.0,
        is_partial: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self.names = names
        self.link = link
        self.state = ModelState.LOADING
        self.starts = 0
        self.on_start: Callable[[int], None] = lambda pid: None
        self._command = command
        self._startup_timeout_s = startup_timeout_s
        self._answer_s = answer_s
        self._is_partial = is_partial
        self._clock = clock or SystemClock()
        self._process: asyncio.subprocess.Process | None = None
        self._upstream: Upstream | None = None
        self._again_s = 0.0
        self._is_told_to_end = False
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def name(self) -> str:
        """Its own name."""
        return self.names[0]

    # -- what asks it --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise HttpError 503 unless it can answer."""
        if self.state is ModelState.READY:
            return
        wait_s = math.ceil(self._again_s - self._clock.monotonic())
        if self.state is ModelState.LOADING:
            message = f"the model {self.name} is loading: try again"
        elif self.state is ModelState.STALLED:
            message = f"the model {self.name} has requests in work and makes no steps: try again"
        else:
            message = f"the model {self.name} stopped and is being started again: try again"
        raise HttpError(503, message, retry_s=max(wait_s, LOADING_RETRY_S), about=MODEL)

    async def ask(
        self, method: str, target: str, headers: list[tuple[str, str]], body: bytes = b""
    ) -> UpstreamResponse:
        """The response of its server, as `Upstream.ask`."""
        if self._upstream is None:
            self._upstream = Upstream(connect_timeout_s=_CONNECT_S, unix_path=self.link.path)
        return await self._upstream.ask("http://model", method, target, headers, body)

    @contextlib.contextmanager
    def asked(self) -> Iterator[None]:
        """In the block, a request of this model is in work."""
        self._busy += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()

    # -- its process ---------------------------------------------------------------------------------------------------

    async def keep(self, turns: asyncio.Semaphore) -> None:
        """Start it, and start it again whenever it ends, until it is stopped.

        turns:  of models that may load at a time.
        Raises: EngineError if it can't be loaded the first time, unless the store is partial.
        """
        pauses = Pauses()
        status: int | None = None
        reason = ""
        while True:
            async with turns:
                began_s = self._clock.monotonic()
                try:
                    process = await self._started()
                except OSError as error:  # no more processes, or files: the other models go on
                    status, reason, is_loaded = None, str(error), False
                else:
                    is_loaded = await self._loads(process)
            if is_loaded:
                self.state = ModelState.READY
                logger.info("model_ready model=%s seconds=%.0f", self.name, self._clock.monotonic() - began_s)
                await self._lives(process)
            if self._process is not None:
                await self._end(self._process, 0.0)
                status, reason = self._process.returncode, self._reason(self._process.returncode)
                self._process = None
            if self.state is ModelState.LOADING and not self._is_partial:
                raise EngineError(f"the model {self.name} can't be served: {reason}")
            self.state = ModelState.RESTARTING
            pause_s = pauses.after(self._clock.monotonic() - began_s)
            self._again_s = self._clock.monotonic() + pause_s
            logger.error("model_ended model=%s status=%s again_s=%.0f: %s", self.name, status, pause_s, reason)
            await asyncio.sleep(pause_s)

    async def drain(self) -> None:
        """Stop it when its last request has ended. No more may be sent, and the task of `keep` must have ended."""
        await self._idle.wait()
        self._terminate()

    async def stop(self, grace_s: float) -> None:
        """End its process group: by SIGTERM, and after `grace_s` by SIGKILL."""
        self.state = ModelState.STOPPED
        self._terminate()
        if self._upstream is not None:
            await self._upstream.close()  # what is still asked of it is given up
        if self._process is not None:
            await self._end(self._process, grace_s)

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _started(self) -> asyncio.subprocess.Process:
        Path(self.link.path).unlink(missing_ok=True)
        self._command.reason.unlink(missing_ok=True)
        self.starts += 1
        # Ctrl-C reaches a whole process group: this one is told by its front, once its requests have ended.
        process = await asyncio.create_subprocess_exec(
            *self._command.words,
            stdin=asyncio.subprocess.PIPE,
            env=dict(self._command.variables),
            start_new_session=True,
        )
        self._process = process
        self.on_start(process.pid)
        if process.stdin is not None:
            with contextlib.suppress(ConnectionError):  # it ended already, which is seen below
                process.stdin.write(self._command.told + b"\n")
                await process.stdin.drain()
        return process

    async def _loads(self, process: asyncio.subprocess.Process) -> bool:
        """Whether it becomes ready in time."""
        try:
            async with asyncio.timeout(self._startup_timeout_s):
                while process.returncode is None:
                    if await self._answers():
                        return True
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            self._command.reason.write_text(
                f"it was not loaded within {self._startup_timeout_s:g} s: raise --startup-timeout-s, or look at its log"
            )
        return False

    async def _lives(self, process: asyncio.subprocess.Process) -> None:
        """Return when it has ended; meanwhile its server is asked whether it is well."""
        watch = asyncio.create_task(go_on("model-health", self._watch))
        try:
            await process.wait()
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            await self._check_health()

    async def _check_health(self) -> None:
        """Ask it whether its engine makes steps; no answer in time is none."""
        is_stalled = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._answer_s):
                is_stalled = await self._status() == HTTPStatus.SERVICE_UNAVAILABLE
        state = ModelState.STALLED if is_stalled else ModelState.READY
        if self.state in (ModelState.READY, ModelState.STALLED) and self.state is not state:
            self.state = state
            logger.warning("%s model=%s", "model_stalled" if is_stalled else "model_steps_again", self.name)

    async def _answers(self) -> bool:
        return await self._status() == HTTPStatus.OK

    async def _status(self) -> int | None:
        """Of its server's answer to a health check; None if it can't be reached."""
        try:
            response = await self.ask("GET", "/ping", [])
        except UnreachedError:
            return None
        response.close()
        return response.status

    def _terminate(self) -> None:
        """Send SIGTERM once: a second one would cut requests off."""
        if self._process is not None and self._process.returncode is None and not self._is_told_to_end:
            self._is_told_to_end = True
            self._process.terminate()

    async def _end(self, process: asyncio.subprocess.Process, grace_s: float) -> None:
        """Return when the process and all that it started are gone."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its group: what an engine leaves behind holds memory
        await process.wait()

    def _reason(self, status: int | None) -> str:
        with contextlib.suppress(OSError):
            return self._command.reason.read_text()
        return f"its process ended with status {status}: its log above has the cause"
