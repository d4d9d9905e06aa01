"""The tokenizer beside a synthetic model's values: any text in, any token out, as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer

from oddrank.synth import describe_release, write_checkpoint, write_headers
from oddrank.synth.tokenizer import tokenizer_files

TEXT = "Grüße, 世界!\n\t 🙂  end"


def written(tmp_path: Path, family: str, **cut: Any) -> Path:
    return write_checkpoint(describe_release(family, size="tiny", layers=2, experts=2, **cut), tmp_path / family)


@pytest.mark.parametrize(
    ("family", "special"), [("llama", {511}), ("gemma3", {1, 2}), ("qwen3", {511}), ("qwen3_5_moe", set())]
)
def test_any_text_in_and_any_token_out(tmp_path: Path, family: str, special: set[int]) -> None:
    path = written(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    config = config.get("text_config", config)
    found = AutoTokenizer.from_pretrained(path)
    assert len(found) == config["vocab_size"] and found.eos_token_id == config.get("eos_token_id")
    ids = found(TEXT).input_ids
    assert len(ids) == len(TEXT.encode()) and max(ids) < len(found)
    assert found.decode(ids) == TEXT
    said = {found.decode([token], skip_special_tokens=True) for token in range(len(found))}
    assert f" {300}" in said and found.decode([300]) == " 300"
    assert {t for t in range(len(found)) if not found.decode([t], skip_special_tokens=True)} == set(
        found.all_special_ids
    )
    assert set(found.all_special_ids) >= special
    chat = found.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "user: hi\nassistant: "


def test_none_where_there_is_no_room_for_bytes(tmp_path: Path) -> None:
    path = written(tmp_path, "llama", vocab=256)  # one of them ends the text
    assert not (path / "tokenizer.json").exists()
    assert tokenizer_files(257, {"eos_token": 256}) and not tokenizer_files(256, {"eos_token": 0})
    assert tokenizer_files(256, {})


def test_none_for_headers_nor_for_a_drafter(tmp_path: Path) -> None:
    release = describe_release("llama", size="tiny")
    assert not (write_headers(release, tmp_path / "headers") / "tokenizer.json").exists()
    assert not (written(tmp_path, "dflash") / "tokenizer.json").exists()


def test_a_whole_vocabulary(tmp_path: Path) -> None:
    release = describe_release("llama", size="tiny")
    release = msgspec.structs.replace(release, size=msgspec.structs.replace(release.size, vocab=128_256))
    found = AutoTokenizer.from_pretrained(write_checkpoint(release, tmp_path / "m"))
    assert len(found) == 128_256 and found.eos_token_id == 128_255 and found.decode([128_000]) == " 128000"
