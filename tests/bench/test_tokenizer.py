"""Requests that are made with the model's tokenizer in the client."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import typer
from tokenizers import Tokenizer
from typer.testing import CliRunner

from benchmarks.peers.material import DATASET, TOKENIZERS, material
from conftest import StartServer
from hotspan.bench.config import BenchConfig
from hotspan.bench.quality import quality_of
from hotspan.bench.records import RequestRecord, RoundName
from hotspan.bench.runner import Progress, run_rounds
from hotspan.bench.summary import summarize
from hotspan.bench.tokenizer import ModelTokenizer
from hotspan.bench.workloads.alignment import Alignment
from hotspan.bench.workloads.single_tokens import SingleTokens
from hotspan.cli.bench import app
from hotspan.core.errors import ConfigError

RAG = {"workload": "rag-qa-quality", "rag_dataset": DATASET, "rag_doc_align_tokens": 64}


@pytest.fixture(autouse=True, scope="module")
def directory() -> Iterator[None]:
    """The tests run in a directory that has the tokenizers and the dataset."""
    with material():
        yield


class Findings(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def found(self, what: str) -> None:
        self.said.append(what)


def loaded(name: str) -> ModelTokenizer:
    tokenizer = ModelTokenizer.load(Path(name))
    assert tokenizer is not None
    return tokenizer


def tokens(name: str, text: str) -> int:
    tokenizer = Tokenizer.from_file(f"{name}/tokenizer.json")
    tokenizer.no_truncation()
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_has_as_many_tokens_as_words(name: str) -> None:
    """In any order, with or without a space in front; words that only look like one token are not drawn."""
    pool = SingleTokens.draw(loaded(name), 10_100, 3)
    assert pool.is_led == (name != "sentencepiece")
    assert len(set(pool.words)) == 10_100 and {len(word) for word in pool.words} == {2, 4}
    for count in (0, 1, 7, 500):
        assert tokens(name, pool.text(count, count)) == count
    shuffled = list(pool.words)
    Random(1).shuffle(shuffled)
    assert tokens(name, pool.join(shuffled)) == 10_100
    assert pool == SingleTokens.draw(loaded(name), 10_100, 3) != SingleTokens.draw(loaded(name), 10_100, 4)


def test_a_tokenizer_with_too_few_words_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"has 10100 words of one token each, and .* need 10101: leave out --model-config"
    ):
        SingleTokens.draw(loaded("byte-level"), 10_101, 1)


class Uneven(ModelTokenizer):
    """Counts a token more in a text of several words."""

    def count(self, text: str) -> int:
        return super().count(text) + (" " in text.strip())


def test_a_tokenizer_whose_words_are_not_independent_is_refused() -> None:
    tokenizer = Uneven(Tokenizer.from_file("byte-level/tokenizer.json"))
    with pytest.raises(ConfigError, match="5 words are 6 tokens"):
        SingleTokens.draw(tokenizer, 5, 1)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_documents_begin_at_a_multiple_of_the_chunk(name: str) -> None:
    """What the chat template and the instructions take, and each document, are whole chunks; no document is cut."""
    alignment = Alignment(loaded(name), 48, 1)
    head = "" if name == "no-template" else "<s><|system|>\nAnswer.<|end|>\n<|user|>\n"
    assert loaded(name).tokens_before_chat == tokens(name, head)
    opening = alignment.opening("Read this.\n")
    assert opening.startswith("Read this.\n") and (tokens(name, head) + tokens(name, opening)) % 48 == 0
    documents = [alignment.document(text) for text in ("one", "two", "baba" * 48)]
    assert [tokens(name, text) % 48 for text in documents] == [0, 0, 0]
    assert [text.split("\n")[0] for text in documents] == ["one", "two", "baba" * 48]
    assert documents[0].split("\n")[1] != documents[1].split("\n")[1]
    assert alignment.document(documents[0]) == documents[0], "a text of whole chunks is left alone"


def test_a_directory_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    """A file that is no tokenizer is an error."""
    assert ModelTokenizer.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json can't be read"):
        ModelTokenizer.load(tmp_path)


@pytest.mark.parametrize(("directory", "ids"), [("byte-level", "sample"), ("", "case"), (".", "case")])
def test_the_tokenizer_decides_what_is_sent(directory: str, ids: str, serve: StartServer) -> None:
    """Where --model-config has one, LMCache's requests are sent; elsewhere the others. Either is told first."""
    server, findings = serve(), Findings()
    flat = {"workload": "rag-qa-quality", "rag_dataset": DATASET, "model_config": directory, "engine_url": server.url}
    result = run_rounds(BenchConfig.from_flat(flat), findings)
    assert all(record.request_id.startswith(ids) for record in result.query.records) and not result.failed
    told = "requests: LMCache's, made with the tokenizer of byte-level" if ids == "sample" else "without a tokenizer"
    assert [told in text for text in findings.said] == [False, True]
    assert [record.sample_id for record in result.query.records] == (
        ["2hop__1_2", "5a8b", "2", "3", "4", "7"] if ids == "sample" else [""] * 6
    )


