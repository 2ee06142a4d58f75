"""The parts that go through HTTP: long-doc-qa, chat and startup."""

import json
import shutil
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.record import Result, gpu_memory_mib, is_direct, say
from benchmarks.gpu.servers import (
    Setting,
    fresh,
    in_turn,
    memory_of,
    native_offloading,
    play,
    room_for,
    summaries,
)
from benchmarks.multi_round_chat import ChatSizes, plan_l2, started
from hotspan.bench.workloads.long_doc_qa import LongDocQaOptions
from hotspan.core.addresses import free_port
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB
from hotspan.demo.plan import gib

_QUESTION_TOKENS: Final = 96
_SPARE: Final = 1.25
_NATIVE_REFUSES: Final = "vLLM's own offloading refuses CPUs"


# -- long-doc-qa ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The published reference run's sizes, and how many documents the engine's own pool holds."""

    documents: int = 46
    tokens: int = 10_000
    in_flight: int = 4
    queries: int = 2
    output: int = 128
    pool: float = 8.0

    @property
    def request_tokens(self) -> int:
        return self.tokens + _QUESTION_TOKENS + self.output

    @property
    def options(self) -> LongDocQaOptions:
        return LongDocQaOptions(
            document_length=self.tokens,
            query_per_document=self.queries,
            num_inflight_requests=self.in_flight,
            max_output_length=self.output,
            num_documents=self.documents,
            text="prose",
        )


def long_doc_qa(setting: Setting, result: Result, wanted: int | None) -> None:
    """Without cache, RAM, disk with O_DIRECT, and vLLM's native offloading: the same requests, one after the other."""
    small = Documents(documents=6, tokens=512, in_flight=2, output=8, pool=3.0)
    sizes = small if setting.is_cpu else Documents()
    request_bytes = sizes.request_tokens * setting.shape.kv_bytes_per_token
    fits = {name: int(n / _SPARE) - sizes.in_flight for name, n in room_for(request_bytes, setting.work).items()}
    documents = min(wanted or sizes.documents, *fits.values())
    if documents < 2 * sizes.pool - 1:
        raise ConfigError(f"room for {documents} documents only ({fits}): there is nothing to measure; free some")
    sizes = Documents(**(asdict(sizes) | {"documents": documents}))
    disk = setting.work / "kv"
    everything = _SPARE * (documents + sizes.in_flight) * request_bytes
    passing = (sizes.in_flight + 0.5) * request_bytes
    result.put("sizes", asdict(sizes) | {"fits": fits, "ram_gib": gib(everything), "passing_gib": gib(passing)})
    result.put("direct_io", is_direct(setting.work))
    modes: dict[str, tuple[str, ...]] = {
        "none": ("--no-cache",),
        "ram": ("--ram-gib", gib(everything)),
        "disk": ("--ram-gib", gib(passing), "--disk", str(disk), "--disk-gib", gib(everything)),
        "native": native_offloading(int(everything)),
    }
    if setting.is_cpu:
        del modes["native"]
        result.leave_out("native", _NATIVE_REFUSES)

    def job(name: str) -> Callable[[], Any]:
        def run() -> dict[str, Any]:
            fresh(disk)
            engine = setting.engine(free_port(), sizes.request_tokens, sizes.pool * sizes.request_tokens)
            with setting.served(name, (*engine, *modes[name])) as (server, ready_s):
                played = play(setting, name, server, sizes.options)
                memory = memory_of(server.pid)
            shutil.rmtree(disk, ignore_errors=True)
            return {"arguments": portable(modes[name], disk), "ready_s": ready_s, "memory": memory} | summaries(played)

        return run

    in_turn(setting, result, {name: job(name) for name in modes})
    result.put("ratios", over_none(result.measured, [name for name in modes if name in result.measured]))


def portable(arguments: tuple[str, ...], disk: Path) -> list[str]:
    """A mode's options without the path that belongs to this run."""
    return [word.replace(str(disk), "DISK") for word in arguments]


def over_none(measured: Mapping[str, Any], modes: list[str]) -> dict[str, dict[str, float]]:
    """How many times faster each mode's query round was than that without a cache, in mean TTFT and in all."""
    if "none" not in modes:
        return {}
    none = measured["none"]["query"]
    ratios = {}
    for name in modes:
        query = measured[name]["query"]
        if name != "none" and query["ttft_s"] and none["ttft_s"]:
            ratios[name] = {
                "ttft": none["ttft_s"]["mean"] / query["ttft_s"]["mean"],
                "total": none["elapsed_s"] / query["elapsed_s"],
            }
            say(f"{name}: TTFT {ratios[name]['ttft']:.2f}x, total {ratios[name]['total']:.2f}x of no cache")
    return ratios


# -- chat ----------------------------------------------------------------------------------------------------------


