"""What a request asks of the cache, and the retention rules that an operator lays down on top of it."""

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hotspan.core.breakpoints import Holds
from hotspan.core.errors import did_you_mean
from hotspan.core.terms import DEFAULT_TENANT, NEVER, Terms, adapter_label, tag_labels, tenant_label

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_MAX_TAGS, _MAX_TAG_LENGTH = 64, 512
MAX_TTL_S = 100 * 365 * 86400

CLIENT_DIRECTIVES = ("ttl", "tags", "tags_from", "session", "no_store", "renew", "blend", "explain")
"""What a client may put into `kv_transfer_params`."""


Places = tuple[tuple[str, int], ...]
"""Parts of a prompt, in order, and the token before which each ends."""

MOST_LAYERS = 1024

BLEND_MODES = ("first_k", "deviation", "query")
"""Which reused tokens are computed again (docs/blending.md)."""


@dataclass(frozen=True, slots=True)
class BlendDirective:
    """How a request that asks for blending wants it; None as the server has it.

    mode: one of BLEND_MODES. recompute_ratio: of the reused tokens, for the modes that choose a share; check_layer: up
    to which these compute all tokens.
    """

    mode: str | None = None
    recompute_ratio: float | None = None
    check_layer: int | None = None


def seconds(value: object) -> int:
    """A time to live: a number of seconds, or a text such as "90", "15m", "12h", "7d".

    Raises: ValueError that says what would do.
    """
    if isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        value = float(match[1]) * _SECONDS.get(match[2], 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= MAX_TTL_S:
        raise ValueError(f"ttl is {value!r}: give whole seconds from 1 on, or a text such as 15m, 12h or 7d")
    return int(value)


@dataclass(frozen=True, slots=True)
class Directives:
    """One request's wishes.

    tenant:    whose it is; the server says so, never the client.
    tags:      documents it contains; "name@version" counts as "name" too.
    tags_from: the token from which on the tags apply; what comes before (a system prompt) does not carry them.
    session:   the conversation it belongs to.
    ttl_s:     how long what it stores or hits may be used; None for ever.
    no_store:  nothing that it computes is kept.
    renew:     its hits begin the time to live anew.
    held_since_s: since when its text is held on this machine, by the monotonic clock; the server says so. None: it is
               not known to be.
    blend:     whether, or how, repeated text that is no prefix is reused, where the server allows it; None as the
               server has it.
    explain:   its answer says why its tokens were computed.
    places:    where the parts of its prompt end, as far as the server knows; the server says so.
    form:      of the options of its template, likewise; 0 for those of the model.
    holds:     prefixes of its prompt that are pinned for a while, likewise (core/breakpoints.py).
    changed_line: the first line of its system prompt that is not as in its session's request before, from 1 on,
               likewise; 0 if none is known.
    """

    tenant: str = DEFAULT_TENANT
    tags: tuple[str, ...] = ()
    tags_from: int = 0
    session: str | None = None
    ttl_s: int | None = None
    no_store: bool = False
    renew: bool = False
    blend: bool | BlendDirective | None = None
    held_since_s: float | None = None
    explain: bool = False
    places: Places = ()
    form: int = 0
    holds: Holds = ()
    changed_line: int = 0

    def terms(self, adapter: str | None, now_s: float) -> Terms:
        """The terms of what this request stores and hits now. adapter: its name, None for the base model."""
        return Terms(
            tenant=tenant_label(self.tenant),
            adapter=0 if adapter is None else adapter_label(adapter),
            labels=tag_labels(with_documents(self.tags), self.session),
            expires_s=NEVER if self.ttl_s is None else int(now_s) + self.ttl_s,
        )

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON types for `from_json`."""
        return {
            "tenant": self.tenant,
            "tags": list(self.tags),
            "tags_from": self.tags_from,
            "session": self.session,
            "ttl": self.ttl_s,
            "no_store": self.no_store,
            "renew": self.renew,
            "blend": asdict(self.blend) if isinstance(self.blend, BlendDirective) else self.blend,
            "held_since": self.held_since_s,
        } | self._shown()

    def _shown(self) -> dict[str, Any]:
        """What few requests have."""
        shown: dict[str, Any] = {"explain": True} if self.explain else {}
        shown |= {"places": [list(place) for place in self.places]} if self.places else {}
        shown |= {"holds": [list(hold) for hold in self.holds]} if self.holds else {}
        shown |= {"changed_line": self.changed_line} if self.changed_line else {}
        return shown | ({"form": self.form} if self.form else {})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Directives":
        """The directives that `to_json` gave. Raises: an error of MALFORMED for anything else."""
        fields = {name: value for name, value in data.items() if value is not None}
        tenant, held = fields.pop("tenant"), fields.pop("held_since", None)
        places = tuple((str(name), int(end)) for name, end in fields.pop("places", ()))
        form, changed = int(fields.pop("form", 0)), int(fields.pop("changed_line", 0))
        holds = tuple((float(share), float(hold_s)) for share, hold_s in fields.pop("holds", ()))
        if not isinstance(tenant, str):
            raise TypeError(f"tenant is {tenant!r}, no text")
        held_since_s = None if held is None else float(held)
        asked = replace(parse_directives(fields), tenant=tenant, held_since_s=held_since_s)
        return replace(asked, places=places, form=form, holds=holds, changed_line=changed)


def parse_directives(params: Mapping[str, Any]) -> Directives:
    """The directives in a client's `kv_transfer_params`.

    Raises: ValueError that names the parameter and says what would do.
    """
    for name in params:
        if name not in CLIENT_DIRECTIVES:
            hint = did_you_mean(str(name), CLIENT_DIRECTIVES, f"it takes {', '.join(CLIENT_DIRECTIVES)}")
            raise ValueError(f"kv_transfer_params has no {name!r}: {hint}")
    tags = _names("tags", params.get("tags", ()))
    session = params.get("session")
    if session is not None:
        (session,) = _names("session", [session])
    tags_from = params.get("tags_from", 0)
    if isinstance(tags_from, bool) or not isinstance(tags_from, int) or tags_from < 0:
        raise ValueError(f"tags_from is {tags_from!r}: give the number of tokens that come before the tagged text")
    flags = {name: params.get(name, False) for name in ("no_store", "renew", "explain")}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}: give true or false")
    ttl_s = None if params.get("ttl") is None else seconds(params["ttl"])
    return Directives(
        tags=tags, tags_from=tags_from, session=session, ttl_s=ttl_s, blend=_blend(params.get("blend")), **flags
    )


def _blend(value: object) -> bool | BlendDirective | None:
    if value is None or isinstance(value, bool):
        return value
    fields = {"mode": value} if isinstance(value, str) else value
    modes = ", ".join(BLEND_MODES)
    if not isinstance(fields, Mapping) or fields.keys() - {"mode", "recompute_ratio", "check_layer"}:
        names = "mode, recompute_ratio and check_layer"
        raise ValueError(f"blend is {value!r}: give true, false, one of {modes}, or an object of {names}")
    mode, ratio, layer = fields.get("mode"), fields.get("recompute_ratio"), fields.get("check_layer")
    if mode is not None and mode not in BLEND_MODES:
        raise ValueError(f"blend has the mode {mode!r}: give one of {modes}")
    if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1):
        raise ValueError(f"recompute_ratio of blend is {ratio!r}: give a share from 0 to 1")
    if layer is not None and (type(layer) is not int or not 1 <= layer <= MOST_LAYERS):
        raise ValueError(f"check_layer of blend is {layer!r}: give a whole number from 1 to {MOST_LAYERS}")
    return BlendDirective(mode, ratio, layer)


def with_documents(tags: Iterable[str]) -> set[str]:
    """These tags, and for each "name@version" also "name"."""
    found = set(tags)
    return found | {tag.rsplit("@", 1)[0] for tag in found if "@" in tag[1:]}


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """How long what belongs to a tenant and a tag may be kept; patterns as in a shell.

    ttl_s: at most so long; None where only `no_store` speaks.
    """

    tenant: str = "*"
    tag: str | None = None
    ttl_s: int | None = None
    no_store: bool = False

    def applies(self, directives: Directives) -> bool:
        """Whether a request falls under it."""
        if not fnmatch.fnmatchcase(directives.tenant, self.tenant):
            return False
        return self.tag is None or any(fnmatch.fnmatchcase(tag, self.tag) for tag in with_documents(directives.tags))


def governed(directives: Directives, rules: Iterable[RetentionRule]) -> Directives:
    """The directives under all rules that apply: the shortest time to live wins, and no_store over all."""
    for rule in rules:
        if rule.applies(directives):
            limits = [ttl for ttl in (directives.ttl_s, rule.ttl_s) if ttl is not None]
            directives = replace(
                directives, ttl_s=min(limits, default=None), no_store=directives.no_store or rule.no_store
            )
    return directives


def _names(field: str, values: object) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{field} is {values!r}: give a list of texts")
    names = tuple(values)
    if len(names) > _MAX_TAGS:
        raise ValueError(f"{field} has {len(names)} entries: give at most {_MAX_TAGS}")
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_TAG_LENGTH:
            raise ValueError(f"{field} holds {name!r}: give texts of 1 to {_MAX_TAG_LENGTH} characters")
        if any("\ud800" <= letter <= "\udfff" for letter in name):  # JSON can spell it, and UTF-8 can't
            raise ValueError(f"{field} holds {name!r}: give texts of whole characters, without lone surrogates")
    return names
