"""The solver: enumerate candidates axis by axis, drop those that cannot be stored or are dominated, pick the cheapest.

Costs of different axes add up, so each pair of axes, each width and the vocabulary is chosen by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import msgspec
import numpy as np

from oddrank.errors import OddrankError
from oddrank.geometry import Axis, Model, Pair, Slots
from oddrank.layout import heads, widths
from oddrank.layout.candidate import Candidate
from oddrank.layout.census import Census
from oddrank.layout.cost import Cost, kv_bytes_per_layer, rank_cost
from oddrank.layout.crosstalk import unhandled
from oddrank.layout.executors import EXECUTORS, RUNTIME, Constraints, Executor
from oddrank.layout.layouts import Layout, apportion
from oddrank.layout.plan import Plan
from oddrank.layout.refinement import Refinement, require_block
from oddrank.layout.shares import require_large_enough, require_shares
from oddrank.layout.storage import require_columns_cut, storage_problem

LAYOUTS = ("auto", "ragged", "pad", "replicate")
DEFAULT_CONTEXT = 4096


class Choice(msgspec.Struct, frozen=True):
    """A candidate with its price on its fullest rank (what its axes are responsible for)."""

    candidate: Candidate
    cost: Cost
    chosen: bool


class Request(msgspec.Struct, frozen=True):
    """What to plan for. shares: the ranks' memory, GiB, where it is known; only its proportions shape the plan (None:
    equal ranks). run_tp: the size the plan will be run at, where that is not `tp`. kv_itemsize: bytes per KV-cache
    element."""

    tp: int
    executor: str = "runtime"
    layout: str = "auto"
    context: int = DEFAULT_CONTEXT
    constraints: Constraints = Constraints()
    shares: tuple[float, ...] | None = None
    run_tp: int | None = None
    kv_itemsize: int = 2


class Solution(msgspec.Struct, frozen=True):
    """The plan, and for each group of axes every candidate that was not dominated."""

    plan: Plan
    choices: tuple[tuple[Choice, ...], ...]


def solve(model: Model, census: Census, request: Request, *, name: str, config_digest: str) -> Solution:
    """Choose a layout for every axis. Raises OddrankError where none exists; does not prove the result."""
    if request.tp < 1:
        raise OddrankError(f"--tp {request.tp}: the number of ranks must be at least 1.")
    if request.layout not in LAYOUTS:
        raise OddrankError(f'layout "{request.layout}" is not one of {", ".join(LAYOUTS)}.')
    if request.executor not in EXECUTORS:
        raise OddrankError(f'executor "{request.executor}" is not one of {", ".join(EXECUTORS)}.')
    facts = EXECUTORS[request.executor]
    if request.layout == "ragged" and facts.equal_ranks:
        raise OddrankError(
            f"the {facts.name} executor gives every rank the same number of heads, so it cannot run a ragged "
            "layout. Use --layout pad or replicate; `oddrank generate --layout ragged` runs it in our own runtime."
        )
    memory = request.shares
    if memory is not None:
        require_shares(memory, request.tp, request.executor, request.layout, request.constraints)
        if len(set(memory)) == 1:
            request = msgspec.structs.replace(request, shares=None)
    require_columns_cut(model, census.uses, request.tp)
    block = request.constraints.block
    if block is not None:
        require_block(model, census.uses, block)
    refinement = Refinement(
        model,
        census.uses,
        request.tp,
        block or facts.finest_block,
        forced=block is not None,
        shares=request.shares,
    )
    _enough_units(model, refinement.fine, request.tp)
    solver = _Solver(model, census, request, facts, refinement)
    paired = {a for p in model.pairs for a in (p.follower, p.leader)}
    groups = solver.pairs()
    groups += [solver.lone(a) for a in model.axes if a.name not in paired]
    picked = [next(c.candidate for c in group if c.chosen) for group in groups]
    layouts = {la.axis: la for c in picked for la in c.layouts}
    plan = Plan(
        name=name,
        config_digest=config_digest,
        model=model,
        uses=census.uses,
        tp=request.tp,
        executor=facts.name,
        kind="weighted" if request.shares else _kind(picked, facts),
        layouts=tuple(layouts[a.name] for a in model.axes),
        pairings=tuple(p for c in picked for p in c.pairings),
        owners=tuple((r.name, 0) for r in model.roles if r.joins is not None),
        constraints=request.constraints,
        context=request.context,
        kv_itemsize=request.kv_itemsize,
        refined=refinement.needed_by(layouts),
        shares=memory or (),
    )
    if request.shares is not None:
        require_large_enough(plan)
    if request.run_tp is not None:
        plan = plan.at(request.run_tp)
    return Solution(plan, tuple(groups))


def _kind(picked: list[Candidate], facts: Executor) -> str:
    """What the whole plan is called: identity where nothing is changed, else what its head pair is called."""
    unchanged = ("identity", "even")
    if all(c.kind in unchanged for c in picked):
        return "identity" if facts.equal_ranks else "even"
    kinds = [c.kind for c in picked if c.pairings] + [c.kind for c in picked]
    return next(k for k in kinds if k not in unchanged)


def _enough_units(model: Model, unit: dict[str, int], tp: int) -> None:
    """Every rank must be able to hold something real: a head, a vocabulary row, a channel. A width of fewer scale
    blocks than ranks is padded nevertheless; the ranks beyond them have the other axes to work on."""
    sizes = {
        a.name: a.count if a.kind == "width" else -(-a.count // unit[a.name])
        for a in model.axes
        if a.summed and a.kind != "experts"
    }
    if not sizes:
        return
    name = min(sizes, key=lambda n: sizes[n])
    if sizes[name] < tp:
        u = 1 if model.axis(name).kind == "width" else unit[name]
        what = f"{model.axis(name).count} {name}" + (f" in units of {u}" if u > 1 else "")
        raise OddrankError(
            f"{tp} ranks are more than this model has units: it has {what}, so "
            f"{tp - sizes[name]} of {tp} ranks would hold no real one. At most --tp {sizes[name]} works.",
            short=f"more ranks than {what}",
        )


class _Solver:
    def __init__(self, model: Model, census: Census, request: Request, facts: Executor, refinement: Refinement) -> None:
        self.model, self.census, self.request, self.facts = model, census, request, facts
        self.refinement = refinement
        self.stock = model.stock()
        self.want = request.constraints

    # -- pairs of head axes ----------------------------------------------------------------------------------

    def pairs(self) -> list[tuple[Choice, ...]]:
        """Every pair chosen by itself; where the executor counts the followers of several by one config key, together,
        with one total for all of them."""
        groups = {p.follower: self.pair(p) for p in self.model.pairs}
        for axes in self.model.counted_together() if self.facts.equal_ranks else ():
            pairs = [p for p in self.model.pairs if p.follower in axes]
            totals = {n for axis, n in self.want.exact.items() if axis in axes}
            totals = totals or {c.candidate.totals()[0] for p in pairs for c in groups[p.follower]}
            if len({next(c for c in groups[p.follower] if c.chosen).candidate.totals()[0] for p in pairs}) > 1:
                groups |= self._with_one_total(pairs, totals)
        return list(groups.values())

    def _with_one_total(self, pairs: list[Pair], totals: set[int]) -> dict[str, tuple[Choice, ...]]:
        """The cheapest of `totals` for which every pair has a layout; with `pad`, of those at which most keep the
        trained ratio."""
        best: tuple[tuple[float, ...], dict[str, tuple[Choice, ...]]] | None = None
        for total in sorted(totals):
            exact = {**self.want.exact, **{p.follower: total for p in pairs}}
            wanted = msgspec.structs.replace(self.want, exact=exact)
            request = msgspec.structs.replace(self.request, constraints=wanted)
            asking = _Solver(self.model, self.census, request, self.facts, self.refinement)
            try:
                made = {p.follower: asking.pair(p) for p in pairs}
            except OddrankError:
                continue
            chosen = [next(c for c in group if c.chosen) for group in made.values()]
            lost = sum(c.candidate.gqa != self.model.ratio(p) for c, p in zip(chosen, pairs, strict=True))
            price = float(sum(c.cost.bytes_per_token() for c in chosen))
            order = (float(lost), price) if self.request.layout == "pad" else (price,)
            if best is None or order < best[0]:
                best = order, made
        if best is None:
            raise OddrankError(
                f"one config key counts {' and '.join(p.follower for p in pairs)}, and at {self.request.tp} ranks no "
                f"number of them serves both; {', '.join(str(n) for n in sorted(totals))} were tried."
                + (" The runtime executor needs no such number: --executor runtime." if RUNTIME.has(self.model) else "")
            )
        return best[1]

    def pair(self, pair: Pair) -> tuple[Choice, ...]:
        sizes = heads.PairSizes(
            pair.follower,
            pair.leader,
            self.stock[pair.follower],
            self.stock[pair.leader],
            (self.refinement.unit(pair.follower), self.refinement.unit(pair.leader)),
        )
        tp, layout = self.request.tp, self.request.layout
        is_kv = pair.leader in {cache.axis for cache in self.model.kv}
        gqa = self.want.gqa if is_kv else None
        found: list[Candidate] = []
        if self.facts.equal_ranks:
            served = self._served(sizes, is_kv)
            if served is not None and self._fits(served, is_kv, gqa):
                return self._choose([served], None)
        elif layout in ("auto", "ragged"):
            shares = self.request.shares
            cuts = [heads.ragged(sizes, tp, shares)]
            if shares is None or layout == "auto":
                cuts.append(heads.whole_groups(sizes, tp, shares))
            if shares is not None:
                cuts.append(heads.nearest(sizes, tp, shares))
            found += [c for c in cuts if c is not None]
        asked = {sizes.follower, sizes.leader} & {*self.want.exact, *self.want.multiple}
        if self.facts.equal_ranks or layout in ("pad", "replicate") or gqa or asked or (is_kv and self.want.kv_bytes):
            if gqa is None:
                found += heads.all_groupings(sizes, tp)
            found += self._fixed_slots(sizes, is_kv, gqa)
        storable = [c for c in found if self._storable(c)]
        fitting = [c for c in storable if self._fits(c, is_kv, gqa)]
        if not fitting:
            self._refuse_pair(sizes, storable, is_kv)
        if layout != "pad":  # which leaves no choice: where it disturbs an operation across heads, the proof refuses it
            fitting = [c for c in fitting if not unhandled(self.model, c.layouts, self.facts)] or fitting
        prefer = None
        if layout == "pad":
            padded = [c for c in fitting if c.gqa is not None and c.gqa >= sizes.ratio] or fitting
            prefer = min(padded, key=lambda c: c.totals())
        elif layout == "ragged" and self.request.shares is None:
            prefer = next((c for c in fitting if c.kind != "groups"), None)
        elif layout == "replicate":
            uniform = [c for c in fitting if c.gqa is not None]
            smaller = [c for c in uniform if c.gqa is not None and c.gqa < sizes.ratio]  # what the user asks for
            prefer = min(smaller or uniform, key=lambda c: c.largest(), default=None)
        return self._choose(fitting, prefer)

    def _served(self, sizes: heads.PairSizes, is_kv: bool) -> Candidate | None:
        """The executor's stock behaviour, where it serves this size."""
        tp = self.request.tp
        if sizes.followers % tp or (sizes.followers // tp) % sizes.follower_unit:
            return None
        if sizes.leaders % tp == 0 and (sizes.leaders // tp) % sizes.leader_unit == 0:
            plain = heads.grouped(sizes, tp, sizes.ratio)
            assert plain is not None
            return msgspec.structs.replace(plain, kind="identity", why="the engine serves this size")
        if is_kv and self.facts.copies_kv and tp % sizes.leaders == 0 and sizes.leader_unit == 1:
            return heads.engine_copies(sizes, tp)
        return None

    def _fixed_slots(self, sizes: heads.PairSizes, is_kv: bool, gqa: int | None) -> list[Candidate]:
        """Groupings whose slot totals the user fixed, directly or through KV bytes or the group size."""
        tp = self.request.tp
        leaders, followers = self.want.exact.get(sizes.leader), self.want.exact.get(sizes.follower)
        if is_kv and self.want.kv_bytes is not None:
            one = kv_bytes_per_layer(self.model, {sizes.leader: 1}, self.request.kv_itemsize)
            if self.want.kv_bytes % one == 0:
                leaders = leaders or self.want.kv_bytes // one * tp
        options = [gqa] if gqa is not None else range(sizes.ratio, 0, -1)
        made = []
        for g in options:
            total = leaders
            if total is None and followers is not None:
                total = followers // g
            made.append(heads.grouped(sizes, tp, g, total))
        return [c for c in made if c is not None]

    def _fits(self, c: Candidate, is_kv: bool, gqa: int | None) -> bool:
        if gqa is not None and c.gqa != gqa:
            return False
        for la in c.layouts:
            if self.want.exact.get(la.axis, la.total()) != la.total():
                return False
            if any(n % self.want.multiple.get(la.axis, 1) for n in la.counts()):
                return False
        if is_kv and self.want.kv_bytes is not None:
            counts = {la.axis: max(la.counts()) for la in c.layouts}
            return kv_bytes_per_layer(self.model, counts, self.request.kv_itemsize) == self.want.kv_bytes
        return True

    def _refuse_pair(self, sizes: heads.PairSizes, storable: list[Candidate], is_kv: bool) -> NoReturn:
        tp, itemsize = self.request.tp, self.request.kv_itemsize
        asked = []
        options = [*storable, *heads.all_groupings(sizes, tp)]
        for key, value in (("gqa", self.want.gqa), ("kv_bytes", self.want.kv_bytes)):
            if value is not None and is_kv:
                asked.append(f"{key}={value}")
        for axis in (sizes.follower, sizes.leader):
            asked += [f"{axis}={v}" for k, v in self.want.exact.items() if k == axis]
            asked += [f"{axis}_multiple={v}" for k, v in self.want.multiple.items() if k == axis]
        works = []
        for c in dict.fromkeys(options):
            f, le = c.totals()
            text = f"{f} {sizes.follower} / {le} {sizes.leader}"
            if is_kv:
                counts = {sizes.leader: max(c.layouts[1].counts())}
                text += f" (kv_bytes={kv_bytes_per_layer(self.model, counts, itemsize)})"
            works.append(text)
        nearest = self._nearest_kv_bytes(sizes) if is_kv and self.want.kv_bytes is not None else ""
        raise OddrankError(
            f"{sizes.followers} {sizes.follower} / {sizes.leaders} {sizes.leader} at {tp} ranks cannot meet "
            f"{', '.join(asked) or 'the storage of this checkpoint'}.{nearest} Without it, these work: "
            f"{'; '.join(dict.fromkeys(works)) or 'none'}."
        )

    def _nearest_kv_bytes(self, sizes: heads.PairSizes) -> str:
        one = kv_bytes_per_layer(self.model, {sizes.leader: 1}, self.request.kv_itemsize)
        asked, tp = self.want.kv_bytes or 0, self.request.tp
        around = sorted({max(1, asked // one + d) for d in range(-1, 2)} | {-(-sizes.leaders // tp)})
        possible = [
            n * one
            for n in around
            if any(heads.grouped(sizes, tp, g, n * tp) is not None for g in range(1, sizes.ratio + 1))
        ]
        if not possible:
            return ""
        best = min(possible, key=lambda b: abs(b - asked))
        if best == asked:
            return ""
        return f" A KV slot is {one} bytes a token, layer and rank; the nearest that works is kv_bytes={best}."

    # -- widths, vocabulary, single head axes -------------------------------------------------------------------

    def lone(self, axis: Axis) -> tuple[Choice, ...]:
        tp = self.request.tp
        exact, multiple = self.want.exact.get(axis.name), self.want.multiple.get(axis.name)
        unit = self.refinement.unit(axis.name, exact)
        if axis.kind == "experts":
            whole = Layout.of(axis.name, [range(axis.count)] * tp, in_engine=True)
            return self._choose([Candidate("even", (whole,), why="on every rank; cut inside")], None)
        step = tp * math.lcm(unit, multiple or 1)  # what an exact total must be a multiple of
        if axis.kind == "vocab" and self.facts.vocab_multiple:
            rows = self.facts.vocab_multiple
            step = math.lcm(rows, tp * (multiple or 1))
            total = -(-axis.count // step) * step if multiple and exact is None else exact
            candidate = None
            if total is None or total % step == 0:
                candidate = widths.engine_vocab(axis.name, axis.count, tp, rows, total)
        elif multiple and axis.count % multiple and self.request.shares is not None:
            raise OddrankError(
                f"constraint {axis.name}_multiple={multiple} pads the {axis.count} {axis.name} with dummies, which "
                "ranks of unequal memory have no use for. Leave it out, or --rank-memory."
            )
        elif self.facts.equal_ranks or exact is not None or (multiple and axis.count % multiple):
            # a width that is no multiple needs dummies to be one on every rank
            candidate = self._equal_width(axis, unit, exact, multiple)
        else:
            preferred = self.facts.width_multiple if axis.kind != "heads" else 1
            cut = math.lcm(unit, multiple or 1)
            cut = cut if multiple else widths.aligned_unit(axis.count, tp, unit, preferred, self.request.shares)
            weighted = self.request.shares is not None
            candidate = widths.ragged(axis.name, axis.count, tp, cut, self.request.shares, empty=weighted)
            if candidate is None:  # fewer of the user's multiples than ranks
                candidate = self._equal_width(axis, unit, exact, multiple)
        if candidate is None or not self._storable(candidate):
            self._refuse_width(axis, step, exact, multiple)
        return self._choose([candidate], None)

    def _equal_width(self, axis: Axis, unit: int, exact: int | None, multiple: int | None) -> Candidate | None:
        tp = self.request.tp
        cut = math.lcm(unit, multiple or 1)
        if exact is None:
            served = widths.even(axis.name, axis.count, tp, cut, "identity")
            if served is not None:
                return served
            if multiple is None and axis.kind == "width" and self._is_quantized(axis):
                # kernels for quantized weights (Marlin, CUTLASS) take whole tiles only
                cut = math.lcm(unit, self.facts.width_multiple)
            elif multiple is None and axis.kind == "width":
                cut = widths.aligned_unit(axis.count, tp, unit, self.facts.width_multiple)
            return widths.padded(axis.name, axis.count, tp, cut)
        run = self.request.run_tp
        if exact % (tp * cut) and run and exact >= axis.count and exact % (run * cut) == 0:
            # planned for another size than it will run at: the ranks of the plan are only a way of writing it
            slots = np.full(exact, -1, dtype=np.int64)
            slots[: axis.count] = np.arange(axis.count)
            bounds = np.cumsum(apportion(exact // unit, tp))[:-1] * unit
            layout = Layout.of(axis.name, np.split(slots, bounds))
            return Candidate("even", (layout,), why=f"{exact} as asked, to run at {run}")
        if exact % (tp * cut):
            return None
        return widths.padded(axis.name, axis.count, tp, unit, exact)

    def _is_quantized(self, axis: Axis) -> bool:
        return any(use.format != "dense" and axis.name in self.model.roles[use.role].axes() for use in self.census.uses)

    def _refuse_width(self, axis: Axis, step: int, exact: int | None, multiple: int | None) -> NoReturn:
        tp, under = self.request.tp, f" under {axis.name}_multiple={multiple}" if multiple else ""
        if exact is None:
            raise OddrankError(f"{axis.count} {axis.name} cannot be stored in whole units on {tp} ranks{under}.")
        least = -(-axis.count // step) * step
        nearest = max(least, round(exact / step) * step)
        why = (
            f"is less than the {axis.count} the model has"
            if exact < axis.count
            else f"is no multiple of {step}, which whole units on {tp} ranks need{under}"
        )
        raise OddrankError(f"{axis.name}={exact} {why}; the nearest that works is {axis.name}={nearest}.")

    # -- choosing ------------------------------------------------------------------------------------------------

    def _storable(self, c: Candidate) -> bool:
        axes = {la.axis for la in c.layouts}
        for rank in range(self.request.tp):
            source = {name: np.arange(n, dtype=np.int64) for name, n in self.stock.items()}
            source |= {la.axis: la.slots(rank) for la in c.layouts}
            partner = {p.follower: np.asarray(p.ranks[rank], dtype=np.int64) for p in c.pairings}
            slots, refined = Slots(source, partner, not self.facts.equal_ranks), self.refinement.everywhere
            if storage_problem(self.model, self.census.uses, slots, axes, refined):
                return False
        return True

    def _price(self, c: Candidate) -> tuple[float, Cost]:
        """(bytes per token over the rank's share of the whole, cost) of the rank where that is most."""
        axes = {la.axis for la in c.layouts}
        tp = self.request.tp
        shares = self.request.shares or (1.0,) * tp
        prices = []
        for rank in range(tp):
            cost = rank_cost(
                self.model,
                self.census.uses,
                {**self.stock, **{la.axis: la.counts()[rank] for la in c.layouts}},
                context=self.request.context,
                kv_itemsize=self.request.kv_itemsize,
                axes=axes,
                refined=self.refinement.everywhere if self.refinement.forced else None,
            )
            prices.append((cost.bytes_per_token() / shares[rank], cost))
        return max(prices, key=lambda price: price[0])

    def _choose(self, candidates: Sequence[Candidate], prefer: Candidate | None) -> tuple[Choice, ...]:
        """Without shares, a candidate that needs no less of anything than another is dropped. With shares, less on
        the fullest rank may be more than its share, so all are weighed."""
        weighed = self.request.shares is not None
        kept = [c for c in candidates if weighed or c is prefer or not any(c.dominated_by(o) for o in candidates)]
        unique: list[Candidate] = []
        for c in kept:
            if all(c.layouts != o.layouts for o in unique):
                unique.append(c)
        prices = [self._price(c) for c in unique]
        order = sorted(range(len(unique)), key=lambda i: (prices[i][0], prices[i][1].macs))
        best = order[0]
        if prefer is not None:
            best = next(i for i, c in enumerate(unique) if c.layouts == prefer.layouts)
        return tuple(Choice(unique[i], prices[i][1], i == best) for i in order)
