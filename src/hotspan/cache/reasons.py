"""Why tokens of a prompt were computed: every reason once, with its rule, its sentence and what to do about it.

A new reason is an entry of `REASONS` and, if it needs a fact that nobody gathers yet, a field of `Case`. Metrics,
dashboard, command line and documentation have it from here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hotspan.cache.history import Past
from hotspan.core.types import Tier

EARLY_TOKENS: Final = 512
"""Texts that differ before this token share no more than a part of a system prompt."""


class Kind(Enum):
    """Of which tokens a reason speaks."""

    ALL = "all"  # nothing of the request can be a hit
    KNOWN = "known"  # an earlier request had them, or a tier has them
    NEW = "new"  # no earlier request had them there
    REST = "rest"  # what follows the last whole chunk


@dataclass(slots=True, kw_only=True)
class Case:
    """What is known of a request's first token that was computed, or of the first that no earlier request had.

    left_out:   why nothing of the request is cached, as who left it out has it.
    reads_cache: it asks for nothing that keeps the engine from reading its cache (prompt_logprobs).
    has_failed_load, cut: its load failed; its wait for chunks was cut, as `Reader.cut_by` says.
    is_refused: the cost model chose to compute the chunk.
    tiers:      that have the chunk. is_down: a tier is given up.
    is_hybrid:  the model has several kinds of KV cache groups, of which all must be there.
    stored:     the latest earlier request that left the chunk. others: those that had it and did not leave it.
    is_invalidated: what `stored` left was invalidated since. is_cleared: RAM was emptied since. now_s: Unix.
    index:      of the chunk.
    nearest:    the earlier request that agrees longest. agreed: in how many chunks, of chunk_tokens each.
    twin:       an earlier request with the same first tokens and other names. salt, owner, namespace, form: its own.
    earlier:    whether any earlier request with this salt is known.
    """

    left_out: str | None = None
    reads_cache: bool = True
    has_failed_load: bool = False
    cut: str | None = None
    is_refused: bool = False
    tiers: frozenset[Tier] = frozenset()
    is_down: bool = False
    is_hybrid: bool = False
    stored: Past | None = None
    others: tuple[Past, ...] = ()
    is_invalidated: bool = False
    is_cleared: bool = False
    now_s: float = 0.0
    index: int = 0
    nearest: Past | None = None
    agreed: int = 0
    chunk_tokens: int = 0
    twin: Past | None = None
    salt: str | None = None
    owner: bytes = b""
    namespace: bytes = b""
    form: int = 0
    earlier: bool = False

    def unstored(self, why: str) -> bool:
        """Whether nobody left the chunk, and one that had it did not for this reason."""
        return self.stored is None and any(each.unstored == why for each in self.others)


@dataclass(frozen=True, slots=True)
class Reason:
    """says: a sentence about the tokens. todo: what would make them hits; empty if nothing is to be done."""

    kind: Kind
    holds: Callable[[Case], bool]
    says: str
    todo: str = ""


REASONS: Final[dict[str, Reason]] = {
    # -- nothing of the request can be a hit ---------------------------------------------------------------------------
    "directives": Reason(
        Kind.ALL,
        lambda case: case.left_out == "directives",
        "the request is not cached: its kv_transfer_params were refused, or are not the client's to send",
        "see the log for directives_refused",
    ),
    "weights_unknown": Reason(
        Kind.ALL,
        lambda case: case.left_out == "weights",
        "the request is not cached: the engine's weights were changing, and had no name yet",
        "hits come again once hotspan_cache_weights_known is 1",
    ),
    "adapter_unknown": Reason(
        Kind.ALL,
        lambda case: case.left_out == "adapter",
        "the request is not cached: the files of its adapter changed or can't be read",
        "register the adapter again",
    ),
    "media": Reason(
        Kind.ALL,
        lambda case: case.left_out == "media",
        "the request is not cached: its images or audio came without hotspan's server, which names them",
        "serve with hotspan serve",
    ),
    "parts": Reason(
        Kind.ALL,
        lambda case: case.left_out == "parts",
        "the request is not cached: its text comes in parts while it runs, as on /v1/realtime",
    ),
    "keys": Reason(
        Kind.ALL,
        lambda case: case.left_out == "keys",
        "the request is not cached: the keys of its tenant are not there yet, or destroyed",
        "see hotspan_keys_failures_total",
    ),
    "mistake": Reason(
        Kind.ALL,
        lambda case: case.left_out is not None,
        "the request is not cached because of a mistake of hotspan's",
        "the log has request_left_out: please report it",
    ),
    "prompt_logprobs": Reason(
        Kind.ALL,
        lambda case: not case.reads_cache,
        "the request asks for something that the engine must compute its whole prompt for, such as prompt_logprobs",
        "leave it out",
    ),
    # -- known, and no hit ---------------------------------------------------------------------------------------------
    "fault": Reason(
        Kind.KNOWN,
        lambda case: case.has_failed_load or case.cut == "fault",
        "reading them from a tier failed, or what was read was corrupt",
        "see hotspan_cache_faults_total and the disk",
    ),
    "late": Reason(
        Kind.KNOWN,
        lambda case: case.cut == "late",
        "a tier had them and did not deliver them in the time that the request could wait",
        "see the tier's latency on the dashboard",
    ),
    "no_slot": Reason(
        Kind.KNOWN,
        lambda case: case.cut == "room",
        "a lower tier had them, and RAM had no slot to load them into",
        "give more --ram-gib",
    ),
    "unanswered": Reason(
        Kind.KNOWN,
        lambda case: case.cut == "unanswered",
        "the shared store did not say in time whether it has them",
        "see the store's latency",
    ),
    "cheaper_to_compute": Reason(
        Kind.KNOWN,
        lambda case: case.is_refused and bool(case.tiers),
        "computing them was sooner than loading them, or loading might have kept the request too long",
    ),
    "group_missing": Reason(
        Kind.KNOWN,
        lambda case: case.is_hybrid and bool(case.tiers),
        "one of the model's kinds of KV (a sliding window, a recurrent state) was not there for them",
    ),
    "in_flight": Reason(
        Kind.KNOWN,
        lambda case: (
            bool(case.tiers)
            or (case.stored is None and any(each.computed_chunks is None and not each.unstored for each in case.others))
        ),
        "another request was computing them at the same time",
        "send the first of several requests with one text a moment before the others",
    ),
    "no_store": Reason(
        Kind.KNOWN,
        lambda case: case.unstored("no_store"),
        "an earlier request had them with no_store, or a retention rule said so: nothing of it was kept",
        "leave no_store out where the text is shared",
    ),
    "withdrawn": Reason(
        Kind.KNOWN,
        lambda case: case.unstored("withdrawn"),
        "an earlier request had them, and was invalidated while it ran or waited: nothing of it was kept",
    ),
    "other_request_failed": Reason(
        Kind.KNOWN,
        lambda case: case.stored is None and any(each.unstored for each in case.others),
        "an earlier request had them, and was not cached itself",
        "explain that request",
    ),
    "no_room": Reason(
        Kind.KNOWN,
        lambda case: (
            case.stored is None
            and any(each.refused_from is not None and each.refused_from <= case.index for each in case.others)
        ),
        "an earlier request had them, and RAM had no room to store them",
        "give more --ram-gib",
    ),
    "answer_not_stored": Reason(
        Kind.KNOWN,
        lambda case: case.stored is None and any(case.index >= each.prompt_chunks for each in case.others),
        "they were an earlier request's answer, and answers are not stored (--prompts-only)",
        "serve without --prompts-only",
    ),
    "aborted": Reason(
        Kind.KNOWN,
        lambda case: case.stored is None and bool(case.others),
        "the earlier request that had them ended before they were computed",
    ),
    "expired": Reason(
        Kind.KNOWN,
        lambda case: case.stored is not None and 0 < case.stored.expires_s <= case.now_s,
        "they were kept, and their time to live is over",
        "give a longer ttl, or renew",
    ),
    "invalidated": Reason(
        Kind.KNOWN,
        lambda case: case.is_invalidated,
        "they were kept, and invalidated since",
    ),
    "cleared": Reason(
        Kind.KNOWN,
        lambda case: case.is_cleared,
        "they were kept, and RAM was emptied since: the engine was paused, put to sleep or reset",
    ),
    "tier_down": Reason(
        Kind.KNOWN,
        lambda case: case.stored is not None and case.is_down,
        "they were kept, and a tier that may have them is given up for now",
        "see hotspan_cache_tier_up and the log",
    ),
    "evicted": Reason(
        Kind.KNOWN,
        lambda case: case.stored is not None,
        "they were kept, and evicted for room since",
        "give the tiers more room, or pin the text",
    ),
    # -- no earlier request had them there -----------------------------------------------------------------------------
    "first": Reason(
        Kind.NEW,
        lambda case: not case.earlier and case.twin is None,
        "no earlier request is known to compare with",
    ),
    "weights_changed": Reason(
        Kind.NEW,
        lambda case: case.twin is not None and case.twin.namespace != case.namespace,
        "an earlier request began with the same tokens, and the engine has other weights since",
    ),
    "other_adapter": Reason(
        Kind.NEW,
        lambda case: case.twin is not None and case.twin.owner != case.owner,
        "an earlier request began with the same tokens under another adapter, or another version of it",
        "KV of one adapter can't serve another",
    ),
    "other_salt": Reason(
        Kind.NEW,
        lambda case: case.twin is not None and case.twin.salt != case.salt,
        "an earlier request began with the same tokens under another cache_salt",
        "give requests that may share text the same cache_salt",
    ),
    "other_media": Reason(
        Kind.NEW,
        lambda case: case.twin is not None,
        "an earlier request began with the same tokens and other images or audio",
    ),
    "new_text": Reason(
        Kind.NEW,
        lambda case: case.nearest is not None and case.agreed >= case.nearest.chunks,
        "they continue the nearest earlier text, which ended there",
    ),
    "other_answer": Reason(
        Kind.NEW,
        lambda case: case.nearest is not None and case.agreed >= case.nearest.prompt_chunks,
        "the answer was sent back in other tokens than it was generated in",
        "send it back unchanged, with its reasoning where the template has a place for it",
    ),
    "other_options": Reason(
        Kind.NEW,
        lambda case: case.nearest is not None and case.nearest.form != case.form,
        "the text differs from the nearest earlier one, and so do the options of its template or its tools",
        "keep chat_template_kwargs, reasoning effort and tools the same",
    ),
    "differs_early": Reason(
        Kind.NEW,
        lambda case: case.agreed * case.chunk_tokens < EARLY_TOKENS,
        f"the text differs from every earlier one within its first {EARLY_TOKENS} tokens",
        "if it should not: a date or an id at the top? Move what changes behind what stays the same",
    ),
    "other_text": Reason(
        Kind.NEW,
        lambda case: True,
        "the text differs from the nearest earlier one",
        "move what changes behind what stays the same",
    ),
    # -- what follows the last whole chunk -----------------------------------------------------------------------------
    "tail": Reason(
        Kind.REST,
        lambda case: True,
        "they follow the last whole chunk, or are the last token, which is always computed",
    ),
}


def reason_of(kind: Kind, case: Case) -> str | None:
    """The first reason of a kind that holds; None if none does, which only happens to ALL."""
    return next((name for name, reason in REASONS.items() if reason.kind is kind and reason.holds(case)), None)
