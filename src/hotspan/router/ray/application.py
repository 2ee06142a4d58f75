"""The Serve application: replicas behind HAProxy, and the picker that it asks."""

import secrets
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.deployment import Application
from ray.serve.handle import DeploymentHandle

from hotspan.core.errors import ConfigError, did_you_mean
from hotspan.router.access import Access
from hotspan.router.ray.picker import Picker
from hotspan.router.ray.plan import Plan
from hotspan.router.ray.replica import ServeReplica
from hotspan.router.text import Prompts

REPLICA, PICKER = "replica", "picker"
IMPORT_PATH = "hotspan.router.ray.application:build"


def build(arguments: Mapping[str, Any]) -> Application:
    """The application of a plan written as a mapping: what a Serve config file's `args` say.

    Raises: ConfigError.
    """
    known = sorted(field.name for field in fields(Plan))
    for name in arguments:
        if name not in known:
            raise ConfigError(f"args: there is no {name}: {did_you_mean(name, known, 'there are ' + ', '.join(known))}")
    return application(Plan(**dict(arguments)))


def application(plan: Plan) -> Application:
    """What `serve.run` takes. HAProxy must be on where this runs, and wherever Ray does."""
    replicas = _deployment(
        ServeReplica,
        name=REPLICA,
        max_ongoing_requests=plan.max_in_flight,
        max_queued_requests=-1,
        graceful_shutdown_timeout_s=plan.drain_s + 15,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class="hotspan.router.ray.policy:FleetRouter",  # type: ignore[arg-type]
            request_router_kwargs={"strategy": str(plan.strategy), "max_s": plan.predict_s + 60},
        ),
        **_size(plan),
    ).bind(list(plan.words), plan.drain_s, plan.startup_s)
    picker = _deployment(
        PickerReplica,
        name=PICKER,
        # It runs beside the proxy of each node, and must not be what requests wait for.
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0},
    ).bind(replicas, plan.model, plan.session_key, plan.is_shared)
    # Ray's way for HAProxy to ask somebody; not yet in its documentation.
    attach = getattr(replicas, "_with_ingress_request_router", None)
    if attach is None:
        raise ConfigError(f"Ray {ray.__version__} has no request router behind HAProxy: install hotspan[ray]")
    found: Application = attach(picker)
    return found


def config(plan: Plan, *, name: str, host: str, port: int) -> dict[str, Any]:
    """The same as a Serve config file, for `serve deploy` or a RayService."""
    given = {key: value for key, value in asdict(plan).items() if value != getattr(_DEFAULTS, key)}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": host, "port": port},
        "applications": [
            {
                "name": name,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": {**given, "words": list(plan.words)},
            }
        ],
    }


_DEFAULTS = Plan(words=("model",))


def _size(plan: Plan) -> dict[str, Any]:
    if not plan.max_replicas:
        return {"num_replicas": plan.replicas}
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function="hotspan.router.ray.scaling:QueueSeconds", policy_kwargs={"target_s": plan.target_queue_s}
    )
    scaling = AutoscalingConfig(
        min_replicas=plan.min_replicas,
        max_replicas=plan.max_replicas,
        initial_replicas=min(max(plan.replicas, plan.min_replicas), plan.max_replicas),
        policy=policy,
    )
    return {"autoscaling_config": scaling}


def _deployment(kind: type, **options: Any) -> Any:
    """`kind` as Serve runs it, with an app that it makes when it starts."""
    return serve.deployment(serve.ingress()(kind), **options)


class PickerReplica:
    """The picker as Ray starts it."""

    def __init__(self, server: DeploymentHandle[Any], model: str | None, session_key: str, is_shared: bool) -> None:
        server._init()  # type: ignore[no-untyped-call]  # it knows the replicas before it is asked
        options: dict[str, Any] = {
            "session_key": session_key,
            "owner_of": Access(is_shared=is_shared).owner_of_texts,
            "secret": secrets.randbits(64),
        }
        prompts = Prompts(**options) if model is None else Prompts.load(Path(model), **options)
        self._picker = Picker(server, prompts)

    def __serve_build_asgi_app__(self) -> Picker:
        return self._picker
