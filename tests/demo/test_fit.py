"""The demo's sizes follow from what a prefill costs on the machine at hand."""

import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hotspan.bench import counters
from hotspan.bench.client import ModelCard
from hotspan.bench.config import BenchConfig
from hotspan.bench.runner import check_fit
from hotspan.core.errors import ConfigError
from hotspan.demo import run as demo_run
from hotspan.demo.fit import BUDGET_S, MIN_COMPUTE_S, STOP_S, Costs, Sample, compute_s, fit, largest
from hotspan.demo.plan import MODE_NAMES, DemoRequest, DemoSizes
from hotspan.demo.run import _options, run_demo, served_type
from hotspan.plan.host import native_type

FAKE = Path(__file__).parent / "fake_hotspan.py"
FAST = Costs(start_s=15, linear=2.0e-4, quadratic=1.1e-8, token_s=0.01)
"""Two cores with AMX: benchmarks/results/long-doc-qa.json has 2.4 s for 8,192 tokens."""

SLOW = Costs(start_s=35, linear=2.0e-3, quadratic=2.6e-7, token_s=0.03)
"""Two AVX2 cores in float32: 34 s for 8,192 tokens."""

EMULATED = Costs(start_s=35, linear=6.0e-3, quadratic=4.8e-7, token_s=0.08)
"""The same in bfloat16: 81 s."""


def test_a_fast_machine_has_the_full_sizes() -> None:
    """Where everything takes less than five minutes, the sizes are the defaults."""
    assert fit(DemoSizes(), FAST, MODE_NAMES) == DemoSizes()


@pytest.mark.parametrize("costs", [SLOW, EMULATED], ids=["float32", "emulated"])
def test_a_slow_machine_has_smaller_ones(costs: Costs) -> None:
    """Starts, stops and computing take less than seven minutes, and questions still have long texts."""
    sizes = fit(DemoSizes(), costs, MODE_NAMES)
    assert sizes.document_tokens < 8192 and sizes.documents > sizes.in_flight
    took_s = compute_s(sizes, costs, MODE_NAMES)
    once_s = 6 * (costs.start_s + STOP_S)
    assert took_s <= max(BUDGET_S - once_s, MIN_COMPUTE_S)
    assert took_s > 0.3 * MIN_COMPUTE_S, "much smaller than it had to be"
    assert took_s + once_s < 7 * 60


def test_fewer_modes_afford_more_and_repetitions_less() -> None:
    """The budget is for all that is played."""
    sizes = fit(DemoSizes(), SLOW, MODE_NAMES)
    assert fit(DemoSizes(), SLOW, ("ram",)).document_tokens > sizes.document_tokens
    assert fit(DemoSizes(), SLOW, MODE_NAMES, 3).document_tokens < sizes.document_tokens


def test_no_request_is_longer_than_the_model_reads() -> None:
    """Documents are as long as fits with question and answer, whatever the machine could compute."""
    for chosen in (fit(DemoSizes(), FAST, MODE_NAMES, max_tokens=8192), largest(DemoSizes(), 8192)):
        assert 7000 < chosen.document_tokens < chosen.request_tokens <= 8192
    assert largest(DemoSizes(), 32768) == DemoSizes()


@pytest.mark.parametrize("max_tokens", [8192, 32768])
@pytest.mark.parametrize("costs", [FAST, SLOW, EMULATED], ids=["fast", "float32", "emulated"])
def test_the_benchmark_takes_the_lengths_of_the_demo(costs: Costs, max_tokens: int) -> None:
    """What the demo asks, whatever it fits, is nothing that the benchmark's look at the server's context refuses: the
    server is started with a context for exactly these requests. One that is a token too short is refused."""
    for sizes in (DemoSizes(), largest(DemoSizes(), max_tokens), fit(DemoSizes(), costs, MODE_NAMES, 1, max_tokens)):
        options = _options(DemoRequest(sizes=sizes))
        config = BenchConfig(options=options, model="demo", engine_url="http://127.0.0.1:1")
        check_fit(config, [ModelCard("demo", max_tokens=sizes.request_tokens)])
        assert options.length is not None
        with pytest.raises(ConfigError, match="lower --ldqa-document-length or --ldqa-max-output-length"):
            check_fit(config, [ModelCard("demo", max_tokens=options.length.tokens - 1)])
        check_fit(config, [ModelCard("demo"), ModelCard("another", max_tokens=1)])


