"""Starting: a backend that cannot take a format says which can; auto measures and every rank chooses the same."""

import logging
import threading

import pytest
import torch
from runtime.experts.stacks import AT, DENSE, E, H, HandSlice, W, error, expected, experts, options, routing, stack

from oddrank import OddrankError
from oddrank.runtime.experts import ExpertOptions, Experts, ExpertShare, device_nbytes, start, start_experts
from oddrank.runtime.experts.backends import BACKENDS
from oddrank.runtime.experts.cpu import Cpu
from oddrank.runtime.layers.module import Module
from oddrank.runtime.parallel import LocalGroup, SoloGroup


class Tiny(Module):
    """A model of two expert layers, run as the engine runs one."""

    def __init__(self, made, chosen, group, cut=(0, 128)):
        self.layers = [experts(made, cut, chosen, group=group) for _ in range(2)]
        for layer in self.layers[1:]:
            layer.share = self.layers[0].share
        self.group, self.seen = group, []

    def new_cache(self, slots):
        return {"slots": slots, "cached": 0}

    def __call__(self, step, cache):
        tokens = len(step.tokens)
        self.seen.append((self.layers[0].backend.name, tokens, cache["cached"]))
        cache["cached"] += tokens
        x = torch.sin(torch.arange(tokens * H).reshape(tokens, H) * (1 + step.tokens[:, None]) / 7).float()
        ids = (step.tokens[:, None] + torch.tensor([0, 2])) % E
        for layer in self.layers:
            x = x + self.group.all_reduce(layer(x, torch.full((tokens, 2), 0.5), ids))
        return x

    def logits(self, hidden):
        return hidden


def test_auto_measures_every_backend_end_to_end_and_ranks_agree(caplog):
    with caplog.at_level(logging.INFO, "oddrank"):

        def rank(group):
            model = Tiny(stack(DENSE), options("auto"), group, [(0, 128), (128, 320)][group.rank])
            return start_experts(model), model.layers[0].backend.name, model.layers[1].backend.name, model.seen

        found = LocalGroup.run(2, rank)
    assert {(first, second) for _, first, second, _ in found} == {(found[0][1],) * 2}
    chosen = found[0][1]
    for said, _, _, seen in found:
        assert said.startswith(f"experts: {chosen}, 2 layers of 6, ")
        assert all(f"{name} " in said for name in BACKENDS)
        for name in BACKENDS:
            # a prompt of 32 tokens and, token by token, what follows, twice: the first time warms up
            runs = [(tokens, cached) for kind, tokens, cached in seen if kind == name]
            assert runs == [(32, 0), (1, 32), (1, 33), (32, 0), *((1, 32 + i) for i in range(8))]
    assert [r.message for r in caplog.records].count(found[0][0]) >= 1
    # the times told are the same on every rank: the slowest's
    assert len({said.partition("auto measured")[2] for said, *_ in found}) == 1


@pytest.mark.parametrize("best", ["resident", "offload", "cpu", "hybrid"])
def test_auto_takes_what_is_fastest_on_the_slowest_rank(best, monkeypatch):
    here = threading.local()

    def seconds(runs, share):
        name = runs.layers[0].backend.name
        slow = 0.001 if name == best else 0.002
        # on rank 1 alone everything else looks faster still
        return (slow, slow) if share.group.rank == 0 else (0.0005, 0.0009 if name == best else 0.0001)

    monkeypatch.setattr(start, "_seconds", seconds)

    def rank(group):
        here.model = Tiny(stack(DENSE), options("auto"), group)
        said = start_experts(here.model)
        return said, [layer.backend.name for layer in here.model.layers], here.model

    for said, names, model in LocalGroup.run(2, rank):
        assert names == [best] * 2
        assert f"{best} 1.0 ms a token, 1 ms for the prompt" in said
        assert [layer.held() for layer in model.layers] == [3 * E * 128 * H * 2] * 2  # one copy is kept
        r = routing()
        assert error(model.layers[0](*r.tensors(torch.float64)), _part(r)) < 1e-13


def _part(r):
    """What channels 0 to 127 add, by numpy."""
    made = stack(DENSE)
    cut = [{"gate": m["gate"][:128], "up": m["up"][:128], "down": m["down"][:, :128]} for m in made.matrices]
    return expected(made._replace(matrices=cut), *r)


