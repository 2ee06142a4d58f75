"""The request streams of the workloads that are a list of prompts, and the times at which an open loop sends them."""

import asyncio
import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from simulated import SimulatedLoop, run_simulated

from hotspan.bench.config import BenchConfig
from hotspan.bench.records import Loop, RequestRecord, RoundName
from hotspan.bench.workloads import WORKLOADS
from hotspan.bench.workloads.base import AwaitingLoop, OpenLoop, Prompt, Round, Scale
from hotspan.bench.workloads.questions import Case, Question, read_cases
from hotspan.bench.workloads.sessions import due_times
from hotspan.core.errors import ConfigError


def config(workload: str, **flat: object) -> BenchConfig:
    return BenchConfig.from_flat({"workload": workload, **flat})


def rounds(config: BenchConfig, tokens_per_word: int | None = None) -> dict[RoundName, Round]:
    async def count_tokens(text: str) -> int | None:
        return None if tokens_per_word is None else tokens_per_word * len(text.split())

    made = asyncio.run(config.options.rounds(Scale(1, 3000), config.seed, count_tokens))
    return {each.name: each for each in map(config.paced, made)}


def prompts(config: BenchConfig, name: RoundName = RoundName.QUERY) -> list[Prompt]:
    found = rounds(config)[name].prompts  # type: ignore[attr-defined]
    return list(found)


def digest(found: dict[RoundName, Round]) -> str:
    """Of every id, text and length of answer in their order, and of the times of arrival."""
    digested = sha256()
    for name, each in found.items():
        due_ms = [round(due_s * 1000) for due_s in getattr(each, "due_s", ())]
        digested.update(f"{name.value} {each.loop.value} {due_ms}".encode())
        for prompt in each.prompts:  # type: ignore[attr-defined]
            digested.update(f"{prompt.request_id} {prompt.max_tokens} {prompt.content}".encode())
    return digested.hexdigest()[:16]


def a_trace(directory: Path) -> str:
    """Three requests, of which the second shares two blocks with the first; the third's last part has no key."""
    rows = (
        {"timestamp": 2000, "input_length": 1100, "output_length": 7, "hash_ids": [1, 2, 3]},
        {"timestamp": 2500, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, 4]},
        {"timestamp": 4000, "input_length": 600, "output_length": 1, "hash_ids": [5]},
    )
    path = directory / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("workload", "flat", "golden"),
    [
        ("random-prefill", {"rp_request_length": 50, "rp_num_requests": 5}, "725daee44d6b3843"),
        ("prefix-suffix-tuner", {"psf_context_length": 700, "psf_thrash": 1.0}, "f7c38bf6302f9890"),
        ("long-doc-permutator", {"ldp_context_length": 40, "ldp_system_prompt_length": 9}, "bf2227e5d4d81eae"),
        ("rag-qa-quality", {"rag_document_length": 40, "rag_num_cases": 2}, "2ed520a4575258ae"),
        ("prefix_repetition", {"prefix_repetition_num_prompts": 30}, "47d28161c13935c9"),
        ("trace-replay", {}, "a8b5124e9b1f2e76"),
        ("random-prefill", {"rp_request_length": 50, "request_rate": 2.0}, "f877c024baa14b2d"),
    ],
)
def test_the_stream_is_the_one_of_earlier_versions(
    workload: str, flat: dict[str, object], golden: str, tmp_path: Path
) -> None:
    """The same seed and flags send the same requests as ever, so that figures compare; other seeds differ."""
    more = {"trace_file": a_trace(tmp_path)} if workload == "trace-replay" else {}
    assert digest(rounds(config(workload, **flat, **more))) == golden
    if workload != "random-prefill":
        assert digest(rounds(config(workload, **flat, **more, seed=43))) != golden


def test_random_prefill_is_what_users_know() -> None:
    """Request i is its number and "hi" length-10 times, one token, all at once, without a warm-up."""
    found = rounds(config("random-prefill", rp_request_length=13, rp_num_requests=2))
    assert RoundName.WARM_UP not in found and found[RoundName.QUERY].in_flight == 2  # type: ignore[attr-defined]
    asked = prompts(config("random-prefill", rp_request_length=13, rp_num_requests=2))
    assert [(p.request_id, p.content, p.max_tokens) for p in asked] == [
        (f"prefill_{i}", f"Request {i}: hi hi hi", 1) for i in range(2)
    ]


