"""The page docs/reference/http.md, from the route tables of server, router and daemon."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

Table = dict[str, tuple[str, str]]
"""Who may call a route, and what for, by its method and path."""

_WHO = {"public": "anybody", "client": "clients", "admin": "administrator"}


def http_page() -> str:
    """The page."""
    from hotspan.daemon import routes as daemon
    from hotspan.router import routes as router

    own = _own()
    named = {name.partition(" ")[2] for name in own}
    lines = [
        "# Routes",
        "",
        "Written from the code by `make reference`. What requests and answers look like: [HTTP](../http.md).",
        "",
        "Clients need an API key where `--tenants` has keys. The administrator's token is `--admin-token-file`;",
        "without one, `hotspan serve` draws a token at its start, and `hotspan route` answers only this machine.",
        *_section("hotspan serve", own),
        "",
        "The routes of adapters also stand under `/models/{model}`.",
        *_fields(),
        "",
        "### Routes of vLLM, SageMaker and LMI",
        "",
        "Which of vLLM's routes there are depends on the model and on vLLM's options. Behind `hotspan route`, a POST",
        "is answered by the replica that fits best, by one, by all, or by the router itself; a GET by one.",
        "",
        "| for | behind a router | routes |",
        "|---|---|---|",
        *_grouped(named),
        *_section("hotspan route", {name: ("administrator", what) for name, what in router.OWN_ROUTES.items()}),
        "",
        "`/health`, `/ping`, `/metrics` and `/dashboard` are the router's own. All other routes are those of",
        "`hotspan serve`.",
        *_section("hotspan daemon", {name: ("anybody", what) for name, what in daemon.ROUTES.items()}),
    ]
    return "\n".join(lines) + "\n"


def _section(title: str, table: Mapping[str, tuple[str, str]]) -> list[str]:
    rows = [f"| `{name}` | {who} | {what} |" for name, (who, what) in table.items()]
    return ["", f"## {title}", "", "| route | for | what it does |", "|---|---|---|", *rows]


def _schema() -> dict[str, Any]:
    """OpenAPI of the routes that hotspan adds to vLLM's."""
    from fastapi import FastAPI

    from hotspan.server.adapters.routes import adapter_router
    from hotspan.server.admin import CacheAdmin, admin_router
    from hotspan.server.warming import Warming, warming_router

    app = FastAPI()
    app.include_router(admin_router(CacheAdmin.__new__(CacheAdmin)))
    app.include_router(warming_router(Warming.__new__(Warming)))
    app.include_router(adapter_router(None, ()))
    return app.openapi()


def _own() -> Table:
    from hotspan.http.paths import MODEL

    who = dict(_access())
    found = {}
    for path, methods in _schema()["paths"].items():
        for method, route in methods.items():
            if path.startswith(MODEL):  # the same under another name
                continue
            name = f"{method.upper()} {path}"
            found[name] = (who.get(name) or who[path], " ".join(route["description"].split()))
    return found


def _fields() -> Iterator[str]:
    """A table of the body's fields of each route that has one."""
    schema = _schema()
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            if "requestBody" not in route:
                continue
            reference = route["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            model = schema["components"]["schemas"][reference.rpartition("/")[2]]
            yield from ("", f"### {method.upper()} {path}", "", "| field | type | meaning |", "|---|---|---|")
            for name, field in model["properties"].items():
                meaning = field.get("description", "")
                required = " Required." if name in model.get("required", ()) else ""
                yield f"| `{name}` | {_type(field)} | {(meaning + required).strip()} |"


def _type(field: Mapping[str, Any]) -> str:
    choices: Iterable[Mapping[str, Any]] = field.get("anyOf", (field,))
    return " or ".join(
        f"list of {_type(each['items'])}" if each.get("type") == "array" else each.get("type", "object")
        for each in choices
        if each.get("type") != "null"
    )


def _access() -> Iterator[tuple[str, str]]:
    """The paths of the server's table, and who may call them where there are API keys."""
    from hotspan.server.policy import access_table

    for path, access in access_table(has_keys=True, has_given_token=True).items():
        yield path, _WHO[access.value]


def _grouped(named: Collection[str]) -> Iterator[str]:
    """The other paths, by who may call them and who answers behind a router."""
    from hotspan.http.paths import ADAPTER_WRITES
    from hotspan.router.routes import Route, route_of

    behind = {Route.WORK: "best replica", Route.ONE: "one", Route.ALL: "all", Route.PREFETCH: "best replica"}
    found: dict[tuple[str, str], list[str]] = {}
    for path, who in _access():
        if path not in named and path.startswith("/") and path not in ADAPTER_WRITES:
            found.setdefault((who, behind.get(route_of("POST", path), "itself")), []).append(f"`{path}`")
    for (who, answers), paths in found.items():
        yield f"| {who} | {answers} | {', '.join(paths)} |"
