"""Trains a small model and two draft heads, all kept in benchmarks/assets/speculative.

usage: python -m benchmarks.speculators [target] [eagle] [eagle3]   (in this order; about a minute each on one core)

`target` is a language model of 0.3 million parameters, of the Llama shape, trained on rotas: texts of fixed form whose
names, goods and places are drawn for each text and then repeated by a rule. `eagle` and `eagle3` are draft heads for
it, each of one layer, trained to give the target's distribution of the next token from the target's hidden states, and
for the tokens after that from their own (three steps; EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840, whose
training-time test this is). Data, initial weights and their order follow from SEED; all are float32 on one thread and
saved as bfloat16. On another CPU or version of PyTorch the weights differ in their last bits.
"""

import json
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

SEED = 20
ASSETS = Path(__file__).parent / "assets" / "speculative"
END = "<|end|>"

VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 512, 64, 176, 4, 4, 2, 32
MAX_TOKENS, THETA, EPSILON = 2048, 10_000.0, 1e-5
AUXILIARY = (1, 2, 3)
"""Of EAGLE-3: the layers before which the target's hidden states are taken."""

BATCH = {"target": 6, "eagle": 2, "eagle3": 2}
LENGTH = {"target": 320, "eagle": 352, "eagle3": 352}
STEPS = {"target": 220, "eagle": 500, "eagle3": 500}
RATE = {"target": 5e-3, "eagle": 3e-3, "eagle3": 3e-3}
DRAFTED = 3
"""How many tokens a head is trained to draft, one after the other."""

PEOPLE = """
    Anna Bert Clara Dirk Elsa Fred Greta Hans Ida Jonas Karla Ludwig Maria Nils Olga Paul Rosa Stefan Tilda Ulrich
    Vera Walter Yara Zeno
"""
PLACES = "Bergen Calais Dover Emden Faro Genoa Hull Izmir Jaffa Kiel Lagos Malmo Nice Oslo Porto Riga"
GOODS = """
    apples barley cotton dates eggs flour ginger honey iron jute knives lamps maps nuts oil paper quilts rope salt tea
    vases wool yarn zinc
"""


# -- text --------------------------------------------------------------------------------------------------------------


def rota(seed: int, days: int = 40) -> str:
    """A text: five people take turns at a shop of four goods, day by day."""
    rng = random.Random(seed)
    people, goods, place = rng.sample(PEOPLE.split(), 5), rng.sample(GOODS.split(), 4), rng.choice(PLACES.split())
    lines = [f"Rota of the shop in {place}: {', '.join(people)}.", f"It sells {', '.join(goods)}."]
    stock = rng.randrange(10, 90)
    for day in range(1, days + 1):
        first, second, third, fourth, free = (people[(day + n) % 5] for n in range(5))
        lines.append(
            f"Day {day}: {first} opens the shop in {place}, {second} weighs the {goods[day % 4]}, {third} sells the "
            f"{goods[(day + 1) % 4]}, {fourth} counts {stock} sacks of {goods[(day + 2) % 4]}, and {free} is free."
        )
        stock = 10 + (stock * 7 + day) % 80
    return "\n".join(lines)


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of VOCABULARY tokens for such texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((rota(seed) for seed in range(200)), trainer)
    return tokenizer


def batches(tokenizer: Tokenizer, name: str) -> Iterator[Tensor]:
    """int64[BATCH, LENGTH] for each step of training `name`; every text is new."""
    first_seed = 10_000 + 100_000 * list(STEPS).index(name)
    for step in range(STEPS[name]):
        texts = [rota(first_seed + step * BATCH[name] + n) for n in range(BATCH[name])]
        yield torch.tensor([tokenizer.encode(text).ids[: LENGTH[name]] for text in texts])


# -- the model, under the names that Llama has in transformers ---------------------------------------------------------


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * self.weight