def test_the_permutators_orders_differ() -> None:
    """All contexts are in each request behind the same system prompt, between separators; no order comes twice."""
    flat = {"ldp_num_contexts": 3, "ldp_num_permutations": 4, "ldp_context_length": 30}
    found = rounds(config("long-doc-permutator", **flat))
    asked = prompts(config("long-doc-permutator", **flat), RoundName.WARM_UP) + prompts(
        config("long-doc-permutator", **flat)
    )
    assert len(found[RoundName.WARM_UP].prompts) == 2 and len(asked) == 6  # type: ignore[attr-defined]
    parts = [prompt.content.split(" # # ") for prompt in asked]
    assert len({part[0] for part in parts}) == len({part[-1] for part in parts}) == 1
    assert len({frozenset(part[1:-1]) for part in parts}) == 1 and len({tuple(part) for part in parts}) == 6
    with pytest.raises(ConfigError, match="has 6 orders"):
        rounds(config("long-doc-permutator", **flat | {"ldp_num_permutations": 5}))


def test_questions_have_their_answers_in_the_documents() -> None:
    """Each question's documents are those of its case, in an order of its own, and one of them has the answer."""
    quality = config("rag-qa-quality", rag_num_cases=2, rag_num_documents=4, rag_num_questions=6)
    found = rounds(quality)
    asked, learnt = prompts(quality), prompts(quality, RoundName.WARM_UP)
    assert (len(learnt), len(asked)) == (4, 12) and asked == prompts(quality, RoundName.ANEW)
    assert list(found)[2:] == [RoundName.QUERY, RoundName.ANEW, RoundName.CHECK]
    for case, mine in enumerate((asked[:6], asked[6:])):
        parts = [prompt.content.split(" # # ") for prompt in (*learnt[2 * case : 2 * case + 2], *mine)]
        assert len({frozenset(part[:-1]) for part in parts}) == 1 and len({tuple(part[:-1]) for part in parts}) == 8
    for prompt in asked:
        assert prompt.answers and any(prompt.answers[0] in text for text in prompt.content.split(" # # ")[:-1])
    assert not any(prompt.answers for prompt in learnt)


def test_questions_from_a_file(tmp_path: Path) -> None:
    """Documents, questions and answers are as the file says; too few orders for the questions repeat."""
    questions = [{"question": f"q{n}?", "answers": ["Yes", f"a{n}"], "kind": "own"} for n in range(3)]
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps({"documents": ["D1", "D2"], "questions": questions}) + "\n\n")
    asked = prompts(config("rag-qa-quality", rag_dataset=str(path)))
    assert [(p.request_id, p.answers) for p in asked] == [(f"case0_own{n}", ("Yes", f"a{n}")) for n in range(3)]
    assert {p.content.rsplit(" # # ", 1)[0] for p in asked} == {"D1 # # D2", "D2 # # D1"}
    assert [p.content.rsplit(" # # ", 1)[1].split()[0] for p in asked] == ["q0?", "q1?", "q2?"]
    assert {p.max_tokens for p in asked} == {1024} and all("<final_answer>" in p.content for p in asked)


