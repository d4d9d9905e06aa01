"""Whether the kernels compute rightly on a GPU: asked once of each form of numbers, before the first matrix of it."""

import logging
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from oddrank.gpu.matrix import described
from oddrank.runtime.formats import Decoder
from oddrank.runtime.formats.rows import RowsDecoder

_OLDEST = (8, 0)
"""Compute capability from which on tensor cores take bf16."""

_ROWS, _COLUMNS = 40, 288
_TOKENS = (3, 40)

log = logging.getLogger(__name__)
_lock = threading.Lock()
_known: dict[tuple[torch.device, str], bool] = {}


def works(decoder: Decoder, device: torch.device) -> bool:
    """Whether the kernels for a form give what its decoder gives, for a small matrix on this device; told once where
    not. In Triton's interpreter, which tests use, always."""
    if device.type != "cuda":
        return True
    with _lock, torch.cuda.device(device):
        key = device, decoder.name
        if key not in _known:
            _known[key] = _right(decoder, device)
        return _known[key]


def _right(decoder: Decoder, device: torch.device) -> bool:
    capability = torch.cuda.get_device_capability(device)
    why = f"its compute capability is {capability[0]}.{capability[1]}, and they need {_OLDEST[0]}.{_OLDEST[1]}"
    if capability >= _OLDEST:
        try:
            why = "" if agrees(decoder, device) else "they compute wrongly there"
        except Exception as error:  # a compiler can fail in any way, and torch computes then
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if why:
        log.warning("Triton's kernels for %s are not used on %s, torch decodes instead: %s", decoder.name, device, why)
    return not why


def agrees(decoder: Decoder, device: torch.device) -> bool:
    """Whether products with a small matrix of random words are the decoder's."""
    from oddrank.gpu.linear import GpuLinear

    if isinstance(decoder, RowsDecoder):
        decoder = RowsDecoder(decoder.group, _COLUMNS, decoder.bits, decoder.points)  # it knows its matrix's columns
    stored = _sample(decoder, device)
    matrix = described(decoder, stored)
    if matrix is None:
        return False
    numbers = decoder.dequantize(stored, torch.float64)
    draw = torch.Generator().manual_seed(1)
    for m in _TOKENS:
        for dtype, near in ((torch.bfloat16, 2.0**-6), (torch.float32, 1e-4)):
            x = torch.randn(m, _COLUMNS, generator=draw).to(device, dtype)
            want = x.double() @ numbers.t()
            if not bool(((GpuLinear(matrix)(x).double() - want).abs() <= near * want.abs().max()).all()):
                return False
    return True


def _sample(decoder: Decoder, device: torch.device) -> Mapping[str, Tensor]:
    """Words of a small matrix: every finite code of values and scales. fp8's scales lie as in `decoder`."""
    draw, found = torch.Generator().manual_seed(0), {}
    kind = decoder.name.partition("-")[0]
    for place, part in enumerate(p for p in decoder.format.stored if not p.optional):
        shape = decoder.shape(part.suffix, _ROWS, _COLUMNS)
        if kind == "dense":
            tensor = torch.randn(shape, generator=draw).bfloat16()
        elif isinstance(decoder, RowsDecoder) and place == 1:
            words = (torch.rand(*shape[:-1], shape[-1] // 4, generator=draw) + 0.5).half().float().view(torch.int32)
            zeros = torch.randint(0, 17, shape[:-1], generator=draw, dtype=torch.int32)
            if decoder.bits == 4:
                words[..., 0] += zeros
            elif decoder.points:
                words[..., 1] = zeros
            tensor = words.view(torch.uint8)
        elif kind in ("mxfp4", "mxfp8") and place == 1:
            tensor = torch.randint(120, 131, shape, generator=draw, dtype=torch.uint8)
        elif place == 0 or (kind == "nvfp4" and place == 1):
            fp8 = kind in ("fp8", "mxfp8") or place == 1
            tensor = torch.randint(0, 127 if fp8 else 256, shape, generator=draw, dtype=torch.uint8)
            tensor = tensor.view(torch.float8_e4m3fn if fp8 else torch.int8 if part.dtypes == ("I8",) else torch.uint8)
        else:
            tensor = torch.rand(shape, generator=draw) + 0.5
        found[part.suffix] = tensor.to(device)
    return found
