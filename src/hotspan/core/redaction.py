"""Which names hold secrets, and text without them: the one rule for configuration, errors, logs and `repr`."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ANYWHERE = ("password", "passwd", "passphrase", "secret", "privatekey", "sharedkey")
_AT_THE_END = frozenset(
    {"key", "pass", "pw", "pwd", "token", "auth", "authorization", "credential", "credentials", "kek"}
)
_AT_THE_END |= {"sig", "signature", "apikey", "accesskey", "authkey", "authtoken", "sessiontoken", "securitytoken"}
_ENCODINGS = frozenset({"base", "b", "hex", "encoded", "value", "plain", "text", "string"})
_KEPT_ELSEWHERE = ("file:", "env:", "aws-kms:")
_ABOUT_ONE = frozenset(
    {"file", "files", "path", "id", "ids", "store", "name", "names", "env", "type", "enabled", "algorithm", "size"}
)
"""After one of these words a name says where a secret is, or what kind of one, and is none."""

# Each is matched in one pass: a text of many MB that an attacker chose takes no longer than another.
_WORDS = re.compile(r"[\w.-]+")
_FIRST_OF_NAME = re.compile(r"[A-Za-z_]")
_ASSIGNED = re.compile(r"""["']?\s*[:=](?!//)\s*""")
_SCHEME = re.compile(r"[\w+.-]+(://)?")
_FIRST_OF_SCHEME = re.compile(r"[A-Za-z]")
_URL_END = re.compile(r"""[\s"']|\Z""")
_VALUE = re.compile(r""""[^"]*"|'[^']*'|(?:Bearer |Basic )?[^\s,;&'"{}\[\]]+""")
_OPTION = re.compile(rf"""(?<![^\s"'])(--([\w.-]+)\s+)(?!--)({_VALUE.pattern})""")


def is_secret(name: str) -> bool:
    """Whether a setting of this name holds a secret, in any spelling: AWS_SECRET_ACCESS_KEY, secretAccessKey, token."""
    words = [word.lower() for word in _WORD.findall(name)]
    while words and words[-1] in _ENCODINGS:
        words.pop()
    if not words or words[-1] in _ABOUT_ONE:
        return False
    return words[-1] in _AT_THE_END or any(secret in "".join(words) for secret in _ANYWHERE)


def is_reference(value: object) -> bool:
    """Whether a value says where a secret is instead of being one: file:PATH or env:NAME."""
    return isinstance(value, str) and value.partition(":")[0] in ("file", "env") and bool(value.partition(":")[2])


def redacted(value: Any, name: str = "") -> Any:
    """A value to show: what stands under the name of a secret is hidden, and so are users and secrets in URLs.

    References to secrets (file:PATH, env:NAME) are shown.
    Mappings and lists are looked through, and so is text that is JSON or pairs of NAME=VALUE.
    """
    if is_secret(name) and value is not None and not isinstance(value, bool):
        return value if str(value).startswith(_KEPT_ELSEWHERE) else HIDDEN
    if isinstance(value, Mapping):
        return {str(inner): redacted(given, str(inner)) for inner, given in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(each) for each in value]
    return redacted_text(value) if isinstance(value, str) else value


def redacted_text(text: str) -> str:
    """The same of text alone. Takes time in proportion to its length."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.dumps(redacted(json.loads(text)))
        except (ValueError, RecursionError):
            pass
    text = _OPTION.sub(_without_value, "".join(_without_users(text)))
    parts: list[str] = []
    shown = at = 0
    while (words := _WORDS.search(text, at)) is not None:
        at = words.end()
        first = _FIRST_OF_NAME.search(text, words.start(), at)
        if first is None or (assigned := _ASSIGNED.match(text, at)) is None:
            continue
        name, at = text[first.start() : at], assigned.end()
        if is_secret(name) and (value := _VALUE.match(text, at)) is not None:
            parts += text[shown:at], value[0] if value[0].startswith(_KEPT_ELSEWHERE) else HIDDEN
            shown = at = value.end()
    return "".join([*parts, text[shown:]])


def _without_value(option: re.Match[str]) -> str:
    """An option of a command line, `--NAME VALUE`, without a secret value."""
    flag, name, value = option.groups()
    return option[0] if not is_secret(name) or value.startswith(_KEPT_ELSEWHERE) else f"{flag}{HIDDEN}"


def _without_users(text: str) -> Iterator[str]:
    """The parts of a text in which users and passwords of URLs are hidden: SCHEME://USER:***@, SCHEME://***@."""
    shown = at = url_end = 0
    while (scheme := _SCHEME.search(text, at)) is not None:
        at = scheme.end()
        if not scheme[1] or _FIRST_OF_SCHEME.search(text, scheme.start(), scheme.start(1)) is None:
            continue
        if at > url_end and (found := _URL_END.search(text, at)) is not None:
            url_end = found.start()
        host = text.find("@", at, url_end)
        if host < 0:
            at = max(at, url_end)
            continue
        colon = text.find(":", at, host)
        if colon >= 0:  # a password may hold any character
            host = text.rfind("@", at, url_end)
        elif host == at or text.find("/", at, host) >= 0:
            continue  # of a path
        yield text[shown : colon + 1 if colon >= 0 else at]
        yield HIDDEN
        shown = at = host
    yield text[shown:]
