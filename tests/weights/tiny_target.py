"""The tiny target: a byte-level Llama trained from scratch on this Python's standard library.

    python -m tests.weights.tiny_target OUT

A model that has something to predict, so that drafts for it can be right. Uses the pieces of
`proposers.training`, but for the teacher, which it has none of.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from torch.nn import functional

from proposers.training import CorpusConfig, LayerSizes, Piece, TrainConfig, read_corpus
from proposers.training.batches import batch_order
from proposers.training.export import prefixed, save_checkpoint
from proposers.training.optimizer import DraftOptimizer
from proposers.training.small_llama import SmallLlama
from tests.tiny import BOS_ID, EOS_ID, VOCAB_SIZE, make_tokenizer

SIZES = LayerSizes(
    hidden_size=128,
    intermediate_size=384,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)
NUM_LAYERS = 4
CORPUS = CorpusConfig(length=384, max_text_tokens=4_000_000)
TRAINING = TrainConfig(steps=2000, batch_tokens=3072, learning_rate=3e-3, clip=1.0, seed=0)


def main(out: Path) -> None:
    torch.set_num_threads(1)  # the same weights whatever the machine has
    torch.manual_seed(TRAINING.seed)
    tokenizer = make_tokenizer()

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return [*ids, EOS_ID]

    stdlib = Path(sysconfig.get_path("stdlib"))
    pieces = read_corpus([stdlib], [], encode, CORPUS, vocab_size=VOCAB_SIZE)
    model = SmallLlama(SIZES, num_layers=NUM_LAYERS, vocab_size=VOCAB_SIZE)
    train(model, [piece for piece in pieces if not piece.held_out])
    held_out = [piece for piece in pieces if piece.held_out][:200]
    with torch.no_grad():
        losses = [float(loss_of(model, [piece])) for piece in held_out]
    print(f"held-out loss {sum(losses) / len(losses):.3f} a token of {len(held_out)} pieces")
    save_checkpoint(out, config(), prefixed(model), torch.bfloat16)
    tokenizer.save_pretrained(out)


def train(model: SmallLlama, pieces: list[Piece]) -> None:
    optimizer = DraftOptimizer(model, weight_decay=TRAINING.weight_decay, clip=TRAINING.clip)
    lengths = [len(piece.token_ids) for piece in pieces]
    order = batch_order(lengths, TRAINING.batch_tokens, TRAINING.seed)
    for step in range(TRAINING.steps):
        loss = loss_of(model, [pieces[index] for index in next(order)])
        optimizer.step(loss, TRAINING.rate(step))
        if step % 100 == 0:
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)


def loss_of(model: SmallLlama, pieces: list[Piece]) -> torch.Tensor:
    """Cross entropy of each next token of the pieces."""
    ids = [torch.from_numpy(piece.token_ids).long() for piece in pieces]
    token_ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    wanted = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-1)[:, 1:]
    logits = model.logits(model.hidden(token_ids)[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-1)


def config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": SIZES.hidden_size,
        "intermediate_size": SIZES.intermediate_size,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": SIZES.num_heads,
        "num_key_value_heads": SIZES.num_kv_heads,
        "head_dim": SIZES.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": SIZES.rms_norm_eps,
        "rope_theta": SIZES.rope_theta,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
