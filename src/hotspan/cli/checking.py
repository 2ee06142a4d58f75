"""What `hotspan config check` and `hotspan doctor` find wrong with a configuration: all of it at once."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import typer

from hotspan.cli.flags import check_engine, load
from hotspan.config.admin_token import given_token
from hotspan.config.configuration import Configuration
from hotspan.config.environment import environment
from hotspan.config.origin import Settings
from hotspan.config.wrong import all_of, collected, each
from hotspan.core.addresses import resolved
from hotspan.core.errors import ConfigError

if TYPE_CHECKING:
    from hotspan.server.options import ServeOptions


def checked(context: typer.Context, model: str | None) -> Configuration:
    """The configuration of a command line, sound as far as this machine can tell without starting a server.

    Blocks: seconds: vLLM is imported.
    Raises: ConfigError with all that is wrong by itself, or the first things that do not go together.
    """
    from hotspan.cli.serve import serve_options
    from hotspan.server.hardening import check_start

    with collected() as wrong:
        configuration = check_engine(load(context, model))
        options = serve_options(configuration)
        _check_each(options, configuration.settings)
        if not wrong:
            check_start(options, environment())
    if wrong:
        raise all_of(wrong)
    return configuration


def _check_each(options: "ServeOptions", settings: Settings) -> None:
    """What is right or wrong whatever else is: ports, files, directories, keys and variables."""
    from hotspan.http.options import check_tls
    from hotspan.server.hardening import check_engine_keys, check_engine_variables, check_files, check_port
    from hotspan.server.options import check_host

    surroundings = environment()
    # Who needs a key is not known where the file of tenants can't be read.
    host = () if settings["tenants"].value is not None else (resolved(options.server.host),)
    checks: list[Callable[[], object]] = [
        partial(check_tls, options.engine_values),
        partial(given_token, options.server.admin_token_file, surroundings),
        partial(check_engine_keys, options.engine_values.get("api_key"), surroundings),
        partial(check_engine_variables, surroundings),
        partial(check_files, options, surroundings),
        partial(check_port, "--port", settings["port"].value),
        partial(check_port, "--admin-port", settings["admin_port"].value),
        *(partial(check_host, address, options) for address in host),
        *(partial(check_place, flag, path) for flag, path in _places(options)),
    ]
    for check in checks:
        with each():
            check()


def _places(options: "ServeOptions") -> Iterator[tuple[str, Path]]:
    """The directories that a server makes where they are missing."""
    cache = options.cache
    if cache is not None and cache.disk is not None:
        yield "--disk", Path(cache.disk.directory)
    if cache is not None and cache.l2 is not None and cache.l2.url.startswith("file:"):
        yield "--l2", Path(urlsplit(cache.l2.url).path)


def check_place(flag: str, directory: Path) -> None:
    """Raise ConfigError if a directory can't be one that this user writes, or makes. Nothing is made."""
    path = directory
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        is_directory = path.is_dir()
    except OSError as error:
        raise ConfigError(f"{flag} {directory}: {path}: {error.strerror}: give another path") from error
    if not is_directory:
        raise ConfigError(f"{flag} {directory}: {path} is no directory: give another path")
    if path.is_relative_to("/proc") or path.is_relative_to("/sys"):
        raise ConfigError(f"{flag} {directory}: {path} holds no data: give a directory on a disk")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {directory}: this user may not write in {path}: change its mode, or give another")
