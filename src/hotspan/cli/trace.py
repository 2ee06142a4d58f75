"""`hotspan trace`: record which requests of a running server share text, and show what a trace is like."""

import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import orjson
import typer

from hotspan.cli.admin_client import Admin
from hotspan.cli.options import runs
from hotspan.cli.output import Printing, check_writable, print_json, print_written
from hotspan.config.kinds import COUNT, POSITIVE, between
from hotspan.config.options import option
from hotspan.core.errors import ConfigError, RefusedError
from hotspan.core.recorded import described
from hotspan.core.trace import BLOCK_RANGE, read

trace = typer.Typer(help="Record and describe traces of requests.", no_args_is_help=True)

_FETCH_S = 1.0


@trace.callback()
def _group() -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """Of which server or router, and for how long."""

    seconds: float = option(
        600.0, "Duration of the recording, in seconds. Ctrl-C or SIGTERM ends it earlier.", kind=POSITIVE
    )
    replica: tuple[str, ...] = option(
        (), "URL of a further replica of the same model, recorded into the same file. May be repeated."
    )
    block_tokens: int | None = option(
        None,
        "Tokens per hash. Smaller ones find more of what is shared, in a larger file. Default: the server's chunks.",
        kind=between(*BLOCK_RANGE),
    )
    admin: Admin = field(default_factory=Admin)


@trace.command("record")
@runs(RecordOptions)
def record(
    options: RecordOptions,
    output: Annotated[Path, typer.Argument(help="File to write, in Mooncake's format (JSON lines).")],
) -> None:
    """Record the requests of a running `hotspan serve`: times, lengths and hashes of blocks, and no text.

    The hashes have a secret that is not kept, so a guessed text can't be looked up in the file. Of `hotspan route` all
    replicas are recorded; behind another router name each: equal texts have equal hashes on all of them. The trace is
    for `hotspan simulate FILE`, which finds in it what the server was, and `hotspan bench engine --workload
    trace-replay --trace-file FILE`. Requests that name a session are replayed in a closed loop: each awaits the answer
    before it, and as long as its client did.
    """
    from hotspan.core.progress import Progress

    check_writable(output)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl-C does: the rows are written
    with Progress(f"recording {options.admin.address}", unit="requests") as progress:
        servers = [options.admin, *(replace(options.admin, server=url) for url in options.replica)]
        posts = [each.post for each in servers]
        found = collect(posts, options.seconds, progress.advance, options.block_tokens)
    rows = found.rows
    if not rows:
        raise ConfigError(f"no request was answered within {options.seconds:g} s: nothing was written")
    write_rows(output, rows, found.servers)
    print_written(output)
    asked = sum(row["input_length"] for row in rows)
    cached = sum(row["cached_length"] for row in rows)
    times = [row["ttft_ms"] / 1000 for row in rows if "ttft_ms" in row]
    ttft = f"{sum(times) / len(times):.3f} s" if times else "unknown"
    typer.echo(f"{len(rows)} requests, hit rate {cached / asked:.1%}, mean TTFT {ttft}")
    if found.silent:
        typer.secho(f"did not always answer, so that requests may be missing: {', '.join(found.silent)}", fg="yellow")
    if found.lost:
        typer.secho(f"{found.lost} requests are missing: not answered at the end, or too many at once", fg="yellow")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """How a trace is described."""

    requests: int | None = option(None, "Number of requests. Default: the whole trace.", kind=COUNT)
    printing: Printing = field(default_factory=Printing)


@trace.command("show")
@runs(ShowOptions)
def show(
    options: ShowOptions,
    path: Annotated[Path, typer.Argument(help="Trace in Mooncake's format, or agents' sessions (file or directory).")],
) -> None:
    """Show what a trace is like: requests, lengths, what an endless cache would find, sessions, how answers ended."""
    trace = read(path, options.requests)
    facts = trace.facts()
    if options.printing.json:
        print_json(asdict(facts) | {"servers": [asdict(each) for each in trace.servers]})
        return
    for server in trace.servers:
        typer.echo(f"recorded from {described(server)}")
    typer.echo(
        f"{facts.requests:,} requests over {facts.span_s:,.0f} s, {facts.mean_tokens:,.0f} tokens in and "
        f"{facts.mean_answer_tokens:,.0f} out, {facts.asked_before:.1%} of the blocks asked for before"
    )
    if facts.sessions is not None:
        typer.echo(f"{facts.sessions:,} sessions, in which requests await earlier answers (closed loop)")
    if facts.finish_reasons is not None:
        ends = sorted(facts.finish_reasons.items(), key=lambda each: -each[1])
        typer.echo("answers ended by " + ", ".join(f"{name or 'unknown'}: {count:,}" for name, count in ends))


