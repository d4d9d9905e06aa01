"""Loading experts: straight into the banks, one thread or several, in memory that the banks and a constant bound."""

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from formats.codec import Raw
from formats.dialects import DIALECTS, matrix, stored
from runtime.experts.stacks import (
    AT,
    CUTS,
    DENSE,
    E,
    H,
    HandSlice,
    W,
    error,
    expected,
    experts,
    options,
    routing,
    stack,
)  # fmt: skip

from oddrank import OddrankError
from oddrank.checkpoint.dtypes import STORAGE
from oddrank.runtime.experts import Experts, ExpertShare
from oddrank.runtime.loader import _return_freed_memory
from oddrank.runtime.parallel import SoloGroup
from oddrank.transform.slice import StoredMatrix

COUNT, HIDDEN, WIDTH = 48, 512, 768
LOADS = ("serial", "parallel")


def rss_anon() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Endless:
    """Large experts that are nowhere: reading one makes its words. Measures at every read."""

    def __init__(self, stacked, dtype="BF16"):
        self.stacked, self._dtype = stacked, dtype
        self.peak, self.threads, self.released = 0, set(), []

    def matrix(self, name):
        if name.endswith("gate_up_proj") != self.stacked and "down" not in name:
            raise KeyError(name)
        return StoredMatrix("dense", {".weight": name + ("" if self.stacked else ".weight")}, {".weight": (1, 1)})

    def shape(self, name):
        matrix = (HIDDEN, WIDTH) if "down" in name else (WIDTH * (2 if self.stacked else 1), HIDDEN)
        return (COUNT, *matrix) if self.stacked else matrix

    def dtype(self, name):
        return self._dtype

    def read_into(self, name, out):
        self._read(out, 0 if self.stacked else int(name.split(".")[5]))

    def read_rows_into(self, name, start, out):
        for at in range(len(out)):
            self._read(out[at], start + at)

    def _read(self, out, expert):
        assert out.dtype == STORAGE[self._dtype]
        bf16 = 0x3F80 + expert  # 1.0 and a little more for each expert
        out[...] = bf16 if self._dtype == "BF16" else bf16 << 16
        self.threads.add(threading.get_ident())
        self.peak = max(self.peak, rss_anon())


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("stacked", "dtype"), [(False, "BF16"), (True, "BF16"), (False, "F32"), (True, "F32")])
def test_memory_while_loading_is_the_banks_and_a_constant(load, stacked, dtype):
    part = Endless(stacked, dtype)
    layer = Experts(
        part, AT, experts=COUNT, hidden=HIDDEN, width=WIDTH, activation=torch.nn.functional.silu,
        weights=torch.bfloat16, share=ExpertShare(options("cpu", load=load), SoloGroup(), threads=4),
    )  # fmt: skip
    gc.collect()
    _return_freed_memory()
    before = rss_anon()
    read = layer.load_own(part, part.released.append)
    bank = COUNT * 3 * WIDTH * HIDDEN * 2
    assert layer.held() == bank
    assert read == bank * STORAGE[dtype].itemsize // 2
    assert bank > 100e6
    # four threads with one expert's matrix each, as stored, and what a thread allocates when it first runs
    assert part.peak - before < bank + 4 * 2 * WIDTH * HIDDEN * 4 + 8e6
    assert sorted(part.released) == sorted(layer.own_tensors())
    assert (len(part.threads) == 1) == (load == "serial")
    for e in (0, 17, COUNT - 1):
        wanted = torch.tensor(0x3F80 + e, dtype=torch.int16).view(torch.bfloat16)
        for parts in layer.backend._layer.banks.expert(e):
            assert (parts[".weight"] == wanted).all()


@pytest.mark.parametrize("kind", [DENSE, "NVFP4, ModelOpt", "fp8 channel, 1-D"])
def test_the_ranks_hold_one_copy_of_the_experts_together(kind):
    made = stack(kind)
    whole = experts(made, (0, W), options("cpu")).held()
    for cuts in CUTS.values():
        held = [experts(made, cut, options("cpu")).held() for cut in cuts]
        assert whole <= sum(held) < 1.02 * whole  # a scale that belongs to a whole tensor is on every rank
        assert max(held) < whole * (max(b - a for a, b in cuts) / W) + 0.02 * whole


