"""Trains the recall model: a small model that answers questions about documents, kept in benchmarks/assets/recall.

usage: python -m benchmarks.recall [--steps 1600] [--output DIRECTORY]   (about 10 minutes on two cores)

A text is documents of filler words and facts, "key value ;", and a question, "kind ordinal key", whose answer is one
word. Kinds:

one     the value of a key
two     the value of the key that is the value of a key: two facts of two documents
nth     the value of a key in the n-th document, where other documents give it other values
last    its value in the last document that has it

A model of the Qwen2 shape, 8 layers, 1.4 million parameters. Its first layers begin with a known circuit for such
questions (a head that looks at the word before, heads that look for what followed a word, one that counts documents;
Olsson et al., arXiv 2209.11895), the rest is random, and all of it is trained. Texts, initial weights and their order
follow from SEED; trained in float32, saved as bfloat16. On another CPU or version of PyTorch the last bits differ.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness import arguments

SEED = 20
ASSETS = Path(__file__).parent / "assets" / "recall"

SPECIALS = ("<|end|>", "<|start|>", "<|doc|>")
KINDS = ("one", "two", "nth", "last")
ORDINALS = ("first", "second", "third", "fourth", "fifth")
KEYS, VALUES, FILLERS = 64, 64, 115
WORDS = (
    *SPECIALS,
    *KINDS,
    *ORDINALS,
    ";",
    *(f"k{n}" for n in range(KEYS)),
    *(f"v{n}" for n in range(VALUES)),
    *(f"w{n}" for n in range(FILLERS)),
)
START, DOC = SPECIALS.index("<|start|>"), SPECIALS.index("<|doc|>")
KIND, ORDINAL = len(SPECIALS), len(SPECIALS) + len(KINDS)
STOP = ORDINAL + len(ORDINALS)
KEY = STOP + 1
VALUE, FILLER = KEY + KEYS, KEY + KEYS + VALUES
UNIQUE, SHARED = 4, 2
"""Of each document: facts whose key no other has. Of a text: keys that several documents have; each has one of them."""
FACTS = UNIQUE + 2
QUESTIONS = {"one": 4, "two": 6, "nth": 9, "last": 5}
"""In a text that is trained on."""

HIDDEN, LAYERS, HEADS, HEAD_DIM, INTERMEDIATE, THETA = 128, 8, 2, 64, 256, 1e8
"""With so large a theta half of a head's dimensions hardly turn within 8,000 tokens: what is found by its content is
found at any distance."""
LONGEST = 16384
RATE = 1.5e-3


# -- texts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Texts:
    """documents: int64[texts, documents, tokens]. questions: int64[texts, questions, 4]: kind, ordinal, key, answer."""

    documents: np.ndarray
    questions: np.ndarray

    def joined(self) -> np.ndarray:
        """int64[texts, tokens]: the documents and all questions, each with its answer."""
        count = len(self.documents)
        start, end = np.full((count, 1), START), np.full((count, 1), DOC)
        parts = [start, self.documents.reshape(count, -1), end, self.questions.reshape(count, -1)]
        return np.concatenate(parts, 1)

    def prompt(self, text: int, question: int) -> list[int]:
        """The documents of one text and one question, without its answer."""
        asked = self.questions[text, question, :3]
        return [START, *self.documents[text].ravel().tolist(), DOC, *asked.tolist()]


def make_texts(rng: np.random.Generator, count: int, documents: int, tokens: int, questions: dict[str, int]) -> Texts:
    """Texts of `documents` documents of `tokens` tokens each."""
    at = np.arange(count)[:, None, None]
    keys = np.argsort(rng.random((count, KEYS)), 1) + KEY
    own = keys[:, : documents * UNIQUE].reshape(count, documents, UNIQUE)
    alias = keys[:, documents * UNIQUE :][:, :documents].reshape(count, documents, 1)
    shared = keys[:, documents * (UNIQUE + 1) :][:, :SHARED]
    values = rng.integers(0, VALUES, (count, documents, UNIQUE)) + VALUE
    other = (np.arange(documents)[None, :, None] + rng.integers(1, documents, (count, documents, 1))) % documents
    which = rng.integers(0, UNIQUE, (count, documents, 1))
    meant, found = own[at, other, which], values[at, other, which]
    held = shared[at, rng.integers(0, SHARED, (count, documents, 1))]
    given = rng.integers(0, VALUES, (count, documents, 1)) + VALUE
    facts = np.stack([np.concatenate([own, alias, held], 2), np.concatenate([values, meant, given], 2)], 3)
    asked = []
    for kind, number in questions.items():
        for _ in range(number):
            document, row = rng.integers(0, documents, count), np.arange(count)
            ordinal = rng.integers(0, documents, count) if kind != "nth" else document
            pick = rng.integers(0, UNIQUE, count)
            if kind == "one":
                key, answer = own[row, document, pick], values[row, document, pick]
            elif kind == "two":
                key, answer = alias[row, document, 0], found[row, document, 0]
            else:
                key = held[row, document, 0]
                if kind == "last":
                    document = documents - 1 - np.argmax((held[:, ::-1, 0] == key[:, None]), 1)
                answer = given[row, document, 0]
            asked.append(np.stack([np.full(count, KIND + KINDS.index(kind)), ORDINAL + ordinal, key, answer], 1))
    order = np.argsort(rng.random((count, len(asked))), 1)
    return Texts(_laid_out(rng, facts, tokens), np.take_along_axis(np.stack(asked, 1), order[:, :, None], 1))


def _laid_out(rng: np.random.Generator, facts: np.ndarray, tokens: int) -> np.ndarray:
    """int64[texts, documents, tokens]: the facts, in any order and at any place, between fillers; DOC before them."""
    count, documents, number, _ = facts.shape
    units = tokens - 1 - 2 * number
    made = rng.integers(0, FILLERS, (count * documents, tokens)) + FILLER
    made[:, 0] = DOC
    chosen = np.sort(np.argsort(rng.random((count * documents, units)), 1)[:, :number], 1)
    begins = 1 + chosen + 2 * np.arange(number)
    order = np.argsort(rng.random((count * documents, number)), 1)
    shuffled = np.take_along_axis(facts.reshape(count * documents, number, 2), order[:, :, None], 1)
    rows = np.arange(count * documents)[:, None]
    made[rows, begins], made[rows, begins + 1], made[rows, begins + 2] = shuffled[..., 0], shuffled[..., 1], STOP
    return made.reshape(count, documents, tokens)


# -- the model ---------------------------------------------------------------------------------------------------------


def make_model() -> Qwen2ForCausalLM:
    """The model before its training."""
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_theta": THETA, "rope_type": "default"},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).float()
    with torch.no_grad():
        _begin(model)
    return model


def _begin(model: Qwen2ForCausalLM) -> None:
    """Give the first layers their circuit."""
    basis = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN))[0]
    words, before = basis[:, :HEAD_DIM], basis[:, HEAD_DIM:]
    """Where the residual stream has a token's word, and the word before it."""
    embedding = model.model.embed_tokens.weight
    embedding.copy_(0.2 * math.sqrt(HIDDEN / HEAD_DIM) * torch.randn(len(WORDS), HEAD_DIM) @ words.T)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(0.2)
        layer.self_attn.o_proj.weight.mul_(0.2)
    half = HEAD_DIM // 2
    angles = THETA ** (-torch.arange(half) / half)
    turning = torch.arange(half) < half // 2
    still = torch.cat([~turning, ~turning])
    first = model.model.layers[0].self_attn
    # Head 0 looks at the token before: constant queries and keys, which agree best at a distance of 1.
    strength = 9.0
    first.k_proj.bias[:half] = strength * turning
    first.q_proj.bias[:half] = strength * turning * torch.cos(-angles)
    first.q_proj.bias[half:HEAD_DIM] = strength * turning * torch.sin(-angles)
    first.q_proj.weight[:HEAD_DIM] *= 0.1
    first.k_proj.weight[:HEAD_DIM] *= 0.1
    first.v_proj.weight[:HEAD_DIM] = words.T
    first.o_proj.weight[:, :HEAD_DIM] = 0.25 * before
    # Head 1 looks at the first tokens of the text and of all documents, evenly: the text's share tells how many.
    norm = embedding.norm(dim=1, keepdim=True)
    marks = (embedding / norm)[[START, DOC]] / math.sqrt(HIDDEN)
    same = torch.zeros(HEAD_DIM)
    same[still] = math.sqrt(8 * 20 / half)
    first.q_proj.bias[HEAD_DIM:] = same
    first.k_proj.weight[HEAD_DIM:] = torch.outer(same, marks.sum(0))
    first.v_proj.weight[HEAD_DIM:] = 0
    first.v_proj.weight[HEAD_DIM] = 4 * marks[0]
    # Layers 1 and 2 look for the token behind the same word, and copy it: a fact, and the fact that it leads to.
    mixing = torch.linalg.qr(torch.randn(HEAD_DIM, half))[0].T
    for layer in (1, 2):
        attention = model.model.layers[layer].self_attn
        attention.q_proj.weight[:HEAD_DIM] = 0
        attention.k_proj.weight[:HEAD_DIM] = 0
        attention.q_proj.weight[:HEAD_DIM][still] = 2.0 * mixing @ words.T
        attention.k_proj.weight[:HEAD_DIM][still] = 2.0 * mixing @ before.T
        attention.v_proj.weight[:HEAD_DIM] = words.T
        attention.o_proj.weight[:, :HEAD_DIM] = 0.4 * words