def test_slow_answers_are_shortened_before_documents_are() -> None:
    """Where each token takes 80 ms, answers are a quarter, so that documents have most of the time."""
    sizes = fit(DemoSizes(), EMULATED, MODE_NAMES)
    assert sizes.output_tokens == 4 and fit(DemoSizes(), FAST, MODE_NAMES).output_tokens == 16


def test_no_machine_is_too_slow() -> None:
    """The smallest sizes are played where none fit the budget."""
    sizes = fit(DemoSizes(), Costs(100, 1.0, 0.0, 1.0), MODE_NAMES)
    assert (sizes.documents, sizes.document_tokens) == (4, 512)


@pytest.mark.parametrize("costs", [FAST, SLOW, EMULATED], ids=["fast", "float32", "emulated"])
def test_what_short_prompts_take_tells_what_long_ones_take(costs: Costs) -> None:
    """From two prompts that take seconds follows the time of one of 8,192 tokens, attention's square included."""
    samples = [Sample(tokens, costs.prefill_s(tokens), costs.token_s) for tokens in (512, 1024)]
    found = Costs.of(costs.start_s, samples)
    assert found.prefill_s(8192) == pytest.approx(costs.prefill_s(8192), rel=0.01)
    assert Costs.of(0, samples[:1]).prefill_s(512) == pytest.approx(costs.prefill_s(512))


@pytest.mark.parametrize(
    ("flags", "limit", "dtype"),
    [
        ("flags : fpu avx2 fma", "", "float32"),
        ("flags : avx2 avx512f avx512_vnni", "", "float32"),
        ("flags : avx2 avx512f avx512_bf16", "", "bfloat16"),
        ("flags : avx512f amx_bf16 amx_tile", "", "bfloat16"),
        ("flags : avx512f amx_bf16 amx_tile", "AVX2", "float32"),
        ("flags : avx512_bf16", "AVX512_CORE_BF16", "bfloat16"),
        ("Features : fp asimd bf16", "", "bfloat16"),
        ("Features : fp asimd", "", "float32"),
    ],
)
def test_the_type_is_what_the_cpu_computes(tmp_path: Path, flags: str, limit: str, dtype: str) -> None:
    """bfloat16 where there are instructions for it that may be used, else float32, with the reason."""
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    found = native_type({"ONEDNN_MAX_CPU_ISA": limit} if limit else {}, tmp_path / "cpuinfo")
    assert found.dtype == dtype and found.why
    assert native_type({}, tmp_path / "none").dtype == "bfloat16"


def test_a_type_that_is_given_is_taken() -> None:
    """--dtype decides."""
    assert (served_type("float16", {}).dtype, served_type("float16", {}).why) == ("float16", "as given")


def test_the_demo_measures_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server is started to be measured; what it took, the type and the sizes are said before the first mode."""
    servers: list[tuple[str, ...]] = []

    def serve(model: Path, arguments: tuple[str, ...]) -> tuple[str, ...]:
        servers.append(arguments)
        return (sys.executable, str(FAKE), "serve", str(model), *arguments)

    def value(arguments: tuple[Any, ...], flag: str) -> str:
        return str(arguments[arguments.index(flag) + 1])

    monkeypatch.setattr(demo_run, "serve_command", serve)
    monkeypatch.setattr(counters, "_WINDOW_S", 0.02)
    monkeypatch.setattr(
        demo_run,
        "fit",
        lambda sizes, costs, modes, repetitions, max_tokens: DemoSizes(documents=3, document_tokens=300),
    )
    console = Console(record=True, width=200)
    request = DemoRequest(
        output=tmp_path,
        threads=1,
        model="made",
        model_size="tiny",
        mode=("none", "ram"),
        dtype="bfloat16",
        is_fitted=True,
    )
    run_demo(request, console)
    said = console.export_text()
    assert "served in bfloat16" in said and "tokens per second over" in said and "3 documents of 300 tokens" in said
    assert said.index("Measured:") < said.index("3 documents")
    assert len(servers) == 3 and (tmp_path / "server-measure.log").exists()
    assert int(value(servers[0], "--max-model-len")) > 8192 > int(value(servers[1], "--max-model-len"))
