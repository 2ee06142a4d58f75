"""`hotspan trace`: record which requests of a running server share text, and show what a trace is like."""

import os
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from hotspan.cli.admin_client import Admin
from hotspan.cli.collecting import collect
from hotspan.cli.options import runs
from hotspan.cli.output import Printing, check_writable, print_json, print_written
from hotspan.config.kinds import COUNT, POSITIVE, between
from hotspan.config.options import option
from hotspan.core.errors import ConfigError
from hotspan.core.recorded import described
from hotspan.core.trace import BLOCK_RANGE, read

trace = typer.Typer(help="Record and describe traces of requests.", no_args_is_help=True)

_ANSWER_S = 20.0
"""Less than the 30 s after which the recordings of the other servers end (engine/traces.py)."""


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
        posts = {each.address: partial(each.post, timeout_s=_ANSWER_S) for each in servers}
        found = collect(posts, options.seconds, progress.advance, options.block_tokens)
    rows = found.rows
    if not rows:
        unasked = f" ({', '.join(found.silent)})" if found.silent else ""
        raise ConfigError(f"no request was answered within {options.seconds:g} s{unasked}: nothing was written")
    _write(output, rows, found.servers)
    print_written(output)
    asked = sum(row["input_length"] for row in rows)
    cached = sum(row["cached_length"] for row in rows)
    times = [row["ttft_ms"] / 1000 for row in rows if "ttft_ms" in row]
    ttft = f"{sum(times) / len(times):.3f} s" if times else "unknown"
    typer.echo(f"{len(rows)} requests, hit rate {cached / asked:.1%}, mean TTFT {ttft}")
    if found.silent:
        typer.secho(f"did not always answer, so that requests may be missing: {', '.join(found.silent)}", fg="yellow")
    if found.interrupted:
        names = ", ".join(found.interrupted)
        typer.secho(f"recording of {names} was interrupted: requests are missing", fg="yellow")
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


def _write(path: Path, rows: list[dict[str, Any]], servers: Sequence[dict[str, Any]]) -> None:
    """Write them, or keep them in a temporary file. Raises: ConfigError that names it."""
    try:
        write_rows(path, rows, servers)
    except OSError as error:
        failed = f"{path} can't be written ({error.strerror})"
        try:
            fd, beside = tempfile.mkstemp(prefix="hotspan-trace-", suffix=".jsonl")
            os.close(fd)
            write_rows(Path(beside), rows, servers)
        except OSError as again:
            raise ConfigError(f"{failed}, nor a temporary file ({again.strerror}): record again") from error
        raise ConfigError(f"{failed}: the recording is in {beside}: move it to where there is room") from error


def write_rows(path: Path, rows: list[dict[str, Any]], servers: Sequence[dict[str, Any]] = ()) -> None:
    """Write them, times from the first on; the first one with what the servers are."""
    begins = rows[0]["timestamp"]
    timed = [{**row, "timestamp": row["timestamp"] - begins} for row in rows]
    if servers:
        timed[0]["servers"] = list(servers)
    path.write_bytes(b"\n".join(map(orjson.dumps, timed)) + b"\n")