def test_other_workloads_take_no_tokenizer(serve: StartServer) -> None:
    """A directory whose tokenizer does not suit is no error for them, and nothing is said of requests."""
    findings = Findings()
    flat = {"workload": "random-prefill", "rp_num_requests": 1, "model_config": "byte-level"}
    run_rounds(BenchConfig.from_flat({**flat, "engine_url": serve().url}), findings)
    assert len(findings.said) == 1


def test_documents_are_prefilled_alone_and_found_at_their_chunk(serve: StartServer) -> None:
    """Each document is sent once behind the instructions; the questions' prompts are made of the same texts."""
    server = serve()
    result = run_rounds(BenchConfig.from_flat({**RAG, "model_config": "byte-level", "engine_url": server.url}))
    warm_up = result.round(RoundName.WARM_UP)
    assert warm_up is not None
    contents = [body["messages"][0]["content"] for body in server.served.bodies]
    alone = contents[-len(result.query.records) * 2 - len(warm_up.records) :][: len(warm_up.records)]
    opening = alone[0][: alone[0].index(" Title") if " Title" in alone[0] else alone[0].index("Title 0")]
    documents = [text.removeprefix(opening) for text in alone]
    assert len(set(documents)) == len(documents) == 12
    for asked in contents[-len(result.query.records) :]:
        rest = asked.removeprefix(opening)
        while found := [text for text in documents if rest.startswith(text)]:
            rest = rest.removeprefix(found[0])
        assert rest.startswith("\n\nAnswer the question")


def test_template_variables_are_in_every_request(serve: StartServer) -> None:
    """true, false and whole numbers have their types; without variables the body has no field for them."""
    kwargs = {"thinking": "False", "effort": "high", "depth": "-3"}
    for given, sent in ((kwargs, {"thinking": False, "effort": "high", "depth": -3}), ({}, None)):
        server = serve()
        flat = {**RAG, "rag_template_kwargs": given, "model_config": "byte-level", "engine_url": server.url, "check": 1}
        run_rounds(BenchConfig.from_flat(flat))
        assert {json.dumps(body.get("chat_template_kwargs")) for body in server.served.bodies} == {json.dumps(sent)}


@pytest.mark.parametrize("flags", [{"rag_output": "a.json"}, {"rag_doc_align_tokens": 64}])
@pytest.mark.parametrize("more", [{}, {"rag_dataset": DATASET}])
def test_flags_of_these_requests_are_refused_without_a_tokenizer(
    flags: dict[str, Any], more: dict[str, Any], serve: StartServer
) -> None:
    flat = {"workload": "rag-qa-quality", "engine_url": serve().url, **flags, **more}
    with pytest.raises(ConfigError, match="--rag-output and --rag-doc-align-tokens are for requests with"):
        run_rounds(BenchConfig.from_flat(flat))


def answers(body: dict[str, Any]) -> tuple[str, ...] | None:
    """The first question is answered in full, the second one without an end."""
    content = body["messages"][0]["content"]
    if "Who keeps" in content:
        return ("So: <final_answer>The", " miller</final_answer>")
    return ("<final_answer>yes",) if "Is it so" in content else None


