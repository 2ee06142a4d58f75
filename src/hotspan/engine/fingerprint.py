"""Digests of a model's and an adapter's files. Equal digests mean equal KV, so they read bytes and not names."""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import ConfigError
from hotspan.core.private import is_private_directory

logger = logging.getLogger(__name__)

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_NOT_KV: Final = frozenset(
    {
        # They make tokens, and KV goes by tokens; or they choose among tokens, after KV.
        *("tokenizer.json", "tokenizer_config.json", "vocab.json", "special_tokens_map.json", "added_tokens.json"),
        *("chat_template.json", "tekken.json", "generation_config.json"),
    }
)
_SAMPLES: Final = 8
_SAMPLE_BYTES: Final = 1 << 16
_MAX_HEADER_BYTES: Final = 1 << 26
_PART_BYTES: Final = 1 << 24
_READ_BYTES: Final = 1 << 20
_REMEMBERED_BYTES: Final = 1 << 26
"""Smaller files are read again at each start: that takes less than a tenth of a second."""
_SETTLED_S: Final = 2.0
"""A file that changed less long ago may change again under the same times: its digest is not remembered."""

State = tuple[int, int, int, int]


def state_of(path: Path) -> State:
    """Size, time of modification, time of change and inode: any write to a file changes one of them."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


class FileDigests:
    """Digests over all bytes of large files, remembered until the file's state changes.

    directory: where they are kept from start to start, if it is this user's alone; None keeps nothing.

    What it can't see: a write that leaves a file's time of change as it was (to the raw device, or under a clock that
    was set back).
    """

    def __init__(
        self, directory: Path | None = None, *, threads: int | None = None, clock: Clock | None = None
    ) -> None:
        self._directory = directory
        self._clock = clock or SystemClock()
        self._threads = threads or min(8, len(os.sched_getaffinity(0)))

    def of(self, path: Path) -> bytes:
        """32 bytes. Blocks: for one pass over a file that is not known, with all threads.

        Raises: OSError; ConfigError if the file changes meanwhile.
        """
        state = state_of(path)
        known = self._known(path, state)
        if known is not None:
            return known
        digest = self._read(path, state[0])
        if state_of(path) != state:
            raise ConfigError(f"{path} changes while it is read: start again when it is complete")
        if state[0] >= _REMEMBERED_BYTES and self._clock.unix() - max(state[1], state[2]) / 1e9 > _SETTLED_S:
            self._remember(path, state, digest)
        return digest

    def _read(self, path: Path, size: int) -> bytes:
        with path.open("rb") as file, ThreadPoolExecutor(self._threads) as pool:
            parts = pool.map(lambda start: _part(file.fileno(), start, size), range(0, size, _PART_BYTES))
            digest = hashlib.sha256(b"hotspan-file-1" + size.to_bytes(8, "little"))
            for part in parts:
                digest.update(part)
        return digest.digest()

    def _entry(self, path: Path) -> Path | None:
        if self._directory is None or not is_private_directory(self._directory):
            return None
        return self._directory / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()}.json"

    def _known(self, path: Path, state: State) -> bytes | None:
        entry = self._entry(path)
        try:
            found = json.loads(entry.read_bytes()) if entry is not None else {}
            digest = bytes.fromhex(found["sha256"]) if tuple(found["state"]) == state else b""
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return digest if len(digest) == 32 else None

    def _remember(self, path: Path, state: State, digest: bytes) -> None:
        if self._directory is None:
            return
        with contextlib.suppress(OSError):  # it is read again then
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            entry = self._entry(path)
            if entry is not None:
                part = entry.with_suffix(f".{os.getpid()}")
                part.write_text(json.dumps({"path": str(path), "state": state, "sha256": digest.hex()}))
                part.replace(entry)


def model_digest(
    model: Path, digests: FileDigests | None = None, *, full: bool = True, with_code: bool = False
) -> bytes:
    """32 bytes over what of a model's directory decides KV, wherever it lies.

    That is each weights file and each JSON file at its top, the preprocessors' included; without the tokenizer's.

    digests:   remembers what was read before.
    full:      all bytes of the weights; else name, size, safetensors header and eight samples of 64 KiB, which doesn't
               see an edit between them.
    with_code: the model's own code, too, which runs.
    Raises: FileNotFoundError if `model` is no directory with a config.json.
    """
    digests = digests or FileDigests()
    digest = hashlib.sha256(b"hotspan-model-2")
    (model / "config.json").stat()
    for path in sorted(path for path in model.iterdir() if decides_kv(path, with_code=with_code)):
        is_sampled = not full and path.suffix in _WEIGHTS
        content = _sampled(path) if is_sampled else digests.of(path)
        name = os.fsencode(path.name)
        digest.update(len(name).to_bytes(8, "little") + name + content)
    return digest.digest()


def decides_kv(path: Path, *, with_code: bool) -> bool:
    """Whether a file of a model's directory is one of those that `model_digest` reads."""
    is_kind = path.suffix in _WEIGHTS or path.suffix == ".json" or (with_code and path.suffix == ".py")
    return is_kind and path.name not in _NOT_KV and path.is_file()


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(b"hotspan-samples-1" + size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(length, _MAX_HEADER_BYTES)))
        for n in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * n // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()


