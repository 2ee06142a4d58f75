"""What clients may take of a server, where no option says otherwise."""

from pathlib import Path

import pytest

from hotspan.config.server_settings import ServerSettings
from hotspan.core.types import GIB, MIB
from hotspan.http.connections import HttpLimits
from hotspan.http.upstream import IDLE_S

PAGE = " ".join((Path(__file__).parents[2] / "docs/http.md").read_text().split())
LIMITS = HttpLimits()


@pytest.mark.parametrize(
    ("limit", "value", "said"),
    [
        ("max_request_bytes", 64 * MIB, "the body is larger than 64 MiB"),
        ("held_bytes", GIB, "All bodies together take at most 1 GiB"),
        ("head_s", 10.0, "A request's head has 10 s"),
        ("stall_s", 10.0, "its body 10 s and"),
        ("least_rate", 1e5, "a further second for each 100 kB"),
        ("deaf_s", 60.0, "an answer that nobody reads 60 s"),
        ("idle_s", 5.0, "a connection without a request 5 s"),
        ("connections", 4096, "There are 4,096 connections at most"),
    ],
)
def test_limits_are_those_of_the_page(limit: str, value: float, said: str) -> None:
    """docs/http.md has each."""
    assert getattr(LIMITS, limit) == value and said in PAGE


def test_connections_to_servers_are_given_up_before_servers_close_them() -> None:
    """Two seconds before: a request that is sent on one must not meet its end."""
    assert LIMITS.idle_s - IDLE_S == 2


def test_a_server_has_the_limits_of_its_options() -> None:
    """The default of --max-request-bytes is that of who has no such option; a head fits one read of 64 KiB."""
    assert ServerSettings().max_request_bytes == LIMITS.max_request_bytes
    assert LIMITS.head_bytes == 64 * 1024
