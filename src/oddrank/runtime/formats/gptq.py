"""GPTQ: [K, N] in words along K, zero points in words along N, less one in the first version."""

from torch import Tensor

from oddrank.runtime.formats.base import Parts
from oddrank.runtime.formats.integers import Codes, IntegerDecoder, unpack

KIND = ("int4-gptq", "int8-gptq")


class GptqDecoder(IntegerDecoder):
    def unpacked(self, stored: Parts) -> Codes:
        codes, scales = unpack(stored[".qweight"].transpose(-1, -2), self.bits), stored[".scales"]
        zeros = self._zeros(stored[".qzeros"])[..., : scales.shape[-1], :]
        return Codes(codes, zeros, scales.transpose(-1, -2))

    def size(self, stored: Parts) -> int:
        return stored[".qweight"].shape[-1]

    def pack_codes(self, words: Tensor, first: int, out: Tensor) -> None:
        out[:, first : first + len(words)] = words.t()

    def pack_zeros(self, words: Tensor) -> Tensor:
        return self._zeros(words)

    def _zeros(self, words: Tensor) -> Tensor:
        points = self.format.zero_points
        assert points is not None
        return unpack(words, self.bits).transpose(-1, -2) + points.plus


DECODER = GptqDecoder