class GpuChatSizes(ChatSizes):
    """Sessions whose answers, of a large vocabulary, are about twice as many tokens when they are sent again."""

    @property
    def request_tokens(self) -> int:
        turns = -(-self.requests // self.sessions)
        return super().request_tokens + 2 * turns * self.output_tokens


def chat_sizes(sessions: int) -> GpuChatSizes:
    """So many long sessions: the pool holds at most eight, RAM about a third, each comes back four times."""
    return GpuChatSizes(
        sessions=sessions,
        shared_prompt_tokens=2000,
        history_tokens=10_000,
        output_tokens=100,
        qps=4.0,
        requests=4 * sessions,
        pool_sessions=min(8.0, sessions // 4),
        ram_sessions=0.35 * sessions,
    )


def fitting_sessions(kv_bytes: int, free_gib: float) -> int:
    """At most 40 sessions: as many as RAM tier and daemon hold in so much of /dev/shm, a tenth of it left free.

    Raises: ConfigError if those are fewer than twelve.
    """
    for sessions in range(40, 11, -1):
        sizes = chat_sizes(sessions)
        if float(sizes.ram_gib(kv_bytes)) + float(sizes.l2_gib(kv_bytes)) <= 0.9 * free_gib:
            return sessions
    raise ConfigError(f"{free_gib:.0f} GiB of /dev/shm hold fewer than twelve sessions: there is nothing to measure")


def chat(setting: Setting, result: Result) -> None:
    """RAM alone, for a fraction of the sessions, against that and a daemon that holds all of them."""
    kv_bytes = setting.shape.kv_bytes_per_token
    if setting.is_cpu:
        sizes = GpuChatSizes(
            sessions=6, shared_prompt_tokens=128, history_tokens=512, output_tokens=8, qps=2.0, requests=12,
            pool_sessions=2.0, ram_sessions=3.0,
        )  # fmt: skip
    else:
        sizes = chat_sizes(fitting_sessions(kv_bytes, shutil.disk_usage("/dev/shm").free / GIB))
    result.put("sizes", asdict(sizes) | {"ram_gib": sizes.ram_gib(kv_bytes), "l2_gib": sizes.l2_gib(kv_bytes)})

    def run(with_l2: bool) -> dict[str, Any]:
        name = "daemon" if with_l2 else "ram"
        engine = setting.engine(free_port(), sizes.request_tokens, sizes.pool_sessions * sizes.request_tokens)
        told = ("--ram-gib", sizes.ram_gib(kv_bytes))
        if not with_l2:
            with setting.served(name, (*engine, *told)) as (server, ready_s):
                return {"ready_s": ready_s} | summaries(play(setting, name, server, sizes.options))
        l2 = plan_l2("daemon", sizes.l2_gib(kv_bytes), "hotspan_gpu_chat")
        log = setting.work / f"l2-{setting.repetition}.log"
        with started(l2, log), setting.served(name, (*engine, *told, *l2.serve)) as (server, ready_s):
            return {"ready_s": ready_s} | summaries(play(setting, name, server, sizes.options))

    in_turn(setting, result, {"ram": lambda: run(False), "daemon": lambda: run(True)})
    result.put("ratios", chat_ratios(result.measured))


def chat_ratios(measured: Mapping[str, Any]) -> dict[str, float]:
    """RAM alone over RAM and daemon (above 1: the daemon is better), within this run."""
    if "ram" not in measured or "daemon" not in measured:
        return {}
    ram, daemon = measured["ram"]["query"], measured["daemon"]["query"]
    found = {"output throughput": daemon["output_throughput"] / max(ram["output_throughput"], 1e-9)}
    for figure, title in (("ttft_s", "TTFT"), ("inter_token_s", "ITL")):
        if ram[figure] and daemon[figure]:
            found |= {f"{title} {which}": ram[figure][which] / daemon[figure][which] for which in ("p50", "p90")}
    for title, ratio in found.items():
        say(f"{title}, RAM over RAM + daemon: {ratio:.2f}x")
    return found


# -- startup -------------------------------------------------------------------------------------------------------


def startup(setting: Setting, result: Result) -> None:
    """Seconds until ready, and memory once ready: of host, /dev/shm and GPU, by mode."""
    ram = 0.25 if setting.is_cpu else min(32.0, shutil.disk_usage("/dev/shm").free / GIB - 2)
    disk = setting.work / "kv"
    modes: dict[str, tuple[str, ...]] = {
        "none": ("--no-cache",),
        "ram small": ("--ram-gib", f"{ram / 8:g}"),
        "ram": ("--ram-gib", f"{ram:g}"),
        "disk": ("--ram-gib", f"{ram / 8:g}", "--disk", str(disk), "--disk-gib", f"{ram:g}"),
        "native": native_offloading(int(ram * GIB)),
    }
    if setting.is_cpu:
        del modes["native"], modes["ram small"]
        result.leave_out("native", _NATIVE_REFUSES)
    tokens = 2048 if setting.is_cpu else 16_384

    def job(name: str) -> Callable[[], Any]:
        def run() -> dict[str, Any]:
            fresh(disk)
            before = gpu_memory_mib()
            arguments = (*setting.engine(free_port(), tokens, 2 * tokens), *modes[name])
            with setting.served(name.replace(" ", "-"), arguments) as (server, ready_s):
                after = gpu_memory_mib()
                gpu = None if before is None or after is None else after[0] - before[0]
                first_s, second_s = _ask(server.url), _ask(server.url)
                memory = memory_of(server.pid)
            asked = {"first_request_s": first_s, "second_request_s": second_s}
            return {
                "arguments": portable(modes[name], disk),
                "ready_s": ready_s,
                "gpu_mib": gpu,
                "memory": memory,
            } | asked

        return run

    in_turn(setting, result, {name: job(name) for name in modes})
    if "none" in result.measured:
        none = result.measured["none"]["ready_s"]
        more = {
            n: round(result.measured[n]["ready_s"] - none, 2) for n in modes if n in result.measured and n != "none"
        }
        result.put("seconds more than none", more)


def _ask(url: str) -> float:
    """Seconds that one short request takes."""
    body = {"model": "model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begun = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()
    return time.monotonic() - begun
