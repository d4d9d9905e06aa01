"""The commands as a user meets them: what they print, their JSON, their exit codes."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from oddrank.cli import main
from oddrank.layout.plan import Plan


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `oddrank ARGS`."""
    old = sys.argv
    sys.argv = ["oddrank", *map(str, args)]
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = old
    out, err = capsys.readouterr()
    return code, out, err


def write_model(path: Path, **changes: object) -> Path:
    """A llama of 2 layers, 9 query and 3 KV heads of 4, MLP 24, vocabulary 40, tied, fp32."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 24,
        "vocab_size": 40,
        "tie_word_embeddings": True,
        **changes,
    }
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (40, 36), "model.norm.weight": (36,)}
    for i in range(2):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (36, 36),
            f"{at}.self_attn.k_proj.weight": (12, 36),
            f"{at}.self_attn.v_proj.weight": (12, 36),
            f"{at}.self_attn.o_proj.weight": (36, 36),
            f"{at}.mlp.gate_proj.weight": (24, 36),
            f"{at}.mlp.up_proj.weight": (24, 36),
            f"{at}.mlp.down_proj.weight": (36, 24),
            f"{at}.input_layernorm.weight": (36,),
            f"{at}.post_attention_layernorm.weight": (36,),
        }
    path.mkdir()
    save_file({n: random.normal(size=s).astype(np.float32) for n, s in shapes.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "tiny")


def test_plan_json_has_every_promised_key(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", model, "--tp", 2, "--json")
    assert code == 0
    report = json.loads(out)
    assert (report["model"], report["family"], report["tp"]) == ("tiny", "llama", 2)
    assert (report["executor"], report["layout"]) == ("runtime", "ragged")
    axes = {a["name"]: a for a in report["axes"]}
    assert set(axes) == {"q_heads", "kv_heads", "mlp", "vocab"}
    assert axes["q_heads"]["stock"] == 9 and axes["q_heads"]["planned"] == 9
    assert axes["q_heads"]["per_rank"] == [5, 4] and axes["q_heads"]["real_per_rank"] == [5, 4]
    assert axes["kv_heads"]["per_rank"] == [2, 2] and axes["q_heads"]["why"]
    assert report["tensors"] == {"total": 20, "changed": 0, "unmatched": 0}
    # 2 layers of 36*36*2 + 12*36*2 + 24*36*3 + 36*2, the embedding and the norm, in fp32
    assert report["bytes"]["stock"] == 4 * (2 * (2 * 36 * 36 + 2 * 12 * 36 + 3 * 24 * 36 + 72) + 40 * 36 + 36)
    assert len(report["bytes"]["per_rank"]) == 2 and report["bytes"]["overhead"] > 0
    # bf16 keys and values of 3 heads of 4 in 2 layers; 2 heads on each rank
    assert report["kv"]["stock_bytes_per_token"] == 2 * 2 * 3 * 4 * 2
    assert report["kv"]["per_rank_bytes_per_token"] == [64, 64]
    assert report["alternatives"] and report["proof"]["ok"] and len(report["proof"]["checks"]) == 7
    assert Plan.from_json(json.dumps(report["plan"])).tp == 2


def test_plan_for_vllm_lists_both_groupings(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", model, "--tp", 2, "--executor", "vllm", "--json")
    report = json.loads(out)
    planned = {tuple(a["planned"] for a in alt["axes"]) for alt in report["alternatives"]}
    assert code == 0 and {(12, 4), (10, 10)} <= planned
    assert sum(alt["chosen"] for alt in report["alternatives"]) == 1


def test_plan_of_several_sizes_is_a_line_each(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", model, "--tp", "1-10", "--json")
    lines = json.loads(out)
    assert code == 0 and [line["tp"] for line in lines] == list(range(1, 11))
    # 9/3 heads, 24 channels and 40 rows (64 padded) divide by 1 and 3 for the heads; 64 does not divide by 3
    assert [line["tp"] for line in lines if line["stock_vllm"]] == [1]
    assert "9 q_heads" in lines[1]["stock_vllm_why"]
    assert "At most --tp 9" in lines[9]["refused"] and lines[8]["refused"] is None
    code, out, _ = run(capsys, "plan", model, "--tp", "1-10")
    first_words = [x.split()[0] for x in out.splitlines() if x[:2].strip().isdigit()]
    assert code == 0 and first_words == [str(n) for n in range(1, 11)]


def test_tables_show_idle_ranks_and_alternatives(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", model, "--tp", 5, "--executor", "vllm", "--layout", "pad")
    assert code == 0 and "idle" in out and "alternatives" in out and "proved" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["plan", "MODEL", "--tp", "0"], ["at least 1"]),
        (["plan", "MODEL", "--tp", "two"], ["two"]),
        (["plan", "MODEL"], ["--tp"]),
        (["plan", "MODEL", "--tp", "10"], ["9 q_heads", "--tp 9"]),
        (["plan", "/no/such/place", "--tp", "2"], ["/no/such/place"]),
        (["plan", "", "--tp", "2"], ["empty"]),
        (["plan", "MODEL/config.json", "--tp", "2"], ["is a file"]),
        (["plan", "MODEL", "--tp", "2", "--constraint", "colour=3"], ["colour", "mlp_multiple"]),
        (["plan", "MODEL", "--tp", "2", "--constraint", "mlp"], ["NAME=NUMBER"]),
        (["plan", "MODEL", "--tp", "2", "--executor", "vllm", "--constraint", "mlp=20"], ["mlp=20", "mlp=24"]),
        (["plan", "MODEL", "--tp", "2", "--executor", "vllm", "--constraint", "kv_bytes=33"], ["kv_bytes=32"]),
        (["plan", "MODEL", "--tp", "2", "--executor", "vllm", "--layout", "ragged"], ["ragged", "runtime"]),
        (["plan", "MODEL", "--tp", "4", "--run-tp", "3"], ["does not run at 3"]),
        (["pad", "MODEL", "OUT", "--tp", "2", "--executor", "runtime"], ["vllm"]),
        (["pad", "MODEL", "MODEL/inside", "--tp", "2"], ["inside"]),
        (["generate", "MODEL", "--tp", "2", "--prompt", "x", "--plan", "MODEL/config.json"], ["not an oddrank plan"]),
        (["generate", "MODEL", "--prompt", "x"], ["--tp", "--plan"]),
        (["generate", "MODEL", "--tp", "2", "--prompt", "x"], ["no tokenizer", "--prompt-ids"]),
        (["generate", "MODEL", "--tp", "2", "--prompt-ids", "1,40"], ["token id 40", "0 to 39"]),
        (
            ["generate", "MODEL", "--tp", "2", "--prompt-ids", "1", "--rank-memory", "0.000001,0.000001"],
            ["rank 0 of 2", "give more memory or more ranks"],
        ),
        (["vllm", "serve", "MODEL", "--oddrank-foo", "3"], ["--oddrank-foo", "--oddrank-help"]),
        (["frobnicate"], ["frobnicate"]),
    ],
)
def test_bad_usage_is_one_clear_error_and_exit_2(
    args: list[str], words: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [a.replace("MODEL", str(model)).replace("OUT", str(tmp_path / "out")) for a in args]
    code, out, err = run(capsys, *given)
    assert code == 2 and not out and "Traceback" not in err
    assert all(word in err for word in words), err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "given", "words"),
    [
        ("--tp", "9" * 5000, "is not a number of ranks"),
        ("--tp", "1-" + "9" * 5000, "is not a number of ranks"),
        ("--constraint", "gqa=" + "9" * 5000, "give NAME=NUMBER"),
        ("--rank-memory", "5e-324,1", "is not memory in GiB"),
    ],
)
def test_numbers_beyond_any_use_are_refused_in_a_line(
    option: str, given: str, words: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "plan", model, *([] if option == "--tp" else ["--tp", 2]), option, given)
    assert (code, out) == (2, "") and words in err and len(err) < 400


def test_ids_are_continued_where_the_tokenizer_does_not_load(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = shutil.copytree(model, tmp_path / "copied")
    (copied / "tokenizer.json").write_text('{"version": 5}')
    asked = ["generate", copied, "--tp", 2, "--max-tokens", 2, "--json"]
    code, out, _ = run(capsys, *asked, "--prompt-ids", "1,2")
    assert code == 0 and json.loads(out)["text"] is None and len(json.loads(out)["token_ids"]) == 2
    code, out, err = run(capsys, *asked, "--prompt", "x")
    assert (code, out) == (2, "") and "no tokenizer that transformers can load" in err


def test_unequal_ranks_are_checked_for_the_runtime(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", model, "--tp", 2, "--rank-memory", "2,1", "--json")
    assert code == 0 and json.loads(out)["ok"]
    code, _, err = run(capsys, "check", model, "--tp", 2, "--rank-memory", "2,1", "--executor", "vllm")
    assert code == 2 and "--executor runtime" in err


def test_a_saved_plan_brings_its_ranks(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "plan", model, "--tp", 2, "--json")
    (tmp_path / "plan.json").write_text(out)
    asked = ["--plan", tmp_path / "plan.json", "--prompt-ids", "1,2", "--max-tokens", 2, "--dtype", "fp32", "--json"]
    code, out, _ = run(capsys, "generate", model, *asked)
    assert code == 0 and json.loads(out)["tp"] == 2


def test_a_config_without_a_model_type_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run(capsys, "plan", write_model(tmp_path / "m", model_type=None), "--tp", 2)
    assert "has no model_type. Known: " in err


def test_unknown_family_names_the_known_and_how_to_add_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", write_model(tmp_path / "m", model_type="bloom"), "--tp", 2)
    assert code == 2
    assert all(word in err for word in ("bloom", "llama", "mistral", "qwen2", "qwen3", "adding-a-family"))


def test_tensors_that_disagree_with_the_config_fail_the_proof(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "plan", write_model(tmp_path / "m", num_hidden_layers=3), "--tp", 2)
    assert code == 2 and "coverage" in err and "model.layers.2" in err and "missing" in err
    code, _, err = run(capsys, "plan", write_model(tmp_path / "n", intermediate_size=32), "--tp", 2)
    assert code == 2 and "[24, 36]" in err and "[32, 36]" in err
    code, _, err = run(capsys, "plan", write_model(tmp_path / "o", num_hidden_layers=1), "--tp", 2)
    assert code == 2 and "no role" in err


def test_senseless_configs_name_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (key, value) in enumerate(
        [("hidden_size", -1), ("num_attention_heads", "nine"), ("num_key_value_heads", 2), ("vocab_size", None)]
    ):
        code, _, err = run(capsys, "plan", write_model(tmp_path / str(number), **{key: value}), "--tp", 2)
        assert code == 2 and key in err and "Traceback" not in err, err


def test_pad_then_plan_is_an_identity(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "pad", model, tmp_path / "padded", "--tp", 2, "--layout", "pad", "--json")
    report = json.loads(out)
    assert code == 0 and report["layout"] == "pad" and report["changed"] == 8
    code, out, _ = run(capsys, "plan", tmp_path / "padded", "--tp", 2, "--executor", "vllm", "--json")
    assert code == 0 and json.loads(out)["layout"] == "identity"
    code, _, err = run(capsys, "pad", model, tmp_path / "padded", "--tp", 2)
    assert code == 2 and "not empty" in err


def test_what_the_runtime_cannot_run_is_said_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ["synth", "dflash", tmp_path / "draft", "--format", "fp8-block", "--size", "tiny", "--json"]
    code, out, _ = run(capsys, *made)
    assert code == 0 and json.loads(out)["tensors"] > 20
    code, out, _ = run(capsys, "plan", tmp_path / "draft", "--tp", 3, "--json")
    assert code == 0 and "no model of family dflash" in json.loads(out)["notes"][0]
    for command in (["generate", "--prompt", "x"], ["verify"]):
        code, _, err = run(capsys, command[0], tmp_path / "draft", "--tp", 3, *command[1:])
        assert code == 2 and "no model of family dflash" in err
    code, out, _ = run(capsys, "check", tmp_path / "draft", "--tp", 3, "--json")
    report = json.loads(out)
    assert code == 0 and report["ok"] and not report["disagreements"] and report["tensors"]["unmatched"] == 0


def test_check_reports_what_the_config_is_wrong_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "synth", "qwen3_5", tmp_path / "m", "--format", "fp8-block", "--size", "tiny")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    kept = config["quantization_config"]["modules_to_not_convert"]
    wrong = "model.layers.3.self_attn.o_proj"
    config["quantization_config"]["modules_to_not_convert"] = [*kept, wrong]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    code, out, err = run(capsys, "check", tmp_path / "m", "--tp", 2, "--json")
    assert code == 1 and f"{wrong} is stored as fp8-block, declared dense" in err
    assert [d["module"] for d in json.loads(out)["disagreements"]] == [wrong]


def test_a_drafter_is_planned_with_its_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The published pair at TP=3: 36/6 heads of 256 beside 48/12 of 128, 6 x 256 = 12 x 128."""
    for family, name in (("qwen3_5", "mxfp4"), ("dflash", "fp8-block")):
        run(capsys, "synth", family, tmp_path / family, "--format", name, "--headers-only")
    args = ["--tp", 3, "--executor", "vllm", "--constraint", "gqa=6", "--constraint", "mlp_multiple=64", "--json"]
    code, out, _ = run(capsys, "plan", tmp_path / "qwen3_5", "--drafter", tmp_path / "dflash", *args)
    assert code == 0
    target = json.loads(out)
    drafter = target["drafter"]
    totals = [{a["name"]: a["planned"] for a in report["axes"]} for report in (target, drafter)]
    assert (totals[0]["q_heads"], totals[0]["kv_heads"]) == (36, 6)
    assert (totals[0]["gdn_k_heads"], totals[0]["gdn_v_heads"]) == (18, 54)
    assert (totals[0]["mlp"], totals[0]["vocab"]) == (17472, 248448)
    assert (totals[1]["q_heads"], totals[1]["kv_heads"], totals[1]["mlp"]) == (48, 12, 17664)
    per_layer = [r["kv"]["per_rank_bytes_per_token"][0] // r["kv"]["layers"] for r in (target, drafter)]
    assert per_layer == [2048, 2048]


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for command in ("plan", "check", "pad", "generate", "verify"):
        assert command in out
        code, text, _ = run(capsys, command, "--help")
        assert code == 0 and "--json" in text and "--tp" in text


def test_what_breaks_is_told_not_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each was a traceback, a hang or a remedy that did not work."""
    model = write_model(tmp_path / "m")
    for args, words in (
        (["plan", model, "--tp", 2, "--constraint", "gqa=99999999999999999999"], ["beyond any model"]),
        (["plan", model, "--tp", 4, "--constraint", "gqa=20000000"], ["beyond any model"]),
        (["plan", write_model(tmp_path / "q", quantization_config=[1]), "--tp", 2], ["quantization_config", "object"]),
        (["pad", model, "", "--tp", 2], ["output directory", "empty"]),
        (["generate", model, "--tp", 2, "--prompt", ""], ["--prompt is empty"]),
        (["generate", model, "--tp", 2, "--prompt", "\udcff"], ["UTF-8"]),
    ):
        code, _, err = run(capsys, *args)
        assert code == 2 and all(w in err for w in words), err
    code, _, _ = run(capsys, "plan", model, "--tp", 2, "--constraint", "q_heads=12", "--constraint", "kv_heads=4")
    assert code == 0  # what a refusal of q_heads=9 says works


def test_a_cache_scale_per_head_is_not_carried_as_if_it_were_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.numpy import load_file

    for shape, expected in (((1,), 0), ((), 0), ((3,), 2)):
        model = write_model(tmp_path / f"m{len(shape)}{sum(shape)}")
        tensors = load_file(model / "model.safetensors")
        tensors["model.layers.0.self_attn.k_scale"] = np.ones(shape, np.float32)
        save_file(tensors, model / "model.safetensors")
        code, _, err = run(capsys, "plan", model, "--tp", 2)
        assert code == expected and ("k_scale is [3]" in err) == (expected == 2)
