"""The families over any layout: transformers' float64 logits, cached decoding, and what is reduced how often."""

from functools import cache

import pytest
import torch
import transformers
from runtime.tiny import CASES, LAYOUTS, TOKENS, VOCAB, Tiny, TinySlice, on_ranks, ragged, reference, tiny

from oddrank.errors import OddrankError
from oddrank.runtime.models import MODELS, build_model
from oddrank.runtime.models.llama import Block, Llama, full_logits
from oddrank.runtime.models.seed_oss import SeedOssConfig
from oddrank.runtime.parallel import Partial, SoloGroup
from oddrank.runtime.precision import Precision
from oddrank.runtime.step import Step

FAMILIES = sorted(CASES)
made = cache(tiny)


@cache
def expected(family: str) -> torch.Tensor:
    return reference(made(family))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("tp", range(1, 8))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_transformers(family: str, tp: int, layout: str) -> None:
    ranks = on_ranks(made(family), LAYOUTS[layout](made(family), tp), lambda m: full_logits(m, TOKENS))
    assert ranks[0].shape == (len(TOKENS), VOCAB)
    for logits in ranks:
        assert relative(logits, expected(family)) < 1e-10
        assert torch.equal(logits, ranks[0])


@pytest.mark.parametrize("change", ["partner", "o_proj.bias twice", "a KV head", "an MLP channel"])
def test_a_wrong_layout_changes_the_logits(change: str) -> None:
    """The comparison can fail: what it compares depends on every part of the layout."""
    model = made("llama")
    layout = ragged(model, 3)
    if change == "partner":
        layout = layout._replace(partner=[layout.partner[0], layout.partner[1][::-1].copy(), layout.partner[2]])
        layout.slots[1]["kv_heads"] = layout.slots[1]["kv_heads"][:1].repeat(2)
        layout.partner[1][:] = 0
        layout.slots[1]["kv_heads"][0] = 0
    elif change == "a KV head":
        layout.slots[2]["kv_heads"][0] = 0
    elif change == "an MLP channel":
        layout.slots[0]["mlp"][0] = 22  # also on another rank

    def work(m: Llama) -> torch.Tensor:
        if change == "o_proj.bias twice":
            m.layers[0].self_attn.o_proj.bias_owner = m.group.rank != 0
        return full_logits(m, TOKENS)

    assert relative(on_ranks(model, layout, work)[0], expected("llama")) > 1e-4


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_steps_equal_the_full_forward(family: str, layout: str) -> None:
    """A prompt in chunks of 1, 2 and 2 tokens, then one token at a time."""

    def work(m: Llama) -> torch.Tensor:
        cache = m.new_cache(1)
        rows, at = [], 0
        for count in (1, 2, 2, 1, 1, 1, 1):
            step = Step.of([(0, TOKENS[at : at + count], at)], "cpu")
            rows.append(m.logits(m(step, cache)))
            at += count
        assert at == len(TOKENS)
        return torch.cat(rows)

    model = made(family)
    for tp in (1, 3):
        assert relative(on_ranks(model, LAYOUTS[layout](model, tp), work)[0], expected(family)) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_different_lengths_equals_each_alone(family: str) -> None:
    prompts = [TOKENS, TOKENS[:2], TOKENS[3:8]]
    nexts = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [1, 2, 3, 4, 5]]
    model = made(family)
    wanted = [reference(model, p + n) for p, n in zip(prompts, nexts, strict=True)]

    def work(m: Llama) -> list[torch.Tensor]:
        cache = m.new_cache(3)
        step = Step.of([(i, p, 0) for i, p in enumerate(prompts)], "cpu")
        got = [m.logits(m(step, cache)[step.last])]
        for i in range(5):
            step = Step.of([(s, [nexts[s][i]], len(p) + i) for s, p in enumerate(prompts)], "cpu")
            assert step.decode
            got.append(m.logits(m(step, cache)))
        return [torch.stack([g[s] for g in got]) for s in range(3)]

    for tp in (1, 2):
        for got, want in zip(on_ranks(model, ragged(model, tp), work)[0], wanted, strict=True):
            assert relative(got, want[-6:]) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_two_reduces_a_layer_one_for_the_embedding_one_gather_for_the_logits(family: str) -> None:
    model = made(family)

    def work(m: Llama) -> tuple[int, int, int]:
        before = m.group.counts.all_reduce, m.group.counts.all_gather, m.group.counts.total
        full_logits(m, TOKENS)
        after = m.group.counts.all_reduce, m.group.counts.all_gather, m.group.counts.total
        return tuple(b - a for a, b in zip(before, after, strict=True))  # type: ignore[return-value]

    layers = model.config["num_hidden_layers"]
    for counts in on_ranks(model, ragged(model, 3), work):
        assert counts == (2 * layers + 1, 1, 2 * layers + 2)


class _Unreduced(Block):
    def __call__(self, h, rotary, step, cache):  # type: ignore[no-untyped-def]
        h += self.self_attn(h.normed(self.input_layernorm), rotary, step, cache)
        return h


class _ReducedTwice(Block):
    def __call__(self, h, rotary, step, cache):  # type: ignore[no-untyped-def]
        term = self.self_attn(h.normed(self.input_layernorm), rotary, step, cache)
        h += term.reduce()
        h += term.reduce()
        return h


class _BiasInside(Block):
    def __call__(self, h, rotary, step, cache):  # type: ignore[no-untyped-def]
        o = self.self_attn.o_proj
        term = self.self_attn(h.normed(self.input_layernorm), rotary, step, cache)
        h += (term + o.bias.data).reduce()
        return h