def test_auto_leaves_out_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(start, "_all_fit", lambda layers, share: False)
    model = Tiny(stack(DENSE), options("auto"), SoloGroup())
    said = start_experts(model)
    assert "resident left out: the device of some rank has no room" in said
    assert {kind for kind, *_ in model.seen} == {"offload", "cpu", "hybrid"}


@pytest.mark.parametrize(
    ("kind", "slots", "said"),
    [
        ("resident", None, "experts: resident, 2 layers of 6, 1.5 MB on cpu"),
        ("cpu", None, "experts: cpu, 2 layers of 6, 1.5 MB in host memory computed on 2 threads"),
        ("offload", 3, "experts: offload, 2 layers of 6, 1.5 MB in host memory with 3 of each layer cached on cpu"),
        ("hybrid", 2, "in host memory with 2 of each layer cached on cpu (0.5 MB) computed on 2 threads"),
        ("offload", None, "with 1 of each layer cached on cpu"),
    ],
)
def test_what_is_said_of_a_backend(kind, slots, said):
    model = Tiny(stack(DENSE), options(kind, slots), SoloGroup())
    assert said in start_experts(model)
    assert not model.seen


def test_a_model_without_experts_has_nothing_to_say():
    assert start_experts(Module()) == ""


def layer_of(kind):
    return Experts(
        HandSlice(stack("MXFP4, Quark"), (0, W)), AT, experts=E, hidden=H, width=W,
        activation=torch.nn.functional.silu, weights=torch.float32,
        share=ExpertShare(ExpertOptions(kind), SoloGroup(), threads=1),
    )  # fmt: skip


def test_a_backend_that_cannot_take_a_format_names_those_that_can(monkeypatch):
    monkeypatch.setattr(Cpu, "kinds", frozenset({"dense", "fp8"}))
    for kind in ("cpu", "hybrid"):
        with pytest.raises(
            OddrankError, match=rf"--experts {kind} does not compute experts stored as mxfp4 .*resident or offload\."
        ):
            layer_of(kind)
    for kind in ("resident", "offload", "auto"):
        layer_of(kind)
    model = Tiny(stack("MXFP4, Quark"), options("auto"), SoloGroup())
    start_experts(model)
    assert {kind for kind, *_ in model.seen} == {"resident", "offload"}


def test_a_format_that_no_backend_takes(monkeypatch):
    for backend in BACKENDS.values():
        monkeypatch.setattr(backend, "kinds", frozenset())
    with pytest.raises(OddrankError, match="No other backend does either"):
        layer_of("auto")


def test_experts_on_the_device_only_cannot_be_computed_elsewhere():
    layer = experts(stack(DENSE), (0, 128), options("resident"))
    with pytest.raises(OddrankError, match="on the device only"):
        layer.use("cpu")


def test_an_automatic_cache_has_one_size_on_all_ranks(monkeypatch):
    monkeypatch.setattr(ExpertShare, "_free_experts", lambda self, experts: 5 - self.group.rank)

    def rank(group):
        model = Tiny(stack(DENSE), ExpertOptions("hybrid"), group)
        start_experts(model)
        return [layer.backend.cache.slots for layer in model.layers], group.counts.all_gather

    # asked once, for all layers
    assert LocalGroup.run(3, rank) == [([3, 3], 1)] * 3


@pytest.mark.parametrize("kind", ["resident", "cpu", "offload", "hybrid"])
def test_what_is_on_the_device_of_a_gpus_rank_and_of_a_cpus(kind, monkeypatch):
    model = Tiny(stack(DENSE), options(kind, 2 if kind in ("offload", "hybrid") else None), SoloGroup())
    start_experts(model)
    one = 3 * 128 * H * 2
    banks, caches = 2 * E * one, {"offload": 2 * 2 * one + 2 * one, "hybrid": 2 * 2 * one + 2 * one}.get(kind, 0)
    assert model.nbytes() == banks
    assert device_nbytes(model) == banks + caches  # two layers' caches, and two experts that stream
    monkeypatch.setattr(model.layers[0].share, "device", torch.device("meta"))  # any that is not the CPU
    assert device_nbytes(model) == (banks if kind == "resident" else caches)
