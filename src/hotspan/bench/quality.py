"""The JSON file of answers and their scores that users of LMCache's rag-qa-quality know."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from hotspan.bench.records import BenchResult, RequestRecord
from hotspan.bench.scores import final_answer
from hotspan.bench.workloads.rag_qa_quality import INSTRUCTIONS, QUESTION, RagQaQualityOptions
from hotspan.config.options import build

QUALITY_NAME: Final = "rag_qa_quality.json"


def quality_path(result: BenchResult, directory: Path) -> Path | None:
    """Where `write_quality` is to write; None if the requests were not LMCache's of rag-qa-quality."""
    if not any(record.sample_id for record in result.query.records):
        return None
    return Path(result.config.get("rag_output") or directory / QUALITY_NAME).expanduser()


def write_quality(path: Path, result: BenchResult) -> None:
    """The answers of the query round, one by one, with their F1 (null where an answer is not complete)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(quality_of(result, path), indent=2) + "\n", encoding="utf-8")


def quality_of(result: BenchResult, path: Path) -> dict[str, Any]:
    """What `write_quality` writes."""
    settings, summary = _settings(result), result.query.summary
    return {
        "run_fingerprint": _fingerprint(result, settings),
        "config": {**settings, "output_path": str(path)},
        "model": result.config["model"],
        "summary": {
            "num_samples": summary.requests,
            "num_parsed": summary.parsed or 0,
            "parse_rate": summary.parse_rate or 0.0,
            "f1_mean": summary.parsed_f1 or 0.0,
        },
        "per_sample": [_sample(record) for record in result.query.records],
    }


def _settings(result: BenchResult) -> dict[str, Any]:
    options = build(RagQaQualityOptions, result.config, f"{RagQaQualityOptions.PREFIX}_")
    return {
        "dataset": options.dataset,
        "num_samples": options.num_samples,
        "max_output_length": options.output_length,
        "doc_align_tokens": options.doc_align_tokens,
        "template_kwargs": options.template_variables,
    }


def _fingerprint(result: BenchResult, settings: dict[str, Any]) -> str:
    """The same for runs that send the same prompts, so that their answers may be compared; LMCache's for its runs."""
    known = {
        **settings,
        "model": result.config["model"],
        "seed": result.config["seed"],
        "sample_ids": [record.sample_id for record in result.query.records],
        "system_prompt": INSTRUCTIONS,
        "question_template": QUESTION,
    }
    return sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def _sample(record: RequestRecord) -> dict[str, Any]:
    return {
        "sample_id": record.sample_id,
        "f1": round(record.f1, 4) if record.is_parsed and record.f1 is not None else None,
        "parsed": record.is_parsed,
        "answer": final_answer(record.answer),
        "ttft": round(record.ttft, 4) if record.successful else -1.0,
        "num_output_tokens": record.num_output_tokens,
    }
