"""The life of a store: unpack, divide the machine, start one server per model, serve, drain."""

import asyncio
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from hotspan.config.admin_token import VARIABLE
from hotspan.config.configuration import Configuration
from hotspan.config.environment import environment
from hotspan.config.own import CommandLine
from hotspan.config.server_settings import ServerSettings
from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import ConfigError
from hotspan.core.threads import go_on
from hotspan.http.connections import raise_file_limit
from hotspan.http.options import check_tls, leave_out, tls_options, with_cors
from hotspan.http.serving import CUT_S, DrainingServer, uvicorn_config
from hotspan.plan.advice import print_plan
from hotspan.plan.host import Host
from hotspan.server.entrance import Entrance, open_entrance
from hotspan.server.lmi.request import LMI_NAMES
from hotspan.server.loading import answering_while_loading
from hotspan.server.models.archives import unpacked
from hotspan.server.models.assignment import NO_ACCESS_LOG, Assignment
from hotspan.server.models.front import StoreFront
from hotspan.server.models.served import ChildCommand, ModelState, ServedModel
from hotspan.server.models.shares import DEVICES, Share, shares, visible_devices
from hotspan.server.models.store import ModelStore
from hotspan.server.options import ServeOptions
from hotspan.server.principal import Link
from hotspan.server.run import show_log
from hotspan.server.source import model_cache

_WATCH_S = 0.1
_STARTUP_SLACK_S = 60.0
"""Its server gives up by itself before, and says more."""

_GRACE_S = 20.0
"""How long a model without requests may take to end: what it has cached is written down."""

_HURRY_S = 3.0
"""The same after a second signal."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """All models, ready to be started.

    at_once: how many of them may load at a time.
    server:  of the front: what all models may take together, since each one's server holds to its own.
    """

    models: tuple[ServedModel, ...]
    at_once: int
    server: ServerSettings


def run_store(
    store: ModelStore, command_line: CommandLine, common: Configuration, options: ServeOptions, words: tuple[str, ...]
) -> None:
    """Serve all models of a store until a signal to stop, then let requests in flight end.

    common, options: what holds for all of them.
    words:           of the command that serves one model, as it is told (`assignment`); its name is put after them.
    Raises: ConfigError or EngineError with what to do.
    """
    show_log()
    raise_file_limit()
    surroundings = environment()
    check_tls(options.engine_values)
    with (
        open_entrance(options, surroundings) as entrance,
        Aftermath() as aftermath,
        tempfile.TemporaryDirectory(prefix="hotspan-store-") as runtime,
    ):
        aftermath.remove(Path(runtime))
        with answering_while_loading(entrance.listeners[0], tls_options(options.engine_values)):
            prepared = prepare(store, command_line, common, Path(runtime), words, surroundings)
        for model in prepared.models:
            model.on_start = lambda pid: aftermath.end(pid, _GRACE_S, is_group=True)
        asyncio.run(_serve(prepared, options, entrance))


def prepare(
    store: ModelStore,
    command_line: CommandLine,
    common: Configuration,
    runtime: Path,
    words: tuple[str, ...],
    surroundings: Mapping[str, str],
) -> Prepared:
    """How each model is to be started. Raises: ConfigError for what can't work.

    runtime: a directory of this run's, for sockets.
    Blocks:  while archives are unpacked and the machine is looked at.
    """
    cache = model_cache(surroundings) / "unpacked"
    assignments = {}
    for number, model in enumerate(store.models):
        place = unpacked(model.path, model.name, cache) if model.is_archive else model.path.absolute()
        assignments[model.name] = Assignment(
            directory=str(place),
            is_container=store.is_container,
            link=Link(str(runtime / str(number)), secrets.token_urlsafe(32)),
            flags=command_line.flags,
            words=tuple(command_line.words),
            reason=str(runtime / f"{number}.reason"),
        )
    own = {name: _explained(name, each, surroundings) for name, each in assignments.items()}
    names = _all_names(own)
    _check_default(common, names)
    devices = visible_devices(surroundings)
    split = shares(own, common, devices, lambda has_disks: Host.probe(surroundings, None if has_disks else ()))
    _show(split)
    models = []
    for name, share in split.items():
        engine = (*share.engine, "--served-model-name", *names[name], "--disable-uvicorn-access-log")
        assignment = replace(assignments[name], cache=share.cache, engine=engine)
        variables = {key: value for key, value in surroundings.items() if key != VARIABLE}
        if share.devices is not None:
            variables[DEVICES] = ",".join(share.devices)
        models.append(
            ServedModel(
                names[name],
                assignment.link,
                ChildCommand((*words, name), assignment.to_json().encode(), variables, Path(assignment.reason)),
                startup_timeout_s=own[name].server.startup_timeout_s + _STARTUP_SLACK_S,
                answer_s=own[name].server.step_timeout_s,
                is_partial=common.server.partial,
            )
        )
    has_own_devices = all(share.devices for share in split.values())
    at_once = common.server.models_at_once or (len(models) if has_own_devices else 1)
    return Prepared(tuple(models), at_once, _together(common.server, [each.server for each in own.values()]))


def _together(common: ServerSettings, servers: Sequence[ServerSettings]) -> ServerSettings:
    return replace(
        common,
        job_queue_size=sum(server.job_queue_size for server in servers),
        max_request_bytes=max(server.max_request_bytes for server in servers),
        predict_timeout_s=max(server.predict_timeout_s for server in servers) + CUT_S,
    )


def _explained(name: str, assignment: Assignment, surroundings: Mapping[str, str]) -> Configuration:
    try:
        return assignment.configuration(surroundings)
    except ConfigError as error:
        raise ConfigError(f"the model {name}: {error}") from error


def _all_names(own: Mapping[str, Configuration]) -> dict[str, tuple[str, ...]]:
    """The names of each model: its entry's, and those in its own configuration. Raises: ConfigError."""
    owners = {name: name for name in own}
    names: dict[str, tuple[str, ...]] = {}
    for name, configuration in own.items():
        setting = configuration.settings.get("served_model_name")
        value = [] if setting is None else setting.value
        given = [str(one) for one in (value if isinstance(value, list) else [value]) if one not in LMI_NAMES]
        for alias in given:
            other = owners.setdefault(alias, name)
            if other != name:
                raise ConfigError(
                    f"{other} and {name} are both called {alias}: a served_model_name belongs into the "
                    "serving.properties of one model"
                )
        names[name] = tuple(dict.fromkeys((name, *given)))
    return names


