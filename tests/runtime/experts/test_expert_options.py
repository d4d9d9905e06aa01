"""What --experts, --expert-cache and --expert-load may say, and what goes together."""

import pytest

from oddrank import OddrankError
from oddrank.runtime.expert_options import CacheSize, ExpertOptions


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("48", CacheSize(count=48)), ("1", CacheSize(count=1)), ("0.25", CacheSize(rate=0.25)),
        ("25%", CacheSize(rate=0.25)), ("1.0", CacheSize(rate=1.0)), ("100%", CacheSize(rate=1.0)),
        (".5", CacheSize(rate=0.5)), ("auto", CacheSize()),
    ],
)  # fmt: skip
def test_cache_sizes(text, wanted):
    assert CacheSize.parse(text) == wanted


@pytest.mark.parametrize("text", ["0", "-3", "0.0", "1.5", "0%", "101%", "many", "", ".", "%", "1e3", "٣.٥"])
def test_sizes_that_mean_nothing(text):
    with pytest.raises(OddrankError, match="give a count of experts a layer"):
        CacheSize.parse(text)


def test_slots_of_a_size():
    assert CacheSize(count=48).slots(256, room=9) == 48
    assert CacheSize(count=300).slots(256, room=9) == 256
    assert CacheSize(rate=0.25).slots(256, room=9) == 64
    assert CacheSize(rate=0.001).slots(256, room=9) == 1
    assert CacheSize().slots(256, room=9) == 9
    assert CacheSize().slots(8, room=9) == 8
    assert CacheSize().slots(8, room=0) == 1


def test_what_goes_together():
    assert ExpertOptions.parse(None) == ExpertOptions("resident", CacheSize(), "parallel")
    assert ExpertOptions.parse(None, "8").kind == "offload"
    assert ExpertOptions.parse("auto", "50%", "serial") == ExpertOptions("auto", CacheSize(rate=0.5), "serial")
    for kind in ("resident", "cpu"):
        with pytest.raises(OddrankError, match=f"--experts {kind} has none. Choose --experts offload"):
            ExpertOptions.parse(kind, "8")
    with pytest.raises(OddrankError, match="is not one of resident, offload, cpu, hybrid, auto"):
        ExpertOptions.parse("gpu")
    with pytest.raises(OddrankError, match="is not one of serial, parallel"):
        ExpertOptions.parse("cpu", load="both")
