"""Everything that one replica was asked for, from wherever it was written, each value with its origin.

Precedence, the strongest first, is that of `origin.Source`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from hotspan.config.engine_options import split_words, words_of
from hotspan.config.inert import inert_notes
from hotspan.config.keys import BY_NAME, CONFIG_FILE, KEYS
from hotspan.config.lmcache import CONNECTORS, DEFAULT_RAM_GIB, MULTI_PROCESS_CONNECTORS, LmcacheReader
from hotspan.config.lmi import LmiReader
from hotspan.config.origin import Given, Note, Setting, Settings, Source, resolve
from hotspan.config.own import CommandLine, read_command_line, read_file, read_variables, with_negations
from hotspan.config.server_settings import ServerSettings
from hotspan.config.settings import CacheSettings
from hotspan.config.targets import build_cache, build_server
from hotspan.config.tenants import Tenants, load_tenants
from hotspan.config.wrong import each, together
from hotspan.core.errors import ConfigError
from hotspan.plan.tiers import Extent
from hotspan.plan.weights import is_model

T = TypeVar("T")

_GPU = re.compile(r"nvidia[0-9]+")
_LMI_SEQUENCES = 32
_LMI_LORAS = 4
_LMI_NAME = "lmi"
_LMI_DEFAULT = "LMI's default"
_LMCACHE_DEFAULT = "LMCache's default"
_FORMATTERS = ("model.py", "formatter.yaml")
_REQUIREMENTS = "requirements.txt"
_CONNECTOR = "kv_transfer_config"
_CONTAINER = "the model's directory"
_LMI_SOURCES = {
    *(Source.SAGEMAKER, Source.SERVING_PROPERTIES, Source.OPTION, Source.SERVING, Source.CONFIG_PROPERTIES),
}


@dataclass(frozen=True, slots=True)
class Places:
    """Where LMI's container has its files.

    model:             the model's directory.
    config_properties: the server's configuration.
    """

    model: Path = Path("/opt/ml/model")
    config_properties: Path = Path("/opt/djl/conf/config.properties")


@dataclass(frozen=True, slots=True)
class Configuration:
    """One replica.

    cache:    None serves with the engine's own prefix cache only.
    engine:   options of the engine that stood elsewhere than on the command line.
    words:    those of the command line, as they stood.
    is_auto:  tiers that nobody named are to be chosen by what the machine and the model are.
    settings: what counts for each key, where it stood and what it overrode; every key of hotspan's is there.
    notes:    what was accepted and sets nothing, with what happens instead; a warning if that is not what was asked.
    """

    model: str
    cache: CacheSettings | None
    server: ServerSettings
    tenants: Tenants
    engine: tuple[Given, ...]
    words: tuple[str, ...] = field(repr=False)
    is_auto: bool
    is_isolated: bool
    settings: Settings = field(repr=False)
    notes: tuple[Note, ...] = ()

    @property
    def engine_words(self) -> tuple[str, ...]:
        """All options of the engine as its parser takes them; of two that are the same, the last counts."""
        return (*(word for option in self.engine for word in words_of(option)), *self.words)

    @property
    def names_tiers(self) -> bool:
        """Whether anybody said what the tiers are."""
        return self.settings.names_tiers

    @property
    def extent(self) -> Extent | None:
        """How much the tiers that are to be chosen may take; None if none are to be chosen."""
        if self.is_auto:
            return Extent.ALL
        return None if self.names_tiers else Extent.MODEST


def load_configuration(
    command_line: CommandLine, surroundings: Mapping[str, str], *, places: Places | None = None, gpus: int = 0
) -> Configuration:
    """What the command line, the environment and their files ask for.

    gpus:   that the engine may use, for a tensor_parallel_degree of max.
    Raises: ConfigError that names key, value, origin and remedy.
    """
    return _Loader(command_line, surroundings, places or Places(), gpus).load()


def visible_gpus(surroundings: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """How many NVIDIA GPUs a process with this environment may use."""
    visible = surroundings.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return sum(1 for device in visible.split(",") if device.strip() not in ("", "-1"))
    return sum(1 for path in devices.iterdir() if _GPU.fullmatch(path.name)) if devices.is_dir() else 0


class _Loader:
    """One way from what was written to a Configuration."""

    def __init__(self, command_line: CommandLine, surroundings: Mapping[str, str], places: Places, gpus: int) -> None:
        self._command_line, self._surroundings = with_negations(command_line), surroundings
        self._places, self._gpus = places, gpus
        self._givens: list[Given] = []
        self._notes: list[Note] = []
        self._named: str | None = None
        self._model_directory: Path | None = None
        self._replaces_lmcache = False
        self._off = set[str]()  # options that are not to be there, whatever is written elsewhere

    def load(self) -> Configuration:
        """All of it, in the order in which one thing needs the other."""
        self._read_own()
        is_lmi = self._read_lmi()
        if is_lmi:
            self._imply_lmi()
        self._resolve_degree()
        self._read_lmcache()
        self._default()
        settings = resolve(self._givens)
        model = self._model(settings)
        tenants = Tenants()
        with each():
            tenants = _read(settings["tenants"], load_tenants) or tenants
        with each():
            _refuse_offloading(settings)
        self._notes += inert_notes(settings, tenants, self._surroundings)
        cache, server = None, ServerSettings()
        with together():
            cache = build_cache(settings, tenants)
            server = build_server(settings)
        if cache is not None and (without := tuple(sorted(self._off & {"disk", "l2"}))):
            cache = replace(cache, without=without)
        return Configuration(
            model=model,
            cache=cache,
            server=server,
            tenants=tenants,
            engine=self._engine(settings),
            words=self._words(),
            is_auto=settings["auto"].value,
            is_isolated=not settings["share_across_tenants"].value,
            settings=settings,
            notes=tuple(self._notes),
        )

    def _read_own(self) -> None:
        self._givens += read_command_line(self._command_line) + read_variables(self._surroundings)
        with each():
            self._givens += _read(resolve(self._givens).get(CONFIG_FILE.name), read_file) or []
        model = resolve(self._givens).get("model")
        self._named = None if model is None else model.value
        hub_id = self._surroundings.get("HF_MODEL_ID", "").strip()
        self._model_directory = _model_directory(self._named, self._places.model, hub_id)

    def _read_lmi(self) -> bool:
        """Whether LMI's configuration is in use, which is read then."""
        reader = LmiReader()
        if self._places.config_properties.is_file():
            reader.read_file(self._places.config_properties, Source.CONFIG_PROPERTIES)
        serving = self._model_directory / "serving.properties" if self._model_directory else None
        if serving is not None and serving.is_file():
            reader.read_file(serving, Source.SERVING_PROPERTIES)
        reader.read_variables(self._surroundings)
        is_named = self._command_line.model is not None
        is_lmi = reader.is_used
        is_lmi |= not is_named and any(given.key == "model" for given in reader.givens)
        is_lmi |= not is_named and self._model_directory is not None
        # Others have variables called MAX_BATCH_SIZE, too.
        self._givens += [given for given in reader.givens if is_lmi or given.source != Source.ALIAS]
        self._notes += reader.notes
        return is_lmi

    def _imply_lmi(self) -> None:
        settings = resolve(self._givens)
        implied: dict[str, Any] = {"max_num_seqs": _LMI_SEQUENCES, "served_model_name": _LMI_NAME}
        if self._gpus > 1:
            implied["tensor_parallel_size"] = "max"
        if settings.is_on("enable_lora"):
            implied["max_loras"] = _LMI_LORAS
        self._givens += [Given(key, value, Source.IMPLIED, key, _LMI_DEFAULT) for key, value in implied.items()]
        directory = self._model_directory
        if directory is not None:
            has_formatters = any((directory / name).is_file() for name in _FORMATTERS)
            if (directory / _REQUIREMENTS).is_file():
                what = "hotspan installs nothing: install these packages into its Python"
                self._notes.append(Note(str(directory / _REQUIREMENTS), what, is_warning=True))
            found = {"adapters": directory / "adapters", "formatters": directory if has_formatters else None}
            for key, path in found.items():
                if path is not None and path.is_dir():
                    self._givens.append(Given(key, str(path), Source.IMPLIED, key, _CONTAINER))

    def _resolve_degree(self) -> None:
        stages = resolve(self._givens).count("pipeline_parallel_size", 1)
        degree = max(1, self._gpus // stages)
        self._givens = [
            replace(given, value=degree, text=given.text or "max") if _is_max(given) else given
            for given in self._givens
        ]

    def _read_lmcache(self) -> None:
        settings = resolve(self._givens)
        workers = settings.count("tensor_parallel_size", 1) * settings.count("pipeline_parallel_size", 1)
        reader = LmcacheReader(workers)
        reader.read_variables(self._surroundings)
        file = settings.get("lmcache_config_file")
        if file is not None:
            _refuse_both(settings, file)
            reader.read_file(self._lmcache_file(file))
        connector = None if settings.is_on("no_cache") else _connector(settings)
        if connector is not None:
            self._replaces_lmcache = True
            reader.read_connector(connector, settings[_CONNECTOR].given.origin)
        self._givens += reader.givens
        self._notes += reader.notes
        # What a server of LMCache's holds, this replica does not.
        is_served = connector is not None and connector["kv_connector"] in MULTI_PROCESS_CONNECTORS
        if (file or reader.givens or (connector and not is_served)) and not settings.is_on("auto"):
            gib = DEFAULT_RAM_GIB * workers
            self._givens.append(Given("ram_gib", gib, Source.IMPLIED, "max_local_cpu_size", _LMCACHE_DEFAULT))
        self._drop_foreign_options()

    def _lmcache_file(self, file: Setting) -> Path:
        directory = self._model_directory if file.source in _LMI_SOURCES else None
        path = (directory or Path()) / Path(file.value).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"{file.given.origin}: there is no file {path}: give an absolute path, or in LMI's configuration one "
                "relative to the model's directory"
            )
        return path

    def _drop_foreign_options(self) -> None:
        """What LMCache says of its own remote does not belong to an L2 that somebody else names."""
        l2 = resolve(self._givens).get("l2")
        if l2 is None or l2.source < Source.LMCACHE_CONNECTOR:
            dropped = [
                given for given in self._givens if given.key == "l2_option" and given.source >= Source.LMCACHE_CONNECTOR
            ]
            why = "no L2 is named (remote_url)" if l2 is None else f"the L2 is another one ({l2.given.origin})"
            self._notes += [Note(given.origin, f"it has no effect: {why}", is_warning=True) for given in dropped]
            self._givens = [given for given in self._givens if given not in dropped]

    def _default(self) -> None:
        self._off = {given.key for given in self._givens if given.is_off}
        self._givens = [given for given in self._givens if given.key not in self._off]
        known = {given.key for given in self._givens}
        for key in KEYS:
            if key.is_own and (key.default is not None or key.name not in known) and key.name != "model":
                self._givens.append(Given(key.name, key.default, Source.DEFAULT, key.name, "default"))
        if self._named is None and self._model_directory is not None:
            self._givens.append(Given("model", str(self._model_directory), Source.DEFAULT, "model", _CONTAINER))

    def _model(self, settings: Settings) -> str:
        if "model" not in settings:
            raise ConfigError(
                "no model is named: give `hotspan serve MODEL`, before all options, or set HF_MODEL_ID or "
                f"option.model_id, or put one model into {self._places.model}"
            )
        setting = settings["model"]
        if setting.source is Source.COMMAND_LINE and setting.overridden and _is_only_configuration(setting.value):
            # MODEL is where serving.properties lies, and that names the weights.
            setting = Setting(setting.overridden[0], setting.overridden[1:])
            settings["model"] = setting
        return str(setting.value)

    def _engine(self, settings: Settings) -> tuple[Given, ...]:
        """What the engine gets besides the command line's words."""
        hidden = {key.name for key in KEYS if key.is_own} | {CONFIG_FILE.name}
        if self._replaces_lmcache:
            hidden.add(_CONNECTOR)
        return tuple(
            setting.given
            for name, setting in settings.items()
            if name not in hidden and setting.source is not Source.COMMAND_LINE
        )

    def _words(self) -> tuple[str, ...]:
        """The command line's, without an LMCache connector that hotspan takes the place of."""
        options = split_words(self._command_line.words)
        kept = [option for option in options if not (self._replaces_lmcache and option.name == _CONNECTOR)]
        return tuple(word for option in kept for word in option.words)


