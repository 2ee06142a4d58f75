"""Edges of formatters that no other test of this package stands on (`make mutants` found them)."""

import inspect

from hotspan.config.server_settings import ServerSettings
from hotspan.formatters.formatters import load_formatters

from .conftest import Write


def test_without_any_call_nothing_is_formatted(write: Write) -> None:
    """Neither a directory without files nor none; one with a section does, and an adapter's alone as well."""
    empty = load_formatters(None, {}, is_secure=False)
    assert empty.is_empty is True and load_formatters(write(), {}, is_secure=False).is_empty is True
    one = load_formatters(write(yaml="input: {prefix: a}\n"), {}, is_secure=False)
    assert one.is_empty is False
    adapter = load_formatters(None, {"legal": write("legal", yaml="input: {prefix: a}\n")}, is_secure=False)
    assert adapter.is_empty is False
    adapter.remove("legal")
    assert adapter.is_empty is True


def test_a_call_has_the_time_of_the_option() -> None:
    """--formatter-timeout-s, where nobody says how long."""
    default = inspect.signature(load_formatters).parameters["timeout_s"].default
    assert default == ServerSettings().formatter_timeout_s == 5.0
