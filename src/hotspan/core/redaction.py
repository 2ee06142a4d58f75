"""Which names hold secrets, and text without them: the one rule for configuration, errors, logs and `repr`."""

import json
import re
from collections.abc import Mapping
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

_NAME = re.compile(r"""([A-Za-z_][\w.-]*)["']?\s*[:=](?!//)\s*""")
_VALUE = re.compile(r""""[^"]*"|'[^']*'|(?:Bearer |Basic )?[^\s,;&'"{}\[\]]+""")
_USER = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*://)(?P<user>[^\s\"'@]*:[^\s\"']*|[^\s\"'@/]+)@")


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
    """The same of text alone."""
    if text.lstrip()[:1] in ("{", "["):
        try:
            return json.dumps(redacted(json.loads(text)))
        except (ValueError, RecursionError):
            pass
    text = _USER.sub(_hide_user, text)
    parts, at = [], 0
    while (name := _NAME.search(text, at)) is not None:
        parts.append(text[at : name.end()])
        at = name.end()
        if is_secret(name[1]) and (value := _VALUE.match(text, at)) is not None:
            parts.append(value[0] if value[0].startswith(_KEPT_ELSEWHERE) else HIDDEN)
            at = value.end()
    return "".join([*parts, text[at:]])


def _hide_user(found: re.Match[str]) -> str:
    user, colon, _ = found["user"].partition(":")
    return f"{found['scheme']}{user if colon else ''}{colon}{HIDDEN}@"
