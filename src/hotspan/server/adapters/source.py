"""Adapters come from directories under a few roots, and from nowhere else.

What is checked is what was opened, and not what a path said a moment before: `..`, links and whoever moves directories
meanwhile get nowhere.
"""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from hotspan.http.errors import HttpError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_PICKLED = ("adapter_model.bin", "adapter_model.pt")
_FORMATTERS = ("model.py", "formatter.yaml", "formatter.yml")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class Sources:
    """The roots that adapters are taken from; a relative source is looked up under each, in order."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(Path(os.path.realpath(root)) for root in roots)

    def of(self, owner: str) -> "Sources":
        """The sources of a tenant: the directory of its name in each root. Raises: HttpError."""
        if not owner:
            return self
        if owner in (".", "..") or "/" in owner:
            raise HttpError(400, f"tenant {owner!r} has a name that no directory can have: ask the administrator")
        places = [(root, Path(os.path.realpath(root / owner))) for root in self.roots]
        return Sources([place for root, place in places if place.is_relative_to(root) and place != root])

    def directory(self, src: str) -> Path:
        """The directory that a source names, without links. Raises: HttpError."""
        if scheme := _SCHEME.match(src):
            raise HttpError(
                400,
                f"src {src!r} is a {scheme[0]} address, and adapters come from directories: copy it to "
                f"{self._wanted()} and give its path",
            )
        if not src or not src.isprintable():
            raise HttpError(400, f"src is {src!r}: give the adapter's directory in {self._wanted()}")
        places = [place for root in self.roots if (place := Path(os.path.realpath(root / src))).is_relative_to(root)]
        for place in places:
            if place.is_dir():
                return place
        if places:
            raise HttpError(400, f"src {src!r} is no directory in {self._wanted()}: put the adapter's files there")
        raise HttpError(400, f"src {src!r} leads out of where adapters may be: give a path in {self._wanted()}")

    def open(self, directory: Path, name: str) -> int:
        """A descriptor of one of an adapter's files; the caller closes it. Raises: HttpError."""
        try:
            file = os.open(directory / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise HttpError(400, _missing(directory, name, error)) from error
        try:
            opened = Path(os.readlink(f"/proc/self/fd/{file}"))
            if not any(opened.is_relative_to(root) for root in self.roots):
                raise HttpError(400, f"{name} of {directory} leads out of {self._wanted()}: put the file itself there")
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise HttpError(400, f"{name} of {directory} is no file: put the adapter's file there")
        except BaseException:
            os.close(file)
            raise
        return file

    def _wanted(self) -> str:
        return " or ".join(map(str, self.roots)) or "a directory that the server was told of (it was told of none)"


def _missing(directory: Path, name: str, error: OSError) -> str:
    pickled = [other for other in _PICKLED if (directory / other).exists()]
    if name == WEIGHTS and pickled and isinstance(error, FileNotFoundError):
        return (
            f"{directory} has {pickled[0]}, a pickle, which can run code when it is read: save the adapter as "
            f"{WEIGHTS} (PEFT's save_pretrained with safe_serialization=True)"
        )
    return f"{directory} has no readable {name} ({error.strerror}): an adapter is {CONFIG} and {WEIGHTS}"


def refuse_formatters(directory: Path) -> None:
    """Raise HttpError for a tenant's adapter with formatters: they run in the server, with all tenants' texts."""
    for name in _FORMATTERS:
        if os.path.lexists(directory / name):
            raise HttpError(
                403,
                f"{name} would run in the server, for a tenant's adapter: remove it, or let the administrator register "
                "the adapter for everybody",
            )
