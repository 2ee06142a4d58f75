"""Why a request was not a hit: gathers what is known of it when it begins to run (cache/reasons.py has the rules).

    prompt   |---- cached ----|---- known, and no hit ----|---- new text ----|- rest -|
             0           kept_tokens              agreed with an earlier one     last whole chunk

What it costs: benchmarks/explain_cost.py.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hotspan.cache.history import NAME_BYTES, History, Nearest, Past, names_of
from hotspan.cache.reasons import REASONS, Case, Kind, reason_of
from hotspan.cache.tiered import TieredCache
from hotspan.cache.withdrawals import Withdrawals
from hotspan.core.clock import Clock
from hotspan.core.directives import Places
from hotspan.core.types import Chunk
from hotspan.engine.counts import reads_cache
from hotspan.engine.requests import RequestRecord

Json = dict[str, Any]

_OF_SEVERAL = re.compile(r"^\d+_")
"""How vLLM begins the names of the requests that one with `n` answers is made of."""

_SHOWN = 20


class Part(NamedTuple):
    """Tokens that were computed, and why."""

    reason: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of a prompt.

    cached_tokens: were not computed. agreed_tokens: stand at the front of an earlier request, too, in whole chunks.
    nearest: the latest request that agrees so far, and how many seconds before it began. places: of the prompt's parts.
    changed_line: of its system prompt, by the session's request before; 0 if none is known.
    """

    request_id: str
    at_s: float
    prompt_tokens: int
    cached_tokens: int
    agreed_tokens: int
    chunk_tokens: int
    nearest: str | None
    nearest_s: float
    parts: tuple[Part, ...]
    places: Places = ()
    has_earlier: bool = False
    changed_line: int = 0

    def to_json(self, *, is_client: bool) -> Json:
        """As an answer has it. is_client: whoever asks is not told of requests under other salts."""
        return {
            "request": self.request_id,
            "at": round(self.at_s, 3),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "agreed_tokens": self.agreed_tokens,
            "nearest": None
            if self.nearest is None
            else {"request": self.nearest, "seconds_before": round(self.nearest_s, 3)},
            "changed_line": self.changed_line or None,
            "computed": [self._shown(part, is_client=is_client) for part in self.parts],
        }

    def _shown(self, part: Part, *, is_client: bool) -> Json:
        name = part.reason
        if is_client and name == "other_salt":
            name = "other_text" if self.has_earlier else "first"
        reason = REASONS[name]
        shown = {"from": part.start, "to": part.end, "tokens": part.end - part.start, "reason": name}
        shown |= {"says": reason.says, "todo": reason.todo}
        if reason.kind is Kind.NEW and name not in ("first", "new_text"):
            until = (self.agreed_tokens // self.chunk_tokens + 1) * self.chunk_tokens
            differs = [part.start, min(part.end, until)]
            shown |= {"differs_within": differs, "place": place_of(self.places, *differs)}
        return shown


def place_of(places: Places, start: int, end: int) -> str | None:
    """The part of a prompt in which these tokens are, or the first and the last one; None if that is not known."""
    names = [next((name for name, until in places if token < until), None) for token in (start, end - 1)]
    if None in names:
        return names[0]
    return names[0] if names[0] == names[1] else f"{names[0]} to {names[1]}"


class Explainer:
    """Of one engine. The scheduler's thread calls it.

    cleared_s: when RAM was emptied last. keeps_answers: answers are stored.
    """

    def __init__(
        self,
        history: History,
        cache: TieredCache,
        withdrawals: Withdrawals,
        clock: Clock,
        *,
        keeps_answers: bool = True,
    ) -> None:
        self.history = history
        self.cleared_s = float("-inf")
        self._cache = cache
        self._withdrawals = withdrawals
        self._clock = clock
        self._keeps_answers = keeps_answers
        self._key = int.from_bytes(os.urandom(8))  # of the names of first tokens: nobody outside can make one

    def begin(self, record: RequestRecord) -> None:
        """A request begins to run: say why what it lacks was not cached, and count it."""
        request, group = record.request, record.ranked[0]
        chain = record.chain(group.index)
        past = self._past(record, chain[: request.num_prompt_tokens // group.tokens], group.tokens)
        nearest = self.history.nearest(past.terms.tenant, past.names)
        explained = self._explained(record, past, nearest, chain)
        for part in explained.parts:
            self._cache.stats.computed_tokens[part.reason] += part.end - part.start
        past.explained = explained
        record.past = past
        self.history.add(past)

    def refuse(self, record: RequestRecord, chunks: Sequence[Chunk]) -> None:
        """RAM had no room for some of a request's chunks."""
        lacking = [chunk.index for chunk in chunks if chunk.key not in self._cache.ram.entries]
        if record.past is not None and lacking:
            refused = record.past.refused_from
            record.past.refused_from = min(lacking) if refused is None else min(refused, *lacking)

    def end(self, record: RequestRecord) -> None:
        """A request ended: its answer is known, and what it left."""
        if (past := record.past) is None:
            return
        group = record.ranked[0]
        past.computed_chunks = record.request.num_computed_tokens // group.tokens
        past.unstored = past.unstored or _unstored(record)
        if not record.is_renamed:
            self.history.extend(past, names_of(record.chain(group.index)))

    def find(self, asked: str, tenant: int | None) -> Explanation | None:
        """Of the latest request of that name, as an answer or the engine has it; of one tenant, or of all."""
        return next((past.explained for past in self._known(tenant) if is_named(asked, past.request_id)), None)

    def last(self, tenant: int | None, count: int = _SHOWN) -> list[Explanation]:
        """Of the last requests, the latest first."""
        found = sorted(self._known(tenant), key=lambda past: past.began_s, reverse=True)
        return [past.explained for past in found[:count]]

    def _known(self, tenant: int | None) -> Iterator[Past]:
        return (past for past in self.history.last(tenant) if past.explained is not None)

    def _past(self, record: RequestRecord, chain: Sequence[Chunk], chunk_tokens: int) -> Past:
        request, keyer = record.request, record.keyer
        tokens = request.prompt_token_ids or ()
        ends = [terms.expires_s for terms in (record.terms, *record.inherited.values()) if terms.expires_s]
        return Past(
            request_id=request.request_id,
            began_s=self._clock.monotonic(),
            prompt_tokens=request.num_prompt_tokens,
            prompt_chunks=len(chain),
            salt=request.cache_salt,
            owner=b"" if keyer is None else keyer.owner,
            namespace=b"" if keyer is None else keyer.namespace,
            form=record.form,
            head=hash((self._key, *tokens[:chunk_tokens])) if len(tokens) >= chunk_tokens else 0,
            names=b"" if keyer is None else names_of(chain),
            terms=record.terms,
            bare_terms=record.bare_terms,
            tags_from=record.tags_from,
            expires_s=min(ends, default=0),
            unstored=_unstored(record),
            keeps_answer=self._keeps_answers,
        )

    def _explained(self, record: RequestRecord, past: Past, nearest: Nearest, chain: Sequence[Chunk]) -> Explanation:
        size, tokens, kept = record.ranked[0].tokens, past.prompt_tokens, min(record.kept_tokens, past.prompt_tokens)
        start, whole, parts = kept // size, past.prompt_chunks, list[Part]()
        case = self._case(record, past, nearest)
        if (why := reason_of(Kind.ALL, case)) is not None:
            parts.append(Part(why, kept, tokens))
        elif start < whole:
            known = self._known_chunks(chain, start, max(nearest.chunks, start), whole)
            if known > start and (why := self._why_known(case, record, past, chain, start)) is not None:
                parts.append(Part(why, kept, known * size))
                kept = known * size
            if known < whole:
                self._compare(case, past)
                parts.append(Part(reason_of(Kind.NEW, case) or "other_text", kept, tokens))
                kept = tokens
        if not parts or (kept < tokens and parts[-1].end < tokens):
            parts.append(Part("tail", kept, tokens))
        return Explanation(
            past.request_id,
            self._clock.unix(),
            tokens,
            min(record.kept_tokens, tokens),
            max(nearest.chunks * size, min(record.kept_tokens, tokens)),
            size,
            None if nearest.past is None else nearest.past.request_id,
            0.0 if nearest.past is None else past.began_s - nearest.past.began_s,
            tuple(part for part in parts if part.end > part.start),
            record.places,
            case.earlier,
            record.changed_line,
        )

    def _case(self, record: RequestRecord, past: Past, nearest: Nearest) -> Case:
        is_left_out = record.keyer is None or past.unstored not in (None, "no_store", "withdrawn")
        return Case(
            left_out=past.unstored if is_left_out else None,
            reads_cache=reads_cache(record.request),
            nearest=nearest.past,
            agreed=nearest.chunks,
            chunk_tokens=record.ranked[0].tokens,
            salt=past.salt,
            owner=past.owner,
            namespace=past.namespace,
            form=past.form,
        )

    def _known_chunks(self, chain: Sequence[Chunk], start: int, known: int, whole: int) -> int:
        """How many of the first chunks an earlier request had, or a tier has."""
        while known < whole and self._cache.where(chain[known].key):
            known += 1
        return max(known, start)

    def _why_known(
        self, case: Case, record: RequestRecord, past: Past, chain: Sequence[Chunk], start: int
    ) -> str | None:
        """Why the chunk at `start`, which was there before, is no hit. Mutates: `case`."""
        chunk, name = chain[start], past.names[start * NAME_BYTES : (start + 1) * NAME_BYTES]
        tenant, others, stored = past.terms.tenant, list[Past](), None
        for each in self.history.last(tenant):
            if each.has(start, name):
                if _leaves(each, start):
                    stored = each
                    break
                others.append(each)
        case.index, case.stored, case.others, case.now_s = start, stored, tuple(others), self._clock.unix()
        case.has_failed_load, case.cut = record.has_failed_load, record.cut_by
        refused = record.plan.refused if record.plan is not None else record.refused
        case.is_refused, case.tiers = chunk.key in refused, self._cache.where(chunk.key)
        case.is_down, case.is_hybrid = self._cache.has_tier_down, len(record.groups) > 1
        if stored is not None:
            case.is_cleared = self.cleared_s >= stored.began_s
            holders = (each for each in self.history.last(tenant) if each.has(start, name))
            case.is_invalidated = self._withdrawals.has_taken(
                holders, chain[: start + 1], past.namespace, stored.began_s
            )
        return reason_of(Kind.KNOWN, case)

    def _compare(self, case: Case, past: Past) -> None:
        """Look for requests that began with the same tokens under another name. Mutates: `case`."""
        earlier = list(self.history.last(past.terms.tenant))
        case.earlier = any(each.salt == past.salt for each in earlier)
        if not case.agreed and past.head:
            twins = [each for each in earlier if each.head == past.head and each.owner]
            # The fewer differences, the likelier the one that matters.
            case.twin = max(twins, key=lambda each: (each.salt == past.salt) + (each.owner == past.owner), default=None)


def _leaves(past: Past, index: int) -> bool:
    """Whether an earlier request left its chunk at `index` in the cache."""
    return (
        past.unstored is None
        and (past.refused_from is None or index < past.refused_from)
        and past.computed_chunks is not None
        and index < past.computed_chunks
        and (past.keeps_answer or index < past.prompt_chunks)
    )


def _unstored(record: RequestRecord) -> str | None:
    """Why nothing of a request is kept; None if it is."""
    if record.may_store and record.keyer is not None:
        return None
    return record.left_out or ("error" if record.keyer is None else "withdrawn")


def is_named(asked: str, request_id: str) -> bool:
    """Whether a request has that name: the engine's, or an answer's, or what came as X-Request-Id."""
    name = _OF_SEVERAL.sub("", request_id)
    given = name.partition("-")[2]
    return any(each == asked or each.startswith(asked + "-") for each in (name, given) if each)
