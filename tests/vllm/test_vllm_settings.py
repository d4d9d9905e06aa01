"""The plugin's knobs: what each accepts, and that nothing else passes."""

from typing import Any

import pytest

from oddrank.engines.vllm.settings import VARIABLES, Settings
from oddrank.errors import OddrankError


def read(**given: str) -> Settings:
    return Settings.from_environment({"PATH": "/bin", "ODDRANK": "1"} | given)


def test_nothing_given_is_off() -> None:
    assert Settings.from_environment({}).on is False


@pytest.mark.parametrize("value", ["", "0", "off", "false", "no", " 0 ", "OFF"])
def test_off(value: str) -> None:
    assert Settings.from_environment({"ODDRANK": value}).on is False


@pytest.mark.parametrize("value", ["1", "on", "true", "yes", "True"])
def test_on_with_every_default(value: str) -> None:
    assert Settings.from_environment({"ODDRANK": value}) == Settings(
        on=True, layout="auto", constraints={}, drafter=True, plan_tp=None, strict=True
    )


def test_off_reads_nothing_else() -> None:
    assert Settings.from_environment({"ODDRANK": "0", "ODDRANK_LAYOUT": "diagonal", "ODDRANK_X": "1"}).on is False


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("ODDRANK_LAYOUT", "pad", "layout", "pad"),
        ("ODDRANK_LAYOUT", "replicate", "layout", "replicate"),
        ("ODDRANK_LAYOUT", "AUTO", "layout", "auto"),
        ("ODDRANK_LAYOUT", "", "layout", "auto"),
        ("ODDRANK_CONSTRAINTS", "gqa=6", "constraints", {"gqa": 6}),
        ("ODDRANK_CONSTRAINTS", " gqa = 6, mlp_multiple=64,", "constraints", {"gqa": 6, "mlp_multiple": 64}),
        ("ODDRANK_CONSTRAINTS", "", "constraints", {}),
        ("ODDRANK_DRAFTER", "off", "drafter", False),
        ("ODDRANK_DRAFTER", "on", "drafter", True),
        ("ODDRANK_PLAN_TP", "3", "plan_tp", 3),
        ("ODDRANK_PLAN_TP", "1024", "plan_tp", 1024),
        ("ODDRANK_PLAN_TP", "", "plan_tp", None),
        ("ODDRANK_COVERAGE", "warn", "strict", False),
        ("ODDRANK_COVERAGE", "strict", "strict", True),
    ],
)
def test_each_knob(variable: str, value: str, field: str, expected: Any) -> None:
    settings = read(**{variable: value})
    assert getattr(settings, field) == expected
    default = Settings(on=True)
    for other in {"layout", "constraints", "drafter", "plan_tp", "strict"} - {field}:
        assert getattr(settings, other) == getattr(default, other)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ODDRANK", "2"),
        ("ODDRANK", "maybe"),
        ("ODDRANK_LAYOUT", "ragged"),
        ("ODDRANK_LAYOUT", "pads"),
        ("ODDRANK_CONSTRAINTS", "gqa"),
        ("ODDRANK_CONSTRAINTS", "gqa=six"),
        ("ODDRANK_CONSTRAINTS", "gqa=-6"),
        ("ODDRANK_CONSTRAINTS", "=6"),
        ("ODDRANK_CONSTRAINTS", "gqa=6,gqa=3"),
        ("ODDRANK_DRAFTER", "2"),
        ("ODDRANK_PLAN_TP", "0"),
        ("ODDRANK_PLAN_TP", "1025"),
        ("ODDRANK_PLAN_TP", "3.0"),
        ("ODDRANK_PLAN_TP", "-3"),
        ("ODDRANK_PLAN_TP", "²"),
        ("ODDRANK_COVERAGE", "off"),
    ],
)
def test_other_values_are_errors_that_name_the_variable(variable: str, value: str) -> None:
    with pytest.raises(OddrankError) as raised:
        read(**{variable: value})
    assert variable in str(raised.value)
    assert value.split(",")[-1].partition("=")[0] in str(raised.value)


@pytest.mark.parametrize("variable", ["ODDRANK_LAYOUTS", "ODDRANK_TP", "ODDRANK_"])
def test_a_variable_it_does_not_know_is_an_error(variable: str) -> None:
    with pytest.raises(OddrankError, match=rf"{variable}, which the vLLM plugin does not know.*ODDRANK_PLAN_TP"):
        read(**{variable: "1"})


def test_names_that_only_begin_alike_are_others() -> None:
    assert read(ODDRANKING="1", VLLM_ODDRANK="x", ODDRANK_LOG="warning").on


@pytest.mark.parametrize(
    "settings",
    [
        Settings(on=True),
        Settings(True, "replicate", {"gqa": 6, "q_heads": 12}, False, 3, False),
    ],
)
def test_child_processes_read_the_same(settings: Settings) -> None:
    said = settings.environment()
    assert set(said) <= set(VARIABLES)
    assert Settings.from_environment(said) == settings
