"""Text that reads like English, as long as wanted, from a seed.

Benchmarks, the demo and the demo model's tokenizer need long documents that cost nothing to ship and that are the same
everywhere. A small grammar over the vocabularies of a few trades gives them names, figures, clauses and paragraphs.
"""

import re
from random import Random
from types import MappingProxyType
from typing import Final

# A symbol expands to one of its alternatives; `{x}` inside an alternative is a symbol again. Verbs stand in the past
# tense, and articles and plurals are repaired at the end, so that no rule has to know about agreement.
_GRAMMAR: Final = MappingProxyType(
    {
        "sentence": (
            "{subject} {deed}",
            "{subject} {deed}",
            "{subject} {deed}, and {subject} {deed}",
            "{subject} {deed}, but {subject} {deed}",
            "{opener}, {subject} {deed}",
            "{opener}, {subject}, which {deed}, {deed}",
            "although {subject} {deed}, {subject} {deed}",
            "when {subject} {deed}, {subject} {deed}; nobody mentioned the {theme}",
            "because {subject} {deed}, {name} asked for another {noun}",
            "the {theme} of the {noun} mattered more than its {theme}",
            "there were {count} {noun}s in {place}, {count} of them {adjective}",
            'according to {name}, "{subject} {deed}"',
            '"{subject} {deed}," wrote {name} on {date}',
            "was it the {theme}, or the {adjective} {noun}, that {deed}",
            "the report lists {count} {noun}s, {count} {noun}s and {a_thing}: see section {section}",
            "from {clock} to {clock} the {noun} {deed}",
            "between {year} and {year} the number of {noun}s rose from {figure} to {figure}",
            "the price of {a_thing} fell by {percent} (about {money} each)",
            "neither {subject} nor {subject} {deed}",
            "in {place}, {name} compared {a_thing} with the {noun} of {year}",
        ),
        "subject": (
            "the {noun}",
            "the {adjective} {noun}",
            "the {adjective}, {adjective} {noun}",
            "{a_thing}",
            "every {noun}",
            "{count} {adjective} {noun}s",
            "{name}",
            "{name}",
            "{name} of {town}",
            "the {noun} from {town}",
            "number {figure}",
        ),
        "deed": (
            "{verb} the {noun}",
            "{verb} the {adjective} {noun}",
            "{verb} {count} {noun}s",
            "{verb} {a_thing} in {place}",
            "{verb} the {noun} {manner}",
            "{verb} the {theme} of the {noun}",
            "{verb} {percent} of the {noun}s before {clock}",
            "{verb} what {name} had left in {place}",
            "waited for {a_thing}",
            "changed {manner} after {date}",
            "{verb} the {noun} and then the {noun}",
        ),
        "a_thing": ("a {noun}", "a {adjective} {noun}", "a {noun} with {a_theme}"),
        "a_theme": ("little {theme}", "remarkable {theme}", "no {theme}", "the usual {theme}", "doubtful {theme}"),
        "opener": (
            "in {year}",
            "on {date}",
            "at {clock}",
            "for {count} days",
            "near {town}",
            "in {place}",
            "as {name} had expected",
            "without {theme}",
            "despite the {theme}",
            "after some discussion",
            "in the end",
            "for once",
            "by contrast",
            "as a rule",
            "to general surprise",
            "more often than not",
        ),
        "manner": (
            "slowly",
            "at once",
            "with care",
            "by hand",
            "in silence",
            "twice",
            "again and again",
            "without a word",
            "under protest",
            "as agreed",
            "for the last time",
            "well before noon",
            "only in part",
        ),
        "name": ("{given} {family}", "{given} {family}", "{title} {family}", "{given}"),
        "title": ("Dr.", "Professor", "Captain", "Judge", "Ms.", "Mr."),
        "date": ("{day} {month}", "{day} {month} {year}"),
        "section": ("{digit}.{day}", "{digit}.{digit}.{digit}"),
        "clock": ("{hour}:{minute}",),
        "percent": ("{day} percent", "{hour}.{digit} percent", "{day}%"),
        "money": ("${figure}", "{figure} euros", "{figure} crowns"),
    }
)

# Ranges of whole numbers, half-open.
_NUMBERS: Final = MappingProxyType(
    {
        "year": (1790, 2030),
        "day": (1, 29),
        "digit": (1, 10),
        "hour": (5, 23),
        "minute": (10, 60),
        "figure": (17, 98_000),
    }
)

