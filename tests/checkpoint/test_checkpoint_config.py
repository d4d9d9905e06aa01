"""Config dialects: the implied values are transformers' own, and wrong ones are named."""

from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError

from oddrank.checkpoint.config import TIED_BY_DEFAULT, ConfigView
from oddrank.errors import OddrankError

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 99,
}


def theirs(model_type: str, config: dict[str, Any]) -> Any:
    """The config as transformers reads it from config.json."""
    return transformers.AutoConfig.for_model(model_type, **config)


# What transformers' class takes for an absent key: head_dim, num_key_value_heads.
DEFAULTS = {"llama": (None, None), "mistral": (None, 8), "qwen2": (None, 32), "qwen3": (128, 32)}


@pytest.mark.parametrize("model_type", DEFAULTS)
@pytest.mark.parametrize("head_dim", [{}, {"head_dim": 24}, {"head_dim": None}])
@pytest.mark.parametrize("kv_heads", [{}, {"num_key_value_heads": 2}, {"num_key_value_heads": None}])
def test_head_arithmetic_is_transformers(model_type: str, head_dim: dict[str, Any], kv_heads: dict[str, Any]) -> None:
    config = SMALL | {"num_attention_heads": 32} | head_dim | kv_heads
    view = ConfigView(config)
    try:
        other = theirs(model_type, config)
    except StrictDataclassFieldValidationError:
        assert None in config.values()
        pytest.skip("transformers takes no null here")
    assert view.num_key_value_heads(DEFAULTS[model_type][1]) == other.num_key_value_heads
    # qwen2 has no such key in its class: its attention takes the quotient where the config has none.
    expected = getattr(other, "head_dim", None) or SMALL["hidden_size"] // 32
    assert view.head_dim(DEFAULTS[model_type][0]) == expected


@pytest.mark.parametrize(
    "model_type", [*sorted(TIED_BY_DEFAULT), "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"]
)
def test_tying_defaults_are_transformers(model_type: str) -> None:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    default = getattr(transformers.CONFIG_MAPPING[model_type], "tie_word_embeddings", False)
    assert ConfigView({"model_type": model_type}).tie_word_embeddings() is default


@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("inner", [None, True, False])
def test_tying_of_a_wrapped_config(outer: bool | None, inner: bool | None) -> None:
    config = {
        "model_type": "llava",
        "tie_word_embeddings": outer,
        "text_config": {"tie_word_embeddings": inner},
    }
    expected = outer if outer is not None else bool(inner)
    assert ConfigView(config).tie_word_embeddings() is expected


YARN = {"factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rope_theta": 5e5},
        {"rope_theta": 500000},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 3e5, **YARN}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 3e5, **LLAMA3}, "rope_theta": 7.0},
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 3e5},
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
)
def test_rope_is_read_as_transformers_reads_it(config: dict[str, Any]) -> None:
    def copy(value: Any) -> Any:
        return {k: copy(v) for k, v in value.items()} if isinstance(value, dict) else value

    other = theirs("llama", copy(config | SMALL)).rope_parameters
    rope = ConfigView(config).rope()
    assert rope.theta == other["rope_theta"]
    assert rope.kind == other["rope_type"]
    assert rope.partial == other.get("partial_rotary_factor")
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    assert rope.extra == {key: value for key, value in other.items() if key not in known}


def test_rope_by_layer_type() -> None:
    full, sliding = (
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    )
    view = ConfigView({"rope_parameters": {"full_attention": full, "sliding_attention": sliding}})
    ropes = view.ropes()
    assert list(ropes) == ["full_attention", "sliding_attention"]
    assert (ropes["full_attention"].theta, ropes["full_attention"].kind) == (1e6, "default")
    assert (ropes["sliding_attention"].theta, ropes["sliding_attention"].extra) == (1e4, {"factor": 2.0})
    with pytest.raises(OddrankError, match="differ between layer types"):
        view.rope()
    assert ConfigView({"rope_parameters": {"full_attention": full, "sliding_attention": full}}).rope().theta == 1e6


def test_dtype_in_both_spellings() -> None:
    assert ConfigView({"torch_dtype": "bfloat16"}).dtype() == "bfloat16"
    assert ConfigView({"dtype": "torch.float16"}).dtype() == "float16"
    assert ConfigView({"text_config": {"dtype": "float32"}}).dtype() == "float32"
    assert ConfigView({}).dtype() is None


def test_text_config() -> None:
    assert ConfigView({"a": 1}).text().data == {"a": 1}
    assert ConfigView({"text_config": {"a": 1}}).text().data == {"a": 1}
    nested = ConfigView({"thinker_config": {"text_config": {"a": -1}}}).text()
    with pytest.raises(OddrankError, match=r"config\.json: thinker_config\.text_config\.a should be .* it is -1\."):
        nested.require_int("a")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (0, "it is 0"),
        (-3, "it is -3"),
        ("8", "it is the string '8'"),
        (True, "it is true"),
        (8.0, "it is 8.0"),
        (None, "it is null"),
        ([8], "it is an array of 1"),
        ({}, "it is an object of 0"),
        (2**31, "it is 2147483648"),
        (10**400, "more than 40 digits"),
        ("x" * 999, "..."),
    ],
)
def test_wrong_integers_are_named(value: Any, found: str) -> None:
    view = ConfigView({"num_attention_heads": value}, "m/config.json", "text_config.")
    with pytest.raises(OddrankError) as error:
        view.require_int("num_attention_heads")
    message = str(error.value)
    assert message.startswith("m/config.json: text_config.num_attention_heads should be a whole number of at least 1")
    assert found in message and len(message) < 500 and "\n" not in message
    assert ("at most 2147483647" in message) == (isinstance(value, int) and value > 8)
    if value is not None:
        with pytest.raises(OddrankError):
            view.get_int("num_attention_heads", 8)
        with pytest.raises(OddrankError):
            view.num_key_value_heads()


def test_missing_keys() -> None:
    view = ConfigView({})
    for call in (view.require_int, view.require_str, view.require_float):
        with pytest.raises(OddrankError, match=r"x should be .* it is missing"):
            call("x")
    assert view.get_int("x", 3) == 3 and view.get_float("x", 0.5) == 0.5 and view.get_str("x", "s") == "s"
    assert view.get_bool("x", True) is True and view.get_list("x") == [] and view.child("x") is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "1", True, [], 10**400])
def test_wrong_numbers_are_named(value: Any) -> None:
    with pytest.raises(OddrankError, match="a finite number of at least 0"):
        ConfigView({"rms_norm_eps": value}).require_float("rms_norm_eps")


def test_other_wrong_types() -> None:
    for call in ("require_str", "get_list", "child"):
        with pytest.raises(OddrankError, match="it is 3"):
            getattr(ConfigView({"x": 3}), call)("x")
    with pytest.raises(OddrankError, match="true or false"):
        ConfigView({"x": 1}).get_bool("x", False)
    with pytest.raises(OddrankError, match="rope_scaling should be an object"):
        ConfigView({"rope_scaling": "x"}).rope()


def test_impossible_heads() -> None:
    with pytest.raises(OddrankError, match="head_dim is missing, and hidden_size 65"):
        ConfigView({"hidden_size": 65, "num_attention_heads": 8}).head_dim()
    with pytest.raises(OddrankError, match="num_key_value_heads 3 does not divide num_attention_heads 8"):
        ConfigView({"num_key_value_heads": 3, "num_attention_heads": 8}).num_key_value_heads()
