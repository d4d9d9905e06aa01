"""AWQ: [K, N] in words along N, each of eight rows in an order of its own, zero points likewise."""

import torch
from torch import Tensor

from oddrank.runtime.formats.base import Parts
from oddrank.runtime.formats.integers import Codes, IntegerDecoder, unpack

KIND = "int4-awq"

NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds each row of its eight; the nibbles hold rows 0, 2, 4, 6, 1, 3, 5, 7."""


class AwqDecoder(IntegerDecoder):
    def unpacked(self, stored: Parts) -> Codes:
        scales = stored[".scales"].transpose(-1, -2)

        def rows(words: Tensor) -> Tensor:
            return unpack(words, 4, NIBBLE)[..., : scales.shape[-2]].transpose(-1, -2)

        return Codes(rows(stored[".qweight"]), rows(stored[".qzeros"]), scales)

    def size(self, stored: Parts) -> int:
        return stored[".scales"].shape[-1]

    def pack_codes(self, words: Tensor, first: int, out: Tensor) -> None:
        n = len(out)
        tiles = torch.zeros(-(-len(words) // 8), 8, words.shape[1], dtype=torch.int32)
        tiles.view(-1, words.shape[1])[: len(words)] = words
        _turn(tiles)
        at, turned = first // 8, tiles[:, list(NIBBLE)].permute(2, 1, 0)  # [N / 8, 8, K / 8]
        if n % 8:
            out[:, at : at + len(tiles)] = turned.reshape(-1, len(tiles))[:n]
        else:
            out.view(-1, 8, out.shape[1])[:, :, at : at + len(tiles)] = turned

    def pack_zeros(self, words: Tensor) -> Tensor:
        return unpack(words, 4, NIBBLE).t()


def _turn(words: Tensor) -> None:
    """Eight words [..., 8, n] of eight nibbles each: nibble p of word i goes to nibble i of word p. (Halves, quarters
    and eighths change places, many at a time.)"""
    for far, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        pairs = words.view(words.shape[0], -1, 2, far, words.shape[-1])
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        moved = (low >> 4 * far).bitwise_xor_(high).bitwise_and_(mask)
        high ^= moved
        low ^= moved << 4 * far


DECODER = AwqDecoder
