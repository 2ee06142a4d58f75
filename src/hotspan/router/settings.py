"""The settings of a router."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from hotspan.config.kinds import COUNT, MEBIBYTES, NATURAL, NOT_NEGATIVE, SECONDS, SHARE, TEXTS, VERBATIM, Kind
from hotspan.config.options import check, option
from hotspan.core.errors import ConfigError
from hotspan.core.redaction import redacted_text
from hotspan.core.types import GIB, MIB
from hotspan.router.policy import Weights
from hotspan.router.types import Strategy

if TYPE_CHECKING:
    from hotspan.config.kv_events import CurveKeys


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """When a replica is taken out, and when it is taken back.

    timeout_s:           of one health check; None is the interval, and at least 1 s.
    downs, ups:          checks in a row that change a replica's state; the first of all counts at once.
    failures:            failed requests in a row that open the circuit breaker.
    open_s, max_open_s:  how long the breaker is open first, and at most: it doubles with each trial that fails.
    """

    path: str = option("/ping", "Health-check path; 200 means healthy.", name="health_path")
    interval_s: float = option(2.0, "Seconds between health checks.", name="health_interval_s", kind=SECONDS)
    timeout_s: float | None = None
    downs: int = 2
    ups: int = 1
    failures: int = 3
    open_s: float = 1.0
    max_open_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises: ConfigError for what can't be checked."""
        if not self.path.startswith("/"):
            raise ConfigError(f"--health-path {self.path}: give a path, such as /ping or /health")
        check(self)

    @property
    def answer_s(self) -> float:
        """How long a replica has to answer a health check."""
        return max(self.interval_s, 1.0) if self.timeout_s is None else self.timeout_s


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


def parse_shares(
    texts: Sequence[str], flag: str = "--split", of: str = "its share of the sessions"
) -> dict[str, float]:
    """Shares by group from `GROUP=10%` each. flag, of: for errors. Raises: ConfigError."""
    shares: dict[str, float] = {}
    for text in texts:
        group, _, given = text.partition("=")
        group, given = group.strip(), given.strip()
        try:
            share = SHARE.read(given)
        except ValueError:
            share = -1.0
        if not group or share < 0:
            raise ConfigError(f"{flag} {text}: give a group and {of}, such as canary=10%")
        if group in shares:
            raise ConfigError(f"{flag} {group} is given twice: give it once")
        shares[group] = share
    return shares


def _replicas(raw: Any) -> tuple[Replica, ...]:
    return tuple(parse_replica(text) for text in TEXTS.read(raw))


def _shares(raw: Any) -> dict[str, float]:
    return parse_shares(TEXTS.read(raw))


def _shadows(raw: Any) -> dict[str, float]:
    return parse_shares(TEXTS.read(raw), "--shadow", "the share of requests that it answers too")


