"""What three ranks hold of a model's layers, put together again by what the matrices say, and not by any plan.

Each head and channel that a rank holds is looked up among the trained ones by its decoded weights, so a test can say
of the whole: every one is there once, beside its own KV head, and meets its own columns of the next matrix.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from formats.codec import F64, Raw
from formats.dialects import to_raw
from quantized_models import KV_HEADS, Kind
from safetensors import safe_open
from safetensors.torch import load_file


class Rank:
    """One rank's parameters, decoded."""

    def __init__(self, kind: Kind, path: Path) -> None:
        self.kind = kind
        self.held = {name: to_raw(value) for name, value in load_file(path).items()}

    def matrix(self, name: str) -> F64:
        """[N, K] of "model.layers.0.mlp.down_proj"."""
        parts = {f".{key.rpartition('.')[2]}": raw for key, raw in self.held.items() if key.startswith(f"{name}.")}
        parts.pop(".bias", None)
        if ".weight_packed" in parts:  # of a fused matrix vLLM keeps the shape of one part
            rows, words = parts[".weight_packed"].words.shape
            parts[".weight_shape"] = Raw("I64", np.array([rows, words * 4], dtype=np.uint64))
        if ".qweight" in parts:  # vLLM has no use for a trivial g_idx
            columns = parts[".qweight"].words.shape[0] * 4
            groups = parts[".scales"].words.shape[0]
            parts[".g_idx"] = Raw("I32", (np.arange(columns) // (columns // groups)).astype(np.uint32))
        found: F64 = self.kind.of(name).decode(parts)
        return found

    def bias(self, name: str) -> F64 | None:
        raw = self.held.get(f"{name}.bias")
        return None if raw is None else raw.words.view(np.float16).astype(np.float64)


def trained(folder: Path) -> dict[str, F64]:
    with safe_open(folder / "model.safetensors", framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


class Found(NamedTuple):
    """Numbers of the trained units that all ranks' slots hold; -1 for a dummy."""

    queries: list[int]
    keys: list[int]
    channels: list[int]


def look_up(mine: Sequence[F64], original: Sequence[F64]) -> list[int]:
    """Which of `original` each of `mine` is; -1 for zeros. AssertionError for anything else."""
    known = {np.ascontiguousarray(unit).tobytes(): i for i, unit in enumerate(original)}
    assert len(known) == len(original)
    found = []
    for unit in mine:
        key = np.ascontiguousarray(unit + 0.0).tobytes()  # -0.0 is zero
        assert key in known or not unit.any(), "weights that were not trained"
        found.append(known.get(key, -1))
    return found


def assemble(ranks: Sequence[Rank], model: Mapping[str, F64], layer: int, width: int) -> Found:
    """Check what every rank holds of a layer against the trained model; width: of a head."""
    name, all_found = f"model.layers.{layer}", Found([], [], [])

    def of(matrix: str) -> F64:
        return model[f"{name}.{matrix}.weight"] + 0.0

    def heads(rows: F64) -> list[F64]:
        return list(rows.reshape(-1, width, *rows.shape[1:]))

    trained_heads = {part: heads(of(f"self_attn.{part}_proj")) for part in "qkv"}
    for rank in ranks:
        out = heads(rank.matrix(f"{name}.self_attn.o_proj").T)
        fused = heads(rank.matrix(f"{name}.self_attn.qkv_proj"))
        copies = (len(fused) - len(out)) // 2
        parts = {"q": fused[: len(out)], "k": fused[len(out) : -copies], "v": fused[-copies:]}
        mine = {part: look_up(parts[part], trained_heads[part]) for part in "qkv"}
        assert mine["k"] == mine["v"]
        ratio, slots = len(trained_heads["q"]) // KV_HEADS, len(out) // copies
        columns = heads(of("self_attn.o_proj").T)
        for slot, query in enumerate(mine["q"]):
            if query >= 0:
                assert mine["k"][slot // slots] == query // ratio
                assert np.array_equal(out[slot], columns[query])
            else:
                assert not out[slot].any()
        bias = rank.bias(f"{name}.self_attn.qkv_proj")
        if bias is not None:
            stored = {part: heads(model[f"{name}.self_attn.{part}_proj.bias"]) for part in "qkv"}
            zero = np.zeros(width)
            wanted = [stored[part][i] if i >= 0 else zero for part in "qkv" for i in mine[part]]
            assert np.array_equal(bias, np.concatenate(wanted))
        gate, up = np.split(rank.matrix(f"{name}.mlp.gate_up_proj"), 2)
        down = rank.matrix(f"{name}.mlp.down_proj").T
        channels = look_up(list(gate), list(of("mlp.gate_proj")))
        assert look_up(list(up), list(of("mlp.up_proj"))) == channels
        assert look_up(list(down), list(of("mlp.down_proj").T)) == channels
        for kept, some in zip(all_found, (mine["q"], mine["k"], channels), strict=True):
            kept.extend(some)
    return all_found
