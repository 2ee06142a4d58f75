"""Lines of system prompts that change in each request: taken out of what clients ask for, or found.

Chats, Anthropic's messages and responses have their system prompts in fields of their own; what is a plain prompt has
none. Only the text that the model reads changes: nothing of it is in an answer. Patterns are in core/system_lines.py.
"""

import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

from hotspan.core.system_lines import SystemLines

logger = logging.getLogger(__name__)

MAX_SESSIONS: Final = 1024
MAX_LINES: Final = 1024

_ROLES: Final = ("system", "developer")


def rewrite(request: Any, lines: SystemLines) -> None:
    """Apply the patterns to a request's system prompts. Mutates: `request`."""
    before = lines.dropped, lines.moved
    for holder, name in _prompts(request):
        _set(holder, name, _content(_field(holder, name), lines))
    dropped, moved = lines.dropped - before[0], lines.moved - before[1]
    if dropped or moved:
        logger.debug("system_lines_changed dropped=%d moved=%d", dropped, moved)


class ChangedLines:
    """Which line of its system prompt a session has changed since its request before. Kept are hashes and no text.

    Bounded: MAX_SESSIONS of MAX_LINES of 8 bytes; the sessions that asked longest ago are forgotten.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str], array[int]] = OrderedDict()

    def note(self, tenant: str, session: str, request: Any) -> int:
        """The number of the first line that is another than in the session's last request, from 1 on; 0 if none is."""
        texts = (text for holder, name in _prompts(request) for text in _texts(_field(holder, name)))
        lines = (line for text in texts for line in text.splitlines())
        now = array("q", (hash(line) for line, _ in zip(lines, range(MAX_LINES), strict=False)))
        before = self._seen.pop((tenant, session), None)
        self._seen[tenant, session] = now
        if len(self._seen) > MAX_SESSIONS:
            self._seen.popitem(last=False)
        if before is None or before == now:
            return 0
        pairs = zip(before, now, strict=False)
        return next((at for at, (one, other) in enumerate(pairs, 1) if one != other), min(len(before), len(now)) + 1)


def _prompts(request: Any) -> Iterator[tuple[Any, str]]:
    """What has a system prompt in a request, and the name of its field there."""
    for name in ("system", "instructions"):
        if getattr(request, name, None):
            yield request, name
    messages = getattr(request, "messages", None)
    for message in messages if isinstance(messages, list) else ():
        if _field(message, "role") in _ROLES and _field(message, "content"):
            yield message, "content"


def _texts(content: Any) -> list[str]:
    """Of a text, or of a list of parts."""
    if isinstance(content, str):
        return [content]
    texts = [_field(part, "text") for part in content] if isinstance(content, list) else []
    return [text for text in texts if isinstance(text, str)]


def _content(content: Any, lines: SystemLines) -> Any:
    """A text, or the same list with its texts changed; what is neither is as it is."""
    if isinstance(content, str):
        return lines.applied([content])[0]
    parts = [part for part in content if isinstance(_field(part, "text"), str)] if isinstance(content, list) else []
    for part, text in zip(parts, lines.applied([_field(part, "text") for part in parts]), strict=True):
        _set(part, "text", text)
    return content


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _set(value: Any, name: str, new: Any) -> None:
    if isinstance(value, dict):
        value[name] = new
    else:
        setattr(value, name, new)
