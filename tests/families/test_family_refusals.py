"""What is refused, and in which words: layouts that a model's own class would not load, configs that make no sense."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_models import FAMILIES, busy
from family_reference import tensor_shapes, transformers_logits
from family_subject import SAME, Subjected, distance, subject_of, virtual

from oddrank.checkpoint.config import ConfigView
from oddrank.errors import OddrankError
from oddrank.families import family_of
from oddrank.layout.executors import Constraints
from oddrank.layout.solver import Request
from oddrank.planner import make_plan, plan_subject
from oddrank.synth import describe_release, write_headers
from oddrank.transform.config import virtual_config


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "oddrank", *arguments], capture_output=True, text=True)


def test_gemma3_where_its_class_wants_heads_that_divide(tmp_path: Path) -> None:
    """27B at three ranks: 36 heads do not divide 5376, 42 and 48 do. The refusal writes nothing and names both."""
    release = describe_release("gemma3", size="27B", layers=1, vocab=1024)
    stock = write_headers(release, tmp_path / "stock")
    done = run("pad", str(stock), str(tmp_path / "out"), "--tp", "3", "--layout", "pad")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert "36 heads" in done.stderr and "hidden_size 5376" in done.stderr and "42, 48" in done.stderr
    plan = make_plan(stock, 3, executor="vllm", constraints={"q_heads": 48}).plan
    assert virtual_config(plan, {"hidden_size": 5376, "head_dim": 128})["num_attention_heads"] == 48


def test_deepseek_v2_likewise() -> None:
    m = Subjected("deepseek_v2", 7, busy("deepseek_v2", 3))
    plan = plan_subject(m.subject, Request(tp=3, executor="vllm")).plan
    with pytest.raises(OddrankError, match=r"deepseek_v2 model has 6 heads.*hidden_size 10"):
        virtual_config(plan, m.config)
    same = virtual_config(plan, {**m.config, "model_type": "deepseek_v3"})
    assert same["num_attention_heads"] == same["num_key_value_heads"] == 6


def test_a_long_rope_of_phi3() -> None:
    """Its class counts the factors by hidden / heads; a plain rope it reads at any number of heads."""
    config = busy("phi3", 3)
    factors = [1.0] * 2
    long: dict[str, Any] = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    view = {**config, "rope_scaling": long}
    plan = plan_subject(Subjected("phi3", 7, config).subject, Request(tp=3, executor="vllm")).plan
    with pytest.raises(OddrankError, match=r"factors of its long rope.*oddrank vllm serve"):
        virtual_config(plan, view)
    assert virtual_config(plan, config)["head_dim"] == 4


def test_latent_attention_has_no_kv_heads_to_ask_for() -> None:
    m = Subjected("deepseek_v3", 1)
    for name in ("gqa", "kv_bytes", "kv_heads"):
        with pytest.raises(OddrankError, match=rf"constraint {name}=2 is not one this model has: block, .*q_heads"):
            Constraints.parse({name: 2}, m.subject.model)
    assert Constraints.parse({"q_heads": 12}, m.subject.model).exact == {"q_heads": 12}


TWO_GEOMETRIES = {
    "num_attention_heads": 20, "num_key_value_heads": 5, "num_global_key_value_heads": 10, "attention_k_eq_v": True,
}  # fmt: skip


def test_no_number_of_heads_serves_both_geometries_of_gemma4() -> None:
    m = Subjected("gemma4", 7, busy("gemma4", 3) | TWO_GEOMETRIES)
    wanted = Constraints(exact={"q_heads": 24, "full_kv_heads": 18})
    with pytest.raises(OddrankError, match=r"counts q_heads and full_q_heads, .* 3 ranks no number .* were tried\.$"):
        plan_subject(m.subject, Request(tp=3, executor="vllm", constraints=wanted))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["sliding_attention", "linear_attention"]}, "layer_types should be 2 of sliding_attention"),
        ({"num_kv_shared_layers": 2, "num_hidden_layers": 2}, "num_kv_shared_layers should be so few"),
        (TWO_GEOMETRIES | {"num_global_key_value_heads": 3}, "a multiple of layer 1's 3 KV heads"),
        ({"per_layer_config": {"0": {"head_dim": 8}, "1": {"head_dim": 6}}, "num_hidden_layers": 4,
          "layer_types": ["sliding_attention", "full_attention"] * 2}, "one geometry of heads for each kind"),
    ],
)  # fmt: skip
def test_a_senseless_gemma4_config(change: dict[str, Any], words: str) -> None:
    config = {**busy("gemma4", 3), "num_hidden_layers": 2, "num_kv_shared_layers": 0,
              "layer_types": ["sliding_attention", "full_attention"]} | change  # fmt: skip
    view = ConfigView(config)
    with pytest.raises(OddrankError, match=words):
        family_of(view).build(view, "model.")


def test_gemma4_says_its_second_geometry_in_two_ways() -> None:
    """As published, and layer by layer as transformers 5.24 saves it: the same plan, and transformers reads both."""
    m = Subjected("gemma4", 7, busy("gemma4", 3) | TWO_GEOMETRIES)
    old = m.config
    full = [i for i, kind in enumerate(old["layer_types"]) if kind == "full_attention"]
    own = {"head_dim": old["global_head_dim"], "num_key_value_heads": old["num_global_key_value_heads"]}
    new = {k: v for k, v in old.items() if "global" not in k} | {"per_layer_config": {f"{i:02}": own for i in full}}
    plans = [plan_subject(subject_of(c, m.weights), Request(tp=3, executor="vllm")).plan for c in (old, new)]
    assert plans[0].layouts == plans[1].layouts
    assert distance(transformers_logits(new, m.weights, m.prompt), m.reference) < SAME
    config, weights = virtual(plans[1], new, m.weights)
    counts = {c["num_key_value_heads"] for c in config["per_layer_config"].values()}
    assert counts == {plans[1].layout("full_kv_heads").total()} != {own["num_key_value_heads"]}
    assert new["per_layer_config"][f"{full[0]:02}"] is own  # the stock config was not touched
    assert distance(transformers_logits(config, weights, m.prompt), m.reference) < SAME


def test_keys_that_borrowing_layers_of_gemma4_store_are_passed_on() -> None:
    """Some files hold keys for layers that use another's; nobody reads them."""
    config = FAMILIES["gemma4"](np.random.default_rng(1)) | {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    m = Subjected("gemma4", 1, config)
    kept = {f"model.layers.2.self_attn.{n}": np.zeros((3, 3)) for n in ("k_proj.weight", "k_norm.weight")}
    census = subject_of(config, {**m.weights, **kept}).census
    assert set(census.ignored) == set(kept)
    with pytest.raises(AssertionError, match=r"layers.9.self_attn.k_proj.weight .* has no role"):
        subject_of(config, {**m.weights, "model.layers.9.self_attn.k_proj.weight": np.zeros((3, 3))})


def test_experts_by_either_name_of_their_number() -> None:
    config = FAMILIES["qwen3_moe"](np.random.default_rng(0))
    other = {k: v for k, v in config.items() if k != "num_experts"} | {"num_local_experts": config["num_experts"]}
    built = [family_of(ConfigView(c)).build(ConfigView(c), "model.") for c in (config, other)]
    assert built[0] == built[1]
    with pytest.raises(OddrankError, match="num_experts should be a whole number"):
        family_of(ConfigView(config)).build(ConfigView({k: v for k, v in config.items() if "experts" not in k}), "")


def test_no_executor_is_named_that_cannot_run_the_family(tmp_path: Path) -> None:
    """MiniMax-M2 at five ranks: our runtime has no model of it."""
    stock = write_headers(describe_release("minimax_m2", size="M2", layers=1, experts=2), tmp_path / "stock")
    with pytest.raises(OddrankError, match="rms_norm across all 48 q_heads") as caught:
        make_plan(stock, 5, executor="vllm")
    assert "runtime" not in str(caught.value) and "Other sizes may" in str(caught.value)
    assert caught.value.short.endswith("computes rms_norm across all 48 q_heads")
    make_plan(stock, 6, executor="vllm")  # such another size


def test_what_seed_oss_means_by_absent_keys() -> None:
    """The tensors that transformers makes of a config without them: 8 KV heads, 128 to a head, biases on q, k and v."""
    silent = ("num_key_value_heads", "head_dim", "attention_bias", "attention_out_bias", "mlp_bias")
    config = {k: v for k, v in busy("seed_oss", 3).items() if k not in silent} | {"num_attention_heads": 16}
    shapes = tensor_shapes(config)
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == (8 * 128,)
    model = subject_of(config, {n: np.zeros(shape) for n, shape in shapes.items()}).model
    assert model.stock()["kv_heads"] == 8 and dict(model.config_fixed) == {"head_dim": 128}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_or_foreign_tensor(family: str) -> None:
    config = FAMILIES[family](np.random.default_rng(2))
    weights = {n: np.zeros(shape) for n, shape in tensor_shapes(config).items()}
    for name in weights:
        if ".layers.1." not in name:
            continue
        with pytest.raises(AssertionError, match=r"missing|is stored as"):
            subject_of(config, {n: w for n, w in weights.items() if n != name})
    with pytest.raises(AssertionError, match=r"bogus.weight F64 \[2\] has no role in family"):
        subject_of(config, {**weights, "model.layers.0.bogus.weight": np.zeros(2)})
