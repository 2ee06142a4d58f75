"""Receipts of invalidations: one of several engine cores, and one of what is not durable."""

from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse

from hotspan.http.errors import REQUEST, HttpError

Json = dict[str, Any]


def merged(answers: Sequence[Json]) -> Json:
    """One receipt of those of several engine cores."""
    first, *others = answers
    result = dict(first)
    for other in others if "refused" not in first else ():
        result["receipt"] += "+" + other["receipt"]
        result["replicas"] = result["replicas"] + other["replicas"]
        result["requests_in_flight"] += other["requests_in_flight"]
        for name in ("replicas_missing", "widened"):
            if name in result or name in other:
                result[name] = sorted({*result.get(name, ()), *other.get(name, ())})
        result["is_durable"] = result["is_durable"] and other["is_durable"]
        tiers = {**result["removed"], **other["removed"]}
        result["removed"] = {tier: result["removed"].get(tier, 0) + other["removed"].get(tier, 0) for tier in tiers}
        if "shredded" in result:  # engine cores that share a store: one of them finds the keys
            keys, more = result["shredded"], other["shredded"]
            roots, had_keys = sorted({*keys["roots"], *more["roots"]}), keys["had_keys"] or more["had_keys"]
            result["shredded"] = keys | {"roots": roots, "had_keys": had_keys}
    return result


def unfinished(message: str, receipt: Json) -> JSONResponse:
    """The response to an invalidation that is not durable: 503 with its receipt."""
    error = HttpError(503, message, about=REQUEST)
    return JSONResponse(error.body() | {"receipt": {"is_durable": False} | receipt}, error.status, error.headers)
