"""The dashboard: one HTML page without data, which reads the metrics and the admin API of its server."""

import base64
import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

DASHBOARD: Final = "/dashboard"

HTML: Final = "text/html; charset=utf-8"

_INLINE = re.compile(rb"<(?P<kind>style|script)>(?P<text>.*?)</(?P=kind)>", re.DOTALL)


class Page(NamedTuple):
    """What is sent. headers: with a policy that allows the page's own style and script, by digest, and nothing else."""

    content: bytes
    headers: Mapping[str, str]


@functools.cache
def dashboard() -> Page:
    """The page."""
    content = Path(__file__).with_name("dashboard.html").read_bytes()
    policy = ["default-src 'none'", "connect-src 'self'", "img-src data:"]
    for found in _INLINE.finditer(content):
        digest = base64.b64encode(hashlib.sha256(found["text"]).digest()).decode()
        policy.append(f"{found['kind'].decode()}-src 'sha256-{digest}'")
    policy += ["base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"]
    headers = {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Page(content, headers)