@pytest.mark.parametrize(
    "record",
    [
        {"paragraphs": [{"title": "T", "paragraph_text": "one"}, {"title": "", "paragraph_text": "two"}]}
        | {"question": "Q?", "answer": "A", "answer_aliases": ["B", "A"]},
        {"context": {"title": ["T", ""], "sentences": [["on", "e"], ["two"]]}, "question": "Q?", "answers": ["A", "B"]},
        {"context": [["T", ["one"]], ["", ["two"]]], "query": "Q?", "answers": ["A", " B "]},
        {"retrieved_contexts": ["T\none", "two", " "], "user_input": "Q?", "reference": "A", "answer_aliases": ["B"]},
        {"ctxs": [{"title": "T", "text": "one"}, {"text": "two"}], "question": "Q?", "answers": ["A", "B"]},
    ],
)
def test_questions_from_published_datasets(record: dict[str, object], tmp_path: Path) -> None:
    """Records of MuSiQue, HotpotQA in both forms, RAGAS and CacheBlend have their documents, question and answers."""
    (tmp_path / "data.json").write_text(json.dumps([record, record]))
    question = Question("Q?", ("A", "B"), "question", "0")
    assert read_cases(tmp_path / "data.json", 1) == [Case(("T\none", "two"), (question,))]
    assert [case.questions[0].sample_id for case in read_cases(tmp_path / "data.json", 50)] == ["0", "1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "can't be read"),
        ("", "has no records: give"),
        ('{"documents": ["a"], "questions": [{"question": "q", "answers": ["a"]}]}\nno', "line 2 is no JSON"),
        ('{"documents": ["a"], "questions": []}', "line 1 is no case .there must be documents and questions"),
        ('{"documents": ["a"], "questions": [{"question": "q", "answers": [1]}]}', "answers must be texts"),
        ('{"documents": ["a"], "questions": [{"question": "q"}]}', "line 1 is no case .'answers or answer or ref"),
        ('[{"documents": ["a"], "answer": "q"}]', "record 1 is no case .'question or query or user_input"),
        ('{"question": "q", "answer": "a"}', "line 1 is no case .'documents or paragraphs"),
        ("[1", "is no JSON list"),
    ],
)
def test_a_file_without_cases_is_refused(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        rounds(config("rag-qa-quality", rag_dataset=str(path)))


def test_an_answer_is_right_if_it_has_a_known_one() -> None:
    """In whatever case; where none is known, it is neither right nor wrong."""
    prompt = Prompt("a", "?", 3, answers=("the Old Mill", "mill"))
    assert [prompt.is_right(text) for text in ("The MILL.", "the bridge", "")] == [True, False, False]
    assert Prompt("a", "?", 3).is_right("mill") is None
    assert [prompt.is_right(f"mill? <final_answer>{text}</final_answer>") for text in ("a mill", "no")] == [True, False]


@pytest.mark.parametrize(
    ("answer", "f1"),
    [
        ("The Old Mill.", 1.0),
        ("the old bridge", 0.5),
        ("it is the old mill", 2 * 2 / 6),
        ("bridge", 0.0),
        ("", 0.0),
        ("I think of mills. <final_answer>no</final_answer> <final_answer>old mill</final_answer>", 1.0),
    ],
)
def test_f1_is_that_of_the_words(answer: str, f1: float) -> None:
    """Precision and recall of words without case, marks and articles, against the known answer that fits best."""
    assert Prompt("a", "?", 3, answers=("an old mill", "wind")).f1(answer) == pytest.approx(f1)
    assert Prompt("a", "?", 3).f1(answer) is None


def test_the_tuners_prefixes_just_overflow_the_tier() -> None:
    """1.05 times the tier in requests, the same in both passes, with a breaker that never repeats."""
    tuner = config("prefix-suffix-tuner", psf_context_length=700, psf_thrash=2.0)
    first, second = prompts(tuner, RoundName.WARM_UP), prompts(tuner)
    assert len(first) == len(second) == int(2.0 * 1.05 * 3000 / 700)
    split = [[p.content.partition(" BR_") for p in each] for each in (first, second)]
    assert [head for head, _, _ in split[0]] == [head for head, _, _ in split[1]]
    assert split[0][0][0] == "PREFIX_00000000 " + " ".join(["hi"] * 556)
    breakers = [tail.partition(" SUFFIX ")[0] for each in split for _, _, tail in each]
    assert len(set(breakers)) == len(breakers)
    assert breakers[0] == f"{Random(44).randrange(2**32):08x} " + " ".join(["hi"] * 28)
    assert {tail.partition(" SUFFIX ")[2] for each in split for _, _, tail in each} == {" ".join(["hi"] * 107)}
    with pytest.raises(ConfigError, match="for the suffix"):
        config("prefix-suffix-tuner", psf_prefix_ratio=0.99)


def test_prefix_repetition_has_many_suffixes_for_each_prefix() -> None:
    """Ten requests begin with each of three prefixes, and no two are equal."""
    asked = prompts(config("prefix_repetition", prefix_repetition_num_prefixes=3, prefix_repetition_num_prompts=31))
    begins = [" ".join(p.content.split()[:256]) for p in asked]
    assert sorted(map(begins.count, set(begins))) == [10, 10, 10] and len({p.content for p in asked}) == 30
    assert {len(p.content.split()) for p in asked} == {512}
    with pytest.raises(ConfigError, match="number of prefixes"):
        config("prefix_repetition", prefix_repetition_num_prompts=5)


@pytest.mark.parametrize("workload", ["trace-replay", "prefix_repetition"])
def test_lengths_are_tokens_of_the_server(workload: str, tmp_path: Path) -> None:
    """Where a word is two tokens, half as many words are sent."""
    more = {"trace_file": a_trace(tmp_path)} if workload == "trace-replay" else {}
    one, two = (rounds(config(workload, **more), each)[RoundName.QUERY] for each in (None, 2))
    lengths = [[len(p.content.split()) for p in each.prompts] for each in (one, two)]  # type: ignore[attr-defined]
    assert [2 * each for each in lengths[1]] == lengths[0]


def test_a_trace_shares_text_where_it_shares_blocks(tmp_path: Path) -> None:
    """The words of equal blocks are equal; lengths, answers and times are scaled, and times begin with the first."""
    replay = config("trace-replay", trace_file=a_trace(tmp_path), trace_length_scale=0.5, trace_rate_scale=2.0)
    first, second, third = prompts(replay)
    words = [p.content.split() for p in (first, second, third)]
    assert [len(each) for each in words] == [550, 550, 300] and [p.max_tokens for p in (first, second, third)] == [
        4,
        4,
        1,
    ]
    assert words[0][:512] == words[1][:512] and words[0][512:] != words[1][512:] and words[2][:256] != words[0][:256]
    assert list(rounds(replay)[RoundName.QUERY].due_s) == [0.0, 0.25, 1.0]  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="--trace-file"):
        prompts(config("trace-replay"))


