"""The gated delta rule (Yang et al., 2024, arXiv 2412.06464): a matrix of memory per head, read and written by tokens.

    S <- exp(g) S + k (beta (v - exp(g) S'k))',   o = S'q

One token at a time for decoding, and in chunks for prompts: within a chunk the corrections of its tokens solve one
triangular system, between chunks the state is carried on. Both give the same numbers up to rounding.
"""

import torch
from torch import Tensor

CHUNK = 64
"""Tokens of a prompt that are taken together."""

UNIT_EPS = 1e-6
"""Added to the square of a vector's length before it is made one."""


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last dimension; a zero stays one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def one_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token of each of n sequences.

    q, k: [n, heads, key width]; v: [n, heads, value width]; g (log of the decay, at most 0), beta: [n, heads];
    state: [n, heads, key width, value width], updated in place. Returns [n, heads, value width].
    """
    state.mul_(g.exp()[..., None, None])
    known = torch.matmul(k.unsqueeze(-2), state)
    correction = (v.unsqueeze(-2) - known).mul_(beta[..., None, None])
    state.addcmul_(k.unsqueeze(-1), correction)
    return torch.matmul(q.unsqueeze(-2), state).squeeze(-2)


def one_sequence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Consecutive tokens of one sequence, in chunks.

    q, k: [tokens, heads, key width]; v: [tokens, heads, value width]; g, beta: [tokens, heads];
    state: [heads, key width, value width], updated in place. Returns [tokens, heads, value width].
    """
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    g, beta = g.t(), beta.t().unsqueeze(-1)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for start in range(0, q.shape[1], CHUNK):
        chunk = slice(start, start + CHUNK)
        qc, kc, decay = q[:, chunk], k[:, chunk], g[:, chunk].cumsum(-1)
        # what is left at token i of what token j wrote; a token sees itself and those before it
        later = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=q.device).triu(1)
        left = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill_(later, float("-inf")).exp_()
        since = decay.exp().unsqueeze(-1)
        written = kc * beta[:, chunk]
        system = (written @ kc.transpose(-1, -2)).mul_(left)
        wanted = v[:, chunk] * beta[:, chunk] - (written * since) @ state
        corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        reads = (qc @ kc.transpose(-1, -2)).mul_(left)
        out[:, chunk] = (qc * since) @ state + reads @ corrections
        kept = (decay[:, -1:] - decay).exp().unsqueeze(-1)
        state.mul_(since[:, -1:]).add_((kc * kept).transpose(-1, -2) @ corrections)
    return out.transpose(0, 1)
