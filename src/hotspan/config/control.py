"""Where engines that vLLM's own server or `LLM()` runs can be administered: Unix sockets of this user.

RUNTIME/engine-OWNER-RANK.sock      OWNER: the process that started the engine. RANK: of a data-parallel core
"""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hotspan.config.admin_token import runtime_directories
from hotspan.core.errors import ConfigError
from hotspan.core.private import is_private_directory, private_directory

SCHEME = "unix:"

MAX_CONNECTIONS = 16
"""Of each listening socket: their files are the engine's."""

_NAME = re.compile(r"engine-(\d+)-(\w+)-(\d+)\.sock")
_TIMEOUT_S = 1.0
_MAX_PATH = 107
"""Bytes that the kernel takes of a socket's path."""


@dataclass(frozen=True, slots=True)
class EngineSockets:
    """The sockets of one engine.

    owner: the process that started it. name: what vLLM calls it, another one at each start. cores: by their rank.
    """

    owner: int
    name: str
    cores: Mapping[int, Path]

    @property
    def url(self) -> str:
        """What names the engine: any of its cores answers for all."""
        return f"{SCHEME}{self.cores[min(self.cores)]}"


@dataclass(frozen=True, slots=True, repr=False)
class ByTcp:
    """A socket that other users and hosts reach, for who has the admin token."""

    listener: socket.socket
    token: str


def socket_path(owner: int, name: str, rank: int, environment: Mapping[str, str]) -> Path:
    """Where a core's socket belongs, in a directory of this user's that is made if it is not there.

    Raises: ConfigError if there can't be such a directory.
    """
    file = f"engine-{owner}-{name}-{rank}.sock"
    fitting = [each for each in runtime_directories(environment) if len(os.fsencode(each / file)) <= _MAX_PATH]
    if not fitting:
        raise ConfigError("no directory for the socket for administration has a name that is short enough")
    return private_directory(fitting[0], "the socket for administration", "set XDG_RUNTIME_DIR") / file


def engine_sockets(environment: Mapping[str, str]) -> list[EngineSockets]:
    """The engines of this user on this host that answer, by their owner. Mutates: removes sockets that nobody has."""
    found: dict[tuple[int, str], dict[int, Path]] = {}
    for directory in runtime_directories(environment):
        if not is_private_directory(directory):
            continue
        for path in sorted(directory.iterdir()):
            parts = _NAME.fullmatch(path.name)
            if parts is not None and _is_answered(path):
                found.setdefault((int(parts[1]), parts[2]), {})[int(parts[3])] = path
    return [EngineSockets(*engine, cores) for engine, cores in sorted(found.items())]


def peers(path: Path) -> dict[int, Path]:
    """The sockets of all cores of the engine that has this one, by rank."""
    stem = path.name.rpartition("-")[0]
    found = (_NAME.fullmatch(each.name) for each in path.parent.iterdir())
    return {
        int(each[3]): path.parent / each[0] for each in found if each is not None and each[0].startswith(f"{stem}-")
    }


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(_TIMEOUT_S)
        try:
            caller.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)  # of an engine that was killed
            return False
        except OSError:
            return False
    return True