# -- training ----------------------------------------------------------------------------------------------------------


def sizes(rng: np.random.Generator, steps: int) -> Iterator[tuple[int, int, int]]:
    """Of each step: how many texts, documents in each, and tokens in each of these. They grow."""
    for step in range(steps):
        done = step / steps
        documents = int(rng.integers(2, 4 if done < 0.1 else 6))
        longest = 30 if done < 0.3 else 120 if done < 0.8 else 400
        tokens = int(rng.integers(20, longest + 1))
        yield max(2, 3600 // (documents * tokens + 97)), documents, tokens


def right(model: Qwen2ForCausalLM, texts: Texts) -> tuple[Tensor, Tensor]:
    """The loss of the answers, and which are right: bool[texts, questions]."""
    ids = torch.from_numpy(texts.joined())
    asked = texts.questions.shape[1]
    places = ids.shape[1] - 4 * asked + 2 + 4 * torch.arange(asked)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, places]
    logits, wanted = model.lm_head(hidden), ids[:, places + 1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()), logits.argmax(-1) == wanted


def shares(found: Tensor, texts: Texts) -> dict[str, float]:
    """The share of right answers by kind."""
    kinds = texts.questions[:, :, 0] - KIND
    return {kind: round(float(found.numpy()[kinds == n].mean()), 3) for n, kind in enumerate(KINDS)}