@pytest.mark.parametrize("block", [_Unreduced, _ReducedTwice, _BiasInside])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_that_breaks_the_rule_does_not_run(block: type[Block], tp: int) -> None:
    def work(m: Llama) -> None:
        for layer in m.layers:
            layer.__class__ = block
        full_logits(m, TOKENS)

    model = made("llama")
    with pytest.raises(TypeError):
        on_ranks(model, ragged(model, tp), work)


def test_dummy_vocabulary_rows_never_win() -> None:
    """All real logits are negative, so a zero row would be the largest (traps: 29)."""
    base = tiny("llama", seed=3)
    hidden = base.config["hidden_size"]
    base.state["model.norm.weight"] = torch.zeros(hidden, dtype=torch.float64)
    base.state["model.norm.weight"][0] = 1.0
    base.state["lm_head.weight"] = torch.zeros(VOCAB, hidden, dtype=torch.float64)
    table = torch.zeros(VOCAB, hidden, dtype=torch.float64)
    table[:, 0] = 100.0  # the first channel stays positive through the blocks
    base.state["model.embed_tokens.weight"] = table
    base.state["lm_head.weight"][:, 0] = -torch.arange(1, VOCAB + 1, dtype=torch.float64)
    for kind in ("padded", "scattered"):
        for logits in on_ranks(base, LAYOUTS[kind](base, 4), lambda m: full_logits(m, TOKENS)):
            assert logits.shape[1] == VOCAB and bool((logits < 0).all())
            assert logits.argmax(-1).tolist() == [0] * len(TOKENS)


def test_a_vocabulary_row_on_two_ranks_is_refused() -> None:
    model = made("llama")
    layout = ragged(model, 2)
    layout.slots[1]["vocab"][0] = 3
    with pytest.raises(OddrankError, match="exactly one"):
        on_ranks(model, layout, lambda m: None)


def test_fp32_and_bf16_stay_near() -> None:
    for dtype, bound in (("fp32", 1e-4), ("bf16", 0.08), ("fp16", 0.01)):
        model = made("qwen3")
        for tp in (1, 3):
            logits = on_ranks(model, ragged(model, tp), lambda m: full_logits(m, TOKENS), dtype)[0]
            assert logits.dtype == torch.float32
            assert 0 < relative(logits.double(), expected("qwen3")) < bound


def test_half_weights_agree_between_sizes() -> None:
    """Ranks sum fp32 terms of the same rounded weights: sizes differ by fp32 rounding, not by bf16's."""
    model = made("llama")
    one, three = (on_ranks(model, ragged(model, tp), lambda m: full_logits(m, TOKENS), "bf16")[0] for tp in (1, 3))
    assert relative(three, one) < 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3, "tie_word_embeddings": True},
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_config_is_read_as_transformers_reads_it(family: str, changes: dict[str, object]) -> None:
    hf = transformers.AutoConfig.for_model(family, num_hidden_layers=3, **changes)
    # What a user's config.json has: only what differs from the family's defaults.
    stated = {
        "hidden_size": hf.hidden_size, "num_hidden_layers": 3, "vocab_size": hf.vocab_size,
        "num_attention_heads": hf.num_attention_heads, "model_type": family,
        "intermediate_size": hf.intermediate_size, **changes,
    }  # fmt: skip
    ours = MODELS[family].CONFIG.read(stated, MODELS[family].DEFAULTS)
    assert ours.head_dim == (getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
    assert ours.eps == hf.rms_norm_eps and ours.activation == hf.hidden_act
    assert ours.max_positions == hf.max_position_embeddings and ours.tied == hf.tie_word_embeddings
    if hasattr(hf, "attention_bias"):
        assert ours.attention_bias == hf.attention_bias
    if isinstance(ours, SeedOssConfig):
        assert (ours.attention_out_bias, ours.mlp_bias) == (hf.attention_out_bias, hf.mlp_bias)
    theirs = {k: v for k, v in hf.rope_parameters.items() if v is not None}
    assert {k: ours.rope[k] for k in theirs} == theirs
    if family == "mistral":
        windows: list[int | None] = [hf.sliding_window] * 3
    elif family.startswith("qwen"):
        windows = [hf.sliding_window if kind == "sliding_attention" else None for kind in hf.layer_types]
    else:
        windows = [None] * 3
    assert list(ours.windows) == windows


def test_what_is_not_known_is_refused_by_name() -> None:
    model = made("llama")
    part, group, fp64 = TinySlice(model, ragged(model, 1), 0), SoloGroup(), Precision.of("fp64")
    with pytest.raises(OddrankError, match="llama, mistral, qwen2, qwen3"):
        build_model("mamba", model.config, part, group, fp64)
    with pytest.raises(OddrankError, match="relu2"):
        build_model("llama", {**model.config, "hidden_act": "relu2"}, part, group, fp64)
    with pytest.raises(OddrankError, match="fancy"):
        rope = {"rope_type": "fancy", "rope_theta": 1e4}
        build_model("llama", {**model.config, "rope_parameters": rope}, part, group, fp64)
    with pytest.raises(OddrankError, match="fp8"):
        Precision.of("fp8")


def test_a_reduce_uses_the_partial_up() -> None:
    term = Partial(torch.ones(2), SoloGroup())
    term.reduce()
    with pytest.raises(TypeError):
        term.reduce()


def test_models_are_named_as_families_are() -> None:
    from oddrank.families import families

    assert set(MODELS) <= set(families())
    assert isinstance(made("llama"), Tiny)