class Collected(NamedTuple):
    """The rows of all servers, by their time.

    lost:    how many requests are not among them. silent: who did not always answer.
    servers: what the engines told of themselves at the end.
    """

    rows: list[dict[str, Any]]
    lost: int
    silent: list[str]
    servers: list[dict[str, Any]]


def collect(
    posts: Sequence[Callable[[str, dict[str, Any]], Any]],
    seconds: float,
    advance: Callable[[int], None] = lambda count: None,
    block_tokens: int | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Collected:
    """Record until the time is over, or Ctrl-C.

    posts:        ask each server.
    block_tokens: of a hash; None is as each server has its chunks.
    A server that can't be asked any more is left out from then on: what it has told is kept.
    Raises:       ConfigError if a server can't be asked at first, somebody else records, or servers have other chunks.
    """
    name = secrets.token_hex(16)
    sized = {} if block_tokens is None else {"block_tokens": block_tokens}
    rows: list[dict[str, Any]] = []
    servers: list[dict[str, Any]] = []
    lost = 0
    silent: set[str] = set()
    ends_s, left = clock() + seconds, [*posts]
    has_begun = False

    def fetch(*, is_last: bool = False) -> None:
        nonlocal lost, has_begun
        asked = {"recording": name, "is_last": is_last} | sized
        answers: list[dict[str, Any]] = []
        for post in [*left]:
            try:
                answers += _answers(post, asked, silent)
            except ConfigError as error:
                if not has_begun:
                    raise
                silent.add(str(error))
                left.remove(post)
        has_begun = True
        found = [row for answer in answers for row in answer["rows"]]
        lost = sum(answer["running"] + answer["dropped"] for answer in answers)
        rows.extend(found)
        servers.extend(server for answer in answers for server in answer.get("servers", ()))
        advance(len(found))

    with contextlib.suppress(KeyboardInterrupt):
        while (left_s := ends_s - clock()) > 0:
            fetch()
            sleep(min(_FETCH_S, left_s))
    fetch(is_last=True)
    if len(sizes := {row["block_tokens"] for row in rows if "block_tokens" in row}) > 1:
        raise ConfigError(f"the servers have chunks of {sorted(sizes)} tokens: give one size for all as --block-tokens")
    rows.sort(key=lambda row: row["timestamp"])
    return Collected(rows, lost, sorted(silent), servers)


def _answers(
    post: Callable[[str, dict[str, Any]], Any], asked: dict[str, Any], silent: set[str]
) -> list[dict[str, Any]]:
    """Of a server, or of the replicas behind a router; those of them that did not answer are added to `silent`."""
    try:
        answer = post("/hotspan/trace", asked)
    except RefusedError as error:
        answer = error.body
        replicas = answer.get("replicas", ()) if isinstance(answer, dict) else ()
        if not any(each["status"] == HTTPStatus.OK for each in replicas):
            raise
    if "replicas" not in answer:
        return [answer]
    silent.update(each["replica"] for each in answer["replicas"] if each["status"] != HTTPStatus.OK)
    return [each["body"] for each in answer["replicas"] if each["status"] == HTTPStatus.OK]


def write_rows(path: Path, rows: list[dict[str, Any]], servers: Sequence[dict[str, Any]] = ()) -> None:
    """Write them, times from the first on; the first one with what the servers are."""
    begins = rows[0]["timestamp"]
    timed = [{**row, "timestamp": row["timestamp"] - begins} for row in rows]
    if servers:
        timed[0]["servers"] = list(servers)
    path.write_bytes(b"\n".join(map(orjson.dumps, timed)) + b"\n")
