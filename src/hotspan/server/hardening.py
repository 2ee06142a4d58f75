"""What vLLM leaves open and hotspan closes, and what a server refuses; looked at before anything is loaded."""

import json
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hotspan.config.admin_token import given_token
from hotspan.config.engine_options import split_words
from hotspan.config.kv_events import FLAG, LOCAL_ENDPOINT, OPTION, Published, published, read_key
from hotspan.config.server_settings import ServerSettings
from hotspan.core.addresses import resolved
from hotspan.core.errors import ConfigError
from hotspan.formatters.declared import load_declared
from hotspan.formatters.formatters import DECLARED, SCRIPT
from hotspan.formatters.script import check_script
from hotspan.http.options import check_tls
from hotspan.keyring.keyring import open_keyring
from hotspan.server.options import ServeOptions, check_admin_port, check_host
from hotspan.server.source import PICKLED

MEDIA_DOMAINS = "allowed_media_domains"
NO_MEDIA_DOMAIN = "(none: the server was started without --allowed-media-domains)"
"""In the list of domains that media may come from, where nobody gave one: no host can be called so.

vLLM takes an empty list for all of the internet, and the networks that only the server reaches."""

REDIRECTS = "VLLM_MEDIA_URL_ALLOW_REDIRECTS"
"""vLLM's variable; unless it is "0", an allowed domain may send the server anywhere."""

CODE = (
    *("trust_remote_code", "worker_cls", "worker_extension_cls", "scheduler_cls", "logits_processors", "middleware"),
    *("tool_parser_plugin", "reasoning_parser_plugin", "io_processor_plugin", "kv_transfer_config"),
    *("ec_transfer_config", "trust_request_chat_template"),
)
"""The engine's options that name code, or let it in."""

