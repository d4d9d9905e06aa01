"""The delta rule and the short convolution alone: recurrences written out in numpy, chunk borders, extreme decays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oddrank.runtime.layers.convolution import ShortConvolution
from oddrank.runtime.layers.gated_delta import CHUNK, one_sequence, one_token, unit
from oddrank.runtime.step import Step

HEADS, KEY, VALUE = 3, 5, 4


def inputs(tokens: int, decay: float) -> tuple[torch.Tensor, ...]:
    """q, k of length one; g of about -decay; beta from 0 to 1, both ends included."""
    rng = np.random.default_rng(tokens)
    q, k, v = (rng.standard_normal((tokens, HEADS, w)) for w in (KEY, KEY, VALUE))
    g = -decay * rng.uniform(0, 2, (tokens, HEADS))
    beta = np.clip(rng.uniform(-0.3, 1.3, (tokens, HEADS)), 0, 1)
    state = rng.standard_normal((HEADS, KEY, VALUE))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return tuple(torch.from_numpy(x) for x in (q, k, v, g, beta, state))


def recurrence(*given: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """S <- e^g (S - beta k (k'S)) + beta k v', o = S'q: the paper's equation 10."""
    q, k, v, g, beta, state = (x.numpy() for x in given)
    out, s = np.empty(v.shape), state.copy()
    for t in range(len(q)):
        for h in range(HEADS):
            kt = k[t, h][:, None]
            s[h] = np.exp(g[t, h]) * (np.eye(KEY) - beta[t, h] * kt @ kt.T) @ s[h] + beta[t, h] * kt @ v[t, h][None]
            out[t, h] = s[h].T @ q[t, h]
    return out, s


@pytest.mark.parametrize("decay", [0.0, 0.1, 5.0, 1e4])
@pytest.mark.parametrize("tokens", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 150])
def test_chunks_are_the_recurrence(tokens: int, decay: float) -> None:
    given = inputs(tokens, decay)
    want, left = recurrence(*given)
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 3e-5)):
        *parts, state = (x.to(dtype, copy=True) for x in given)
        out = one_sequence(*parts, state)
        assert np.abs(out.double().numpy() - want).max() < bound
        assert np.abs(state.double().numpy() - left).max() < bound  # updated in place


@pytest.mark.parametrize("decay", [0.1, 1e4])
def test_single_tokens_are_the_recurrence(decay: float) -> None:
    """Two sequences at once."""
    first, second = inputs(9, decay), inputs(9, decay / 2)
    wants = [recurrence(*given) for given in (first, second)]
    q, k, v, g, beta = (torch.stack([a, b], 1) for a, b in zip(first[:5], second[:5], strict=True))
    state = torch.stack([first[5], second[5]])
    for t in range(9):
        out = one_token(q[t], k[t], v[t], g[t], beta[t], state)
        for i, (want, _) in enumerate(wants):
            assert np.abs(out[i].numpy() - want[t]).max() < 1e-12
    for i, (_, left) in enumerate(wants):
        assert np.abs(state[i].numpy() - left).max() < 1e-12


def test_a_dummy_head_stays_zero() -> None:
    """All of its weights are zero: no key, no value, no decay; nothing of it is NaN."""
    zero = torch.zeros(70, HEADS, KEY)
    out = one_sequence(unit(zero), unit(zero), torch.zeros(70, HEADS, VALUE), torch.full((70, HEADS), -0.69),
                       torch.full((70, HEADS), 0.5), torch.zeros(HEADS, KEY, VALUE))  # fmt: skip
    assert not out.any()


@pytest.mark.parametrize("kernel", [2, 4])
def test_convolution_in_pieces(kernel: int) -> None:
    """Two sequences: a prompt each, a chunk shorter than the kernel, then together one token at a time."""
    conv = ShortConvolution("c", 6, kernel, torch.float64)
    conv.weight.fill(torch.randn(6, 1, kernel, dtype=torch.float64))
    lengths = [12, 9]
    xs = [torch.randn(n, 6, dtype=torch.float64) for n in lengths]
    taps = conv.weight.data.squeeze(1)
    wants = []
    for x in xs:
        before = torch.cat([torch.zeros(kernel - 1, 6, dtype=torch.float64), x])
        sums = torch.stack([sum(taps[:, j] * before[t + j] for j in range(kernel)) for t in range(len(x))])
        wants.append(sums * torch.sigmoid(sums))
    state = torch.zeros(2, kernel - 1, 6, dtype=torch.float64)
    got: list[list[torch.Tensor]] = [[], []]
    at = [0, 0]
    for counts in ((6, 3), (2, 1), (1, 1), (1, 1), (1, 1), (1, 1), (0, 1)):
        live = [i for i in (0, 1) if counts[i]]
        step = Step.of([(i, [0] * counts[i], at[i]) for i in live], "cpu")
        out = conv(torch.cat([xs[i][at[i] : at[i] + counts[i]] for i in live]), step, state)
        for i, rows in zip(live, out.split([counts[i] for i in live]), strict=True):
            got[i].append(rows)
            at[i] += counts[i]
    assert at == lengths
    for rows, want in zip(got, wants, strict=True):
        assert torch.allclose(torch.cat(rows), want, rtol=1e-13, atol=1e-13)
