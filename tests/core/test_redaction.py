"""Names and texts with secrets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.redaction import is_secret, redacted, redacted_text

SECRET = "s3cr3tVALUE/+x"
_NAMES = """
password PASSWORD Redis_Password redispassword passwd passphrase secret_access_key AWS_SECRET_ACCESS_KEY
aws_secret_access_key secretAccessKey awssecretaccesskey session_token aws_session_token AWS_TOKEN token hf_token
HF_TOKEN api_key apikey api-key sse_customer_key_base64 aws_sse_customer_key_base64 Authorization x-amz-security-token
X-Amz-Signature client_secret private_key private-key-pem credentials s3_secret_access_key pw
"""
_PLAIN = """
max_num_batched_tokens chunk_tokens tokenizer tokenizer_mode admin_token_file key_store access_key_id sse_kms_key_id
bucket_key_enabled web_identity_token_file served_model_name timeout_s prefix keys monkey return_tokens_as_token_ids
password_file sse_customer_algorithm region endpoint
"""


@pytest.mark.parametrize("name", _NAMES.split())
def test_names_of_secrets(name: str) -> None:
    """One rule knows a secret's name however it is spelled, and what stands under it is never shown."""
    assert is_secret(name)
    assert SECRET not in str(redacted({"options": [{name: SECRET}]}))
    assert SECRET not in redacted_text(f"timeout_s=1,{name}={SECRET},prefix=a")
    assert SECRET not in redacted_text(f'a: {{"{name}": "{SECRET}", "x"')  # broken JSON


@pytest.mark.parametrize("name", _PLAIN.split())
def test_other_names(name: str) -> None:
    """Names that only look alike, and those of a secret's place, are shown as they are."""
    assert not is_secret(name) and redacted({name: "value"}) == {name: "value"}
    assert redacted_text(f"{name}=value") == f"{name}=value"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@cache:6379/0",
        f"rediss://user:{SECRET}@cache",
        f"https://{SECRET.replace('/', '-')}@example.com/x",
        f"s3://AKIA:{SECRET}@bucket/prefix",
        f"redis://cache?password={SECRET}",
        f"https://b.s3.amazonaws.com/k?X-Amz-Expires=5&X-Amz-Signature={SECRET}",
        f"http://proxy:3128/?Token={SECRET}&a=b",
    ],
)
def test_urls(url: str) -> None:
    """Users, passwords and query parameters of URLs are hidden, a password with slashes too; the host is shown."""
    shown = redacted_text(f"--l2 is {url!r}: wrong")
    assert SECRET not in shown and SECRET.replace("/", "-") not in shown and "***" in shown
    assert shown.endswith(": wrong")


@pytest.mark.parametrize("text", ["redis://cache:6379/0", "file:///shared/kv", "s3://bucket/a/b", "a@b.c", "x: y"])
def test_plain_text_stays(text: str) -> None:
    """What holds no secret is shown as it is."""
    assert redacted_text(text) == text


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.text("ab/:@+%=!", min_size=1, max_size=12), st.sampled_from(["redis", "s3", "https"]))
def test_any_password_in_a_url_is_hidden(password: str, scheme: str) -> None:
    """Whatever letters a password has, a URL is shown without it."""
    shown = redacted_text(f"{scheme}://user:Q{password}Q@host")
    assert f"Q{password}Q" not in shown and shown.endswith("@host")