_SPECULATION = frozenset({"speculative_config", "spec_method", "spec_model"})
_PICKLED_OPTIONS = ("lora_modules",)
_FORMATS = ("safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "sharded_state", "mistral", "dummy")
_BACKENDS = ("mp", "ray", "uni", "external_launcher")
_SCRIPTS = ("model.py", "requirements.txt")

_CONTROLS = "SAGEMAKER_SECURITY_CONTROLS"
_CHANNELS = "SAGEMAKER_UNTRUSTED_CHANNELS"
_NO_TEMPLATE = "DISALLOW_CHAT_TEMPLATE"
_ALWAYS = (
    *("DISALLOW_REQUIREMENTS_TXT", "DISALLOW_PICKLE_FILES", "DISALLOW_TRUST_REMOTE_CODE"),
    *("DISALLOW_CUSTOM_INFERENCE_SCRIPTS",),
)
_MAX_NAMED = 3
_ON = ("1", "true")
_MAX_PORT = 65_535
_EVENTS = OPTION.replace("_", "-")


def hardened(options: ServeOptions, environment: Mapping[str, str]) -> ServeOptions:
    """The same, with what vLLM leaves open closed.

    Media are fetched from nowhere unless domains were named; KV events are published on this machine only unless an
    address was named; secure mode reads only safetensors.

    Raises: ConfigError for an option that secure mode forbids, and where KV events would tell other machines what the
            rest of the configuration keeps secret.
    """
    given = options.engine_values
    added: tuple[str, ...] = ()
    if MEDIA_DOMAINS not in given:
        added += ("--allowed-media-domains", NO_MEDIA_DOMAIN)
    if options.server.secure:
        _check_options(options, environment)
        if str(given.get("load_format", "auto")).lower() == "auto":
            added += ("--load-format", "safetensors")
    return _guarded_events(replace(options, engine=(*options.engine, *added)))


# -- what a start would refuse --------------------------------------------------------------------------------------


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
    check_engine_variables(environment)
    check_files(options, environment)
    if options.server.secure and not _SPECULATION.isdisjoint(options.engine_values):
        from hotspan.engine.arguments import parse_engine_arguments

        check_draft(options, parse_engine_arguments(options.model, options.engine), environment)
    _check_formatters(options.server)


def check_engine_keys(given: object, environment: Mapping[str, str]) -> None:
    """Raise ConfigError for vLLM's own keys: they guard some routes and not others, and know no tenants."""
    option = "--api-key" if given else "VLLM_API_KEY"
    if given or environment.get("VLLM_API_KEY"):
        raise ConfigError(
            f"{option} is vLLM's and leaves routes open: leave it out, and give keys with --tenants FILE, as in "
            'tenants: {default: {keys: ["..."]}}'
        )


def check_engine_variables(environment: Mapping[str, str]) -> None:
    """Raise ConfigError for variables of vLLM's that open what hotspan closes.

    Its routes for adapters take files from anywhere, and leave KV of old weights behind. Ids that clients choose may
    come twice: with a store of the first request in flight that ends the engine.
    """
    for name, instead in {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "unset it, and use POST /adapters",
        "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "unset it: two requests with one id can end the engine",
    }.items():
        if environment.get(name, "").lower() in _ON:
            raise ConfigError(f"{name} is vLLM's: {instead}")


def _check_addresses(options: ServeOptions) -> None:
    check_port("--port", options.server.port)
    check_port("--admin-port", options.server.admin_port)
    check_admin_port(options.server, options.server.port)
    check_host(resolved(options.server.host), options)


def check_port(flag: str, port: int | None) -> None:
    """Raise ConfigError for a number that no port has; 0 is any that is free."""
    if port is not None and not 0 <= port <= _MAX_PORT:
        raise ConfigError(f"{flag} {port} is no port: give one from 1 to {_MAX_PORT}")


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


# -- KV events -----------------------------------------------------------------------------------------------------


def secrets_of(options: ServeOptions) -> tuple[str, ...]:
    """The options of this configuration whose secrets KV events would reveal."""
    cache = options.cache
    found = {
        "--tenants": options.has_keys,
        "--kek": cache is not None and cache.encryption is not None,
        "--persistence none": cache is not None and cache.persistence == "none",
    }
    return tuple(name for name, is_so in found.items() if is_so)


def _guarded_events(options: ServeOptions) -> ServeOptions:
    events = published(options.engine_values)
    key = None if options.cache is None else options.cache.events_key
    if key is not None:
        if events is None:
            raise ConfigError(f"{FLAG} is given without KV events: give --{_EVENTS} too, or leave it out")
        read_key(key)
    if events is None:
        return options
    if options.cache is None:  # vLLM's default, and vLLM's publisher
        _check_events(replace(events, endpoint=events.endpoint or "tcp://*:5557"), options)
        return options
    events = replace(events, endpoint=events.endpoint or LOCAL_ENDPOINT)
    _check_events(events, options)
    config = json.dumps({**events.config, "endpoint": events.endpoint})
    return replace(options, engine=(*options.engine, f"--{_EVENTS}={config}"))


def _check_events(events: Published, options: ServeOptions) -> None:
    is_keyed = options.cache is not None and options.cache.events_key is not None
    if not events.open_addresses or is_keyed:
        return
    if kept := secrets_of(options):
        without = "" if options.cache is not None else " (a key needs hotspan's tiers, without --no-cache)"
        raise ConfigError(
            f"--{_EVENTS} publishes all tenants' tokens and salts at {', '.join(events.open_addresses)} to whoever "
            f"connects, and {', '.join(kept)} keeps them secret: give {FLAG} FILE here and to the router{without}, "
            f"or publish at {LOCAL_ENDPOINT}"
        )


# -- secure mode ---------------------------------------------------------------------------------------------------


def check_files(options: ServeOptions, environment: Mapping[str, str]) -> None:
    """Raise ConfigError if secure mode is on and a directory that the server reads holds code or pickles.

    Blocks: for a walk through the directories.
    """
    if not options.server.secure:
        return
    named = [Path(options.model), options.server.adapters, options.server.formatters]
    directories = [path for path in named if path is not None and path.is_dir()]
    for text in filter(None, (part.strip() for part in environment.get(_CHANNELS, "").split(","))):
        if not Path(text).is_dir():
            raise ConfigError(f"{_CHANNELS} names {text}, which is no directory: correct it")
        directories.append(Path(text))
    _check_directories(directories, environment)


def check_draft(options: ServeOptions, arguments: Namespace, environment: Mapping[str, str]) -> None:
    """Raise ConfigError if secure mode is on and what drafts tokens is code, or a directory that holds code or pickles.

    arguments: the engine's, with a draft model that is on this machine if it will be.
    """
    if not options.server.secure:
        return
    from hotspan.engine.arguments import draft_class, draft_format, draft_model

    if (proposer := draft_class(arguments)) is not None:
        raise _refused("speculative_config", f"executes no code but what is installed: {proposer} can't draft tokens")
    if (format_ := draft_format(arguments)) not in (None, *_FORMATS):
        reason = f"reads only safetensors: the load_format of its draft_load_config is {format_}: leave it out"
        raise _refused("speculative_config", reason)
    if (model := draft_model(arguments)) is not None and Path(model).is_dir():
        _check_directories([Path(model)], environment)


def _check_directories(directories: Sequence[Path], environment: Mapping[str, str]) -> None:
    has_templates = _NO_TEMPLATE not in _controls(environment)
    for directory in directories:
        found = list(_forbidden(directory, has_templates=has_templates))
        if found:
            more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
            raise ConfigError(
                f"secure mode takes no code, no requirements and only safetensors, and {directory} holds "
                f"{', '.join(found[:_MAX_NAMED])}{more}: take them away (convert weights with safetensors), or turn "
                "secure mode off"
            )


def code_options(options: ServeOptions) -> list[str]:
    """The options of CODE that the engine is given, also inside others, as in --structured-outputs-config."""
    return [name for name in CODE if any(name in words for words in _named(options))]


def _named(options: ServeOptions) -> list[str]:
    """For each option that is on: its name, the part after a dot, and the keys of its JSON."""
    return [
        " ".join([option.words[0].partition("=")[0], *(word for word in option.words if "{" in word)]).replace("-", "_")
        for option in split_words(options.engine)
        if option.value is not False
    ]


def _check_options(options: ServeOptions, environment: Mapping[str, str]) -> None:
    given = options.engine_values
    refused = code_options(options) + [name for name in _PICKLED_OPTIONS if name in given]
    if _NO_TEMPLATE in _controls(environment) and "chat_template" in given:
        refused.append("chat_template")
    for name in refused:
        raise _refused(name, "executes no code but what is installed, and reads no pickles: leave it out")
    format_ = str(given.get("load_format", "auto")).lower()
    if format_ not in ("auto", *_FORMATS):
        raise _refused("load_format", f"reads only safetensors: give one of {', '.join(_FORMATS)}, or leave it out")
    backend = str(given.get("distributed_executor_backend", _BACKENDS[0]))
    if backend not in _BACKENDS:
        raise _refused("distributed_executor_backend", f"takes none but {', '.join(_BACKENDS)}")


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError(f"--{name.replace('_', '-')} is given, and secure mode (SAGEMAKER_SECURE_MODE) {reason}")


def _controls(environment: Mapping[str, str]) -> frozenset[str]:
    """What LMI's list of controls names. Raises: ConfigError for one that hotspan could not enforce."""
    named = frozenset(part.strip() for part in environment.get(_CONTROLS, "").split(",")) - {""}
    for name in sorted(named - {*_ALWAYS, _NO_TEMPLATE}):
        raise ConfigError(
            f"{_CONTROLS} asks for {name}, which hotspan does not know: it has {', '.join((*_ALWAYS, _NO_TEMPLATE))}"
        )
    return named


def _forbidden(directory: Path, *, has_templates: bool) -> Iterator[str]:
    for parent, directories, names in os.walk(directory):
        directories.sort()
        for name in sorted(names):
            path = Path(parent) / name
            is_template = not has_templates and _is_template(path)
            if name in _SCRIPTS or name.lower().endswith(PICKLED) or is_template:
                yield str(path.relative_to(directory))


def _is_template(path: Path) -> bool:
    """Whether it is a chat template, or holds one; a file that can't be read may."""
    if path.suffix == ".jinja" or path.name == "chat_template.json":
        return True
    if path.name != "tokenizer_config.json":
        return False
    try:
        return "chat_template" in json.loads(path.read_text())
    except (OSError, ValueError):
        return True
