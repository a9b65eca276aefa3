"""Compares PyTorch with llama.cpp: python -m tools.training.check tokenizer.json builtin.gguf

Both are of train.py. Prints how far the chunked delta rule is from the loop, and the logits of the network from
those of the GGUF file in llama.cpp, over a conversation. Needs torch, tokenizers and llama_cpp in one environment.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import llama_cpp
import numpy as np
import torch
from tokenizers import Tokenizer

from tools.training.delta import delta_rule, delta_rule_by_token
from tools.training.dialogue import conversation
from tools.training.export import read_gguf
from tools.training.network import Network, Sizes
from tools.training.tokens import assemble

_TOKENS = 512


def delta_error() -> float:
    """Largest difference between the chunked form in f32 and the loop in f64, for keys that resemble each other."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 256, 32) + offset for offset in (0.0, 1.5, 0.0))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g, b = -torch.rand(2, 3, 256) / 10, torch.rand(2, 3, 256) / 5 + 0.8
    exact = delta_rule_by_token(*(x.double() for x in (q, k, v, g, b)))
    return float((delta_rule(q, k, v, g, b) - exact).abs().max() / exact.abs().max())


def llama_logits(path: Path, ids: list[int]) -> np.ndarray:
    """Logits after each token, with an f32 cache."""
    model = llama_cpp.Llama(
        str(path), n_ctx=len(ids) + 8, n_batch=len(ids), n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0
    )
    assert model.tokenize(model.detokenize(ids, special=True), add_bos=False, special=True) == ids
    model.eval(ids)
    return np.array(model.scores[: len(ids)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, metavar="TOKENIZER")
    parser.add_argument("gguf", type=Path, metavar="FILE")
    args = parser.parse_args()
    print(f"delta rule, chunks against loop: {delta_error():.1e} of the largest value")
    network = Network(Sizes())
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    read_gguf(args.gguf, network, tokenizer)
    ids = assemble(tokenizer, conversation(Random(0), _TOKENS))[0][:_TOKENS]
    with torch.no_grad():
        ours = network.logits(network(torch.from_numpy(ids)[None]))[0].numpy()
    theirs = llama_logits(args.gguf, ids.tolist())
    print(f"logits: difference up to {np.abs(ours - theirs).max():.2e}, deviation {ours.std():.2f}, {len(ids)} tokens")
    print(f"likeliest token equal: {(ours.argmax(-1) == theirs.argmax(-1)).mean():.2%}")


if __name__ == "__main__":
    main()