_REPLICAS = Kind("text", _replicas, TEXTS.wants, is_repeated=True)
_SHARES = Kind("text", _shares, TEXTS.wants, is_repeated=True)
_SHADOWS = Kind("text", _shadows, TEXTS.wants, is_repeated=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """What `hotspan route` is started with.

    held_bytes:  of all request bodies in memory.
    keys:        SHA-256 of each API key that is let in, and the tenant that replicas take it for ("" is unknown); none
                 lets in everybody.
    admin_token: for /router/... and, where there is one or keys are, /metrics; None: this machine only.
    events_keys: of the replicas' KV events; None follows events that are not encrypted.
    """

    replicas: tuple[Replica, ...] = option(
        (),
        "Replica: URL or GROUP=URL; append ,events=tcp://HOST:PORT for its KV events. May be repeated.",
        name="replica",
        kind=_REPLICAS,
    )
    strategy: Strategy = option(Strategy.AUTO, "Routing strategy: auto, prefixaware, kvaware, session or roundrobin.")
    threshold: int = option(
        Weights().threshold,
        "prefixaware, kvaware: requests in flight at a replica above which another one is chosen.",
        kind=COUNT,
    )
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.")
    model: Path | None = option(None, "Directory with the model's tokenizer and chat template: needed for KV events.")
    model_names: tuple[str, ...] = option(
        (), "Name of the model in requests; other names are adapters. May be repeated.", name="model_name"
    )
    shares: Mapping[str, float] = option(
        {}, "GROUP=10%: share of the sessions for that group. May be repeated.", name="split", kind=_SHARES
    )
    shadow: Mapping[str, float] = option(
        {},
        "GROUP=2%: share of the requests that this group answers too; its answers are compared and discarded. "
        "May be repeated.",
        kind=_SHADOWS,
    )
    max_drift: float = option(
        0.01,
        "With --shadow: share of answers that may differ above the noise floor; a group above it is rolled back.",
        kind=SHARE,
    )
    shadow_in_flight: int = option(4, "With --shadow: maximum number of comparisons at a time.", kind=COUNT)
    session_key: str | None = option(
        None, "Request header or body field with the session id; takes precedence over the built-in ones."
    )
    tenant_header: str | None = option(
        None, "Request header with the tenant's name. Default: the API key identifies the tenant."
    )
    max_in_flight: int = option(
        256, "Maximum number of requests in flight per replica; further requests are queued.", kind=COUNT
    )
    queue_size: int = option(
        1024, "Maximum number of queued requests; further requests are refused with 429.", kind=NATURAL
    )
    queue_timeout_s: float = option(
        30.0, "Maximum time in the queue, in seconds; then a request is refused with 503.", kind=SECONDS
    )
    retry_share: float = option(0.1, "Retry budget: retries per request, on average.", kind=NOT_NEGATIVE)
    retry_reserve: int = option(
        256, "Retry budget: additional retries at once, for the requests of a replica that fails.", kind=NATURAL
    )
    attempts: int = option(3, "Maximum number of attempts per request; 1 disables retries.", kind=COUNT)
    connect_timeout_s: float = option(2.0, "Connect timeout, in seconds.", kind=NOT_NEGATIVE)
    read_timeout_s: float = option(300.0, "Read timeout, in seconds without a byte from the replica.", kind=SECONDS)
    health: HealthSettings = field(default_factory=HealthSettings)
    blend_separators: tuple[str, ...] = option(
        (),
        "Text between documents, as replicas with --blend have it: prompts go where their documents were computed, "
        "in whatever order. May be repeated.",
        name="blend_separator",
        kind=VERBATIM,
    )
    index_bytes: int = option(
        256 * MIB, "Memory for the index of cached texts, in MiB.", name="index_mib", kind=MEBIBYTES
    )
    max_request_bytes: int = option(64 * MIB, "Maximum size of a request body, in bytes.", kind=COUNT)
    held_bytes: int = GIB
    drain_s: float = option(30.0, "Time for requests in flight after a signal to stop, in seconds.", kind=NOT_NEGATIVE)
    is_exposing: bool = option(
        False, "Add response headers with the chosen replica and the expected cache hit.", name="expose"
    )
    api_keys_file: Path | None = option(
        None, "File (mode 0600) with one API key or sha256:HEX per line. With it, every client needs a key."
    )
    tenants: Path | None = option(
        None, "The --tenants file of the replicas. With it, every client needs one of its keys."
    )
    share_across_tenants: bool = option(
        False,
        "Do not tell clients' texts apart: the replicas share texts between tenants (--share-across-tenants), or have "
        "no tenants.",
    )
    admin_token_file: Path | None = option(
        None, "File (mode 0600) with the admin token. Without one, only this machine can reach /router/..."
    )
    insecure: bool = option(
        False, "Allow a --host other than 127.0.0.1 without API keys here, as where replicas check them."
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host name that requests may use where no API key is needed, besides this machine's. May be repeated. *: any.",
        name="allowed_host",
        kind=TEXTS,
    )
    kv_events_key: Path | None = option(
        None, "File (0600) with the key of the replicas' KV events: no others are believed."
    )
    otlp_endpoint: str | None = option(
        None,
        "OTLP/HTTP endpoint for OpenTelemetry spans, such as http://localhost:4318. Default: "
        "OTEL_EXPORTER_OTLP_ENDPOINT.",
    )
    keys: Mapping[bytes, str] = field(default_factory=dict, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    events_keys: "CurveKeys | None" = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Raises: ConfigError for replicas and shares that do not fit together."""
        if not self.replicas:
            raise ConfigError("there is no replica to route to: give --replica URL, once for each")
        urls = [replica.url for replica in self.replicas]
        if twice := sorted({url for url in urls if urls.count(url) > 1}):
            raise ConfigError(f"--replica {twice[0]} is given twice: give each once")
        groups = {replica.group for replica in self.replicas}
        for flag, named in (("--split", self.shares), ("--shadow", self.shadow)):
            for group in named:
                if group not in groups:
                    there = ", ".join(sorted(groups - {""})) or "none"
                    raise ConfigError(
                        f"{flag} {group}: no replica is in that group (there are: {there}): give --replica {group}=URL"
                    )
        split = sum(self.shares.get(group, 0.0) for group in self.shadow)
        if self.shadow and (groups <= set(self.shadow) or split > 1 - 1e-9):
            given = ", ".join(self.shadow)
            raise ConfigError(f"--shadow {given}: no other replica answers what is to be compared: give one")
        total = sum(self.shares.values())
        if total > 1 + 1e-9:
            raise ConfigError(f"the shares of --split add up to {total:.0%}: lower some, to 100% in all")
        if total < 1 - 1e-9 and groups <= set(self.group_shares):
            raise ConfigError(
                f"the shares of --split add up to {total:.0%}, and no replica takes the rest: give one without a "
                "group, or shares of 100% in all"
            )

    @property
    def group_shares(self) -> Mapping[str, float]:
        """Shares of the sessions by group; a group that only gets shadow requests has none."""
        return {**dict.fromkeys(self.shadow, 0.0), **self.shares}
