"""The gated delta rule, token by token and in chunks.

Per head, with state S [keys, values], decay exp(g), write strength b, and keys of unit length:

    S_t = exp(g_t) S_{t-1} + b_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T        o_t = S_t^T q_t / sqrt(keys)

The chunked form is that of "Gated Delta Networks" (Yang, Kautz, Hatamizadeh, arXiv 2412.06464): within a chunk the
writes are solved for at once (WY representation); between chunks the state is S' = M S + B with one M and B per chunk,
which is an associative scan.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CHUNK", "delta_rule", "delta_rule_by_token"]

CHUNK = 64
_BLOCK = 16


def delta_rule_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """The definition, as a loop. q, k, v: [batch, heads, tokens, size]; g, b: [batch, heads, tokens]."""
    q = q * q.shape[-1] ** -0.5
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t, None, None].exp()
        error = v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, t], error * b[:, :, t, None])
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    return torch.stack(outputs, 2)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """The same for a number of tokens that is a multiple of `CHUNK`; f32 throughout."""
    batch, heads, tokens, size = q.shape
    chunks = tokens // CHUNK
    q, k, v = (x.reshape(batch, heads, chunks, CHUNK, -1) for x in (q * size**-0.5, k, v))
    g, b = (x.reshape(batch, heads, chunks, CHUNK) for x in (g, b))
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    total = g.cumsum(-1)
    since = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()

    written = k * b[..., None]
    solved = _inverse((written @ k.mT * since).tril(-1))
    new = solved @ (v * b[..., None])
    erased = solved @ (written * total.exp()[..., None])

    kept = k * (total[..., -1:] - total).exp()[..., None]
    eye = torch.eye(size, device=q.device)
    carry = total[..., -1, None, None].exp() * eye - kept.mT @ erased
    state = _scan(carry, kept.mT @ new)
    before = torch.cat([torch.zeros_like(state[:, :, :1]), state[:, :, :-1]], 2)

    within = (q @ k.mT) * since
    output = (q * total.exp()[..., None]) @ before + within @ (new - erased @ before)
    return output.reshape(batch, heads, tokens, -1)


def _inverse(a: Tensor) -> Tensor:
    """Inverse of I + a for strictly lower triangular a [..., CHUNK, CHUNK].

    Small diagonal blocks by doubling, (I - a)(I + a^2)(I + a^4)..., then larger ones out of smaller ones: powers of a
    whole chunk could cancel badly in f32.
    """
    pieces = a.unflatten(-1, (-1, _BLOCK)).unflatten(-3, (-1, _BLOCK))  # [..., row block, row, column block, column]
    diagonal = torch.stack([pieces[..., i, :, i, :] for i in range(CHUNK // _BLOCK)], -3)
    power = -diagonal
    inverse = torch.eye(_BLOCK, device=a.device) + power
    for _ in range(3):
        power = power @ power
        inverse = inverse + inverse @ power
    size = _BLOCK
    blocks = list(inverse.unbind(-3))
    while len(blocks) > 1:
        merged = []
        for i in range(0, len(blocks), 2):
            first, second = blocks[i], blocks[i + 1]
            corner = a[..., (i + 1) * size : (i + 2) * size, i * size : (i + 1) * size]
            left = -second @ corner @ first
            top = torch.cat([first, torch.zeros_like(first)], -1)
            merged.append(torch.cat([top, torch.cat([left, second], -1)], -2))
        blocks, size = merged, 2 * size
    return blocks[0]


def _scan(carry: Tensor, new: Tensor) -> Tensor:
    """All S_i = carry_i S_{i-1} + new_i with S_{-1} = 0, along dimension 2, in log2 steps."""
    step = 1
    while step < new.shape[2]:
        new = torch.cat([new[:, :, :step], carry[:, :, step:] @ new[:, :, :-step] + new[:, :, step:]], 2)
        carry = torch.cat([carry[:, :, :step], carry[:, :, step:] @ carry[:, :, :-step]], 2)
        step *= 2
    return new
