"""How an S3 bucket is used as an L2."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class S3Settings:
    """How to use a bucket.

    timeout_s:      of each method. A thousand keys at once are done within a few round trips, and so within it.
    connections:    requests side by side.
    log_entries:    that the log keeps; chunks that were stored before the oldest of them are no hits any more.
    is_per_tenant:  whether a tenant's objects lie under its label, with no other's chunks; False where tenants share.
    client:         obstore's settings for S3 by their names: endpoint, region, access_key_id, secret_access_key,
                    session_token, virtual_hosted_style_request, skip_signature, unsigned_payload, sse_kms_key_id, ...
                    What is not named, obstore takes from AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID,
                    AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, ..., and credentials from web identity
                    (AWS_WEB_IDENTITY_TOKEN_FILE), container or instance; it reads no profiles.
    """

    timeout_s: float = 5.0
    connections: int = 64
    log_entries: int = 1 << 16
    is_per_tenant: bool = True
    client: Mapping[str, Any] = field(default_factory=dict, repr=False)
