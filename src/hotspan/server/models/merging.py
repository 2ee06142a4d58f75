"""Merges the answers of several models: metrics with a label for the model, lists, receipts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from hotspan.http.errors import REQUEST, HttpError
from hotspan.server.models.relay import ModelAnswer
from hotspan.server.models.served import ModelState, ServedModel
from hotspan.server.receipts import merged

LABEL = "model"


class _Page:
    """Metrics in the form of a registry."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self._metrics


def merged_metrics(pages: Mapping[str, str], models: Sequence[ServedModel]) -> bytes:
    """One page of each model's, every sample with its model; and which models are up."""
    found: dict[str, Metric] = {}
    for model, page in pages.items():
        for family in text_string_to_metric_families(page):
            metric = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            metric.samples += [sample._replace(labels={**sample.labels, LABEL: model}) for sample in family.samples]
    up = GaugeMetricFamily("hotspan_model_up", "1 while a model can answer.", labels=[LABEL])
    starts = CounterMetricFamily("hotspan_model_starts", "How often a model's process was started.", labels=[LABEL])
    for served in models:
        up.add_metric([served.name], float(served.state is ModelState.READY))
        starts.add_metric([served.name], served.starts)
    return bytes(generate_latest(_Page([up, starts, *found.values()])))


def merged_models(answers: Sequence[ModelAnswer], models: Sequence[ServedModel], created: int) -> dict[str, Any]:
    """The list of /v1/models: what the models' servers list, and by name those that can't say."""
    listed = {answer.model: json.loads(answer.content)["data"] for answer in answers if answer.status == 200}
    rows: list[Any] = []
    for model in models:
        alone = {"id": model.name, "object": "model", "created": created, "owned_by": "hotspan"}
        rows += listed.get(model.name, [alone])
    return {"object": "list", "data": rows}


def merged_receipt(answers: Sequence[ModelAnswer]) -> dict[str, Any]:
    """One receipt of all models' (an invalidation, a clearing, a shredding).

    Raises: HttpError, as `parts`.
    """
    receipts = parts(answers)
    first = next(iter(receipts.values()))
    return merged(list(receipts.values())) | {"scope": first["scope"], "models": receipts}


def merged_lists(answers: Sequence[ModelAnswer], name: str) -> dict[str, Any]:
    """One answer whose list `name` has every model's entries. Raises: HttpError, as `parts`."""
    said = parts(answers)
    rows = [
        {**row, LABEL: model} if isinstance(row, dict) else row
        for model, answer in said.items()
        for row in answer.get(name, [])
    ]
    return {**next(iter(said.values())), name: rows}


def parts(answers: Sequence[ModelAnswer]) -> dict[str, dict[str, Any]]:
    """The answer of each model.

    A model that does not know what was named (404) is left out if another one does.
    Raises: HttpError with the first refusal, naming the models for which it was not done.
    """
    refused = [answer for answer in answers if answer.status != 200]
    unknown = [answer for answer in refused if answer.status == 404]
    if len(unknown) < len(answers):
        refused = [answer for answer in refused if answer.status != 404]
    if not refused:
        return {answer.model: json.loads(answer.content) for answer in answers if answer.status == 200}
    worst = max(refused, key=lambda answer: answer.status)
    about = REQUEST if worst.status >= HTTPStatus.BAD_GATEWAY else ""  # the store is well, whatever its models are
    if len(refused) == len(answers):
        raise HttpError.answered(worst.status, worst.content, about=about)
    said = str(HttpError.answered(worst.status, worst.content).body(worst.status)["error"]["message"])
    names = ", ".join(answer.model for answer in refused)
    raise HttpError(worst.status, f"it was not done for {names}, only for the other models: {said}", about=about)