@pytest.mark.parametrize("load", LOADS)
def test_every_stored_tensor_is_read_once_and_activation_scales_are_not(load):
    made = stack("NVFP4, ModelOpt")
    layer = experts(made, (0, 128), options("cpu", load=load))
    part = HandSlice(made, (0, 128))
    released = []
    layer.load_own(part, released.append)
    wanted = [name for name in made.tensors if not name.endswith("input_scale")]
    assert len(wanted) == E * 3 * 3
    assert sorted(part.reads) == sorted(released) == sorted(wanted)
    assert sorted(layer.own_tensors()) == sorted(made.tensors)


def test_every_expert_has_its_own_scales():
    """One pair of experts swapped in the bank would go unseen if all had the same."""
    made = stack("fp8 tensor, ModelOpt")
    scales = {float(made.tensors[f"{AT}.{e}.{p}_proj.weight_scale"].words.view(np.float32)) for e in range(E)
              for p in ("gate", "up", "down")}  # fmt: skip
    assert len(scales) == 3 * E


def build(made, width=W, cut=(0, W)):
    return Experts(
        HandSlice(made, cut), AT, experts=E, hidden=H, width=width, activation=torch.nn.functional.silu,
        weights=torch.float32, share=ExpertShare(options("cpu"), SoloGroup(), threads=1),
    )  # fmt: skip


def test_another_width_than_the_slice_has_is_told():
    with pytest.raises(OddrankError, match=r"the plan gives this rank BF16 \[320, 160\].*room for BF16 \[128, 160\]"):
        build(stack(DENSE), width=128)


def test_experts_of_a_layer_that_are_stored_differently_are_told():
    made = stack(DENSE)

    class Mixed(HandSlice):
        def matrix(self, name):
            found = super().matrix(name)
            return found._replace(format="fp8-tensor") if ".4.up" in name else found

    with pytest.raises(OddrankError, match=r"experts\.4\.up_proj is stored as fp8-tensor and .* as dense"):
        Experts(
            Mixed(made, (0, W)), AT, experts=E, hidden=H, width=W, activation=torch.nn.functional.silu,
            weights=torch.float32, share=ExpertShare(options("cpu"), SoloGroup(), threads=1),
        )  # fmt: skip
    name = f"{AT}.2.down_proj.weight"
    other = made._replace(tensors={**made.tensors, name: made.tensors[name]._replace(dtype="F16")})
    with pytest.raises(OddrankError, match=r"2\.down_proj\.weight: the plan gives this rank F16"):
        build(other)


def test_use_before_loading_is_told():
    layer = build(stack(DENSE))
    with pytest.raises(OddrankError, match="used before it was loaded"):
        layer(*routing().tensors(torch.float32))


def test_gate_and_up_of_a_stack_come_apart_where_a_scale_covers_both():
    """320 channels of gate and of up are 2.5 blocks each: of five blocks of rows the third lies over the border."""
    kind = "fp8 block, HF, fp32 scales"
    one, tensors, matrices = stack(kind), {}, []
    made = [stored(DIALECTS[kind], matrix(2 * W, H, seed=90 + e)) for e in range(E)]
    for e in range(E):
        both = DIALECTS[kind].decode(made[e])
        matrices.append({"gate": both[:W], "up": both[W:], "down": one.matrices[e]["down"]})
    for suffix in one.blocks:
        tail, down = suffix.removeprefix(".weight"), [one.tensors[f"{AT}.{e}.down_proj{suffix}"] for e in range(E)]
        tensors[f"{AT}.gate_up_proj{tail}"] = Raw(made[0][suffix].dtype, np.stack([m[suffix].words for m in made]))
        tensors[f"{AT}.down_proj{tail}"] = Raw(down[0].dtype, np.stack([raw.words for raw in down]))
    assert tensors[f"{AT}.gate_up_proj_scale_inv"].words.shape == (E, 5, 2)
    whole = one._replace(tensors=tensors, matrices=matrices, stacked=True)
    r = routing()
    assert error(experts(whole, (0, W), options("cpu"))(*r.tensors(torch.float64)), expected(whole, *r)) < 1e-13
