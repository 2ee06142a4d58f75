"""The options of `hotspan deploy ray`, and of the `args` of a Serve config file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotspan.config.engine_options import split_words
from hotspan.config.kinds import COUNT, NOT_NEGATIVE, POSITIVE, one_of
from hotspan.config.options import check, option
from hotspan.config.tenants import load_tenants
from hotspan.core.errors import ConfigError
from hotspan.router.types import Strategy

_TRUE = ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to run.

    words:     the model, and the options of `hotspan serve` and of vLLM.
    drain_s:   time for requests in flight when a replica stops.
    startup_s: maximum time to load the model.
    predict_s: maximum duration of one request.
    """

    words: Sequence[str]
    replicas: int = option(2, "Number of replicas at the start.", kind=COUNT)
    min_replicas: int = 0
    max_replicas: int = 0
    target_queue_s: float = option(
        2.0,
        "With --autoscale: target queue length per replica, in seconds of work.",
        name="target_queue_seconds",
        kind=POSITIVE,
    )
    gpus: float = option(1.0, "GPUs per replica. 0: CPU only.", kind=NOT_NEGATIVE)
    cpus: float = option(4.0, "CPUs per replica, in Ray's units.", kind=NOT_NEGATIVE)
    strategy: str = option(
        Strategy.AUTO.value,
        "Routing strategy: auto, session, prefixaware, kvaware or roundrobin.",
        kind=one_of(*(each.value for each in Strategy)),
    )
    session_key: str = option("", "Request header with the session ID.", shown="x-session-id")
    model: str | None = option(
        None,
        "Directory with the tokenizer and chat template, on every node. Default: compare prompts as text.",
        name="tokenizer",
    )
    max_in_flight: int = option(1000, "Maximum number of concurrent requests per replica.")
    drain_s: float = 30.0
    startup_s: float = 1200.0
    predict_s: float = 240.0

    def __post_init__(self) -> None:
        """Raises: ConfigError."""
        if not self.words or self.words[0].startswith("-"):
            raise ConfigError("no model is named: give one before all options")
        check(self)
        least, most = self.min_replicas, self.max_replicas
        if most and not 1 <= least <= most:
            raise ConfigError(f"--autoscale {least}:{most} can't be: give MIN:MAX with 1 <= MIN <= MAX")

    @property
    def is_shared(self) -> bool:
        """Whether replicas share texts between all clients: they have no tenants, or are told to."""
        given = {option.name: option.value for option in split_words(tuple(self.words)) if option.name}
        return not given.get("tenants") or bool(given.get("share_across_tenants"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Where a plan runs."""

    host: str = option("0.0.0.0", "Address of HAProxy. Ray listens on all addresses.")
    port: int = option(8000, "Port of HAProxy.")
    address: str | None = option(None, "Address of the Ray cluster. Default: start Ray on this machine.")
    name: str = option("hotspan", "Name of the Ray Serve application.")


def checked_words(words: Sequence[str], surroundings: Mapping[str, str]) -> list[str]:
    """The words, with what this environment says of keys: the replicas' nodes have environments of their own.

    Ray's HAProxy and its replicas listen on all addresses, while each server behind them is told of loopback only.

    words:  the model, and the options of `hotspan serve`. A file of tenants that is not on this machine is not read
            here; each replica does so before it starts.
    Raises: ConfigError unless clients need a key, or the operator has said that they need none.
    """
    given = {option.name: option.value for option in split_words(words) if option.name}
    more = []
    if "tenants" not in given and (file_here := surroundings.get("HOTSPAN_TENANTS", "").strip()):
        more.append(f"--tenants={file_here}")
    if "insecure" not in given and surroundings.get("HOTSPAN_INSECURE", "").strip().lower() in _TRUE:
        more.append("--insecure")
    if given.get("insecure") or "--insecure" in more:
        return [*words, *more]
    named = given.get("tenants") or surroundings.get("HOTSPAN_TENANTS", "").strip()
    if not named:
        raise ConfigError(
            "Ray listens on all addresses, and nobody would need a key: give -- --tenants FILE, or -- --insecure if "
            "the network keeps strangers out"
        )
    file = Path(str(named)).expanduser()
    if file.exists() and not load_tenants(file).has_keys:
        raise ConfigError(
            f"Ray listens on all addresses, and {file} has no API keys, so nobody would need one: give keys in it, or "
            "-- --insecure if the network keeps strangers out"
        )
    return [*words, *more]
