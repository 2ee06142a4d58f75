"""What of a router is made of its settings alone."""

import secrets
from typing import Any

from hotspan.core.errors import ConfigError
from hotspan.http.connections import HttpLimits
from hotspan.http.hosts import Hosts
from hotspan.router.access import Access
from hotspan.router.settings import RouterSettings
from hotspan.router.text import Prompts


def http_limits(settings: RouterSettings) -> HttpLimits:
    """What the clients of a router may take: half is divided between the API keys, where there are any."""
    return HttpLimits(settings.max_request_bytes, settings.held_bytes, max(1, len(settings.keys)))


def access_of(settings: RouterSettings) -> Access:
    return Access(
        settings.tenant_header,
        settings.keys,
        settings.admin_token,
        is_shared=settings.share_across_tenants,
        hosts=Hosts((settings.host, *settings.allowed_hosts)),
    )


def prompts_of(settings: RouterSettings, access: Access) -> Prompts:
    """What reads prompts. Raises: ConfigError if there are events and no tokens to read them with."""
    has_events = any(replica.events for replica in settings.replicas)
    options: dict[str, Any] = {
        # Events do not say which name is the model's own; without them each name can have its own texts.
        "names": settings.model_names or (None if has_events else ()),
        "session_key": settings.session_key or "",
        "owner_of": access.owner_of_texts,
        "secret": secrets.randbits(64),
        "separators": settings.blend_separators,
    }
    if settings.model is not None:
        return Prompts.load(settings.model, needs_tokens=has_events, **options)
    if has_events:
        raise ConfigError("events name tokens: give the model's directory with --model, or leave events= out")
    return Prompts(**options)