def test_sessions_are_sent_after_the_answers_that_they_await(tmp_path: Path) -> None:
    """In a closed loop a prompt comes a pause after the last of its answers, however slow; other sessions go on."""
    rows = [
        {"timestamp": at, "input_length": 600, "output_length": 2, "hash_ids": [at, at + 1], "session": session}
        | {"after": after, "think_ms": think}
        for at, session, after, think in ((0, 1, [], 0), (1, 2, [], 0), (1000, 1, [0], 2000), (1500, 1, [0, 2], 500))
    ]
    path = tmp_path / "closed.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    round = rounds(config("trace-replay", trace_file=str(path)))[RoundName.QUERY]
    assert isinstance(round, AwaitingLoop) and round.loop is Loop.CLOSED and round.expected == 4
    sent: dict[str, float] = {}

    async def main(clock: Callable[[], float]) -> None:
        async def send(prompt: Prompt, due_time: float | None = None) -> RequestRecord:
            sent[prompt.request_id] = clock()
            await asyncio.sleep(100)
            return RequestRecord(prompt.request_id, 0, False, clock(), clock(), clock())

        await round.play(send, clock)

    ended = run_simulated(main)
    assert [sent[f"r{n}"] for n in range(4)] == pytest.approx([0.0, 0.001, 102.0, 202.5])
    assert ended == pytest.approx(302.5)


def test_an_open_loop_sends_when_it_is_due_however_slow_the_server_is() -> None:
    """Answers that take 100 s delay nothing: every request is sent at its time, and its wait is counted from then."""
    paced = config("random-prefill", rp_num_requests=500, rp_request_length=11, request_rate=50.0)
    round = rounds(paced)[RoundName.QUERY]
    assert isinstance(round, OpenLoop) and round.loop is Loop.OPEN
    sent: list[tuple[float, float]] = []

    async def main(clock: Callable[[], float]) -> None:
        async def send(prompt: Prompt, due_time: float | None = None) -> RequestRecord:
            assert due_time is not None
            sent.append((due_time, clock()))
            await asyncio.sleep(100)
            return RequestRecord(prompt.request_id, 0, True, clock(), clock(), clock(), due_time=due_time)

        await round.play(send, clock)

    ended = run_simulated(main)
    assert len(sent) == 500 and max(now - due for due, now in sent) < 0.005
    assert [due for due, _ in sent] == sorted(round.due_s) and ended == pytest.approx(round.due_s[-1] + 100)
    gaps = [b - a for a, b in zip(round.due_s, round.due_s[1:], strict=False)]
    assert 0.8 / 50 < sum(gaps) / len(gaps) < 1.2 / 50 and min(gaps) < 0.2 / 50  # poisson, not even


class Laborious(Sequence[Prompt]):
    """Prompts of which each takes 4 ms to make, in simulated time."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        if at >= self._count:
            raise IndexError(at)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        loop.pass_time(0.004)
        return Prompt(f"r{at}", "text", 1)


def test_making_a_prompt_delays_no_other() -> None:
    """Prompts of 4 ms at 50 a second on average: each is sent when it is due, since none is made while one is sent."""
    due = tuple(islice(due_times(50.0, "poisson", 4), 300))
    late: list[float] = []

    async def main(clock: Callable[[], float]) -> None:
        async def send(prompt: Prompt, due_time: float | None = None) -> RequestRecord:
            await asyncio.sleep(0)  # as a client that connects: it takes more than one turn
            late.append(clock() - (due_time or 0.0))
            return RequestRecord(prompt.request_id, 0, True, clock(), clock(), clock(), due_time=due_time)

        await OpenLoop(RoundName.QUERY, Laborious(len(due)), due).play(send, clock)

    run_simulated(main)
    assert len(late) == len(due) and max(late) == pytest.approx(0)


def test_a_workload_with_times_of_its_own_takes_no_rate() -> None:
    """multi-round-chat has --mrc-qps: two rates for one round are refused."""
    with pytest.raises(ConfigError, match="arrival times of its own"):
        rounds(config("multi-round-chat", mrc_num_sessions=1, request_rate=1.0))


def test_every_workload_has_a_check_round_or_says_why() -> None:
    """`--check` finds questions to ask again in every workload that needs no file."""
    for name in WORKLOADS:
        if name not in ("trace-replay", "multi-round-chat", "rag-qa-quality"):
            assert RoundName.CHECK in rounds(config(name)), name
