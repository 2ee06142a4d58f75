"""The formatters of a server: the base model's, and those of adapters, which override them."""

import os
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import ConfigError
from hotspan.formatters.calls import Calls, Threads
from hotspan.formatters.declared import load_declared
from hotspan.formatters.formatter import Context, Formatter, Phase
from hotspan.formatters.script import Script, load_script

SCRIPT, DECLARED = "model.py", "formatter.yaml"


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """What one directory gives."""

    directory: Path
    script: Script | None
    calls: Mapping[Phase, Calls]


class Formatters:
    """What a request's payload and its answer go through.

    An adapter's formatter stands in the place of the base model's, each phase on its own. Loading and taking away may
    happen in any thread; calls belong to one event loop.

    tokenizer: handed to those that take one; it may be given later.
    """

    def __init__(self, *, is_secure: bool, tokenizer: Any, timeout_s: float, clock: Clock) -> None:
        self._is_secure = is_secure
        self.tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._clock = clock
        self._threads = Threads()
        self._lock = threading.Lock()
        self._loaded: dict[str | None, _Loaded] = {}  # None is the base model

    def add(self, adapter: str | None, directory: Path) -> None:
        """Load what stands in an adapter's directory, in the place of what it had before; None is the base model.

        A directory that several adapters name is loaded once for all of them, and anew for all when one is added again.
        Blocks: as long as the user's `model.py` takes to load.
        Raises: ConfigError that says what to correct; what was there before stays.
        """
        directory = directory.resolve()
        with self._lock:
            sharers = [name for name, loaded in self._loaded.items() if loaded.directory == directory]
            is_known = bool(sharers) and adapter not in self._loaded
            loaded = self._loaded[sharers[0]] if is_known else self._load(directory)
            for name in {adapter, *sharers}:
                self._put(name, loaded)

    def remove(self, adapter: str) -> None:
        """Forget an adapter's formatters; calls that run end as they would."""
        with self._lock:
            self._put(adapter, None)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is formatted, neither for the base model nor for any adapter."""
        return not any(loaded.calls for loaded in list(self._loaded.values()))

    def has_input(self, adapter: str | None) -> bool:
        """Whether payloads for `adapter` ("" or None: the base model) go through a formatter."""
        return self._calls(adapter, Phase.INPUT) is not None

    def has_output(self, adapter: str | None) -> bool:
        """Whether answers of `adapter` go through a formatter."""
        return self._calls(adapter, Phase.OUTPUT) is not None

    async def input(
        self, adapter: str | None, payload: dict[str, Any], headers: Mapping[str, str], owner: Hashable = ""
    ) -> dict[str, Any]:
        """The payload to serve; `payload` itself belongs to the formatter from here on. owner: whose turn it takes.

        Raises: FormatterError with the status to answer with: 400 if the formatter refuses the request.
        """
        result: dict[str, Any] = await self._run(Phase.INPUT, adapter, payload, headers, owner)
        return result

    async def output(
        self,
        adapter: str | None,
        output: dict[str, Any] | str | bytes,
        headers: Mapping[str, str] | None = None,
        owner: Hashable = "",
    ) -> dict[str, Any] | str | bytes:
        """What to send for an answer, or for a chunk of a streamed one.

        headers: the request's; they have the request's id and what its client accepts.
        owner:   whose turn it takes.
        Raises: FormatterError, also in the middle of a stream, which can't go on then.
        """
        result: dict[str, Any] | str | bytes = await self._run(Phase.OUTPUT, adapter, output, headers or {}, owner)
        return result

    async def _run(
        self, phase: Phase, adapter: str | None, value: Any, headers: Mapping[str, str], owner: Hashable
    ) -> Any:
        calls = self._calls(adapter, phase)
        if calls is None:
            return value
        lowered = {name.lower(): text for name, text in headers.items()}
        return await calls.run(value, Context(adapter or None, lowered, self.tokenizer, self._clock.unix()), owner)

    def _calls(self, adapter: str | None, phase: Phase) -> Calls | None:
        for name in (adapter, None):
            loaded = self._loaded.get(name)
            if loaded is not None and phase in loaded.calls:
                return loaded.calls[phase]
        return None

    def _put(self, name: str | None, loaded: _Loaded | None) -> None:
        before = self._loaded.get(name)
        if loaded is not None:
            self._loaded[name] = loaded
        else:
            self._loaded.pop(name, None)
        if before is not None and before.script is not None and before not in self._loaded.values():
            before.script.close()

    def _load(self, directory: Path) -> _Loaded:
        if not directory.is_dir():
            raise ConfigError(f"{directory} is no directory: name the one with the model's or the adapter's files")
        script_file, declared_file = _file(directory, SCRIPT), _file(directory, DECLARED)
        if (directory / "formatter.yml").exists():
            raise ConfigError(f"{directory / 'formatter.yml'} is not read: name it {DECLARED}")
        if script_file is not None and self._is_secure:
            raise ConfigError(
                f"{script_file} is code, and secure mode (SAGEMAKER_SECURE_MODE) executes none: take it away, write its"
                f" rules into {DECLARED}, or turn secure mode off"
            )
        declared = load_declared(declared_file) if declared_file is not None else {}
        script = load_script(script_file) if script_file is not None else None
        formatters: dict[Phase, Formatter] = {}
        if script is not None:
            formatters |= script.formatters
            for phase in script.formatters.keys() & declared.keys():
                script.close()
                raise ConfigError(f"{directory} has two {phase} formatters, in {SCRIPT} and in {DECLARED}: keep one")
        calls = {
            phase: Calls(formatter, self._threads, self._timeout_s)
            for phase, formatter in (formatters | declared).items()
        }
        return _Loaded(directory, script, calls)


def _file(directory: Path, name: str) -> Path | None:
    """A file that stands in `directory`, and does not lead out of it; None if there is none."""
    file = directory / name
    if not os.path.lexists(file):
        return None
    if not file.resolve().is_relative_to(directory):
        raise ConfigError(f"{file} leads to {file.resolve()}, out of its directory: put the file itself there")
    return file


def load_formatters(
    base: Path | None,
    adapters: Mapping[str, Path],
    *,
    is_secure: bool,
    tokenizer: Any = None,
    timeout_s: float = 5.0,
    clock: Clock | None = None,
) -> Formatters:
    """The formatters in the base model's directory and in those of the adapters, by name.

    is_secure: whether no user's code is executed; `formatter.yaml` is allowed all the same.
    tokenizer: what formatters get that ask for it.
    timeout_s: how long a call may take, its wait for a turn included.
    Raises:    ConfigError that names the file and says what to correct.
    """
    if timeout_s <= 0:
        raise ConfigError(f"formatters have {timeout_s:g} s for a call: give them more than 0")
    formatters = Formatters(is_secure=is_secure, tokenizer=tokenizer, timeout_s=timeout_s, clock=clock or SystemClock())
    if base is not None:
        formatters.add(None, base)
    for name, directory in adapters.items():
        formatters.add(name, directory)
    return formatters