def linear(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=inputs**-0.5)
    return made


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of [batch, heads, tokens, HEAD_DIM]."""
    half = HEAD_DIM // 2
    angles = torch.arange(x.shape[2])[:, None] * THETA ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def shifted(x: Tensor, places: int) -> Tensor:
    """[..., tokens, width] moved to later tokens; zeros come in."""
    return x if not places else functional.pad(x, (0, 0, places, 0))[..., : x.shape[-2], :]


class Attention(nn.Module):
    """Attention with grouped heads, also of a head that drafts its second and later tokens."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.q_proj, self.o_proj = linear(inputs, HEADS * HEAD_DIM), linear(HEADS * HEAD_DIM, HIDDEN)
        self.k_proj, self.v_proj = linear(inputs, KV_HEADS * HEAD_DIM), linear(inputs, KV_HEADS * HEAD_DIM)

    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """past: keys and values of the drafting steps before this one, to which this step's are appended.

        At its step s a head that stands at token p sees the first step's keys up to p - s + 1, and one key of each
        later step, up to its own at p.
        """
        past = [] if past is None else past
        batch, tokens, _ = x.shape

        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(batch, tokens, count, HEAD_DIM).transpose(1, 2)

        def joined(y: Tensor) -> Tensor:
            return self.o_proj(y.transpose(1, 2).reshape(batch, tokens, -1))

        q = rotated(heads(self.q_proj(x), HEADS))
        k, v = rotated(heads(self.k_proj(x), KV_HEADS)), heads(self.v_proj(x), KV_HEADS)
        past.append((k.repeat_interleave(HEADS // KV_HEADS, 1), v.repeat_interleave(HEADS // KV_HEADS, 1)))
        step = len(past)
        if step == 1:
            return joined(functional.scaled_dot_product_attention(q, *past[0], is_causal=True))
        q = q * HEAD_DIM**-0.5
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril(1 - step)
        scores = [(q @ past[0][0].transpose(-1, -2)).masked_fill(~seen, -1e9)]
        later = [(shifted(k, step - s), shifted(v, step - s)) for s, (k, v) in enumerate(past[1:], 2)]
        scores += [(q * k).sum(-1, keepdim=True) for k, _ in later]
        weights = torch.cat(scores, -1).softmax(-1)
        out = weights[..., :tokens] @ past[0][1]
        for n, (_, v) in enumerate(later):
            out = out + weights[..., tokens + n, None] * v
        return joined(out)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(HIDDEN, INTERMEDIATE), linear(HIDDEN, INTERMEDIATE)
        self.down_proj = linear(INTERMEDIATE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A layer; `is_bare` without the first norm, as EAGLE's heads have it."""

    def __init__(self, *, is_bare: bool = False) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(HIDDEN), Mlp()
        if not is_bare:
            self.input_layernorm = Norm(HIDDEN)
        self.post_attention_layernorm = Norm(HIDDEN)
        self._is_bare = is_bare

    def forward(self, x: Tensor, past: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        x = x + self.self_attn(x if self._is_bare else self.input_layernorm(x), past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """The language model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.5)
        self.model.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.model.norm = Norm(HIDDEN)
        self.lm_head = linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The logits, the hidden states that they are made from, and those before the layers AUXILIARY."""
        x, auxiliary = self.model.embed_tokens(tokens), []
        for n, layer in enumerate(self.model.layers):
            if n in AUXILIARY:
                auxiliary.append(x)
            x = layer(x)
        hidden = self.model.norm(x)
        return self.lm_head(hidden), hidden, torch.cat(auxiliary, -1)


class Eagle(nn.Module):
    """EAGLE's head: a layer over the target's last hidden state and the next token; embedding and output are shared."""

    config: ClassVar[dict[str, Any]] = {"architectures": ["LlamaForCausalLM"]}

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.fc = linear(2 * HIDDEN, HIDDEN)
        self.layers = nn.ModuleList([Layer(is_bare=True)])
        self._output = [target.lm_head]  # in a list it is no part of this module

    def begun(self, hidden: Tensor, auxiliary: Tensor) -> Tensor:
        return hidden

    def forward(self, embedded: Tensor, hidden: Tensor, past: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The logits, and the hidden state for the next step."""
        hidden = self.layers[0](self.fc(torch.cat([embedded, hidden], -1)), past)
        return self._output[0](hidden), hidden


class MidLayer(nn.Module):
    """EAGLE-3's layer, whose attention sees the token and the hidden state side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(2 * HIDDEN), Mlp()
        self.input_layernorm, self.hidden_norm = Norm(HIDDEN), Norm(HIDDEN)
        self.post_attention_layernorm = Norm(HIDDEN)

    def forward(self, embedded: Tensor, hidden: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        x = hidden + self.self_attn(both, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nn.Module):
    """EAGLE-3's head: over hidden states of three layers, with an output of its own."""

    config: ClassVar[dict[str, Any]] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": list(AUXILIARY),
    }

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.fc = linear(len(AUXILIARY) * HIDDEN, HIDDEN)
        self.midlayer, self.norm = MidLayer(), Norm(HIDDEN)
        self.lm_head = linear(HIDDEN, VOCABULARY)
        self.lm_head.weight.data.copy_(target.lm_head.weight)

    def begun(self, hidden: Tensor, auxiliary: Tensor) -> Tensor:
        return self.fc(auxiliary)

    def forward(self, embedded: Tensor, hidden: Tensor, past: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        hidden = self.midlayer(embedded, hidden, past)
        return self.lm_head(self.norm(hidden)), hidden


# -- training ----------------------------------------------------------------------------------------------------------


def optimized(name: str, module: nn.Module) -> Iterator[tuple[int, Tensor]]:
    """A batch for each step of training; the caller computes gradients of it, which are applied then."""
    steps, tokenizer = STEPS[name], Tokenizer.from_file(str(ASSETS / "target" / "tokenizer.json"))
    adam = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    for step, tokens in enumerate(batches(tokenizer, name)):
        rate = RATE[name] * min(1.0, (step + 1) / 12) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.zero_grad()
        yield step, tokens
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        adam.step()


def train_target() -> None:
    write_target_files(ASSETS / "target")
    target, started = Target(), time.monotonic()
    for step, tokens in optimized("target", target):
        logits, _, _ = target(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if step % 20 == 0 or step == STEPS["target"] - 1:
            right = (logits.argmax(-1) == tokens[:, 1:]).float().mean()
            print(f"{step} loss {loss:.3f} right {right:.3f} {time.monotonic() - started:.0f} s", flush=True)
    save(target, ASSETS / "target")


def train_head(name: str, kind: type[Eagle] | type[Eagle3]) -> None:
    """A head for the target as it was saved."""
    target = Target()
    weights = load_file(ASSETS / "target" / "model.safetensors")
    target.load_state_dict({key: value.float() for key, value in weights.items()})
    target.requires_grad_(False)
    head, started = kind(target), time.monotonic()
    for step, tokens in optimized(name, head):
        logits, hidden, auxiliary = target(tokens)
        embedded, state, past = target.model.embed_tokens(tokens[:, 1:]), head.begun(hidden, auxiliary)[:, :-1], []
        wanted, loss, right = logits[:, 1:].log_softmax(-1), torch.zeros(()), []
        for drafted in range(DRAFTED):
            said, state = head(embedded, state, past)
            loss = loss + functional.kl_div(
                said[:, drafted:].log_softmax(-1).flatten(0, 1),
                wanted[:, drafted:].flatten(0, 1),
                reduction="batchmean",
                log_target=True,
            )
            right.append(float((said.argmax(-1) == wanted.argmax(-1))[:, drafted:].float().mean()))
            state = shifted(state, 1)
        loss.backward()
        if step % 20 == 0 or step == STEPS[name] - 1:
            agreed = " ".join(f"{share:.3f}" for share in right)
            print(f"{step} loss {loss.detach():.3f} agrees {agreed} {time.monotonic() - started:.0f} s", flush=True)
    save(head, ASSETS / name)
    write_config(ASSETS / name, num_hidden_layers=1, **kind.config)


# -- files -------------------------------------------------------------------------------------------------------------


def save(module: nn.Module, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in module.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def write_config(directory: Path, **fields: Any) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_TOKENS,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config | fields, indent=1) + "\n")


def write_target_files(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": MAX_TOKENS}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    parts = {"target": train_target}
    parts |= {"eagle": lambda: train_head("eagle", Eagle), "eagle3": lambda: train_head("eagle3", Eagle3)}
    for name in sys.argv[1:] or parts:
        torch.manual_seed(SEED)
        print(f"-- {name}")
        parts[name]()


if __name__ == "__main__":
    main()
