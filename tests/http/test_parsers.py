"""Who parses JSON or normalises text in what serves HTTP, and what bounds its time: a new place is decided upon."""

import ast
from collections import Counter
from pathlib import Path

import hotspan

SOURCE = Path(hotspan.__file__).parent
SERVING = ("server", "router", "http", "daemon")

ADMITTED = "a client's body, after Admission has counted what it holds (server/test_body_limits.py)"
OWN = "what this host's files or hotspan's own processes write"
ANSWER = "an answer of a replica or an engine, of bounded size"

PLACES = {
    "server/lmi/routes.py": (3, f"{ADMITTED}; {ANSWER}; what a formatter returns"),
    "server/sizes.py": (1, ADMITTED),
    "server/models/front.py": (1, ADMITTED),
    "server/adapters/routes.py": (1, "a body of at most _MAX_BODY_BYTES"),
    "server/principal.py": (1, OWN),
    "server/control_app.py": (1, ANSWER),
    "server/python_control.py": (1, OWN),
    "server/hardening.py": (1, OWN),
    "server/adapters/check.py": (2, "files of an adapter, of bounded size (server/adapters/test_files.py)"),
    "server/models/merging.py": (2, ANSWER),
    "router/text.py": (1, "a body of at most MAX_READ bytes, counted in slices before (router/test_bounded_work.py)"),
    "router/harmony.py": (1, OWN),
    "router/answers.py": (2, f"a body of at most MAX_BYTES and MAX_NODES lists and objects, to be copied; {ANSWER}"),
    "router/gateway.py": (1, "the administrator's"),
    "router/template.py": (2, f"arguments of a tool call, counted with its chat (router/test_bounded_work.py); {OWN}"),
    "router/tokens.py": (4, f"text of bounded size and runs of marks (router/test_bounded_work.py); {OWN}"),
    "router/health.py": (1, ANSWER),
    "router/models.py": (1, ANSWER),
    "router/fan_out.py": (1, ANSWER),
    "router/ray/launch.py": (1, OWN),
    "http/errors.py": (1, ANSWER),
    "http/sse.py": (2, ANSWER),
    "http/texts.py": (1, "a body of at most 64 KiB (http/test_texts.py)"),
    "http/warming.py": (1, "lines of a file that the command line reads"),
    "http/options.py": (1, OWN),
    "daemon/operations.py": (1, "a message of bounded size (daemon/test_http.py)"),
}
"""By module: how many such calls, and what bounds what they are given."""


def test_each_parser_is_given_what_is_bounded() -> None:
    """Calls of `loads` and `normalize`, as listed above: whoever adds one says what bounds its time."""
    found = Counter[str]()
    for package in SERVING:
        for path in sorted((SOURCE / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    found[path.relative_to(SOURCE).as_posix()] += node.func.attr in ("loads", "normalize")
    assert {path: calls for path, calls in found.items() if calls} == {path: n for path, (n, _) in PLACES.items()}
