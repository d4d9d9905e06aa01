"""Mixtures of experts: a router, which every rank has whole, and experts that are cut inside, each along its width.

Stored as three linear layers an expert or as two tensors a layer, gate over up in one of them; published files have
both, even within one family.
"""

from __future__ import annotations

import msgspec

from oddrank.checkpoint.config import ConfigView
from oddrank.families.decoder import Index, Part, gated_mlp
from oddrank.geometry import Along, Axis, Concat, Role, Whole

NAMED, NUMBERED = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
"""What the gate, up and down projection of one expert are called."""


class Experts(msgspec.Struct, frozen=True):
    """count: of a layer. chosen: by each token. width: of one. width_key: the config key that says it."""

    count: int
    chosen: int
    width: int
    width_key: str

    @classmethod
    def of(
        cls, c: ConfigView, *, count: tuple[str, ...] = ("num_experts", "num_local_experts"),
        chosen: str = "num_experts_per_tok", width: str = "moe_intermediate_size",
    ) -> Experts:  # fmt: skip
        """As the config says; `count`: the keys that a number of experts goes by, the usual one first."""
        number = c.count(next((key for key in count if key in c), count[0]))
        return cls(number, c.require_int(chosen, high=number), c.require_int(width), width)

    def part(
        self, at: str, hidden: int, index: Index, *, choice: str = "experts", names: tuple[str, str, str] = NAMED
    ) -> Part:
        """The experts under `at`, stacked or one by one (`names`: gate, up and down of one); nothing where no layer has
        any. choice: tells these layers, which are stored alike, from others (an MTP layer) that may not be."""
        if not index[0][1]:
            return Part()
        h, width, work = Whole(hidden), Along("moe"), self.chosen / self.count
        each: Index = (*index, ("expert", tuple(range(self.count))))
        stack, both, shape = (choice, "stacked"), Concat((width, width)), (Along("experts"),)
        one = gated_mlp(f"{at}.{{expert}}", hidden, width, each, names=names)
        roles = [
            *(msgspec.structs.replace(r, either=(choice, "separate"), work=work) for r in one),
            Role(f"{at}.gate_up_proj", (*shape, both, h), "column", index, matrix=True, work=work, either=stack),
            Role(f"{at}.down_proj", (*shape, h, width), "row", index, matrix=True, work=work, either=stack),
        ]
        return Part(
            roles=roles,
            axes=(Axis("experts", self.count, "experts", summed=False), Axis("moe", self.width, "width")),
            config_axes=((self.width_key, "moe"),),
        )

    def shared(self, at: str, hidden: int, times: int, index: Index) -> Part:
        """The shared expert of families whose config gives it `times` the width of a routed one, and no key of its own:
        its channels go where the routed experts' go."""
        return Part(gated_mlp(at, hidden, Along("moe", times), index) if times and index[0][1] else ())


def router(name: str, hidden: int, index: Index) -> Role:
    return Role(f"{name}.weight", (Along("experts"), Whole(hidden)), "replicated", index, matrix=True, work=1.0)


def per_expert(name: str, index: Index) -> Role:
    """One number an expert (a bias of the router, a scale), on every rank."""
    return Role(name, (Along("experts"),), "replicated", index)


def sparse_layers(c: ConfigView) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(layers with a dense MLP, layers with experts) of Qwen's MoE configs."""
    every = range(c.count("num_hidden_layers"))
    step, dense = c.get_int("decoder_sparse_step", 1), c.get_list("mlp_only_layers")
    if not all(isinstance(number, int) for number in dense) or len(dense) > len(every):
        raise c.error("mlp_only_layers", "an array of layer numbers", dense)
    sparse = tuple(i for i in every if i not in dense and (i + 1) % step == 0)
    return tuple(i for i in every if i not in sparse), sparse
