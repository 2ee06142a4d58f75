"""What a router is told: its replicas, how it chooses, and when it gives up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from hotspan.core.curve import CurveKeys
from hotspan.core.errors import ConfigError
from hotspan.core.redaction import redacted_text
from hotspan.core.types import GIB, MIB
from hotspan.router.health import HealthSettings
from hotspan.router.policy import Weights
from hotspan.router.types import Strategy


@dataclass(frozen=True, slots=True)
class Replica:
    """One server behind the router.

    url:    without a path. group: of a split; "" is none.
    events: its KV events (a ZMQ address), and where they are replayed; "" has none.
    """

    url: str
    group: str = ""
    events: str = ""
    replay: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """One router.

    shares:            of the sessions, by group.
    model:             directory with the model's tokenizer and chat template; None compares prompts as they come.
    model_names:       by which requests call the model; any other is an adapter's. None are needed without events.
    index_bytes:       for what replicas hold; past it the least used goes.
    threshold:         requests at one replica from which on `prefixaware` and `kvaware` go elsewhere.
    session_key:       header or field of the body that names a session, before all others.
    max_in_flight:     requests at one replica at a time; more wait in the queue.
    queue_size:        that wait at a time. queue_timeout_s: how long one waits.
    retry_share:       retries for each request, on average. retry_reserve: that may be made at once besides.
    attempts:          of one request, the first counted.
    connect_timeout_s: to a replica. read_timeout_s: without a byte of it.
    tenant_header:     names whose a request is; None takes the API key.
    is_exposing:       answers say which replica gave them, and what was expected to be cached there.
    max_request_bytes: of one body. held_bytes: of all bodies in memory.
    drain_s:           that requests in flight may go on after a signal to stop.
    keys:              SHA-256 of each API key that is let in, and the tenant that replicas take it for ("" is unknown);
                       none lets in everybody.
    admin_token:       for /router/... and, where there is one or keys are, /metrics; None: this machine only.
    otlp_endpoint:     where spans go; None makes none.
    events_keys:       of the replicas' KV events; None follows events that are not encrypted.
    """

    replicas: tuple[Replica, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    strategy: Strategy = Strategy.AUTO
    shares: Mapping[str, float] = field(default_factory=dict)
    model: Path | None = None
    model_names: tuple[str, ...] = ()
    index_bytes: int = 256 * MIB
    threshold: int = Weights().threshold
    session_key: str | None = None
    max_in_flight: int = 256
    queue_size: int = 1024
    queue_timeout_s: float = 30.0
    health: HealthSettings = field(default_factory=HealthSettings)
    retry_share: float = 0.1
    retry_reserve: int = 256
    attempts: int = 3
    connect_timeout_s: float = 2.0
    read_timeout_s: float = 300.0
    tenant_header: str | None = None
    is_exposing: bool = False
    max_request_bytes: int = 64 * MIB
    held_bytes: int = GIB
    drain_s: float = 30.0
    keys: Mapping[bytes, str] = field(default_factory=dict, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    otlp_endpoint: str | None = None
    events_keys: CurveKeys | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Raises: ConfigError for replicas and shares that do not fit together."""
        if not self.replicas:
            raise ConfigError("there is no replica to route to: give --replica URL, once for each")
        urls = [replica.url for replica in self.replicas]
        if twice := sorted({url for url in urls if urls.count(url) > 1}):
            raise ConfigError(f"--replica {twice[0]} is given twice: give each once")
        groups = {replica.group for replica in self.replicas}
        for group in self.shares:
            if group not in groups:
                named = ", ".join(sorted(groups - {""})) or "none"
                raise ConfigError(
                    f"--split {group}: no replica is in that group (there are: {named}): give --replica {group}=URL"
                )
        total = sum(self.shares.values())
        if total > 1 + 1e-9:
            raise ConfigError(f"the shares of --split add up to {total:.0%}: lower some, to 100% in all")
        if total < 1 - 1e-9 and groups <= set(self.shares):
            raise ConfigError(
                f"the shares of --split add up to {total:.0%}, and no replica takes the rest: give one without a "
                "group, or shares of 100% in all"
            )
        for name in (
            "threshold",
            "max_in_flight",
            "attempts",
            "max_request_bytes",
            "queue_timeout_s",
            "read_timeout_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}: give a number above 0")


def parse_replica(text: str) -> Replica:
    """A replica from `[GROUP=]URL[,events=ADDRESS[,replay=ADDRESS]]`. Raises: ConfigError."""
    first, *more = (part.strip() for part in text.split(","))
    group, equals, url = first.rpartition("=")
    if equals and (not group or "/" in group):
        raise ConfigError(f"--replica {text}: give URL, or GROUP=URL with a plain name for the group")
    options = {}
    for part in more:
        name, equals, value = part.partition("=")
        if name not in ("events", "replay") or not equals or "://" not in value:
            raise ConfigError(
                f"--replica {text}: {part!r} is not known: after the URL come events= and replay=tcp://..."
            )
        options[name] = value
    if "replay" in options and "events" not in options:
        raise ConfigError(f"--replica {text}: replay= is of no use alone: give events= too")
    return Replica(_url(url, text), group, **options)


def _url(url: str, text: str) -> str:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        is_fine = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_fine = False
    if not is_fine:
        raise ConfigError(f"--replica {redacted_text(text)} is no URL of a server: give one like http://10.0.0.5:8080")
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(
            f"--replica {redacted_text(text)}: give scheme, host and port alone, such as {parts.scheme}://{parts.hostname}"
        )
    return f"{parts.scheme}://{parts.netloc.lower()}"


def parse_shares(texts: Sequence[str]) -> dict[str, float]:
    """Shares by group from `GROUP=10%` each. Raises: ConfigError."""
    shares: dict[str, float] = {}
    for text in texts:
        group, _, given = text.partition("=")
        group, given = group.strip(), given.strip()
        try:
            share = float(given[:-1]) / 100 if given.endswith("%") else float(given)
        except ValueError:
            share = -1.0
        if not group or not 0 <= share <= 1:
            raise ConfigError(f"--split {text}: give a group and its share of the sessions, such as canary=10%")
        if group in shares:
            raise ConfigError(f"--split {group} is given twice: give it once")
        shares[group] = share
    return shares
