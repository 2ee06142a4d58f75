"""What a store tells the server of one model through a pipe: its model, its link and its share of the machine."""

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hotspan.config.configuration import Configuration, Places, load_configuration, visible_gpus
from hotspan.config.engine_options import split_words
from hotspan.config.own import CommandLine
from hotspan.config.settings import CacheSettings
from hotspan.core.threads import start
from hotspan.server.options import ServeOptions
from hotspan.server.principal import Link

NO_ACCESS_LOG = "disable_uvicorn_access_log"
FRONT_OPTIONS = (
    *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh"),
    NO_ACCESS_LOG,
)
"""The engine's options that are about the port, which the front has."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """One model of a store.

    directory:    of the model.
    is_container: the store is LMI's, where nobody names a model on a command line.
    flags, words: of the command line, which counts for all models.
    reason:       the file in which it leaves why it could not start.
    cache:        its tiers; nothing else is looked at. None is to serve without.
    engine:       words for the engine that come last.
    """

    directory: str
    is_container: bool
    link: Link
    flags: Mapping[str, Any] = field(repr=False)
    words: tuple[str, ...] = field(repr=False)
    reason: str
    cache: CacheSettings | None = None
    engine: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One line that `from_json` takes."""
        return TypeAdapter(Assignment).dump_json(self).decode()

    @classmethod
    def from_json(cls, line: str) -> "Assignment":
        """The assignment that `to_json` gave."""
        return TypeAdapter(Assignment).validate_json(line)

    def configuration(self, surroundings: Mapping[str, str]) -> Configuration:
        """What the model is to be served with: its serving.properties, and what counts for all.

        Raises: ConfigError, as `load_configuration`.
        """
        model, places = (None, Places(Path(self.directory))) if self.is_container else (self.directory, Places())
        gpus = visible_gpus(surroundings)
        return load_configuration(CommandLine(model, self.flags, self.words), surroundings, places=places, gpus=gpus)

    def applied(self, options: ServeOptions) -> ServeOptions:
        """The options for its server."""
        kept = (option.words for option in split_words(options.engine) if option.name not in FRONT_OPTIONS)
        engine = (*(word for words in kept for word in words), *self.engine)
        return replace(
            options, cache=self.cache, engine=engine, extent=None, server=replace(options.server, admin_port=None)
        )


def assigned() -> Assignment:
    """Read this process's assignment from standard input. It stops when the input closes: its store has ended."""
    assignment = Assignment.from_json(sys.stdin.readline())

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    start("front", wait)
    return assignment