def _model_directory(model: str | None, container: Path, hub_id: str) -> Path | None:
    """Where serving.properties, adapters/ and model.py are looked for. HF_MODEL_ID may name a directory, too."""
    if model is not None and Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    if is_model(container):
        return container
    if model is None and hub_id and is_model(Path(hub_id)):
        return Path(hub_id)
    if model is not None or not container.is_dir():
        return None
    inner = sorted(path for path in container.iterdir() if path.is_dir() and is_model(path))
    if len(inner) > 1:
        raise ConfigError(
            f"{container} holds several models ({', '.join(path.name for path in inner)}): `hotspan serve` serves them "
            f"all if nothing else lies beside them. One alone is named, as in `hotspan serve {inner[0]}`"
        )
    return inner[0] if inner else None


def _is_only_configuration(model: str) -> bool:
    path = Path(model).expanduser()
    return (path / "serving.properties").is_file() and not (path / "config.json").exists()


def _read(file: Setting | None, read: Callable[[Path], T]) -> T | None:
    """What a file holds that a setting names; None if it names none."""
    if file is None or file.value is None:
        return None
    try:
        return read(Path(file.value).expanduser())
    except ConfigError as error:
        if file.source is Source.COMMAND_LINE:
            raise
        raise ConfigError(f"{error} ({file.given.origin})") from error


