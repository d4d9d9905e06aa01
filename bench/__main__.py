"""Run every benchmark, one after the other, and write the table in bench/README.md. `python bench [--json] [NAME ...]`.

Exit code 1 where a target is missed. --json: print what every script reported, too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from machine import describe

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
BEGIN, END = "<!-- begin measured -->", "<!-- end measured -->"
SCRIPTS = (
    "plan", "hub", "pad", "quantized", "load", "load_quantized", "allreduce", "kernels", "operations", "decode",
    "prefill", "moe_decode", "compare", "vllm_load", "serving",
)  # fmt: skip
WHEN_NAMED = ("compare_kernels",)
"""Not among those that run without a name: other libraries' kernels, which few have installed."""
LIMIT_S, ENDING_S = 900, 60


def run(name: str) -> dict[str, Any]:
    """What a script reports, or {"failed": why}."""
    with subprocess.Popen([sys.executable, str(HERE / f"{name}.py")], stdout=subprocess.PIPE, text=True) as script:
        try:
            said, _ = script.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            script.terminate()  # so that it ends what it has started
            try:
                script.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                script.kill()
            return {"failed": f"it took longer than {LIMIT_S} s"}
    try:
        report = json.loads(said)
    except ValueError:
        return {"failed": f"it ended with {script.returncode} and no JSON"}
    return report if isinstance(report, dict) else {"failed": "its JSON is not an object"}


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = report.get("rows", [])
    return rows


def number(value: float | None, unit: str) -> str:
    """Three digits and the unit."""
    if value is None:
        return ""
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:#.3g} {unit}"


def table(machine: dict[str, Any], reports: dict[str, dict[str, Any]]) -> str:
    """The Markdown of the measured section."""
    lines = [
        f"Measured {datetime.date.today().isoformat()} on {machine['cores']} {machine['architecture']} cores "
        f"({', '.join(machine['cpu_flags']) or 'no notable features'}), {machine['memory_gib']} GiB of memory. "
        f"Load average before the first benchmark: {machine['load']}"
        + (" (the machine was busy with other work)." if machine["load"] > machine["cores"] / 2 else "."),
        "",
        "| what | measured | target | met | ceiling | share of it |",
        "|---|---|---|---|---|---|",
    ]
    for name, report in reports.items():
        if "failed" in report:
            lines.append(f"| {name} | not measured: {report['failed']} | | | | |")
        for r in rows_of(report):
            met = {True: "yes", False: "**no**", None: ""}[r["passed"]]
            ceiling = f"{number(r['ceiling'], r['unit'])} ({r['ceiling_is']})" if r.get("ceiling") else ""
            share = f"{r['share']:.0%}" if r.get("share") is not None else ""
            measured = number(r["measured"], r["unit"])
            lines.append(f"| {r['what']} | {measured} | {r['target'] or ''} | {met} | {ceiling} | {share} |")
    loads = ", ".join(f"{name} {report['load']}" for name, report in reports.items() if "load" in report)
    return "\n".join([*lines, "", f"Load average when each began: {loads}."])


def write_readme(section: str) -> None:
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    fresh = README.with_suffix(".md.new")
    fresh.write_text(f"{before}{BEGIN}\n{section}\n{END}{after}")
    os.replace(fresh, README)


def updated(section: str, names: Iterable[str]) -> str:
    """The README's section with the rows of `section` in place of those of the same name, new ones at the table's end,
    and a line that says when. That one of the scripts `names` was not measured is no longer said."""
    unmeasured = tuple(f"| {name} | not measured" for name in names)
    old = README.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    new = [line for line in section.splitlines() if line.startswith("|")][2:]
    fresh = {line.split("|")[1].strip(): line for line in new}
    kept = [line for line in old if not line.startswith(unmeasured)]
    rows = [fresh.pop(line.split("|")[1].strip(), line) if line.startswith("|") else line for line in kept]
    last = max(i for i, line in enumerate(rows) if line.startswith("|"))
    named = section.rsplit("Load average when each began: ", 1)[-1]
    today = datetime.datetime.now(datetime.UTC).date()
    return "\n".join([*rows[: last + 1], *fresh.values(), *rows[last + 1 :], "", f"Measured again {today}: {named}"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python bench", description=__doc__)
    known = SCRIPTS + WHEN_NAMED
    only = f"of {', '.join(known)}: only these, and the README stays as it is"
    parser.add_argument("names", nargs="*", metavar="NAME", help=only)
    parser.add_argument("--update", action="store_true", help="put the rows of these in the README's table")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.names) - set(known):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    machine = describe()
    reports: dict[str, dict[str, Any]] = {}
    for name in options.names or SCRIPTS:
        if (HERE / f"{name}.py").exists():
            print(f"bench: {name} ...", file=sys.stderr, flush=True)
            reports[name] = run(name)
    section = table(machine, reports)
    if not options.names:
        write_readme(section)
    elif options.update:
        write_readme(updated(section, reports))
    print(json.dumps({"machine": machine, "reports": reports}, indent=2) if options.json else section)
    failed = any("failed" in r or any(x["passed"] is False for x in rows_of(r)) for r in reports.values())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
