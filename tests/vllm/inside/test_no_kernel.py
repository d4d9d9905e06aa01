"""Which integers stock vLLM refuses on a CPU, at one rank, in its own words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Places
from one_rank import load, rank_of

from oddrank.synth import describe_release, write_checkpoint

Configured = Callable[..., Any]

BITS = r"Quant type \(uint8b128\) not supported by CPUWNA16, supported types are: .*uint4.*uint4b8"


def written(folder: Path, family: str, form: str, **said: object) -> Path:
    write_checkpoint(describe_release(family, form, layers=1, vocab=512, size="tiny"), folder / "model")
    path = folder / "model" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= said
    path.write_text(json.dumps(config))
    return folder / "model"


def load_alone(folder: Path, configured: Configured) -> None:
    config = configured(folder, 1, dtype="float16")
    with rank_of(0, 1):
        load(config, config.model_config)


@pytest.mark.parametrize(
    ("family", "form", "said"),
    [
        ("llama", "int8-ct", BITS),
        ("qwen2", "gptq-int8", r"Marlin does not support weight_bits = uint8b128. Only types = .*uint4b8"),
    ],
)
def test_eight_bits_in_words(
    family: str, form: str, said: str, stock: Places, configured: Configured, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        load_alone(written(tmp_path, family, form), configured)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sym": False}, "Unsupported quantization config: bits=4, sym=False"),
        ({"desc_act": True}, r"group activation ordering \(desc_act=True\) is no longer supported"),
    ],
)
def test_gptq_in_any_build(
    change: dict[str, object], said: str, stock: Places, configured: Configured, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        load_alone(written(tmp_path, "qwen2", "gptq", **change), configured)