def _is_max(given: Given) -> bool:
    return given.key == "tensor_parallel_size" and given.value == "max" and given.source != Source.COMMAND_LINE


def _refuse_both(settings: Settings, file: Setting) -> None:
    if settings.is_on("auto"):
        raise ConfigError(
            f"{settings['auto'].given.origin} chooses the tiers, and {file.given.origin} names them: leave one of them "
            "out"
        )


def _refuse_offloading(settings: Settings) -> None:
    """vLLM would put its own connector, or LMCache's, in the place of hotspan's without a word."""
    for name in ("kv_offloading_size", "kv_offloading_backend"):
        if name in settings and not settings.is_on("no_cache"):
            raise ConfigError(
                f"{settings[name].given.origin}: vLLM's own offloading would take the place of hotspan's tiers: leave "
                "it out and name --ram-gib, or serve with --no-cache"
            )


def _connector(settings: Settings) -> Mapping[str, Any] | None:
    """The kv_transfer_config, if it names LMCache. Raises: ConfigError for what hotspan can't take the place of."""
    if _CONNECTOR not in settings:
        return None
    given = settings[_CONNECTOR].given
    config = BY_NAME[_CONNECTOR].kind.parse(given.value, given.origin)
    if config.get("kv_connector") in CONNECTORS:
        return cast(Mapping[str, Any], config)
    raise ConfigError(
        f"{given.origin}: kv_connector is {config.get('kv_connector')!r}, and the engine's connector is hotspan's: "
        f"leave it out, or serve with --no-cache; {', '.join(sorted(CONNECTORS))} may stay, hotspan takes their place"
    )
