"""The two sides of a canary split, told apart by sessions: those that live at the canary, and all others."""

from collections.abc import Mapping, Sequence
from typing import Final

from hotspan.ab.asking import Asking, Side
from hotspan.ab.items import Item
from hotspan.bench.client import OpenAIClient
from hotspan.core.errors import ConfigError

SESSION_HEADER: Final = "x-session-id"

_SESSIONS: Final = 4
"""Of each side: several, so that a group of several replicas is not judged by one of them alone."""

_MAX_PROBES: Final = 1000
_PROBE: Final = Item("probe", ({"role": "user", "content": "Say yes."},), max_tokens=1)


async def split_sides(client: OpenAIClient, canary: Sequence[str], model: str, asking: Asking) -> tuple[Side, Side]:
    """The rest and the canary behind a router: requests of one token find sessions that live at each.

    Raises: ConfigError if the router does not name replicas, or one side has no session.
    """
    names = frozenset(url.rstrip("/").lower() for url in canary)
    side = Side("the router", client, model, Asking(1, 0.0, 0, 0))
    found: dict[bool, list[Mapping[str, str]]] = {True: [], False: []}
    for number in range(_MAX_PROBES):
        session = {SESSION_HEADER: f"hotspan-ab-{number}"}
        side.sessions = (session,)
        answer = await side.ask(_PROBE)
        if not answer.is_whole:
            raise ConfigError(f"the router can't answer: {answer.record.error}")
        if not answer.replica:
            raise ConfigError("the router names no replica in its answers: start `hotspan route` with --expose")
        group = found[answer.replica in names]
        if len(group) < _SESSIONS:
            group.append(session)
        if all(len(each) == _SESSIONS for each in found.values()):
            break
    for is_canary, what in ((True, "--canary"), (False, "another replica")):
        if not found[is_canary]:
            raise ConfigError(
                f"no session of {_MAX_PROBES} lives at {what}: is --split's share of the canary above 0 % and below "
                "100 %, and --canary written as the router has it?"
            )
    return (
        Side("A", client, model, asking, found[False], lambda replica: replica not in names),
        Side("B", client, model, asking, found[True], lambda replica: replica in names),
    )
