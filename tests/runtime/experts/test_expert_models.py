"""Whole models: every backend gives resident's logits, in one process, over processes and by the commands."""

import json
import sys

import pytest

from oddrank.checkpoint import Checkpoint
from oddrank.cli import main
from oddrank.planner import make_plan
from oddrank.runtime.expert_options import ExpertOptions
from oddrank.runtime.generate import Session
from oddrank.runtime.request import Sampling
from oddrank.runtime.worker import local_logits
from oddrank.synth.release import describe_release
from oddrank.synth.write import write_checkpoint

TOKENS = [3, 17, 52, 0, 17, 41, 8, 29, 11]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny checkpoints by format, made when first asked for."""
    at, made = tmp_path_factory.mktemp("models"), {}

    def get(family, form):
        if (family, form) not in made:
            made[family, form] = at / f"{family}-{form}"
            release = describe_release(family, form, size="tiny", layers=2, experts=8, vocab=64)
            write_checkpoint(release, made[family, form])
        return made[family, form]

    return get


@pytest.mark.parametrize("form", ["bf16", "fp8-block", "nvfp4-mixed", "nvfp4-ct", "mxfp4"])
def test_backends_agree_in_a_model(models, form):
    path = models("qwen3_5_moe", form)
    with Checkpoint.open(path) as checkpoint:
        plan = make_plan(str(path), 3).plan
        logits = {
            kind: local_logits(plan, checkpoint, TOKENS, "fp64", ExpertOptions.parse(kind, cache))
            for kind, cache in (("resident", None), ("offload", "3"), ("cpu", None), ("hybrid", "50%"))
        }
    largest = logits["resident"].abs().max()
    assert largest > 0.1
    for kind, found in logits.items():
        assert (found - logits["resident"]).abs().max() < 1e-12 * largest, kind


def command(capsys, *args):
    """(exit code, stdout, stderr) of `oddrank ARGS`."""
    old, sys.argv = sys.argv, ["oddrank", *map(str, args)]
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = old
    return code, *capsys.readouterr()


def generate(capsys, path, *options):
    return command(capsys, "generate", path, "--tp", 2, "--prompt", "5", "--max-tokens", 3, *options)


def test_rank_processes_choose_the_same_and_tell_it(models):
    path = models("qwen3_5_moe", "fp8-block")
    plan = make_plan(str(path), 2).plan
    with Session(path, plan, dtype="fp32", threads=1, experts=ExpertOptions.parse("auto", "2", "serial")) as session:
        said = [loaded.experts for loaded in session.wait()]
        logits = session.logits(TOKENS)
        completions, _ = session.generate([TOKENS], Sampling(max_tokens=4, ignore_eos=True))
    assert said[0] == said[1] and "auto measured" in said[0]
    with Checkpoint.open(path) as checkpoint:
        wanted = local_logits(plan, checkpoint, TOKENS, "fp64")
    assert (logits.double() - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert len(completions[0].token_ids) == 4
    assert completions[0].token_ids[0] == int(wanted[-1].argmax())


def test_options_that_do_not_go_together_are_refused(models, capsys):
    moe, dense = models("qwen3_5_moe", "bf16"), models("llama", "bf16")
    for path, options, wanted in (
        (moe, ("--experts", "cpu", "--expert-cache", "3"), "--experts cpu has none"),
        (moe, ("--experts", "offload", "--expert-cache", "120%"), "give a count of experts a layer"),
        (moe, ("--experts", "gpu"), "is not one of"),
        (dense, ("--experts", "offload"), "has no routed experts; leave out --experts"),
        (dense, ("--expert-load", "serial"), "has no routed experts"),
    ):
        code, _, err = generate(capsys, path, *options)
        assert code != 0 and wanted in err, (options, err)
        code, _, err = command(capsys, "verify", path, "--tp", 2, "--only", "runtime", *options)
        assert code != 0 and wanted in err, (options, err)


@pytest.mark.long
def test_verify_runs_the_backend_it_is_asked_for(models, capsys):
    path = models("qwen3_5_moe", "bf16")
    code, out, err = command(
        capsys, "verify", path, "--tp", 2, "--only", "runtime", "--experts", "hybrid", "--expert-cache", 2, "--json"
    )
    assert code == 0, err
    assert json.loads(out)["ok"]
