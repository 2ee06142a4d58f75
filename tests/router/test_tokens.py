"""Tokens: their bytes, joined, are the prompt as the router spells it."""

import json
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from hotspan.core.errors import ConfigError
from hotspan.router.tokens import TokenTable

CORPUS = ["the quick brown fox jumps over the lazy dog x y z 0123456789"] * 50 + [
    "Word WORD caf\u00e9 na\u00efve \u6f22"
] * 10
BOS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
SPECIALS = ["<unk>", "<s>", "</s>"]


def byte_level(
    *, prefix_space: bool = False, form: normalizers.Normalizer | None = None, bos: bool = False
) -> Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    if form is not None:
        tokenizer.normalizer = form
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos:
        tokenizer.post_processor = BOS
    return tokenizer


def unigram(scheme: str) -> Tokenizer:
    """Of SentencePiece's kind, with bytes for what has no token."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace()
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.UnigramTrainer(
        vocab_size=330, special_tokens=[*SPECIALS, *alphabet], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    described = json.loads(tokenizer.to_str())
    described["model"]["byte_fallback"] = True
    described["added_tokens"] = described["added_tokens"][: len(SPECIALS)]
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.post_processor = BOS
    return tokenizer


def llama() -> Tokenizer:
    """As Llama 2's and Phi 3's: a space before each stretch, and special tokens that take the space behind them."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    described = json.loads(tokenizer.to_str())
    first = len(described["model"]["vocab"])
    described["model"]["vocab"] |= {f"<0x{byte:02X}>": first + byte for byte in range(256)}
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_special_tokens([AddedToken("<|user|>", rstrip=True, normalized=False, special=True)])
    tokenizer.post_processor = BOS
    return tokenizer


@cache
def made(kind: str) -> tuple[Tokenizer, TokenTable]:
    """A tokenizer and its table."""
    tokenizer = {
        "byte-level": byte_level,
        "byte-level with a space": lambda: byte_level(prefix_space=True),
        "byte-level with NFC": lambda: byte_level(form=normalizers.NFC(), bos=True),
        "unigram, always": lambda: unigram("always"),
        "unigram, first": lambda: unigram("first"),
        "unigram, never": lambda: unigram("never"),
        "llama": llama,
    }[kind]()
    return tokenizer, TokenTable(tokenizer)


KINDS = (
    "byte-level",
    "byte-level with a space",
    "byte-level with NFC",
    "unigram, always",
    "unigram, first",
    "unigram, never",
    "llama",
)
PARTS = st.sampled_from([*SPECIALS[1:], "<|user|>", " ", "\n", "the fox", "e\u0301", "\u00e9", "\U0001f389", "\u6f22"])
TEXTS = st.one_of(st.text(max_size=40), st.lists(PARTS, max_size=12).map("".join)).filter(
    lambda text: "\u2581" not in text
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, is_whole=st.booleans())
def test_a_prompts_tokens_spell_its_text(kind: str, text: str, is_whole: bool) -> None:
    """Joined, the tokens of any text are the bytes that the router takes it for."""
    tokenizer, table = made(kind)
    ids = tokenizer.encode(text, add_special_tokens=is_whole).ids
    assert table.join(ids) == table.spell(text, is_whole=is_whole)


@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet="a\u00e9\u6f22\U0001f389", min_size=1, max_size=20), data=st.data())
def test_a_character_may_lie_in_two_blocks(text: str, data: st.DataObject) -> None:
    """Tokens are joined as bytes: a cut through a character loses nothing."""
    tokenizer, table = made("byte-level")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    cut = data.draw(st.integers(0, len(ids)))
    first, second = table.join(ids[:cut]), table.join(ids[cut:])
    assert first is not None and second is not None
    assert first + second == text.encode()


def test_what_a_prompt_gets_in_front_is_known() -> None:
    """A BOS that the tokenizer adds is part of a whole prompt, and of no chat's, whose template writes it."""
    _, table = made("llama")
    assert table.spell("the fox", is_whole=True) == b"<s> the fox"
    assert table.spell("<s>the fox<|user|>\n fox", is_whole=False) == b"<s> the fox<|user|> fox"


@pytest.mark.parametrize("make", [llama, lambda: unigram("first")], ids=["llama", "unigram"])
def test_tokens_that_are_not_known_have_no_bytes(make: Callable[[], Tokenizer]) -> None:
    """An id beyond the vocabulary, or the token for unknown text, makes the whole unknown."""
    table = TokenTable(make())
    assert table.join([len(table)]) is None
    assert table.join([0]) is None
    assert table.join([]) == b""


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "x": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def lower_case() -> Tokenizer:
    return byte_level(form=normalizers.Lowercase())


@pytest.mark.parametrize("make", [word_piece, lower_case])
def test_a_tokenizer_that_changes_text_is_refused(make: Callable[[], Tokenizer]) -> None:
    """WordPiece and lower case lose what the text was: an error that says what to do."""
    with pytest.raises(ConfigError, match="leave events out"):
        TokenTable(make())


def test_a_space_and_its_mark_may_be_one() -> None:
    """As in Gemma 3: the mark is written for spaces in added tokens too, and a text that has it itself is the same."""
    tokenizer = Tokenizer(models.BPE({"\u2581": 0, "x": 1, "y": 2, "?": 3, "z": 4}, [], unk_token="?"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    tokenizer.add_tokens(["\u2581\u2581"])
    table = TokenTable(tokenizer)
    for text in ("x y", "x\u2581\u2581y", "  x"):
        spelt = table.spell(text, is_whole=True)
        assert spelt == table.join(tokenizer.encode(text).ids) == text.replace("\u2581", " ").encode()
