"""`oddrank plan --html`: what the page says is what the plan has, and it needs nothing but itself."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from cli.test_cli import run, write_model
from layout.shapes import plan as planned_for
from layout.shapes import subject_of, toy_model, toy_table
from picture.tree import Box, Node, is_about, numbers, ranks_of, read

from oddrank.layout.layouts import Layout, Pairing
from oddrank.layout.proof import prove
from oddrank.picture import page
from oddrank.report import describe
from oddrank.synth import describe_release, write_headers


class Shown(NamedTuple):
    """A page, and `plan --json` of the same arguments."""

    html: str
    document: Node
    report: dict[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headers of published sizes: 27B (MXFP4, with a vision tower), its drafter, 35B-A3B (fp8 blocks), 135M; and small
    ones of latent attention and of layers with two geometries of heads."""
    at = tmp_path_factory.mktemp("models")
    for name, family, form, vision in (
        ("27B", "qwen3_5", "mxfp4", True),
        ("drafter", "dflash", "fp8-block", False),
        ("35B-A3B", "qwen3_5_moe", "fp8-block", False),
        ("135M", "llama", "bf16", False),
    ):
        write_headers(describe_release(family, form, layers=None, experts=None, vocab=None, vision=vision), at / name)
    write_headers(describe_release("deepseek_v3", "fp8-block", size="tiny"), at / "latent")
    write_headers(describe_release("gemma4", "bf16", size="tiny"), at / "two geometries")
    return at


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """9 query and 3 KV heads of 4, MLP 24, vocabulary 40, fp32: see write_model."""
    return write_model(tmp_path / "tiny")


def show(capsys: pytest.CaptureFixture[str], out: Path, *args: object) -> Shown:
    file = out / "plan.html"
    code, said, err = run(capsys, "plan", *args, "--html", file, "--json")
    assert code == 0, err
    html = file.read_text(encoding="utf-8")
    return Shown(html, read(html), json.loads(said))


def article(shown: Shown, number: int = 0) -> Node:
    return shown.document.all("article")[number]


# -- who holds what: worked out by hand ------------------------------------------------------------------------------


