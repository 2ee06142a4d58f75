"""Every metric that is declared moves, with each value of its labels; what moves is declared.

The lists are those of the code: whoever adds a metric, or a value of a label, adds a way to move it here.
"""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("vllm")

from docsite.reference import metrics_page
from hotspan.engine import gpus
from hotspan.engine.metrics import DEFINITIONS
from hotspan.server.models.merging import merged_metrics
from tests.engine.test_gpus import FakeNvml
from tests.server.models.rig import ADMIN_TOKEN, bearer, store

from . import ways_of_daemon, ways_of_engine, ways_of_router, ways_of_tiers
from .moved import Moved
from .pages import Pages


def test_those_of_an_engine(tmp_path: Path, tiny_model: Path) -> None:
    """Every series of hotspan's own in vLLM's metrics: caches, tiers, cost model, prefetches, blending, media, keys."""
    moved = Moved()
    with moved.watching():
        for way in ways_of_tiers.WAYS:
            (path := tmp_path / way.__name__).mkdir()
            way(path)
        for engine_way in ways_of_engine.WAYS:
            (path := tmp_path / engine_way.__name__).mkdir()
            engine_way(path, tiny_model)
    assert not moved.unmoved, f"declared, and nothing here moves {moved.unmoved}"
    assert not moved.undeclared, f"they move, and hotspan.engine.series does not have them: {moved.undeclared}"


async def test_those_of_a_router(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every metric of `hotspan route`, and each value of each of its labels."""
    pages = ways_of_router.declared()
    with ways_of_router.watching(pages):
        await ways_of_router.run(tmp_path, caplog, monkeypatch)
    assert not pages.unmoved, f"declared, and nothing here moves {pages.unmoved}"
    assert not pages.undeclared, f"they move, and are not on the page from the start: {pages.undeclared}"


def test_those_of_a_daemon(tmp_path: Path) -> None:
    """Every metric of `hotspan daemon`."""
    pages = Pages(ways_of_daemon.declared())
    for way in ways_of_daemon.WAYS:
        way(pages, tmp_path)
    assert not pages.unmoved, f"declared, and nothing here moves {pages.unmoved}"
    assert not pages.undeclared, f"they move, and are not declared: {pages.undeclared}"


async def test_those_of_a_directory_of_models() -> None:
    """Whether each model is up, and how often its process was started; of a model that died it is not."""
    declared = list(text_string_to_metric_families(merged_metrics({}, ()).decode()))
    pages = Pages(declared)
    async with store("alpha") as running:
        reply = await running.http.get("/metrics", headers=bearer(ADMIN_TOKEN))
        found = [each for each in text_string_to_metric_families(reply.text) if each.name.startswith("hotspan_")]
    pages.note(found)
    assert {name for name, _, _ in pages.moved} == {each.name for each in declared}


def test_those_of_gpus() -> None:
    """How busy each GPU is, of a library that stands in for NVML."""
    registry = CollectorRegistry()
    found = patch.object(gpus, "_collector", lambda count: gpus.GpuUtilization(FakeNvml(), {2: 2}))
    with found, gpus.gpus_shown(1, registry):
        (metric,) = registry.collect()
        assert (metric.name, [sample.value for sample in metric.samples]) == (gpus.NAME, [0.75])


def test_the_reference_has_no_other_metric() -> None:
    """docs/reference/metrics.md names what is here, and nothing else."""
    named = set(re.findall(r"^\| `(hotspan_\w+?)(?:_total)?` \|", metrics_page(), re.MULTILINE))
    daemon = {metric.name for metric in ways_of_daemon.declared()}
    router = {name for name, _, _ in ways_of_router.declared().declared}
    models = {each.name for each in text_string_to_metric_families(merged_metrics({}, ()).decode())}
    assert named == {*DEFINITIONS, gpus.NAME} | daemon | router | models
