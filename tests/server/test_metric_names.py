"""What metrics may say: names in one shape, and labels of a few fixed values, never a tenant, a session or a text."""

import json
import re

import pytest

from docsite import alerts
from docsite.grafana import BOARD, board
from docsite.metrics import declared
from docsite.reference import REFERENCE, metrics_page
from hotspan.daemon.disk import DiskCounts
from hotspan.daemon.metrics import GAUGES, DaemonFigures
from hotspan.daemon.stored import PoolCounts
from hotspan.engine.metrics import DEFINITIONS

BOUNDED = {"tier", "fault", "choice", "what", "reason", "engine_state", "source"}
"""Labels whose values are of an enumeration of hotspan's own. Others grow with what clients send, or name them."""


def test_the_engines_metrics() -> None:
    """Each is hotspan's by its name, says what it counts, and has bounded labels only."""
    for name, definition in DEFINITIONS.items():
        assert re.fullmatch(r"hotspan_[a-z0-9]+(_[a-z0-9]+)+", name), name
        assert definition.documentation.endswith("."), name
        assert {*definition.labelnames} <= BOUNDED, name


def test_the_daemons_metrics() -> None:
    """They have no labels at all: figures of the node, not of those who share it."""
    page = DaemonFigures(PoolCounts(), DiskCounts(), lambda: dict.fromkeys(GAUGES, 0), lambda: 0).page()
    lines = [line for line in page.decode().splitlines() if not line.startswith("#")]
    assert len(lines) > 30 and all(re.fullmatch(r"hotspan_daemon_\w+ [0-9.e+-]+", line) for line in lines)


def test_reference_of_metrics_is_that_of_the_code() -> None:
    """docs/reference/metrics.md is what `make reference` writes."""
    assert (REFERENCE / "metrics.md").read_text() == metrics_page()


def test_grafanas_dashboard_is_that_of_the_code() -> None:
    """examples/compose/grafana/hotspan.json is what `make reference` writes, with every declared metric."""
    assert BOARD.read_text() == board() + "\n"
    assert all(each.query in json.dumps(json.loads(board()), ensure_ascii=False) for each in declared())


def test_alerts_are_of_declared_metrics() -> None:
    """The compose example and the page have what `make reference` writes. Unknown metrics and labels are refused."""
    assert alerts.FILE.read_text() == alerts.file() and alerts.PAGE.read_text() == alerts.page()
    assert alerts.rules() in alerts.page()
    metrics = {each.name: each for each in declared()}
    for alert in (
        alerts.Alert("A", "hotspan_cache_no_such", "> 0", ""),
        alerts.Alert("A", "hotspan_cache_tier_up", "> 0", "", labels={"no_such": "x"}),
    ):
        with pytest.raises(KeyError):
            alert.expression(metrics)