# A line is a symbol and some of its words. The first block serves every topic, each further block is one topic's own.
# Nouns must form their plural with -s, or -ies for -y.
_WORDS: Final = """
given Ada Alma Anton Bela Bruno Carla Cyril Dora Edda Emil Fatima Felix Gita Greta Hamid Hanna Igor Ines Ivo
given Jonas Kaito Katrin Lena Linus Mara Milo Nadia Nils Olga Otto Paula Petra Quentin Rana Rosa Samir Selma
given Tariq Tessa Ulla Vera Viktor Wanda Yara Yusuf Zora
family Abara Albrecht Bergman Castell Chaudhry Dalton Demir Eklund Farrow Fischer Gallo Haddad Holm Ibsen Jansen
family Kimura Kovacs Lindqvist Lombard Marsh Mbeki Moreau Nakano Novak Okafor Olsen Pereira Quist Rahman Rivera
family Sandoval Sorensen Tanaka Thorne Ueda Varga Vogel Whitlock Xu Yildiz Zeller
town Aldermoor Brackwater Calder Dunholm Eastmere Fernleigh Grayport Hollin Inverdale Kestrel Larkfield
town Millbrook Northwick Oakham Penrow Quarley Ravensford Saltby Thornbury Upwell Westerhaven Yarrow
month January February March April May June July August September October November December
count two three four five six seven eight nine ten eleven twelve fourteen fifteen twenty thirty forty sixty

noun harbor pilot crane anchor ferry trawler cargo lighthouse buoy captain hull container tide chart rope
adjective rusty northern tidal loaded narrow abandoned seaworthy coastal leaking foreign overdue heavy
verb moored towed unloaded repaired inspected painted delayed insured followed weighed reported sank
theme visibility tonnage ballast insurance weather discipline draught salvage
place dry-dock port quarantine harbor storage

noun patient nurse vaccine symptom ward surgeon dose trial fever clinic remedy sample record artery lung
adjective chronic mild sterile elderly pediatric severe benign viral careful infected stable clinical
verb examined treated measured prescribed isolated compared tested recorded admitted discharged halved
theme pressure immunity recovery hygiene consent evidence mortality relief
place surgery isolation intensive-care hospital quarantine

noun contract tenant court clause juror judge appeal statute lender verdict deed notary claim plaintiff
adjective binding void equitable disputed lawful written implied hostile federal joint several honest
verb signed amended breached upheld reversed dismissed enforced cited settled assigned waived drafted
theme liability damages fairness precedent negligence notice jurisdiction privilege
place chambers court custody arbitration probate

noun telescope comet planet orbit detector galaxy spectrum probe crater mirror nebula star signal eclipse
adjective faint distant infrared binary frozen luminous variable elliptical massive dusty spinning dark
verb observed tracked resolved catalogued photographed predicted crossed outshone captured calibrated
theme gravity parallax brightness noise radiation symmetry distance time
place orbit space transit eclipse opposition

noun orchard farmer seed harvest tractor meadow barn hedge pump plow beehive market fence furrow root
adjective dry fertile organic early wild stony ripe sheltered muddy grafted green autumn
verb watered planted pruned harvested fenced sold fertilized stored mulched carried weeded sowed
theme rainfall soil yield shade rotation frost manure patience
place storage spring autumn town bloom

noun server query cluster router packet cache deployment kernel thread queue replica shard scheduler token
adjective stale idle remote encrypted parallel nightly flaky redundant slow read-only hidden virtual
verb restarted replicated flushed indexed throttled migrated monitored compiled patched measured revoked
theme latency throughput consistency memory bandwidth load observability downtime
place production staging memory rotation maintenance

noun locomotive signal bridge tunnel carriage platform conductor timetable freight siding junction ticket
adjective electric delayed regional steep wooden double suburban freight empty punctual noisy express
verb hauled coupled boarded crossed missed electrified widened passed inspected rerouted closed opened
theme gradient gauge punctuality steam traffic maintenance safety speed
place transit service storage reserve bloom

noun kitchen recipe pie oven broth spice onion spoon apron sauce lemon kettle cheese dumpling pepper
adjective smoky bitter fresh roasted salty golden thin crisp sweet pickled warm generous
verb chopped simmered tasted baked seasoned strained served burned folded chilled stirred devoured
theme flavor heat salt texture appetite freshness aroma timing
place brine season vinegar town storage

noun budget auditor bond ledger investor merger tariff bank dividend invoice fund forecast loan broker
adjective quarterly fiscal risky liquid modest foreign secured overdue private net steep municipal
verb financed audited booked repaid hedged acquired taxed refinanced published disclosed priced doubled
theme inflation credit interest growth confidence debt revenue solvency
place default escrow surplus arrears recession

noun castle manuscript emperor treaty siege monk coin map rebellion dynasty scribe cathedral archive tomb
adjective ancient forged royal ruined forgotten medieval sacred exiled painted walled disputed humble
verb conquered copied translated burned besieged crowned excavated betrayed restored signed buried
theme succession faith tribute memory honor plague legitimacy trade
place exile ruins captivity winter retreat
"""

