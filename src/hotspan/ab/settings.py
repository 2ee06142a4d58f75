"""What `hotspan ab` is asked to do."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from hotspan.config.kinds import COUNT, NATURAL, NOT_NEGATIVE, SECONDS, SHARE, between, several
from hotspan.config.options import check, json_option, option, options_of
from hotspan.core.errors import ConfigError

_SIDES = "Sides"
_SET = "Questions"
_VERDICT = "Verdict"
_FILES = "Files"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbSettings:
    """One comparison, or one check of reproducibility (`same`, `same_serve`)."""

    a: str = option("", "URL of server A, the reference.", panel=_SIDES)
    b: str = option("", "URL of server B, the candidate.", panel=_SIDES)
    a_serve: str = option(
        "", 'Start server A: MODEL and options of `hotspan serve`, as one text: "MODEL --no-cache".', panel=_SIDES
    )
    b_serve: str = option("", "Start server B, likewise.", panel=_SIDES)
    start: Literal["auto", "together", "in-turn"] = option(
        "auto",
        "When servers that are started run: together, in-turn, or auto: together if memory allows, on CPUs.",
        panel=_SIDES,
    )
    router: str = option(
        "", "URL of a `hotspan route --expose` whose --split has a canary: A is the rest.", panel=_SIDES
    )
    canary: tuple[str, ...] = option(
        (), "URL of a replica of the canary, as the router has it: B. May be repeated.", panel=_SIDES
    )
    same: str = option("", "Check that the server at this URL repeats its answers. No comparison.", panel=_SIDES)
    same_serve: str = option("", "The same, of a server that is started, and started again.", panel=_SIDES)
    model: str = option("", "Model name. Default: the first model that each server lists.", panel=_SIDES)
    b_model: str = option("", "Model name of B. Default: --model.", panel=_SIDES)
    api_key: str = option("", "API key to send as a bearer token. Default: OPENAI_API_KEY.", panel=_SIDES)
    start_timeout_s: float = option(600.0, "Time for a server to start, in seconds.", kind=SECONDS, panel=_SIDES)
    request_timeout: float = option(
        600.0, "Maximum time without received data before a request fails, in seconds.", kind=SECONDS, panel=_SIDES
    )
    set: Path | None = option(None, "JSONL file with one question per line. Default: generated questions.", panel=_SET)
    items: int = option(
        0,
        "Number of questions. Default: the whole file, or as many generated as the verdict needs.",
        kind=NATURAL,
        panel=_SET,
    )
    max_tokens: int = option(64, "Maximum length of an answer, in tokens.", kind=COUNT, panel=_SET)
    temperature: float = option(0.0, "Temperature. Tokens are comparable at 0.", kind=NOT_NEGATIVE, panel=_SET)
    seed: int = option(
        42, "Seed of the generated questions, of the order, of sampling and of intervals.", kind=NATURAL, panel=_SET
    )
    concurrency: int = option(1, "Requests in flight, over both sides.", kind=COUNT, panel=_SET)
    top_logprobs: int = option(
        5, "Log probabilities per token to compare; 0 asks for none.", kind=between(0, 20), panel=_SET
    )
    no_reuse: bool = option(
        False, "Give each request a cache_salt of its own, so that no prompt is found in a cache.", panel=_SET
    )
    repeats: int = option(
        2, "With --same: how often each question is asked again per condition.", kind=COUNT, panel=_SET
    )
    levels: tuple[int, ...] = option(
        (4, 16),
        "With --same: concurrency to check beside 1. May be repeated. Default: 4, 16.",
        kind=several(COUNT),
        name="level",
        panel=_SET,
    )
    max_drift: float = option(
        0.005,
        "Maximum share of answers that may differ above the noise floor, such as 0.5%.",
        kind=SHARE,
        panel=_VERDICT,
    )
    detect: float = option(0.02, "Drift that must be found, for the number of items.", kind=SHARE, panel=_VERDICT)
    json: bool = json_option(panel=_FILES)
    output: Path | None = option(None, "Write the result to this JSON file.", panel=_FILES)
    report: Path | None = option(None, "Write a report to this HTML file.", panel=_FILES)
    review: Path | None = option(
        None, "Write the different answers, blinded, to this .jsonl or .csv file, for people to judge.", panel=_FILES
    )
    logs: Path = option(Path("."), "Directory for the logs of servers that are started.", panel=_FILES)
    quiet: bool = option(False, "Do not show progress.", also="-q", panel=_FILES)
    command: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        """Raises: ConfigError for options that do not fit together."""
        check(self)
        self._check_sides()
        for flag, url in (("--a", self.a), ("--b", self.b), ("--router", self.router), ("--same", self.same)):
            if url and not url.startswith(("http://", "https://")):
                raise ConfigError(f"{flag} must start with http:// or https://, not {url!r}")
        if not self.max_drift:
            raise ConfigError("--max-drift must be above 0: no number of items shows that nothing ever differs")
        if self.detect <= self.max_drift and not self.is_same:
            raise ConfigError(
                f"--detect {self.detect:.2%} must be above --max-drift {self.max_drift:.2%}: a drift within that passes"
            )
        if self.review is not None and self.review.suffix not in (".jsonl", ".csv"):
            raise ConfigError(f"--review {self.review} must end in .jsonl or .csv")
        self._check_effects()

    def _check_sides(self) -> None:
        if self.same and self.same_serve:
            raise ConfigError("both --same and --same-serve name the server to check: give one of them")
        others = [self.a, self.b, self.a_serve, self.b_serve, self.router, *self.canary]
        if self.is_same:
            if any(others):
                raise ConfigError("--same checks one server alone: leave --a, --b, --router and --canary out")
            return
        if bool(self.router) != bool(self.canary):
            raise ConfigError("--router and --canary belong together: give both, or neither")
        if self.router:
            if any((self.a, self.b, self.a_serve, self.b_serve)):
                raise ConfigError("--router has both sides behind it: leave --a and --b out")
            return
        for name, url, serve in (("a", self.a, self.a_serve), ("b", self.b, self.b_serve)):
            if bool(url) == bool(serve):
                raise ConfigError(f"side {name.upper()} is not clear: give either --{name} URL or --{name}-serve TEXT")

    def _check_effects(self) -> None:
        """Raise ConfigError for an option that does nothing in this kind of run."""
        served = [bool(each) for each in (self.a_serve, self.b_serve, self.same_serve)]
        idle = (
            (self.is_same, "with --same", ("b_model", "concurrency", "detect", "review")),
            (not self.is_same, "without --same", ("repeats", "levels")),
            (bool(self.router), "with --router, whose sides have one model", ("b_model",)),
            (sum(served) < 2, "without --a-serve and --b-serve", ("start",)),
            (not any(served), "without a server that is started", ("start_timeout_s", "logs")),
        )
        for each, declared in zip(fields(self), options_of(type(self)), strict=False):
            for is_so, when, names in idle:
                if is_so and each.name in names and getattr(self, each.name) != each.default:
                    raise ConfigError(f"{declared.flag} has no effect {when}: leave it out")

    @property
    def is_same(self) -> bool:
        """Whether one server is checked, and not two compared."""
        return bool(self.same or self.same_serve)