def _part(fd: int, start: int, size: int) -> bytes:
    digest, stop = hashlib.sha256(), min(size, start + _PART_BYTES)
    while start < stop:
        data = os.pread(fd, min(_READ_BYTES, stop - start), start)
        if not data:
            raise OSError(f"the file ended at {start} bytes, of {size}")
        digest.update(data)
        start += len(data)
    return digest.digest()


class AdapterDigests:
    """Content digests of adapters as the engine loaded them.

    The engine loads an adapter's files again whenever it has evicted it. Once they have changed, nobody can say which
    of both it computes with: nothing of that adapter is cached any more, until it is loaded as another one.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[bytes, bytes]] = {}
        self._paths: dict[int, str | None] = {}  # that ids were loaded from; None: from one of several
        self._contents: dict[str, bytes] = {}  # by name, what the engine may have computed with last

    def load(self, adapter_id: int, path: str, *, anew: bool = True) -> None:
        """The engine is about to load an adapter. Blocks: for one pass over its files.

        anew: also if it has one of that id; else it keeps that one.
        """
        if anew or adapter_id not in self._paths:
            for known in [known for known in self._known if known[0] == adapter_id]:
                del self._known[known]
            self._paths[adapter_id] = path
            self.of(adapter_id, path)

    def unload(self, adapter_id: int) -> None:
        """The engine has dropped an adapter: it reads the files again when it needs it."""
        self._paths.pop(adapter_id, None)

    def is_as_loaded(self, adapter_id: int, path: str) -> bool:
        """Whether a request with this id and path is computed with the files of that path.

        Once one id comes with two paths, nobody can say which of them the engine has read last.
        """
        if self._paths.setdefault(adapter_id, path) != path:
            self._paths[adapter_id] = None
        return self._paths[adapter_id] == path

    def is_other(self, name: str, adapter_id: int, path: str) -> bool:
        """Whether the adapter of that name may have had another content so far; it has this one from now on."""
        content = self.of(adapter_id, path) if self.is_as_loaded(adapter_id, path) else None
        before, self._contents[name] = self._contents.get(name), content or b""
        return before is not None and before != self._contents[name]

    def of(self, adapter_id: int, path: str) -> bytes | None:
        """32 bytes over all files of what was loaded; None if they can't be read, or have changed since.

        Blocks: for one pass over the files at the first call, if `load` did not come before.
        """
        try:
            files = sorted(p for p in Path(path).rglob("*") if p.is_file())
            state = hashlib.sha256(repr([(p, state_of(p)) for p in files]).encode(errors="surrogateescape")).digest()
            known = self._known.get((adapter_id, path))
            if known is None:
                known = self._known[adapter_id, path] = state, _adapter_digest(Path(path), files)
        except OSError:
            return None
        return known[1] if files and known[0] == state else None


def _adapter_digest(path: Path, files: Iterable[Path]) -> bytes:
    digest = hashlib.sha256(b"hotspan-adapter-1")
    for file in files:
        data = file.read_bytes()
        name = os.fsencode(file.relative_to(path))
        digest.update(len(name).to_bytes(8, "little") + name + len(data).to_bytes(8, "little") + data)
    return digest.digest()