_SYMBOL: Final = re.compile(r"\{(\w+)\}")
_ARTICLE: Final = re.compile(r"\b([Aa]) (?=[aeiou])")
_PLURAL: Final = re.compile(r"(?<=[b-df-hj-np-tv-z])ys\b")

# An alternative: literal text at even positions, a symbol to expand at odd ones.
_Parts = tuple[str, ...]
_Rules = dict[str, tuple[_Parts, ...]]


def _rules(block: str) -> _Rules:
    """The word lists of one block of `_WORDS`; lines of the same symbol add up."""
    rules: _Rules = {}
    for line in block.splitlines():
        symbol, *words = line.split()
        rules[symbol] = rules.get(symbol, ()) + tuple((word,) for word in words)
    return rules


def _grammars() -> tuple[_Rules, ...]:
    """One grammar a topic, with every alternative split at its symbols, so that expansion only joins strings."""
    common, *topics = _WORDS.strip().split("\n\n")
    sentences = {symbol: tuple(tuple(_SYMBOL.split(text)) for text in texts) for symbol, texts in _GRAMMAR.items()}
    return tuple({**sentences, **_rules(common), **_rules(topic)} for topic in topics)


_GRAMMARS: Final = _grammars()


def prose(seed: int, words: int) -> str:
    """Exactly `words` space-separated words of varied text, the same for a seed on every machine and Python version.

    Two lengths of one seed agree up to the end of the shorter, except for its last mark. Paragraphs are separated by an
    empty line, and each keeps to one topic. Roughly a million words a second.

    Raises: ValueError if `words` is negative.
    """
    if words < 0:
        raise ValueError(f"prose() takes a number of words of at least 0, not {words}")
    # Of all of random's methods only random() is promised to repeat across versions (its documentation says so).
    rng = Random(seed)
    paragraphs: list[str] = []
    left = words
    while left > 0:
        grammar = _GRAMMARS[int(rng.random() * len(_GRAMMARS))]
        sentences: list[str] = []
        for _ in range(3 + int(rng.random() * 6)):
            sentence = _sentence(grammar, rng)
            length = sentence.count(" ") + 1
            if length >= left:
                sentence = " ".join(sentence.split(" ")[:left]).rstrip(",;:.?") + "."
            sentences.append(sentence)
            left -= length
            if left <= 0:
                break
        paragraphs.append(" ".join(sentences))
    return "\n\n".join(paragraphs)


def _sentence(grammar: _Rules, rng: Random) -> str:
    """One sentence, with a capital, an end mark, and its articles and plurals repaired."""
    out: list[str] = []
    _expand("sentence", grammar, rng, out)
    text = _PLURAL.sub("ies", _ARTICLE.sub(r"\1n ", "".join(out)))
    end = "?" if text.startswith("was it ") else "."
    first = 1 if text[0] == '"' else 0
    return text[:first] + text[first].upper() + text[first + 1 :] + end


def _expand(symbol: str, grammar: _Rules, rng: Random, out: list[str]) -> None:
    """Append one expansion of `symbol` to `out`."""
    if symbol in _NUMBERS:
        low, high = _NUMBERS[symbol]
        out.append(str(low + int(rng.random() * (high - low))))
        return
    alternatives = grammar[symbol]
    parts = alternatives[int(rng.random() * len(alternatives))]
    for position, part in enumerate(parts):
        if position % 2:
            _expand(part, grammar, rng, out)
        elif part:
            out.append(part)