def _check_default(common: Configuration, names: Mapping[str, Sequence[str]]) -> None:
    default = common.server.default_model
    known = [name for group in names.values() for name in group]
    if default is not None and default not in known:
        origin = common.settings["default_model"].given.origin
        raise ConfigError(f"{origin} is {default}, which is no model of the store: there are {', '.join(known)}")


def _show(split: Mapping[str, Share]) -> None:
    for name, share in split.items():
        if share.plan is not None:
            Console().print(f"\nThe model {name}:")
            print_plan(share.plan)


class StoreServer(DrainingServer):
    """The store's process: on a signal, each model ends as its last request does."""

    models: Sequence[ServedModel] = ()
    keepers: "Sequence[asyncio.Task[None]]" = ()

    async def _drain(self) -> None:
        for keeper in self.keepers:
            keeper.cancel()
        ends = [asyncio.create_task(model.drain()) for model in self.models]
        try:
            await super()._drain()
        finally:
            for end in ends:
                end.cancel()


async def _serve(prepared: Prepared, options: ServeOptions, entrance: Entrance) -> None:
    began_s = time.monotonic()
    models, options = prepared.models, replace(options, server=prepared.server)
    front = StoreFront(models, options.server, options.limits, has_keys=options.has_keys)
    given = options.engine_values
    tls = tls_options(given)
    leave_out(given)
    config = uvicorn_config(
        with_cors(entrance.gate(front), given),
        options.limits,
        lifespan="off",
        ws="none",
        access_log=not given.get(NO_ACCESS_LOG, False),
        **tls,
    )
    address = f"{'https' if tls else 'http'}://{options.server.host}:{options.server.port}"
    loads_line = f"hotspan loads {len(models)} models, {prepared.at_once} at a time: {address} says when they are there"
    server = StoreServer(config, front.admission, options.drain_s, lambda: loads_line)
    turns = asyncio.Semaphore(prepared.at_once)
    server.models = models
    server.keepers = keepers = [asyncio.create_task(model.keep(turns)) for model in models]
    watch = asyncio.create_task(go_on("watch", lambda: _watch(server, address, began_s)))
    try:
        await server.serve(sockets=entrance.listeners)
    finally:
        for task in (watch, *keepers):
            task.cancel()
        ended = await asyncio.gather(*keepers, return_exceptions=True)
        grace_s = _HURRY_S if server.force_exit else _GRACE_S
        await asyncio.gather(*(model.stop(grace_s) for model in models))
    for end in ended:
        if isinstance(end, Exception):
            raise end


async def _watch(server: StoreServer, address: str, began_s: float) -> None:
    """Print when all models are loaded; stop the server if one can't be."""
    is_said = False
    while not any(keeper.done() and not keeper.cancelled() for keeper in server.keepers):
        states = [model.state for model in server.models]
        if not is_said and ModelState.LOADING not in states:
            count = f"{states.count(ModelState.READY)} of {len(states)} models"
            print(f"hotspan is ready on {address} after {time.monotonic() - began_s:.0f} s: {count}", flush=True)
            is_said = True
        await asyncio.sleep(_WATCH_S)
    server.should_exit = True
