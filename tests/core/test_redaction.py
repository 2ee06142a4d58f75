"""Names and texts with secrets."""

import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.redaction import _VALUE, is_secret, redacted, redacted_text
from tests.operations import operations

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
    assert redacted_text(f"MODEL --{name} {SECRET} --seed 1") == f"MODEL --{name} *** --seed 1"
    assert SECRET not in redacted_text(f'a: {{"{name}": "{SECRET}", "x"')  # broken JSON


@pytest.mark.parametrize("name", _PLAIN.split())
def test_other_names(name: str) -> None:
    """Names that only look alike, and those of a secret's place, are shown as they are."""
    assert not is_secret(name) and redacted({name: "value"}) == {name: "value"}
    assert redacted_text(f"{name}=value") == f"{name}=value"
    assert redacted_text(f"--{name} value") == f"--{name} value"


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


_USER = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*://)(?P<user>[^\s\"'@]*:[^\s\"']*|[^\s\"'@/]+)@")
_OPTION = re.compile(rf"""(?<![^\s"'])--(?P<name>[\w.-]+)(?P<space>\s+)(?!--)(?P<value>{_VALUE.pattern})""")
_NAME = re.compile(r"""([A-Za-z_][\w.-]*)["']?\s*[:=](?!//)\s*""")


def defined(text: str) -> str:
    """What is hidden of a text that is no JSON, as two expressions define it, which take time without bound."""

    def without_user(found: re.Match[str]) -> str:
        user, colon, _ = found["user"].partition(":")
        return f"{found['scheme']}{user if colon else ''}{colon}***@"

    def without_value(found: re.Match[str]) -> str:
        is_kept = not is_secret(found["name"]) or found["value"].startswith(("file:", "env:"))
        return found[0] if is_kept else f"--{found['name']}{found['space']}***"

    text, shown, at = _OPTION.sub(without_value, _USER.sub(without_user, text)), "", 0
    while (name := _NAME.search(text, at)) is not None:
        shown, at = shown + text[at : name.end()], name.end()
        if is_secret(name[1]) and (value := _VALUE.match(text, at)) is not None:
            shown, at = shown + (value[0] if value[0].startswith(("file:", "env:")) else "***"), value.end()
    return shown + text[at:]


PIECES = [*"a=:@/ \"',\u00e91.-+_\n{}", "key", "pw:", "Token=", "//", "://", "Bearer ", "file:", "env:"]


@settings(deadline=None, max_examples=500, derandomize=True)
@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join).filter(lambda text: text.lstrip()[:1] != "{"))
def test_what_is_hidden_is_what_is_defined(text: str) -> None:
    """No more and no less, wherever names, quotes, schemes and users meet."""
    assert redacted_text(text) == defined(text)


@pytest.mark.parametrize("piece", ["a://x/@", "a://", "key=", "key='", "a@b:", "key "])
def test_a_text_takes_steps_in_proportion_to_its_length(piece: str) -> None:
    """Eight times the text takes eight times the operations."""
    short, long = (operations(lambda n=n: redacted_text(piece * n)) for n in (50, 400))
    assert long < 8.2 * short


def test_no_expression_takes_longer_for_a_text_that_was_made_for_it() -> None:
    """Texts of MB for each of which an expression that tries a part from every place would need half an hour."""
    code = (
        "from hotspan.core.redaction import redacted_text as shown\n"
        "for text in ('a' * 3_000_000, 'x://' + ':' * 3_000_000, '1' * 3_000_000 + '://', 'a://' * 100_000):\n"
        "    assert shown(text) == text\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
