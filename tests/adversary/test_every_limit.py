"""Every limit of what serves clients has an attack that goes to it, or a reason why no client reaches it."""

import ast
import re
from pathlib import Path

import hotspan

SOURCE = Path(hotspan.__file__).parent
HERE = Path(__file__).parent
PACKAGES = ("server", "router", "http", "daemon")
LIMIT = re.compile(
    r"_?(MAX|MOST|LARGEST)(_|$)|max_|held_bytes$|head_bytes$|(job_)?queue_size$|least_rate$|connections$"
)

OVER = "test_over_limits.py::test_one_more_than_a_limit_is_refused"
BODY = "test_over_limits.py::test_a_body_has_a_size"
VALUES = "test_over_limits.py::test_values_and_lists_of_a_body_are_counted"
FLOOD = "test_limits.py::test_a_tenant_over_its_limits_closes_no_replica"
SLOW = "test_limits.py::test_a_body_that_is_slow_to_read_stops_nobody"
NAMES = "test_limits.py::test_made_up_names_leave_nothing"
UPLOADS = "test_neighbours.py::test_slow_uploads_keep_nobody_out"
IDLE = "test_neighbours.py::test_idle_connections_keep_nobody_out"
HEAD = "test_wire.py::test_a_head_has_a_size"
MESSAGE = "test_wire.py::test_half_a_message_holds_nobody_up"
PIPELINE = "test_wire.py::test_pipelined_requests_are_answered_in_order"
ADAPTERS = "test_adapters.py::test_a_tenant_that_registers_without_end"
SCOPE = "test_neighbours.py::test_what_an_invalidation_may_name_is_bounded"
STORED = "test_storage.py::test_broken_entries_of_the_log_stop_no_replica"
SPARSE = "test_limits.py::test_sparse_files_in_the_shared_directory_take_no_memory"

NOT_A_CLIENTS = "no client reaches it: "
BY_PART = "tested by its part alone, not by the adversary: "

LIMITS = {
    "daemon/disk.py": (3, NOT_A_CLIENTS + "chunks of the daemon's own disk"),
    "daemon/log.py": (5, BY_PART + "daemon/test_log.py"),
    "daemon/metadata.py": (1, BY_PART + "daemon/test_metadata.py"),
    "daemon/operations.py": (1, BY_PART + "daemon/test_http.py"),
    "daemon/options.py": (3, NOT_A_CLIENTS + "the operator's"),
    "daemon/pool.py": (1, BY_PART + "daemon_protocol/test_protocol.py"),
    "daemon/routes.py": (4, MESSAGE),
    "daemon/segment.py": (1, NOT_A_CLIENTS + "events of the kernel"),
    "daemon/server.py": (3, NOT_A_CLIENTS + "time that the end takes"),
    "daemon/space.py": (1, NOT_A_CLIENTS + "extents of a segment"),
    "daemon/stored.py": (1, BY_PART + "daemon/test_metadata.py"),
    "http/bodies.py": (1, NOT_A_CLIENTS + "a name of a field"),
    "http/connections.py": (7, (BODY, HEAD, UPLOADS, IDLE, PIPELINE)),
    "http/json_size.py": (3, VALUES),
    "http/paths.py": (1, (OVER, "test_over_limits.py::test_a_small_request_has_a_small_body")),
    "http/upstream.py": (1, NOT_A_CLIENTS + "a replica's answer"),
    "router/answers.py": (1, NOT_A_CLIENTS + "copies of answers"),
    "router/caches.py": (4, NOT_A_CLIENTS + "replicas' answers to the administrator"),
    "router/dispatcher.py": (1, FLOOD),
    "router/event_sync.py": (2, NOT_A_CLIENTS + "replicas' events"),
    "router/events.py": (2, "test_events.py::test_other_protocols_get_no_event"),
    "router/gateway.py": (1, HEAD),
    "router/health.py": (1, NOT_A_CLIENTS + "a replica's answer"),
    "router/index.py": (1, NOT_A_CLIENTS + "sets of replicas"),
    "router/models.py": (1, NOT_A_CLIENTS + "replicas' lists of their models"),
    "router/prompt.py": (5, SLOW),
    "router/ray/plan.py": (2, NOT_A_CLIENTS + "the operator's"),
    "router/ray/reports.py": (1, NOT_A_CLIENTS + "replicas' reports"),
    "router/retries.py": (1, BY_PART + "router/test_retries.py"),
    "router/sections.py": (2, BY_PART + "router/test_sections.py"),
    "router/session.py": (2, NAMES),
    "router/settings.py": (6, (FLOOD, BODY, UPLOADS)),
    "router/text.py": (5, (SLOW, NAMES)),
    "router/tokens.py": (3, SLOW),
    "router/unready.py": (2, NAMES),
    "server/adapters/check.py": (4, ADAPTERS),
    "server/adapters/registry.py": (3, ADAPTERS),
    "server/adapters/routes.py": (2, OVER),
    "server/admin.py": (1, "test_limits.py::test_announcements_hold_up_no_invalidation"),
    "server/admission.py": (2, FLOOD),
    "server/announce.py": (3, OVER),
    "server/control.py": (1, BY_PART + "server/test_control.py"),
    "server/control_app.py": (1, NOT_A_CLIENTS + "another core's answer"),
    "server/hardening.py": (2, NOT_A_CLIENTS + "the operator's"),
    "server/invalidation.py": (4, (OVER, SCOPE)),
    "server/liveness.py": (1, NOT_A_CLIENTS + "a pause of the watch"),
    "server/lmi/routes.py": (1, NOT_A_CLIENTS + "characters of an error"),
    "server/lmi/sessions.py": (2, BY_PART + "server/lmi/test_sessions.py"),
    "server/models/archives.py": (2, NOT_A_CLIENTS + "the operator's archives"),
    "server/models/relay.py": (1, NOT_A_CLIENTS + "an engine's answer"),
    "server/models/served.py": (1, NOT_A_CLIENTS + "a pause between starts"),
    "server/warm_requests.py": (2, OVER),
    "server/warming.py": (
        6,
        (OVER, "test_limits.py::test_a_body_that_multiplies_is_refused", BY_PART + "server/test_warming.py"),
    ),
    "config/server_settings.py": (4, (FLOOD, BODY, ADAPTERS)),
}
"""By module: how many names of limits, and the attacks that go to them, or why there is none."""


def places() -> dict[str, set[str]]:
    """Names of constants, fields and options that are limits, by module."""
    found = dict[str, set[str]]()
    modules = [path for package in PACKAGES for path in (SOURCE / package).rglob("*.py")]
    for path in (*modules, SOURCE / "config/server_settings.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(each, ast.Name) and LIMIT.match(each.id):
                        found.setdefault(path.relative_to(SOURCE).as_posix(), set()).add(each.id)
    return found


def test_each_limit_is_in_the_table() -> None:
    """Whoever adds a limit to server, router, HTTP or daemon names the attack that goes to it."""
    assert {path: len(names) for path, names in places().items()} == {path: n for path, (n, _) in LIMITS.items()}


def test_each_attack_is_there() -> None:
    """What the table names is a test: of the adversary's by its function, of another part by its file."""
    for path, (_, named) in LIMITS.items():
        for each in (named,) if isinstance(named, str) else named:
            if each.startswith(BY_PART):
                assert (HERE.parent / each.removeprefix(BY_PART)).is_file(), each
            elif not each.startswith(NOT_A_CLIENTS):
                file, _, function = each.partition("::")
                assert f"def {function}(" in (HERE / file).read_text(), (path, each)