@pytest.mark.parametrize("path", ["", "elsewhere/answers.json"])
def test_each_answer_is_in_a_file(path: str, serve: StartServer, tmp_path: Path) -> None:
    """Its sample, F1, answer and times; null for the F1 of what is not complete. The settings are those that acted."""
    flags = ["--workload", "rag-qa-quality", "--rag-dataset", DATASET, "--rag-num-samples", "2", "-q"]
    flags += ["--rag-template-kwargs", "a=1", "--rag-template-kwargs", "b=x", "--model-config", "byte-level"]
    flags += ["--output", str(tmp_path), *(["--rag-output", str(tmp_path / path)] if path else [])]
    root = typer.Typer()
    root.add_typer(app, name="bench")
    url = serve(answers=answers).url
    done = CliRunner().invoke(root, ["bench", "engine", "--engine-url", url, *flags])
    written = tmp_path / (path or "rag_qa_quality.json")
    assert done.exit_code == 0, done.output
    assert f"written: {written}" in done.output
    found = json.loads(written.read_text())
    assert list(found) == ["run_fingerprint", "config", "model", "summary", "per_sample"] and found["model"] == "small"
    assert found["config"] == {
        "dataset": DATASET,
        "num_samples": 2,
        "max_output_length": 1024,
        "doc_align_tokens": 256,
        "template_kwargs": {"a": 1, "b": "x"},
        "output_path": str(written),
    }
    assert found["summary"] == {"num_samples": 2, "num_parsed": 1, "parse_rate": 0.5, "f1_mean": 1.0}
    times = [sample.pop("ttft") for sample in found["per_sample"]]
    assert all(ttft >= 0 for ttft in times)
    assert found["per_sample"] == [
        {"sample_id": "2hop__1_2", "f1": 1.0, "parsed": True, "answer": "The miller", "num_output_tokens": 2},
        {"sample_id": "5a8b", "f1": None, "parsed": False, "answer": "", "num_output_tokens": 1},
    ]
    summary = json.loads((tmp_path / "bench_summary.json").read_text())["results"]
    assert (summary["parse_rate"], summary["parsed_f1"]) == (0.5, 1.0)
    assert "answers in tags" in done.output


def test_a_failed_request_is_a_sample_without_times(serve: StartServer) -> None:
    """It has no answer, no F1 and a TTFT of -1 s, and counts as one that is not parsed."""
    server = serve(answers=answers, fails=lambda content: 500 if "Who keeps" in content else 0)
    flat = {**RAG, "rag_num_samples": 1, "model_config": "byte-level", "engine_url": server.url}
    found = quality_of(run_rounds(BenchConfig.from_flat(flat)), Path("any"))
    sample = {"sample_id": "2hop__1_2", "f1": None, "parsed": False, "answer": "", "ttft": -1.0, "num_output_tokens": 0}
    assert found["per_sample"] == [sample]
    assert found["summary"] == {"num_samples": 1, "num_parsed": 0, "parse_rate": 0.0, "f1_mean": 0.0}


def test_no_file_without_samples(serve: StartServer, tmp_path: Path) -> None:
    """Other runs write no file of answers, and have no parse rate."""
    root = typer.Typer()
    root.add_typer(app, name="bench")
    flags = ["--workload", "rag-qa-quality", "--rag-num-cases", "1", "--rag-document-length", "40", "-q"]
    done = CliRunner().invoke(root, ["bench", "engine", "--engine-url", serve().url, "--output", str(tmp_path), *flags])
    assert done.exit_code == 0 and not (tmp_path / "rag_qa_quality.json").exists(), done.output
    assert json.loads((tmp_path / "bench_summary.json").read_text())["results"]["parse_rate"] is None


def test_failures_and_cut_answers_are_not_parsed() -> None:
    """The parse rate is over all samples, the F1 over the parsed ones."""

    def record(answer: str, f1: float, *, good: bool = True) -> RequestRecord:
        return RequestRecord("a", 0, good, 0.0, 1.0, 2.0, answer=answer, f1=f1, is_right=f1 == 1, sample_id="a")

    whole = "<final_answer>yes</final_answer>"
    found = [record(whole, 1.0), record("<final_answer>no</final_answer>", 0.5), record(whole, 1.0, good=False)]
    summary = summarize([*found, record(whole + " <final_answer>ye", 1.0), record("yes", 1.0)], 1.0, None, None)
    assert (summary.scored, summary.parsed, summary.parse_rate, summary.parsed_f1) == (5, 2, 0.4, 0.75)


def test_a_comparison_of_servers_writes_no_file_of_answers(serve: StartServer) -> None:
    """--rag-output is refused rather than ignored."""
    root = typer.Typer()
    root.add_typer(app, name="bench")
    flags = ["--workload", "rag-qa-quality", "--rag-output", "a.json"]
    done = CliRunner().invoke(root, ["bench", "compare", serve().url, serve().url, *flags])
    assert done.exit_code == 2 and "--rag-output is for `bench engine`" in done.output
