"""What `hotspan serve` refuses before it starts an engine, for who asks without serving."""

import socket
from collections.abc import Mapping
from pathlib import Path

from hotspan.config.admin_token import given_token
from hotspan.config.server_settings import ServerSettings
from hotspan.core.errors import ConfigError
from hotspan.formatters.declared import load_declared
from hotspan.formatters.formatters import DECLARED, SCRIPT
from hotspan.formatters.script import check_script
from hotspan.http.options import check_tls
from hotspan.keyring.keyring import open_keyring
from hotspan.server.hardening import check_files, hardened
from hotspan.server.options import ServeOptions, check_admin_port, check_host

_ON = ("1", "true")
_MAX_PORT = 65_535


def check_start(options: ServeOptions, environment: Mapping[str, str]) -> None:
    """Raise ConfigError if a server would refuse these options on any machine. `model.py` is read, never executed.

    Blocks: in secure mode for a walk through the directories that the server reads.
    """
    hardened(options, environment)
    check_tls(options.engine_values)
    _check_addresses(options)
    if options.cache is not None and (encryption := options.cache.encryption) is not None:
        open_keyring(Path(encryption.store), encryption.kek, environment).close()
    given_token(options.server.admin_token_file, environment)
    check_engine_keys(options.engine_values.get("api_key"), environment)
    check_engine_adapters(environment)
    check_files(options, environment)
    _check_formatters(options.server)


def check_engine_keys(given: object, environment: Mapping[str, str]) -> None:
    """Raise ConfigError for vLLM's own keys: they guard some routes and not others, and know no tenants."""
    option = "--api-key" if given else "VLLM_API_KEY"
    if given or environment.get("VLLM_API_KEY"):
        raise ConfigError(
            f"{option} is vLLM's and leaves routes open: leave it out, and give keys with --tenants FILE, as in "
            'tenants: {default: {keys: ["..."]}}'
        )


def check_engine_adapters(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for vLLM's own routes: they take files from anywhere, and leave KV of old weights behind."""
    if environment.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in _ON:
        raise ConfigError("VLLM_ALLOW_RUNTIME_LORA_UPDATING is vLLM's: unset it, and use POST /adapters")


def _check_addresses(options: ServeOptions) -> None:
    for flag, port in (("--port", options.server.port), ("--admin-port", options.server.admin_port)):
        if port is not None and not 0 <= port <= _MAX_PORT:
            raise ConfigError(f"{flag} {port} is no port: give one from 1 to {_MAX_PORT}")
    check_admin_port(options.server, options.server.port)
    try:
        family = socket.AF_INET6 if ":" in options.server.host else socket.AF_INET
        address = str(socket.getaddrinfo(options.server.host, options.server.port, family)[0][4][0])
    except OSError:
        address = options.server.host  # another machine may know the name
    check_host(address, options)


def _check_formatters(server: ServerSettings) -> None:
    """What loading them would refuse, as far as it can be told without executing anything."""
    directory = server.formatters
    if directory is None:
        return
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory: name the one with {SCRIPT} or {DECLARED}")
    if (directory / DECLARED).exists():
        load_declared(directory / DECLARED)
    if (directory / SCRIPT).exists():
        check_script(directory / SCRIPT)
