"""What `hotspan cache explain` prints."""

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


def explained(told: Sequence[Json]) -> list[Json]:
    """The requests that engine cores told of; the latest first."""
    found = [request for each in told for request in each["requests"]]
    return sorted(found, key=lambda request: float(request["at"]), reverse=True)


def shown(request: Json) -> str:
    """One request, in words."""
    cached, total = request["cached_tokens"], request["prompt_tokens"]
    lines = [f"{request['request']}: {cached:,} of {total:,} prompt tokens were cached"]
    if request["nearest"] is not None:
        nearest = request["nearest"]
        lines.append(
            f"  agrees in {request['agreed_tokens']:,} tokens with {nearest['request']}, "
            f"{nearest['seconds_before']:,.1f} s before"
        )
    if line := request.get("changed_line"):
        lines.append(f"  line {line:,} of its system prompt is not that of its session's request before")
    for part in request["computed"]:
        lines.append(f"  {part['tokens']:,} computed (tokens {part['from']:,} to {part['to'] - 1:,}): {part['says']}")
        if differs := part.get("differs_within"):
            place = f", in the {part['place']}" if part.get("place") else ""
            lines.append(f"    the first difference is within tokens {differs[0]:,} to {differs[1] - 1:,}{place}")
        if part["todo"]:
            lines.append(f"    {part['todo']}")
    return "\n".join(lines)
