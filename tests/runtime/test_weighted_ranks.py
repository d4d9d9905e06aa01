"""Ranks of unequal memory, run: the same logits and tokens as one rank, and the parts they were promised."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from runtime.tiny import CASES, TOKENS, Tiny, reference, tiny

from oddrank.cli import main
from oddrank.errors import OddrankError
from oddrank.layout.capacity import rooms, tokens_together
from oddrank.planner import make_plan
from oddrank.runtime.generate import Session, forward_logits
from oddrank.runtime.request import Sampling
from oddrank.synth import describe_release, write_checkpoint
from oddrank.transform.slice import RankSlice

MEMORY = [(2.0, 1.0), (24.0, 24.0, 16.0), (1.0, 2.0, 3.0), (4.0, 2.0, 2.0, 3.0)]
HEADS = {"llama": (12, 3), "mistral": (10, 5), "qwen2": (8, 1), "qwen3": (8, 4)}


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A tiny model of each family, stored by transformers in float64."""
    family = request.param
    path = tmp_path_factory.mktemp(family)
    model(family).hf.save_pretrained(path)
    return family, path


def model(family: str) -> Tiny:
    q, kv = HEADS[family]
    hidden = {"hidden_size": q * 4} if family in ("llama", "qwen2") else {}
    return tiny(family, num_attention_heads=q, num_key_value_heads=kv, **hidden)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def test_weighted_ranks_give_the_logits_of_one(saved: tuple[str, Path]) -> None:
    family, path = saved
    one = forward_logits(path, make_plan(path, 1).plan, TOKENS, "fp64")
    assert relative(one, reference(model(family))) < 1e-9
    uneven = 0
    for memory in MEMORY:
        plan = make_plan(path, len(memory), rank_memory=memory, layout="ragged").plan
        assert all(len(set(plan.layout(axis).counts())) > 1 for axis in ("mlp", "vocab"))
        uneven += len(set(plan.layout("q_heads").counts())) > 1
        assert relative(forward_logits(path, plan, TOKENS, "fp64"), one) < 1e-12, memory
    assert uneven >= 2  # heads are few: near some shares they are equal


@pytest.mark.parametrize("family", ["qwen3_5-mxfp4", "qwen3_5_moe-fp8-block"])
def test_weighted_ranks_of_quantized_hybrids(family: str, tmp_path: Path) -> None:
    """The same weights cut otherwise: gated delta nets, experts' widths, scale blocks. 256 channels an expert are four
    blocks of 64, so that of five ranks one has none."""
    name, _, scheme = family.partition("-")
    path = tmp_path / "model"
    write_checkpoint(describe_release(name, scheme, size="tiny"), path)
    one = forward_logits(path, make_plan(path, 1).plan, TOKENS, "fp64")
    for memory in ((24.0, 24.0, 16.0), (4.0, 4.0, 3.0, 3.0, 3.0)):
        plan = make_plan(path, len(memory), rank_memory=memory).plan
        assert len(set(plan.layout("gdn_v_heads").counts())) > 1
        if name == "qwen3_5_moe":
            assert plan.layout("moe").counts() == ((128, 64, 64) if len(memory) == 3 else (64, 64, 64, 64, 0))
        assert relative(forward_logits(path, plan, TOKENS, "fp64"), one) < 1e-12, memory


def test_weighted_rank_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, llama = tmp_path / "model", model("llama")
    llama.hf.save_pretrained(path)
    plan = make_plan(path, 3, rank_memory=(24, 24, 8), context=0).plan
    with Session(path, plan, dtype="fp64") as ranks:
        made = ranks.generate([TOKENS[:3], TOKENS], Sampling(max_tokens=8, ignore_eos=True))[0]
        loaded = ranks.wait()
    held, lines = [rank.stored_bytes for rank in loaded], capfd.readouterr().err.splitlines()
    for prompt, completion in zip((TOKENS[:3], TOKENS), made, strict=True):
        said = reference(llama, prompt + completion.token_ids).argmax(-1).tolist()
        assert said[len(prompt) - 1 : -1] == completion.token_ids
    assert held == [RankSlice(plan, None, rank).nbytes() for rank in range(3)]
    assert min(held[:2]) > 1.5 * held[2]
    # what was predicted is what is there: stored in float64 and computed in it, nothing is kept otherwise
    predicted = rooms(plan, (24, 24, 8))
    assert [rank.room for rank in loaded] == predicted
    for rank in range(3):
        free = 0.9 * (24, 24, 8)[rank] * 2**30 - held[rank]  # a tenth kept back
        assert abs((predicted[rank].tokens() or 0) - free / predicted[rank].token) <= 1
        assert predicted[rank].token == 2 * plan.layout("kv_heads").counts()[rank] * 6 * 8 * 2  # k, v; layers
        assert loaded[rank].cache_tokens == tokens_together(predicted) == min(r.tokens() or 0 for r in predicted)
        mine = [line for line in lines if line.startswith(f"rank {rank} of 3: ")]
        assert any(f"{predicted[rank].token} bytes of KV cache a token" in line for line in mine)
        assert any(f"room for {predicted[rank].tokens()} tokens" in line for line in mine)
        assert any(line.endswith("GB/s)") and "MiB" in line for line in mine)


def test_the_commands_take_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model"
    model("llama").hf.save_pretrained(path)
    memory = ["--tp", "3", "--rank-memory", "24,24,16"]

    def run(*args: str) -> tuple[int, str, str]:
        with mock.patch.object(sys, "argv", ["oddrank", args[0], str(path), *args[1:]]):
            try:
                main()
                code = 0
            except SystemExit as stop:
                code = int(stop.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    code, out, _ = run("plan", *memory, "--json")
    report = json.loads(out)
    assert code == 0 and report["layout"] == "weighted" and report["plan"]["shares"] == [24, 24, 16]
    assert {a["name"]: a["per_rank"] for a in report["axes"]}["mlp"] == [9, 8, 6]  # of 23: 8.6, 8.6, 5.75
    code, out, _ = run("plan", *memory)
    assert code == 0 and "24 / 24 / 16 GiB" in out
    code, out, _ = run("check", *memory, "--executor", "runtime", "--json")
    assert code == 0 and json.loads(out)["ok"]
    code, out, _ = run("verify", *memory, "--dtype", "fp32", "--json", "--only", "runtime")
    assert code == 0 and json.loads(out)["verdicts"][0]["layout"] == "weighted"
    for command, more, words in (
        ("plan", ["--tp", "2", "--rank-memory", "24,24,16"], "is for 3 ranks, and --tp is 2"),
        ("plan", ["--tp", "2", "--rank-memory", "24,lots"], "not memory in GiB"),
        ("check", [*memory, "--executor", "vllm"], "--executor runtime"),
        ("verify", [*memory, "--only", "padded"], "no padded checkpoint"),
        ("generate", [*memory, "--prompt", "x", "--plan", "p.json"], "Leave out one"),
    ):
        code, out, err = run(command, *more)
        assert code == 2 and words in " ".join(err.split()), (command, err)


def test_a_weighted_plan_runs_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "model"
    model("llama").hf.save_pretrained(path)
    with pytest.raises(OddrankError, match="vllm executor gives every rank the same"):
        make_plan(path, 3, executor="vllm", rank_memory=(24, 24, 16))
    with pytest.raises(OddrankError, match="every rank needs some memory"):
        make_plan(path, 3, rank_memory=(5e-324, 24, 16))
