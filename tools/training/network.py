"""The `qwen35` architecture in PyTorch, as llama.cpp computes it: three Gated-DeltaNet layers to one of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.training.delta import CHUNK, delta_rule

__all__ = ["Head", "Network", "Sizes"]

EPSILON = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Widths in elements; `head` and `recurrent_head` are per head."""

    vocab: int = 2560
    layers: int = 8
    width: int = 192
    feed_forward: int = 480
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    rope: int = 16
    rope_base: float = 1e7
    recurrent_heads: int = 4
    recurrent_head: int = 32
    conv_kernel: int = 4
    interval: int = 4

    def is_recurrent(self, layer: int) -> bool:
        return (layer + 1) % self.interval != 0


class Norm(nn.Module):
    """RMS norm with a gain, in f32."""

    def __init__(self, size: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), gain))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, EPSILON)


def _linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs))
    return layer


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys, partial rotary positions and an output gate."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.q = _linear(sizes.width, sizes.heads * 2 * sizes.head)
        self.k = _linear(sizes.width, sizes.kv_heads * sizes.head)
        self.v = _linear(sizes.width, sizes.kv_heads * sizes.head)
        # Sharp enough from the start that one row in thousands can win.
        self.q_norm, self.k_norm = Norm(sizes.head, 1.5), Norm(sizes.head, 1.5)
        self.out = _linear(sizes.heads * sizes.head, sizes.width, 1 / math.sqrt(2 * sizes.layers))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        sizes, (batch, tokens, _) = self.sizes, x.shape
        q, gate = self.q(x).view(batch, tokens, sizes.heads, 2 * sizes.head).chunk(2, -1)
        k = self.k(x).view(batch, tokens, sizes.kv_heads, sizes.head)
        v = self.v(x).view(batch, tokens, sizes.kv_heads, sizes.head)
        q, k = _rotate(self.q_norm(q), rotation).to(v.dtype), _rotate(self.k_norm(k), rotation).to(v.dtype)
        groups = sizes.heads // sizes.kv_heads
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        mixed = functional.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
        mixed = mixed.transpose(1, 2) * torch.sigmoid(gate)
        return self.out(mixed.reshape(batch, tokens, -1))


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


class DeltaNet(nn.Module):
    """Short convolution, gated delta rule, gated norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        heads, inner = sizes.recurrent_heads, sizes.recurrent_heads * sizes.recurrent_head
        self.qkv = _linear(sizes.width, 3 * inner)
        self.gate = _linear(sizes.width, inner)
        self.conv = nn.Parameter(torch.randn(3 * inner, sizes.conv_kernel) / math.sqrt(sizes.conv_kernel))
        self.alpha, self.beta = _linear(sizes.width, heads, 0.5), _linear(sizes.width, heads)
        # Memories from a few tokens to about a thousand.
        forget = torch.logspace(0, -3, heads)
        self.a_log = nn.Parameter(torch.full((heads,), math.log(4.0)))
        self.dt = nn.Parameter(torch.log(torch.expm1(forget / 4.0)))
        self.norm = Norm(sizes.recurrent_head)
        self.out = _linear(inner, sizes.width, 1 / math.sqrt(2 * sizes.layers))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        sizes, (batch, tokens, _) = self.sizes, x.shape
        mixed = self.qkv(x)
        padded = functional.pad(mixed, (0, 0, sizes.conv_kernel - 1, 0))
        mixed = sum(padded[:, i : i + tokens] * self.conv[:, i] for i in range(sizes.conv_kernel))
        mixed = functional.silu(mixed.float())
        q, k, v = mixed.view(batch, tokens, 3, sizes.recurrent_heads, sizes.recurrent_head).permute(2, 0, 3, 1, 4)
        q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + EPSILON) for y in (q, k))
        beta = torch.sigmoid(self.beta(x).float()).transpose(1, 2)
        decay = (-self.a_log.exp() * functional.softplus(self.alpha(x).float() + self.dt)).transpose(1, 2)
        missing = -tokens % CHUNK
        if missing:
            q, k, v = (functional.pad(y, (0, 0, 0, missing)) for y in (q, k, v))
            beta, decay = functional.pad(beta, (0, missing)), functional.pad(decay, (0, missing))
        with torch.autocast(x.device.type, enabled=False):
            output = delta_rule(q, k, v, decay, beta)[:, :, :tokens].transpose(1, 2)
        gate = self.gate(x).view(batch, tokens, sizes.recurrent_heads, sizes.recurrent_head)
        return self.out((self.norm(output) * functional.silu(gate.float())).reshape(batch, tokens, -1))


class Block(nn.Module):
    """A mixing layer and a feed-forward layer, each behind a norm and added to the stream."""

    def __init__(self, sizes: Sizes, layer: int) -> None:
        super().__init__()
        self.mixer_norm, self.norm = Norm(sizes.width), Norm(sizes.width)
        self.mixer = DeltaNet(sizes) if sizes.is_recurrent(layer) else Attention(sizes)
        self.gate, self.up = (_linear(sizes.width, sizes.feed_forward) for _ in range(2))
        self.down = _linear(sizes.feed_forward, sizes.width, 1 / math.sqrt(2 * sizes.layers))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), rotation)
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Head(nn.Module):
    """The nextn block: from a token and the hidden state of the position before to a hidden state for the token after.

    That state is as the trunk's for what follows: `Network.logits` reads it, and it stands in for the trunk's when the
    head drafts another token.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token_norm, self.hidden_norm, self.norm = (Norm(sizes.width) for _ in range(3))
        self.join = _linear(2 * sizes.width, sizes.width)
        self.block = Block(sizes, sizes.interval - 1)

    def forward(self, embedded: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """`embedded` tokens and `hidden` states of the positions before them, [batch, tokens, width] each."""
        x = self.join(torch.cat([self.token_norm(embedded), self.hidden_norm(hidden)], -1)).float()
        return self.norm(self.block(x, rotation))


class Network(nn.Module):
    """Token ids [batch, tokens] to hidden states; `logits` makes the output. Embedding and output matrix are one."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Parameter(torch.randn(sizes.vocab, sizes.width) * 0.05)
        self.blocks = nn.ModuleList(Block(sizes, layer) for layer in range(sizes.layers))
        self.norm = Norm(sizes.width)
        self.head = Head(sizes)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Hidden states [batch, tokens, width]; `positions` [batch, tokens] are 0, 1, 2, ... unless given."""
        rotation = self._rotation(ids, positions)
        x = functional.embedding(ids, self.embedding)
        for block in self.blocks:
            x = block(x, rotation)
        return self.norm(x)

    def drafts(self, ids: Tensor, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        """The head's states for `ids`; `hidden` are those of the same positions, of the trunk or of the head.

        Row i has seen token i and state i - 1, so its logits are for the same token as the trunk's row i. The embedding
        does not learn from it.
        """
        before = functional.pad(hidden[:, :-1], (0, 0, 1, 0))
        embedded = functional.embedding(ids, self.embedding.detach())
        return self.head(embedded, before, self._rotation(ids, positions))

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.embedding)

    def _rotation(self, ids: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        half = self.sizes.rope // 2
        exponents = torch.arange(half, device=ids.device, dtype=torch.float64) / half
        angles = positions[..., None, None].double() * self.sizes.rope_base**-exponents
        return angles.cos().float(), angles.sin().float()
