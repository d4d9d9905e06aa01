"""Plans as tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oddrank.report import amount


def each(values: list[int], ranks: int) -> str:
    """Per-rank numbers, short where all are equal."""
    if len(set(values)) == 1:
        return f"{values[0]}"
    if ranks <= 8:
        return " ".join(str(v) for v in values)
    return f"{min(values)}..{max(values)}"


def show_plan(report: dict[str, Any]) -> None:
    """One plan in full."""
    out = Console(highlight=False, soft_wrap=False)
    tp = report["tp"]
    out.print(
        f"[bold]{escape(report['model'])}[/] ({report['family']}) at TP={tp} for {report['executor']}: "
        f"[bold]{report['layout']}[/]"
    )
    axes = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in (
        ("axis", "left"),
        ("stock", "right"),
        ("planned", "right"),
        ("per rank", "right"),
        ("real per rank", "right"),
        ("why", "left"),
    ):
        axes.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    told = None
    for a in report["axes"]:
        why, told = ("" if a["why"] == told else a["why"]), a["why"]
        axes.add_row(
            a["name"],
            str(a["stock"]),
            str(a["planned"]),
            each(a["per_rank"], tp),
            each(a["real_per_rank"], tp),
            why,
        )
    out.print(axes)
    size, kv, tensors = report["bytes"], report["kv"], report["tensors"]
    out.print(
        f"weights  {amount(size['stock'])} stock, {amount(max(size['per_rank']))} on the fullest rank "
        f"({size['overhead']:+.1%} over an even split)"
    )
    out.print(
        f"KV cache {amount(kv['stock_bytes_per_token'])} per token stock, "
        f"{amount(max(kv['per_rank_bytes_per_token']))} per token on the fullest rank"
    )
    state = report["state"]
    if state["stock_bytes_per_request"]:
        out.print(
            f"state    {amount(state['stock_bytes_per_request'])} per request stock, "
            f"{amount(max(state['per_rank_bytes_per_request']))} per request on the fullest rank"
        )
    if report["capacity"] is not None:
        out.print(room_line(report))
    stored = ", ".join(f"{n} {name}" for name, n in report["formats"].items())
    out.print(f"matrices {stored}" + "".join(f"; {k} in blocks of {v}" for k, v in report["refined"].items()))
    virtual = report["executor"] == "vllm"
    change = f"{tensors['changed']} change in the virtual checkpoint" if virtual else "each rank takes its slices"
    out.print(f"tensors  {tensors['total']} stored, {change}")
    for note in report["notes"]:
        out.print(f"[yellow]note     {note}[/]")
    if report["idle_ranks"]:
        ranks = ", ".join(map(str, report["idle_ranks"]))
        out.print(f"[yellow]idle     rank {ranks} holds no real unit of some axis: it computes zeros there[/]")
    if report["alternatives"]:
        other = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("alternatives", "planned", "per rank", "their weights", "KV/token", "why"):
            other.add_column(column, overflow="fold")
        for alt in report["alternatives"]:
            other.add_row(
                ("* " if alt["chosen"] else "  ") + alt["layout"],
                "/".join(str(a["planned"]) for a in alt["axes"]),
                " | ".join(each(a["per_rank"], tp) for a in alt["axes"]),
                amount(alt["weight_bytes_per_rank"]),
                amount(alt["kv_bytes_per_token_per_rank"]),
                alt["why"],
            )
        out.print(other)
    for check in report["proof"]["checks"]:
        out.print(f"[green]proved[/]   {check['name']}: {check['detail']}")


def room_line(report: dict[str, Any]) -> str:
    """Memory, weights and KV cache of every rank, where the memory is known."""
    room, sizes = report["capacity"], report["bytes"]["per_rank"]
    gib = " / ".join(f"{g:g}" for g in room["memory_gib"])
    weights = " / ".join(amount(n) for n in sizes)
    if not room["fits"]:
        full = next(r for r, tokens in enumerate(room["per_rank_tokens"]) if tokens == 0)
        return f"[yellow]memory   {gib} GiB: rank {full} has no room for KV cache beside its {amount(sizes[full])}[/]"
    tokens = "no limit" if room["tokens"] is None else f"{room['tokens']} tokens of KV cache"
    return f"memory   {gib} GiB: weights {weights}, then {tokens} (a tenth kept back)"


def show_sizes(name: str, executor: str, lines: list[dict[str, Any]]) -> None:
    """One line a size."""
    out = Console(highlight=False)
    table = Table(
        title=f"{escape(name)}, executor {executor}",
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    table.add_column("TP", justify="right")
    for column in ("stock vLLM", "oddrank", "query/KV heads a rank", "weights a rank", "overhead", "KV/token a rank"):
        table.add_column(column, overflow="fold")
    for line in lines:
        stock = "serves" if line["stock_vllm"] else f"refuses: {line['stock_vllm_why']}"
        if line["refused"]:
            table.add_row(str(line["tp"]), stock, f"refuses: {line['refused_short']}")
            continue
        heads = "/".join(each(a["per_rank"], line["tp"]) for a in line["axes"] if a["name"] in ("q_heads", "kv_heads"))
        table.add_row(
            str(line["tp"]),
            stock,
            line["layout"],
            heads,
            amount(max(line["bytes"]["per_rank"])),
            f"{line['bytes']['overhead']:+.1%}",
            amount(max(line["kv"]["per_rank_bytes_per_token"])),
        )
    out.print(table)
