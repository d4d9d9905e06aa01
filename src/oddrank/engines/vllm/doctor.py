"""What the plugin finds in the vLLM of this environment."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Any

from oddrank import __version__
from oddrank.engines.vllm import layout_of_vllm, patches
from oddrank.engines.vllm.settings import VARIABLES, Settings, left_out
from oddrank.errors import OddrankError


def examine() -> dict[str, Any]:
    """Versions, settings, places; `ok`: whether everything could be installed; `would_install`: whether it would be."""
    version = layout_of_vllm.version()
    places = layout_of_vllm.places() if version is not None else []
    problems = [f"{p.name}: {p.problem}" for p in places if p.problem is not None]
    if version is None:
        problems.append("vLLM is not installed in this Python environment")
    entry = [e.value for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "oddrank"]
    if not entry:
        problems.append("the entry point vllm.general_plugins:oddrank is missing; reinstall oddrank there")
    allowed = left_out(os.environ)
    if allowed is not None:
        problems.append(f'VLLM_PLUGINS="{allowed}" leaves the plugin out')
    on = False
    try:
        on = Settings.from_environment().on
    except OddrankError as error:
        problems.append(str(error))
    return {
        "versions": {"oddrank": __version__, "vllm": version, "python": sys.version.split()[0]} | _others(),
        "written_for": [f"{v}.x" for v in patches.KNOWN],
        "known_version": version is not None and version.startswith(tuple(f"{v}." for v in patches.KNOWN)),
        "entry_point": entry[0] if entry else None,
        "settings": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "places": [
            {"name": p.name, "kind": p.kind, "does": p.what, "found": p.problem is None, "problem": p.problem}
            for p in places
        ],
        "problems": problems,
        "ok": not problems,
        "on": on,
        "would_install": on and not problems,
    }


def show(found: dict[str, Any]) -> None:
    """The same as tables, for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    console.print("  ".join(f"{k} {v or 'not installed'}" for k, v in found["versions"].items()))
    if found["versions"]["vllm"] and not found["known_version"]:
        console.print(f"written for vLLM {', '.join(found['written_for'])}; untried with this one")
    table = Table(box=None, pad_edge=False)
    for column in ("place in vLLM", "kind", "found", "does"):
        table.add_column(column, overflow="fold")
    for place in found["places"]:
        table.add_row(place["name"], place["kind"], "yes" if place["found"] else place["problem"], place["does"])
    console.print(table)
    for problem in found["problems"]:
        console.print(f"problem: {problem}", markup=False)
    if found["would_install"]:
        console.print("on: all of these would be installed in every vLLM process")
    elif found["ok"]:
        console.print("off: nothing would be installed; set ODDRANK=1, or start with `oddrank vllm serve`")


def _others() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in ("torch", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions
