"""compressed-tensors' packed integers: words along K; zero points, where there are any, in words along N."""

from torch import Tensor

from oddrank.runtime.formats.base import Parts
from oddrank.runtime.formats.integers import Codes, IntegerDecoder, unpack

KIND = ("int4-pack", "int8-pack")


class PackQuantizedDecoder(IntegerDecoder):
    def unpacked(self, stored: Parts) -> Codes:
        scales, bits = stored[".weight_scale"], self.bits
        k = int(stored[".weight_shape"].flatten()[-1])  # the last word of a row may have codes of no column
        codes = unpack(stored[self.values], bits)[..., :k]
        zeros = stored.get(".weight_zero_point")
        if zeros is None:
            return Codes(codes, 1 << (bits - 1), scales)
        points = unpack(zeros.transpose(-1, -2), bits).transpose(-1, -2)
        return Codes(codes, points[..., : codes.shape[-2], :], scales)

    def pack_codes(self, words: Tensor, first: int, out: Tensor) -> None:
        out[first : first + len(words)] = words

    def pack_zeros(self, words: Tensor) -> Tensor:
        return unpack(words.t(), self.bits).t()


DECODER = PackQuantizedDecoder