def test_ragged_heads_sit_beside_the_kv_heads_they_read(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = show(capsys, tmp_path, tiny, "--tp", 2)
    (heads,) = [ranks_of(figure) for figure in article(shown).all("ol", "ranks")]
    assert heads == [
        [Box("KV 0", "", [0, 1, 2]), Box("KV 1", "copy 1 of 2, also rank 1", [3, 4])],
        [Box("KV 1", "copy 2 of 2, also rank 0", [5]), Box("KV 2", "", [6, 7, 8])],
    ]


def test_padding_is_marked_in_words(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = show(capsys, tmp_path, tiny, "--tp", 2, "--executor", "vllm", "--layout", "pad")
    (heads,) = [ranks_of(figure) for figure in article(shown).all("ol", "ranks")]
    assert heads[1] == [Box("KV 2", "", [6, 7, 8]), Box("dummy KV", "", [-1, -1, -1])]
    assert "6 query heads (3 real)" in article(shown).all("ol", "ranks")[0].text()
    # 40 vocabulary rows on 2 ranks of 32: the second has 8 of them and 24 dummies
    vocab = rows(article(shown), "vocab")
    assert vocab[1][:4] == ["1", "32–39", "8", "24"]
    tile = next(n for n in article(shown).one("dl", "tiles").all("div") if "Padding" in n.text())
    # per layer 3 query heads of q and o, 1 KV head of k and v, each 4 x 36 in fp32; 24 rows of 36; of all weights
    dummies = 4 * (2 * (3 * 2 + 1 * 2) * 4 * 36 + 24 * 36)
    weights = 4 * (2 * (2 * 36 * 36 + 2 * 12 * 36 + 3 * 24 * 36 + 72) + 40 * 36 + 36)
    assert shown.report["bytes"]["dummies_per_rank"] == [0, dummies]
    assert (
        f"{100 * dummies / weights:.1f}%" in tile.text()
        and "12.4 KiB" in tile.text()
        and 12.35 < dummies / 1024 < 12.45
    )


def test_copies_on_one_rank_are_numbered(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = show(
        capsys, tmp_path, tiny, "--tp", 5, "--executor", "vllm", "--constraint", "gqa=1"
    )  # each query head with a KV head of its own
    (heads,) = [ranks_of(figure) for figure in article(shown).all("ol", "ranks")]
    assert heads[0] == [Box("KV 0", "copy 1 of 3, also rank 1", [0]), Box("KV 0", "copy 2 of 3, also rank 1", [1])]
    assert heads[1] == [Box("KV 0", "copy 3 of 3, also rank 0", [2]), Box("KV 1", "copy 1 of 3, also rank 2", [3])]
    assert heads[4] == [Box("KV 2", "copy 3 of 3, also rank 3", [8]), Box("dummy KV", "", [-1])]


def test_one_number_tells_a_query_head_and_its_own_kv_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_toy(followers=5, leaders=5, tp=3, executor="vllm")
    (heads,) = [ranks_of(figure) for figure in article(shown).all("ol", "ranks")]
    assert heads == [[Box("", "", [0, 1])], [Box("", "", [2, 3])], [Box("", "", [4, -1])]]
    assert "the head of the same number" in article(shown).text()


def test_heads_without_kv_heads_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """As in latent attention, where all heads share one cache."""
    model = toy_model(followers=8, leaders=8)
    model = msgspec.structs.replace(
        model,
        axes=tuple(a for a in model.axes if a.name != "kv_heads"),
        pairs=(),
        roles=tuple(r for r in model.roles if "kv_heads" not in r.axes()),
        kv=(),
    )
    shown = of_subject(subject_of(model, toy_table(model)), 3, "runtime")
    (heads,) = [ranks_of(figure) for figure in article(shown).all("ol", "ranks")]
    assert heads == [[Box("", "", [0, 1, 2])], [Box("", "", [3, 4, 5])], [Box("", "", [6, 7])]]
    assert "KV cache, per token" not in article(shown).text()


def test_dummies_and_copies_anywhere() -> None:
    """Slots in an order that no solver gives them: what is shown is the plan, not what plans look like."""
    model = toy_model(followers=4, leaders=2)
    made = planned_for(subject_of(model, toy_table(model)), 2)
    layouts = {
        "q_heads": Layout.of("q_heads", [[-1, 3, -1, -1, 2, 0], [-1, 1]]),
        "kv_heads": Layout.of("kv_heads", [[-1, 1, 0], [0, 0]]),
    }
    pairing = Pairing("q_heads", "kv_heads", ((1, 1, 1, 0, 1, 2), (0, 1)))
    plan = msgspec.structs.replace(
        made.plan, layouts=tuple(layouts.get(la.axis, la) for la in made.plan.layouts), pairings=(pairing,)
    )
    solution = msgspec.structs.replace(made.solution, plan=plan)
    document = read(page([{**describe(solution, made.census, prove(plan, made.census)), "plan": plan}]))
    assert ranks_of(document.one("ol", "ranks")) == [
        [
            Box("dummy KV", "", [-1]),
            Box("KV 1", "", [-1, 3, -1, 2]),
            Box("KV 0", "copy 1 of 3, also rank 1", [0]),
        ],
        [Box("KV 0", "copy 2 of 3, also rank 0", [-1]), Box("KV 0", "copy 3 of 3, also rank 0", [1])],
    ]
    assert document.one("p", "verdict").text().startswith("✓")


def test_a_failed_check_is_told() -> None:
    model = toy_model(followers=4, leaders=2)
    made = planned_for(subject_of(model, toy_table(model)), 2)
    wrong = msgspec.structs.replace(made.plan, pairings=(Pairing("q_heads", "kv_heads", ((0, 0), (0, 0))),), layouts=(
        made.plan.layouts[0], Layout.of("kv_heads", [[0], [0]]), *made.plan.layouts[2:])
    )  # fmt: skip
    solution = msgspec.structs.replace(made.solution, plan=wrong)
    document = read(page([{**describe(solution, made.census, prove(wrong, made.census)), "plan": wrong}]))
    assert document.one("p", "verdict").text() == "✗ Not proven. pairing"
    (failed,) = [row for row in document.one("ol", "checks").all("li") if row.text().startswith("✗")]
    assert "Pairing" in failed.text() and "belongs to kv_heads 1" in failed.text()


def shown_toy(followers: int, leaders: int, tp: int, executor: str) -> Shown:
    model = toy_model(followers=followers, leaders=leaders)
    return of_subject(subject_of(model, toy_table(model)), tp, executor)


def of_subject(subject: Any, tp: int, executor: str) -> Shown:
    made = planned_for(subject, tp, executor)
    report = {**describe(made.solution, made.census, made.checks), "plan": made.plan}
    html = page([report])
    return Shown(html, read(html), json.loads(msgspec.json.encode(report)))


# -- who holds what: against the plan's JSON -------------------------------------------------------------------------

CASES = {
    "135M at 3": ("135M", ["--tp", 3]),
    "135M on fewer": ("135M", ["--tp", 4, "--executor", "vllm", "--layout", "pad", "--run-tp", 2]),
    "27B padded": ("27B", ["--tp", 3, "--executor", "vllm", "--layout", "pad"]),
    "27B by memory": ("27B", ["--tp", 3, "--rank-memory", "24,24,16"]),
    "35B-A3B at 3": ("35B-A3B", ["--tp", 3, "--executor", "vllm"]),
    "35B-A3B at 7": ("35B-A3B", ["--tp", 7]),
    "35B-A3B at 8": ("35B-A3B", ["--tp", 8, "--executor", "vllm"]),
    "latent at 3": ("latent", ["--tp", 3, "--executor", "vllm"]),
    "two geometries at 3": ("two geometries", ["--tp", 3]),
    "35B-A3B refined": ("35B-A3B", ["--tp", 3, "--constraint", "block=64", "--memory", 24]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_number_is_the_plans(case: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, args = CASES[case]
    shown = show(capsys, tmp_path, models / name, *args)
    check_heads(article(shown), shown.report)
    check_widths(article(shown), shown.report)
    check_bytes(article(shown), shown.report)
    check_alternatives(article(shown), shown.report)
    check_proof(article(shown), shown.report)
    check_alone(shown)
    assert len(shown.html.encode()) < 100_000


def slots(report: dict[str, Any], axis: str) -> list[list[int]]:
    """Of every rank, from the plan's runs."""
    layout = next(la for la in report["plan"]["layouts"] if la["axis"] == axis)
    return [[-1 if start < 0 else start + i for start, count in runs for i in range(count)] for runs in layout["ranks"]]


def check_heads(at: Node, report: dict[str, Any]) -> None:
    figures = [ranks_of(figure) for figure in at.all("ol", "ranks")]
    pairings = report["plan"]["pairings"]
    paired = {pairing[side] for pairing in pairings for side in ("follower", "leader")}
    alone = [a["name"] for a in report["plan"]["model"]["axes"] if a["kind"] == "heads" and a["name"] not in paired]
    assert len(figures) == len(pairings) + len(alone)
    for shown, axis in zip(figures[len(pairings) :], alone, strict=True):
        assert [box.heads for (box,) in shown] == slots(report, axis)
    for shown, pairing in zip(figures, pairings, strict=False):
        followers, leaders = slots(report, pairing["follower"]), slots(report, pairing["leader"])
        everywhere = [head for mine in leaders for head in mine]
        seen: dict[int, int] = {}
        assert len(shown) == report["tp"]
        for rank, groups in enumerate(shown):
            assert len(groups) == len(leaders[rank])
            for slot, (box, head) in enumerate(zip(groups, leaders[rank], strict=True)):
                reading = [f for f, to in zip(followers[rank], pairing["ranks"][rank], strict=True) if to == slot]
                assert box.heads == reading
                assert box.label.endswith(f" {head}") if head >= 0 else box.label.startswith("dummy ")
                seen[head] = seen.get(head, 0) + 1
                copies = everywhere.count(head)
                if head < 0 or copies == 1:
                    assert not box.copies
                    continue
                assert box.copies.startswith(f"copy {seen[head]} of {copies}")
                others = re.search(r"also ranks? (.*)$", box.copies)
                expected = [r for r, mine in enumerate(leaders) if r != rank and head in mine]
                assert (numbers(others[1]) if others else []) == expected


def rows(at: Node, axis: str) -> list[list[str]]:
    """The table of a width or the vocabulary: cells of each rank."""
    (figure,) = [n for n in at.one("div", "widths").all("div") if n.one("code").text() == axis]
    assert (
        figure.one("svg", "strip").attributes["role"] == "img" and figure.one("svg", "strip").attributes["aria-label"]
    )
    return [[cell.text() for cell in row.all("th") + row.all("td")] for row in figure.one("tbody").all("tr")]


def check_widths(at: Node, report: dict[str, Any]) -> None:
    kinds = {axis["name"]: axis["kind"] for axis in report["plan"]["model"]["axes"]}
    widths = [axis for axis in report["axes"] if kinds[axis["name"]] in ("width", "vocab")]
    assert len(at.one("div", "widths").all("table")) == len(widths)
    for axis in widths:
        held, table = slots(report, axis["name"]), rows(at, axis["name"])
        padded = axis["per_rank"] != axis["real_per_rank"]
        for rank, (mine, cells) in enumerate(zip(held, table, strict=True)):
            real = [channel for channel in mine if channel >= 0]
            assert cells[0] == str(rank) and numbers(cells[1]) == real and numbers(cells[2]) == [len(real)]
            if padded:
                assert numbers(cells[3]) == [len(mine) - len(real)]
            if axis["unit"] > 1:
                assert numbers(cells[-1]) == sorted({channel // axis["unit"] for channel in real})
    if "experts" in kinds:
        count = next(axis["stock"] for axis in report["axes"] if axis["name"] == "experts")
        assert f"{count} experts. Every rank holds a part of each" in at.text()


def figure(at: Node, heading: str) -> list[tuple[list[int], str, str, Node]]:
    """The bars under a heading: ranks, value, mark, row."""
    inside = [n for n in at.walk() if n.tag in ("h3", "ol")]
    (bars,) = [b for a, b in pairwise(inside) if a.text() == heading]
    found = []
    for row in (n for n in bars.children if isinstance(n, Node)):
        who = row.one("span", "rank").text()
        value = row.one("span", "value")
        marks = [n.text() for n in value.all("span", "mark")]
        ranks = list(range(1000)) if who == "every rank" else numbers(re.sub("^ranks? ", "", who))
        found.append((ranks, value.one("b").text(), marks[0] if marks else "", row))
    return found


def check_bars(at: Node, heading: str, values: list[int]) -> None:
    bars = figure(at, heading)
    told = {}
    for ranks, amount, mark, row in bars:
        for rank in ranks[: len(values)]:
            told[rank] = (amount, mark)
        width = sum(float(s.attributes["width"].rstrip("%")) for s in row.one("svg", "bar").all("svg"))
        assert width == pytest.approx(100 * values[ranks[0]] / max(values), abs=0.01)
    assert sorted(told) == list(range(len(values)))
    for rank, value in enumerate(values):
        amount, mark = told[rank]
        assert is_about(amount, value)
        marked = {"▲ largest": value == max(values), "▽ smallest": value == min(values), "": True}
        assert marked[mark] and (mark or len(set(values)) == 1 or min(values) < value < max(values))


def check_bytes(at: Node, report: dict[str, Any]) -> None:
    size = report["bytes"]
    check_bars(at, "Weights", size["per_rank"])
    check_bars(at, "KV cache, per token", report["kv"]["per_rank_bytes_per_token"])
    if report["state"]["stock_bytes_per_request"]:
        check_bars(at, "Recurrent state, per request", report["state"]["per_rank_bytes_per_request"])
    legend = [n.text() for n in at.all("p", "legend")[1].all("span", "key")]
    assert len(legend) == len(size["parts"])
    for ranks, _, _, row in figure(at, "Weights"):
        said = dict(
            re.fullmatch(r"(.*) ([\d.]+ [KMG]?i?B)", n.text()).groups()
            for n in row.one("span", "parts").all("span")
            if not n.classes
        )  # type: ignore[union-attr]
        values = sorted(part["per_rank"][ranks[0]] for part in size["parts"] if part["per_rank"][ranks[0]])
        assert set(said) <= set(legend) and len(said) == len(values)
        dummies = [n.text() for n in row.all("span", "of")]
        assert len(dummies) == (1 if size["dummies_per_rank"][ranks[0]] else 0)
        for text in dummies:
            assert is_about(text.removesuffix(" of it dummies"), size["dummies_per_rank"][ranks[0]])
        for amount, value in zip(sorted(said.values(), key=in_bytes), values, strict=True):
            assert is_about(amount, value)
    cells = [[n.text() for n in row.all("td")] for row in at.one("table", "sum").all("tr")]
    expected = [v for key, v in size["held"].items() if v or key in ("stock", "dummies")]
    assert [
        is_about(c[0].removeprefix("+ "), v) for c, v in zip(cells, [*expected, sum(size["per_rank"])], strict=True)
    ]
    shares = [float(c[1].rstrip("%")) for c in cells]
    assert shares == pytest.approx([100 * v / size["stock"] for v in [*expected, sum(size["per_rank"])]], abs=0.051)
    if report["capacity"]:
        tokens = report["capacity"]["per_rank_tokens"]
        for ranks, _, _, row in figure(at, "Memory"):
            assert f"{tokens[ranks[0]]:,} tokens fit" in row.text()


def in_bytes(amount: str) -> float:
    number, unit = amount.split()
    return float(number) * {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]


def check_alternatives(at: Node, report: dict[str, Any]) -> None:
    options = [row for group in at.all("ol", "options") for row in group.children if isinstance(row, Node)]
    for row, alt in zip(options, report["alternatives"], strict=True):
        assert ("chosen" in row.classes) == alt["chosen"] == ("✓" in row.text()) == (" chosen" in row.text())
        planned = "/".join(str(axis["planned"]) for axis in alt["axes"])
        assert f"{alt['layout']} {planned} " in row.text().replace("✓ ", "") and alt["why"] in row.text()
        read = alt["weight_bytes_per_rank"] + report["context"] * alt["kv_bytes_per_token_per_rank"]
        assert is_about(row.one("span", "value").text(), read)


def check_proof(at: Node, report: dict[str, Any]) -> None:
    shown = at.one("ol", "checks").all("li")
    for row, check in zip(shown, report["proof"]["checks"], strict=True):
        assert check["name"] in row.text().lower() and check["detail"] in row.text() and row.text().startswith("✓")
        assert row.one("span", "asks").text()  # a check that the page has no question for
    assert at.one("p", "verdict").text().startswith("✓ Proven. All 7 checks hold")


def check_alone(shown: Shown) -> None:
    """Nothing is fetched, nothing runs, every reference inside the page has its target."""
    tags = {node.tag for node in shown.document.walk()}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    (policy,) = [n for n in shown.document.all("meta") if n.attributes.get("http-equiv") == "Content-Security-Policy"]
    assert policy.attributes["content"] == "default-src 'none'; style-src 'unsafe-inline'"
    ids = [n.attributes["id"] for n in shown.document.walk() if "id" in n.attributes]
    assert len(ids) == len(set(ids))
    for node in shown.document.walk():
        assert not {a for a in node.attributes if a.startswith("on") or a in ("src", "srcset", "style", "xlink:href")}
        if "href" in node.attributes:
            assert node.attributes["href"].removeprefix("#") in ids
    style = shown.document.one("style").text()
    assert "@import" not in style and "//" not in shown.html
    assert set(re.findall(r"url\(([^)]*)\)", shown.html)) <= {f"#{name}" for name in ids}


@pytest.mark.parametrize(
    ("name", "args", "axis", "unit"),
    [
        ("27B", [], "mlp", 32),  # MXFP4: down_proj's scales are one for 32 columns
        ("35B-A3B", [], "moe", 64),  # 512 is 4 blocks of 128: 3 ranks of the runtime cut them in 64
        ("35B-A3B", ["--executor", "vllm"], "moe", 128),
        ("135M", [], "mlp", 1),
    ],
)
def test_groups_are_those_of_the_storage(
    name: str, args: list[str], axis: str, unit: int, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = show(capsys, tmp_path, models / name, "--tp", 3, *args)
    assert next(a["unit"] for a in shown.report["axes"] if a["name"] == axis) == unit
    assert (f"Stored in groups of {unit}" in article(shown).text()) == (unit > 1)


# -- what is said in words -------------------------------------------------------------------------------------------


def test_the_header_tells_what_was_planned(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = show(capsys, tmp_path, models / "35B-A3B", "--tp", 3, "--constraint", "block=64")
    header = article(shown).one("header").text()
    assert all(
        word in header
        for word in ("35B-A3B", "TP 3", "engine runtime", "layout ragged", "family qwen3_5_moe", "fp8-block (31,745)",
                     "dense (145)", "block=64", "rewritten in blocks of 64")
    )  # fmt: skip


def test_idle_ranks_and_notes_are_told(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = show(capsys, tmp_path, models / "35B-A3B", "--tp", 7)
    assert shown.report["idle_ranks"] == [4, 5, 6]
    assert "Ranks 4–6 hold no real unit" in article(shown).one("ul", "notes").text()
    shown = show(capsys, tmp_path, models / "27B", "--tp", 3, "--executor", "vllm", "--layout", "pad")
    told = article(shown).one("ul", "notes").text()
    assert "Rank 2 holds no real unit" in told and shown.report["notes"][0] in told


def test_why_the_chosen_one(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for layout, words in (("auto", "fewest bytes for a token at 4,096 tokens of context"), ("pad", "was asked for")):
        shown = show(capsys, tmp_path, models / "27B", "--tp", 3, "--executor", "vllm", "--layout", layout)
        heads = [alt for alt in shown.report["alternatives"] if alt["axes"][0]["name"] == "q_heads"]
        reads = [alt["weight_bytes_per_rank"] + 4096 * alt["kv_bytes_per_token_per_rank"] for alt in heads]
        more = f"{reads[1] / reads[0] - 1:.1%}"  # 36/6, which pads, is second to 27/9
        assert [alt["axes"][0]["planned"] for alt in heads][:2] == [27, 36]
        told = article(shown).text()
        assert words in told
        assert (f"the next reads {more} more" if layout == "auto" else f"the chosen one reads {more} more") in told


def test_a_drafter_has_a_part_of_its_own(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--tp", 3, "--executor", "vllm", "--constraint", "q_heads=36", "--drafter", models / "drafter"]
    shown = show(capsys, tmp_path, models / "27B", *args)
    assert len(shown.document.all("article")) == 2
    for number, report in enumerate((shown.report, shown.report["drafter"])):
        check_heads(article(shown, number), report)
        check_widths(article(shown, number), report)
        check_bytes(article(shown, number), report)
    check_alone(shown)
    # 6 KV slots of 256 and 12 of 128, keys and values in bf16, on 3 ranks
    assert "the KV caches of both have 2,048 bytes a token, layer and rank" in article(shown, 1).text()


def test_names_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, architecture = '<script>x()<&"', "</style><img src=x onerror=x()>"
    shown = show(capsys, tmp_path, write_model(tmp_path / name, architectures=[architecture]), "--tp", 2)
    check_alone(shown)
    assert article(shown).one("h1").text() == name and architecture in article(shown).one("header").text()
    assert shown.document.one("title").text().startswith(name)


def test_many_heads_on_many_ranks_stay_small() -> None:
    shown = shown_toy(followers=128, leaders=8, tp=7, executor="vllm")
    check_heads(article(shown), shown.report)
    shown = shown_toy(followers=128, leaders=128, tp=64, executor="runtime")
    assert len(shown.html.encode()) < 200_000


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("no/such/page.html", ["no/such/page.html", "No such file or directory"]),
        ("tiny/config.json/page.html", ["Not a directory"]),
        ("tiny", ["is a directory"]),
        ("a" * 300, ["too long"]),
    ],
)
def test_a_page_that_cannot_be_written(
    where: str, words: list[str], tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    code, out, err = run(capsys, "plan", tiny, "--tp", 2, "--html", tmp_path / where)
    assert code == 2 and not out and "Traceback" not in err and all(word in err for word in words), err
    assert sorted(tmp_path.rglob("*")) == before


def test_no_name_and_several_sizes_are_refused(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", tiny, "--tp", 2, "--html", "")
    assert code == 2 and not out and "names no file" in err
    code, out, err = run(capsys, "plan", tiny, "--tp", "2,3", "--html", "x.html")
    assert code == 2 and not out and "one size" in err and not Path("x.html").exists()


def test_a_plan_that_cannot_be_made_leaves_no_page(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, _ = run(capsys, "plan", tiny, "--tp", 10, "--html", tmp_path / "page.html")
    assert code == 2 and not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("through", ["", "link.html"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_page_takes_the_place_of_no_file_of_the_model(
    file: str, through: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied, before = tmp_path / "copied", (tiny / file).read_bytes()
    shutil.copytree(tiny, copied)
    page = copied / file
    if through:
        page = tmp_path / through
        page.symlink_to(copied / file)
    code, out, err = run(capsys, "plan", copied, "--tp", 2, "--html", page)
    assert code == 2 and not out and "a file of the model" in err
    assert (copied / file).read_bytes() == before
    for _ in range(2):  # beside them is a place as any other, and an earlier page is no file of the model
        code, _, _ = run(capsys, "plan", copied, "--tp", 2, "--html", copied / "page.html")
        assert code == 0


def test_an_earlier_page_is_replaced_whole(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, link = tmp_path / "page.html", tmp_path / "link.html"
    file.write_text("earlier")
    link.symlink_to(file)
    code, out, _ = run(capsys, "plan", tiny, "--tp", 2, "--html", link)
    assert code == 0 and "proved" in out  # the tables are printed all the same
    assert link.is_symlink() and read(file.read_text()).one("h1").text() == "tiny"
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".new")]