def train(steps: int, model: Qwen2ForCausalLM) -> None:
    rng, started = np.random.default_rng(SEED), time.monotonic()
    adam = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    known: dict[str, float] = {}
    for step, (count, documents, tokens) in enumerate(sizes(rng, steps)):
        rate = RATE * min(1.0, (step + 1) / 50) * min(1.0, 0.02 + (steps - step) / (0.4 * steps))
        for group in adam.param_groups:
            group["lr"] = rate
        texts = make_texts(rng, count, documents, tokens, QUESTIONS)
        loss, found = right(model, texts)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        for kind, share in shares(found, texts).items():
            known[kind] = 0.95 * known.get(kind, share) + 0.05 * share
        if step % 25 == 0 or step == steps - 1:
            said = " ".join(f"{kind} {share:.3f}" for kind, share in known.items())
            print(f"{step} loss {loss:.3f} {said} {time.monotonic() - started:.0f} s", flush=True)


def check(model: Qwen2ForCausalLM) -> None:
    """Print what it answers on texts of its own."""
    rng = np.random.default_rng(SEED + 1)
    for tokens in (30, 100, 400, 1600):
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(max(1, 1600 // tokens)):
            texts = make_texts(rng, 2, 5, tokens, QUESTIONS)
            with torch.no_grad():
                _, is_right = right(model, texts)
            for kind, share in shares(is_right, texts).items():
                found[kind].append(share)
        print(f"5 documents of {tokens} tokens:", {kind: round(float(np.mean(f)), 3) for kind, f in found.items()})


# -- files -------------------------------------------------------------------------------------------------------------


def make_tokenizer() -> Tokenizer:
    """Words, separated by spaces."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def save(model: Qwen2ForCausalLM, directory: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(directory)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": WORDS[0], "model_max_length": LONGEST}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields, indent=1) + "\n")


def main() -> None:
    options = arguments(__doc__, steps=1600)
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    model = make_model()
    train(options.steps, model)
    directory = options.output or ASSETS
    save(model, directory)
    check(Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32))


if __name__ == "__main__":
    main()
