"""A key-encryption key that stays inside AWS KMS."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hotspan.core.errors import ConfigError, KeyUnavailable
from hotspan.keyring.wrapped import changed, pack, unpack

_CONNECT_S = 2
_READ_S = 5
_ATTEMPTS = 2


class AwsKmsWrapper:
    """KMS `Encrypt` and `Decrypt` under one key; the context travels as encryption context, which the KMS checks."""

    __slots__ = ("_client", "_faults", "_key", "id")

    def __init__(self, key: str, client: Any, faults: tuple[type[Exception], type[Exception]]) -> None:
        """client: boto3's, for `kms`. faults: botocore's BotoCoreError and ClientError."""
        self.id = f"aws-kms:{key}"
        self._key = key
        self._client = client
        self._faults = faults

    def __repr__(self) -> str:
        return f"AwsKmsWrapper({self.id})"

    def wrap(self, key: bytes, context: bytes) -> bytes:
        with self._explained():
            answer = self._client.encrypt(KeyId=self._key, Plaintext=key, EncryptionContext=_logged(context))
        return pack(self.id, answer["CiphertextBlob"])

    def unwrap(self, blob: bytes, context: bytes) -> bytes:
        sealed = unpack(self.id, blob)
        with self._explained():
            # The key is named although the KMS knows it: else who writes to the store could plant keys of their own.
            answer = self._client.decrypt(KeyId=self._key, CiphertextBlob=sealed, EncryptionContext=_logged(context))
        key: bytes = answer["Plaintext"]
        return key

    @contextmanager
    def _explained(self) -> Iterator[None]:
        no_answer, refused = self._faults
        try:
            yield
        except refused as error:
            code = str(getattr(error, "response", {}).get("Error", {}).get("Code", "unknown error"))
            if code == "InvalidCiphertextException":
                raise changed() from error
            raise KeyUnavailable(
                f"AWS KMS refuses to use key {self._key} ({code}): check that it exists and is enabled, and that this "
                "process may call kms:Encrypt and kms:Decrypt with it"
            ) from error
        except no_answer as error:
            raise KeyUnavailable(
                f"AWS KMS does not answer for key {self._key} ({type(error).__name__}): check network, region and "
                "credentials; it is asked again"
            ) from error


def open_kms(key: str, region: str | None, endpoint: str | None) -> AwsKmsWrapper:
    """The KMS key `key`, an id, an alias or an ARN; the KMS is not asked yet.

    region: None takes the ARN's, and for an id what boto3 finds in its own configuration.
    Raises: ConfigError without boto3 or without a region.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise ConfigError("an aws-kms: key needs boto3, which is not installed: pip install 'hotspan[aws]'") from error
    arn = key.split(":")
    if region is None and len(arn) > 5 and arn[0] == "arn":
        region = arn[3]
    config = Config(
        connect_timeout=_CONNECT_S,
        read_timeout=_READ_S,
        retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
        max_pool_connections=16,
    )
    try:
        client = boto3.session.Session().client("kms", region_name=region, endpoint_url=endpoint, config=config)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"no client for AWS KMS ({type(error).__name__}): give aws-kms:{key}?region=REGION, and a valid endpoint "
            "if any"
        ) from error
    return AwsKmsWrapper(key, client, (BotoCoreError, ClientError))


def _logged(context: bytes) -> dict[str, str]:
    """The encryption context: a digest, as AWS writes it to its logs in the clear and bounds its length."""
    return {"hotspan": hashlib.sha256(context).hexdigest()}
