"""Security findings about a server with these options on this machine, each with a remedy (`hotspan doctor`)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from hotspan.config.admin_token import VARIABLE
from hotspan.config.kv_events import FLAG, published
from hotspan.config.settings import L2Settings
from hotspan.core.addresses import is_loopback
from hotspan.server.facts import SEGMENT, SOCKET, Facts
from hotspan.server.findings import Finding, Findings, bad, ok, warning
from hotspan.server.hardening import MEDIA_DOMAINS, REDIRECTS, code_options, secrets_of
from hotspan.server.options import ServeOptions


def posture(options: ServeOptions, facts: Facts) -> list[Finding]:
    """The findings, at least one per subject."""
    return [finding for check in _CHECKS for finding in check(options, facts)]


def files_of(options: ServeOptions) -> list[Path]:
    """The files and directories whose permissions `posture` looks at."""
    cache = options.cache
    found = [options.server.admin_token_file, _script(options), None if cache is None else cache.events_key]
    if cache is not None and cache.disk is not None:
        found.append(Path(cache.disk.directory))
    if cache is not None and cache.encryption is not None:
        found.append(Path(cache.encryption.store))
        found.append(_kek_file(cache.encryption.kek))
    if cache is not None and cache.l2 is not None and cache.l2.url.startswith("file://"):
        found.append(_directory(cache.l2))
    return [path for path in found if path is not None]


def _private(what: str, path: Path, facts: Facts, state: str, remedy: str, missing: Finding | None = None) -> Finding:
    """That a file or directory is private, as `state`; missing: the finding where it is not there."""
    fact = facts.files.get(path)
    if fact is None and missing is not None:
        return missing
    is_open = fact is not None and not fact.is_private
    return bad(what, f"{path} is open to others", remedy) if is_open else ok(what, state)


# -- who may ask ---------------------------------------------------------------------------------------------------


def _exposure(options: ServeOptions, facts: Facts) -> Findings:
    where = f"{options.server.host}:{options.server.port}"
    if is_loopback(options.server.host):
        yield ok("exposure", f"{where}, this machine only")
    elif options.has_keys:
        yield ok("exposure", f"{where}, other machines with a key")
    elif options.server.insecure:
        yield warning(
            "exposure",
            f"{where}, anybody, since --insecure says so",
            "let only a gateway or SageMaker reach this port, or give keys with --tenants",
        )
    else:
        yield bad("exposure", f"{where}, anybody", "give keys with --tenants FILE, or listen on 127.0.0.1")


def _tls(options: ServeOptions, facts: Facts) -> Findings:
    given = options.engine_values
    if given.get("ssl_keyfile") and not given.get("ssl_certfile"):
        yield bad("TLS", "a key without a certificate", "give --ssl-certfile, too")
    elif given.get("ssl_certfile"):
        yield ok("TLS", f"with {given['ssl_certfile']}")
    elif is_loopback(options.server.host) and (
        options.server.admin_port is None or is_loopback(options.server.admin_host)
    ):
        yield ok("TLS", "none, and nothing leaves this machine")
    else:
        yield warning(
            "TLS",
            "none: keys, prompts and answers cross the network as they are",
            "give --ssl-certfile and --ssl-keyfile, or put what ends TLS on this host",
        )


def _keys(options: ServeOptions, facts: Facts) -> Findings:
    if options.has_keys:
        tenants = options.tenants.tenants
        count = sum(len(tenant.keys) for tenant in tenants)
        yield ok("API keys", f"{count} of {len(tenants)} tenants, as digests, compared in constant time")
    elif is_loopback(options.server.host):
        yield ok("API keys", "none: every user of this machine may ask")
    else:
        yield warning("API keys", "none: all clients are one tenant", "give each client a key with --tenants FILE")


def _admin(options: ServeOptions, facts: Facts) -> Findings:
    file = options.server.admin_token_file
    if file is not None:
        missing = bad("admin token", f"{file} is not there", "write one: openssl rand -hex 32, mode 0600")
        remedy = f"chmod 600 {file}, and write another token into it"
        yield _private("admin token", file, facts, f"from {file}", remedy, missing)
    elif facts.environment.get(VARIABLE):
        yield ok("admin token", f"from {VARIABLE}")
    else:
        yield ok("admin token", "made at each start, for commands of this user on this machine")
    if options.server.admin_port is not None:
        yield ok(
            "admin address",
            f"{options.server.admin_host}:{options.server.admin_port}; {options.server.port} refuses administration",
        )
    elif is_loopback(options.server.host):
        yield ok("admin address", "where the clients are, on this machine only")
    else:
        yield warning(
            "admin address",
            "where the clients are: whoever reaches them may try tokens",
            "give administration a port of its own with --admin-port, at 127.0.0.1 unless --admin-host says else",
        )


def _events(options: ServeOptions, facts: Facts) -> Findings:
    what, events = "KV events", published(options.engine_values)
    key = None if options.cache is None else options.cache.events_key
    if events is None:
        yield ok(what, "not published")
        return
    if events.endpoint is None and options.cache is None:
        events = replace(events, endpoint="every address of this machine")
    where = ", ".join(events.open_addresses) or "this machine only"
    if key is not None:
        remedy = f"chmod 600 {key}, and write another key into it"
        yield _private(what, key, facts, f"{where}, encrypted, for routers with the key of {key}", remedy)
    elif not events.open_addresses:
        yield warning(
            what,
            "every user of this machine can follow them: they hold all tenants' tokens and salts",
            f"give {FLAG} FILE here and to `hotspan route`",
        )
    else:
        finding = bad if secrets_of(options) else warning
        yield finding(
            what,
            f"{where}, to whoever connects: they hold all tenants' tokens and salts",
            f"give {FLAG} FILE here and to `hotspan route`, or publish on 127.0.0.1",
        )


def _metrics(options: ServeOptions, facts: Facts) -> Findings:
    has_token = options.server.admin_token_file is not None or bool(facts.environment.get(VARIABLE))
    if options.has_keys or has_token:
        yield ok("metrics", "with the admin token")
    elif is_loopback(options.server.host):
        yield ok("metrics", "public, on this machine only")
    else:
        yield warning("metrics", "public: they tell how much is asked, and of what length", f"set {VARIABLE}")


# -- whose is what -------------------------------------------------------------------------------------------------


def _adapters(options: ServeOptions, facts: Facts) -> Findings:
    if (place := options.server.client_adapters) is None:
        yield ok("adapters", "registered by the administrator")
    elif options.has_keys:
        yield ok("adapters", f"registered by the administrator, and by each tenant from its directory in {place}")
    elif is_loopback(options.server.host):
        yield ok("adapters", f"registered by every user of this machine (--client-adapters {place})")
    else:
        yield warning(
            "adapters",
            f"registered and deleted by anybody (--client-adapters {place})",
            "let only SageMaker reach this port, or leave --client-adapters out",
        )


def _isolation(options: ServeOptions, facts: Facts) -> Findings:
    if options.is_isolated:
        yield ok("tenants", "isolated: nobody hits another's texts")
    else:
        yield warning(
            "tenants",
            "shared: by time to first token each can tell what others asked",
            "leave --share-across-tenants out, unless they may know",
        )


def _encryption(options: ServeOptions, facts: Facts) -> Findings:
    cache, what = options.cache, "encryption at rest"
    if cache is None or (cache.disk is None and cache.l2 is None and not _is_open(options)):
        yield ok(what, "nothing leaves memory")
    elif cache.encryption is None:
        yield warning(
            what,
            "none: who reads the disk or the L2 reads prompts",
            "give --kek and --key-store (`hotspan keys init`), or --persistence none",
        )
    else:
        yield ok(what, f"AES-256-GCM, a key for each tenant under {cache.encryption.kek.partition(':')[0]}:...")
        yield from _key_files(cache.encryption.store, cache.encryption.kek, facts)


def _key_files(store: str, kek: str, facts: Facts) -> Findings:
    missing = bad("key store", f"{store} is not there", f"hotspan keys init --store {store} --kek {kek}")
    yield _private("key store", Path(store), facts, f"{store}, this user's only", f"chmod 700 {store}", missing)
    file = _kek_file(kek)
    if file is not None and (found := facts.files.get(file)) is not None and not found.is_private:
        yield bad("key-encryption key", f"{file} is open to others", f"chmod 600 {file}, and rotate it")
    elif file is not None and file.is_relative_to(store):
        yield bad("key-encryption key", f"{file} lies in the key store that it locks", "keep it on another medium")
    elif kek.startswith("env:"):
        yield warning(
            "key-encryption key",
            "in the environment, which every process of this user can read",
            "take it from a KMS (aws-kms:KEY) or a file (file:PATH)",
        )


def _disk(options: ServeOptions, facts: Facts) -> Findings:
    cache = options.cache
    if cache is None or cache.disk is None:
        state = "chosen at the start: `hotspan plan MODEL` shows it" if _is_open(options) else "none"
        yield ok("disk", state)
        return
    path = Path(cache.disk.directory)
    missing = ok("disk", f"{path}, made at the start as this user's only")
    remedy = f"chmod 700 {path}, as the user that serves"
    yield _private("disk", path, facts, f"{path}, this user's only", remedy, missing)


def _l2(options: ServeOptions, facts: Facts) -> Findings:
    cache = options.cache
    if cache is None or cache.l2 is None:
        yield ok("L2", "none")
        return
    settings, is_sealed = cache.l2, cache.encryption is not None
    problem, remedy = _l2_problem(settings, facts)
    shown = f"{urlsplit(settings.url).scheme}://{urlsplit(settings.url).netloc.rpartition('@')[2]}"
    if not problem:
        yield ok("L2", shown)
    elif is_sealed:
        yield warning("L2", f"{shown}: {problem}; chunks are sealed, but may be dropped", remedy)
    else:
        yield bad("L2", f"{shown}: {problem}, and what is there can be read and forged", f"{remedy}; or give --kek")


def _l2_problem(settings: L2Settings, facts: Facts) -> tuple[str, str]:
    """The problem of the connection to an L2, and its remedy; both empty if there is none."""
    url = urlsplit(settings.url)
    if url.scheme == "file":
        fact = facts.files.get(_directory(settings))
        if fact is not None and fact.permissions & 0o007:
            return "every user of its machines gets at it", f"chmod o-rwx {_directory(settings)}"
        return "", ""
    if url.scheme == "s3":
        endpoint = settings.options.get("endpoint") or facts.environment.get("AWS_ENDPOINT_URL", "")
        if endpoint.startswith("http://") and not is_loopback(urlsplit(endpoint).hostname or ""):
            return "not encrypted on its way", "give an endpoint with https://"
        return "", ""
    if is_loopback(url.hostname or ""):
        return "", ""
    if url.scheme == "sagemaker-hyperpod":
        if url.hostname == facts.environment.get("NODE_IP"):
            return "", ""
        return "the daemon knows no authentication and no TLS", "use the one of this node, at 127.0.0.1 or NODE_IP"
    if url.scheme == "redis":
        return "not encrypted on its way", "use rediss://"
    if "password" not in settings.options:
        return "no password", "give one with --l2-option password=file:PATH"
    return "", ""


def _daemon(options: ServeOptions, facts: Facts) -> Findings:
    open_hosts = [host for host in facts.daemon_hosts if not is_loopback(host)]
    if open_hosts:
        yield warning(
            "daemon",
            f"something listens for other machines at {', '.join(open_hosts)} on the daemon's port",
            "let `hotspan daemon` listen on 127.0.0.1, or keep others from its port: it knows no authentication",
        )
    elif facts.daemon_hosts:
        yield ok("daemon", "for this machine only")
    else:
        yield ok("daemon", "none on this machine")


def _memory(options: ServeOptions, facts: Facts) -> Findings:
    yield ok("shared memory", "0600, without a name once it is mapped")
    for path in (SEGMENT, SOCKET):
        fact = facts.files.get(path)
        if fact is not None and fact.permissions & 0o007:
            yield bad("shared memory", f"{path} of the daemon is open to every user", "start it with --mode 600")
    if facts.core_bytes != 0:
        yield warning(
            "core dumps",
            f"a crash writes KV and keys to {facts.core_pattern or 'a file'}",
            "ulimit -c 0, LimitCORE=0 in a unit, or --ulimit core=0 for a container",
        )
    else:
        yield ok("core dumps", "off")
    if facts.has_swap:
        yield warning("swap", "memory may be written to a disk", "swapoff -a, MemorySwapMax=0, or encrypt the swap")
    else:
        yield ok("swap", "none")


# -- what is fetched and executed ----------------------------------------------------------------------------------


def _media(options: ServeOptions, facts: Facts) -> Findings:
    given = options.engine_values
    domains = given.get(MEDIA_DOMAINS)
    if domains is None:
        yield ok("media URLs", "none are fetched: data: URLs only")
    else:
        named = domains if isinstance(domains, str) else ", ".join(domains)
        if facts.environment.get(REDIRECTS, "0") != "0":
            yield warning(
                "media URLs", f"from {named}, which may redirect to any address", f"unset {REDIRECTS}, or make it 0"
            )
        else:
            yield ok("media URLs", f"from {named}, without redirects")
    if local := given.get("allowed_local_media_path"):
        yield warning(
            "local media",
            f"clients may name any file below {local}",
            "leave --allowed-local-media-path out, or let nothing else lie there",
        )


def _code(options: ServeOptions, facts: Facts) -> Findings:
    if options.server.secure:
        yield ok("secure mode", "on: no code of the model's, only safetensors")
        return
    names = [f"--{name.replace('_', '-')}" for name in code_options(options)]
    script = _script(options)
    if script in facts.files:
        names.append(str(script))
    if names:
        yield warning("custom code", f"executed: {', '.join(names)}", "read it, or serve with --secure")
    else:
        yield ok("custom code", "none")
    yield ok("secure mode", "off: pickled weights (*.bin, *.pt) are read, with torch's weights_only")


def _start(options: ServeOptions, facts: Facts) -> Findings:
    if facts.refusal is not None:
        yield bad("start", "the server would refuse to start", facts.refusal)


_CHECKS: tuple[Callable[[ServeOptions, Facts], Findings], ...] = (
    *(_exposure, _tls, _keys, _admin, _metrics, _events, _adapters, _isolation, _encryption, _disk, _l2, _daemon),
    *(_memory, _media, _code, _start),
)


def _is_open(options: ServeOptions) -> bool:
    """Whether the start chooses tiers, of which some may not be memory."""
    return options.extent is not None and options.cache is not None and options.cache.persistence != "none"


def _script(options: ServeOptions) -> Path | None:
    """The path of the user's formatters in Python, if they are configured."""
    return None if options.server.formatters is None else options.server.formatters / "model.py"


def _kek_file(kek: str) -> Path | None:
    return Path(kek.removeprefix("file:")) if kek.startswith("file:") else None


def _directory(settings: L2Settings) -> Path:
    return Path(urlsplit(settings.url).path)
