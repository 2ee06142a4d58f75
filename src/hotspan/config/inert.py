"""hotspan's own settings that have no effect beside others: each is named at the start, with why."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hotspan.config.admin_token import VARIABLE as ADMIN_TOKEN
from hotspan.config.keys import BY_NAME, unlisted
from hotspan.config.lmi import SECURE_ONLY
from hotspan.config.origin import ENVIRONMENT, Note, Settings, Source, said
from hotspan.config.tenants import Tenants


@dataclass(frozen=True, slots=True)
class Rule:
    """Settings that have no effect where `holds`, and what happens instead."""

    names: tuple[str, ...]
    holds: Callable[[Settings], bool]
    instead: str


def _on(name: str) -> Callable[[Settings], bool]:
    return lambda settings: settings.is_on(name)


def _off(name: str) -> Callable[[Settings], bool]:
    return lambda settings: not settings.is_on(name)


def _has_no_formatters(settings: Settings) -> bool:
    return settings["formatters"].value is None and not settings.is_on("enable_lora")


def _stays_in_ram(settings: Settings) -> bool:
    """Whether no tier below RAM is named, and none will be chosen."""
    is_named = settings.is_given("ram_gib") and not settings.is_on("auto")
    return is_named and settings["disk"].value is None and settings["l2"].value is None


def _has_other_hash(settings: Settings) -> bool:
    return not settings.is_on("no_cache") and str(settings.value("prefix_caching_hash_algo", _HASH)) != _HASH


_ENGINES = unlisted("")
_HASH = "sha256_cbor"
_TIERS = (
    *("ram_gib", "disk", "disk_gib", "disk_compress", "l2", "l2_option", "l2_log", "l2_compress", "chunk_tokens"),
    *("prompts_only", "model_digest", "kek", "key_store", "prefetch_sessions", "explain_requests", "patience_s"),
    *("auto", "lmcache_config_file"),
)
RULES = (
    Rule(_TIERS, _on("no_cache"), "--no-cache serves with the engine's own prefix cache only: it has no effect"),
    Rule(("kek", "key_store"), _stays_in_ram, "nothing leaves RAM without --disk or --l2: nothing is encrypted"),
    Rule(
        ("prefetch_sessions", "patience_s"),
        _stays_in_ram,
        "all texts are in RAM without --disk or --l2: it has no effect",
    ),
    Rule(
        ("sessions_path", "session_expiry_s", "strict_sessions", "forget_closed_sessions"),
        _on("no_sessions"),
        "--no-sessions refuses sessions: it has no effect",
    ),
    Rule(
        ("adapters", "adapter_copies", "max_client_adapters", "max_loras", "max_cpu_loras", "max_lora_rank"),
        _off("enable_lora"),
        "no adapters are served without --enable-lora (option.enable_lora=true): it has no effect",
    ),
    Rule(
        ("max_client_adapters",),
        lambda settings: settings.is_on("enable_lora") and settings["client_adapters"].value is None,
        "clients register no adapters without --client-adapters: it has no effect",
    ),
    Rule(
        ("kv_events_key",),
        lambda settings: "kv_events_config" not in settings,
        "no KV events are published without --kv-events-config: it has no effect",
    ),
    Rule(("formatter_timeout_s",), _has_no_formatters, "there are no formatters: it has no effect"),
    Rule(("prefix_caching_hash_algo",), _has_other_hash, f"hotspan's keys need {_HASH}, which is used"),
    Rule(
        ("enable_prompt_tokens_details",),
        lambda settings: not settings.is_on("enable_prompt_tokens_details"),
        "answers always say how many tokens of the prompt were cached",
    ),
    Rule(
        ("per_request_spec_decode_metrics",),
        lambda settings: (
            any(name in settings for name in ("speculative_config", "spec_method", "spec_model"))
            and settings.value("per_request_spec_decode_metrics", "") == "none"
        ),
        "answers of a server that drafts tokens always say how many were accepted",
    ),
)
OF_STORES = Rule(
    ("default_model", "partial", "models_at_once"),
    lambda settings: True,
    "one model is served, not a directory of several: it has no effect",
)


def inert_notes(settings: Settings, tenants: Tenants, surroundings: Mapping[str, str]) -> list[Note]:
    """What somebody wrote that has no effect beside the rest."""
    notes = [note for rule in RULES if rule.holds(settings) for note in _notes(rule, settings)]
    has_shares = any(share.floor is not None or share.quota != 1 for share in tenants.shares)
    if settings.is_on("no_cache") and (has_shares or tenants.retention):
        where = settings["tenants"].given.origin
        notes.append(_warning(where, "without tiers its floors, quotas and times to live have no effect; its keys do"))
    if settings["admin_token_file"].value is not None and surroundings.get(ADMIN_TOKEN):
        origin = settings["admin_token_file"].given.origin
        notes.append(_warning(said(ENVIRONMENT, ADMIN_TOKEN), f"the admin token is that of the file ({origin})"))
    if not settings.is_on("secure"):
        unused = (name for name in SECURE_ONLY if surroundings.get(name, "").strip())
        notes += [_warning(said(ENVIRONMENT, name), "it acts in secure mode only (--secure)") for name in unused]
    return notes


def store_notes(settings: Settings) -> list[Note]:
    """The same of what only a directory of several models has use for, where one is served."""
    return _notes(OF_STORES, settings)


def _notes(rule: Rule, settings: Settings) -> list[Note]:
    written = [settings[name].given for name in rule.names if name in settings]
    # "false" asks for what is not there; of the engine's options it is what somebody turned off.
    asked = (given for given in written if given.value is not False or not BY_NAME.get(given.key, _ENGINES).is_own)
    return [_warning(given.origin, rule.instead) for given in asked if given.source < Source.IMPLIED]


def _warning(where: str, text: str) -> Note:
    return Note(where, text, is_warning=True)
