"""The Plan: where every head, channel and row goes. A value: immutable, comparable, JSON both ways.

It is the one truth. Modules take their sizes from it and weights are cut by it; nothing else decides how a tensor is
sharded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from oddrank.errors import OddrankError
from oddrank.geometry import Dim, Model, Role, Slots
from oddrank.geometry.dims import IntArray
from oddrank.layout.census import Use
from oddrank.layout.executors import EXECUTORS, Constraints, Executor
from oddrank.layout.layouts import Layout, Pairing, even_pairing, from_runs

VERSION = 1


def config_digest(config: dict[str, Any]) -> str:
    """sha256 of config.json's meaning (keys sorted), to tell whether a plan was made for this config."""
    return hashlib.sha256(msgspec.json.encode(config, order="deterministic")).hexdigest()


class Plan(msgspec.Struct, frozen=True):
    """model + ranks + executor -> layouts, roles, formats.

    name: the checkpoint's directory or hub name, for people. config_digest: see `config_digest`.
    model: the stock geometry with its roles. uses: how each role's instances are stored.
    tp: ranks. executor: registry name. kind: what the heads' layout is called (see Candidate).
    layouts: one per axis. pairings: one per pair. owners: role pattern of a replicated term that joins a sum ->
        the one rank that adds it.
    refined: axis (or "*") -> the finer block in which scales along it are rewritten, see storage.target_block.
    shares: the ranks' memory in GiB, by whose proportions the layouts were cut; empty where none was told.
    constraints, context, kv_itemsize (bytes per KV-cache element): what the plan was made under.
    """

    name: str
    config_digest: str
    model: Model
    uses: tuple[Use, ...]
    tp: int
    executor: str
    kind: str
    layouts: tuple[Layout, ...]
    pairings: tuple[Pairing, ...]
    owners: tuple[tuple[str, int], ...]
    constraints: Constraints
    context: int
    kv_itemsize: int
    refined: tuple[tuple[str, int], ...] = ()
    shares: tuple[float, ...] = ()
    version: int = VERSION

    # -- what a rank holds ---------------------------------------------------------------------------------

    def layout(self, axis: str) -> Layout:
        for layout in self.layouts:
            if layout.axis == axis:
                return layout
        raise KeyError(axis)

    def slots(self, rank: int) -> Slots:
        """One rank's slots, for every axis; the partner map of every follower axis."""
        return Slots(
            {la.axis: la.slots(rank) for la in self.layouts},
            {p.follower: np.asarray(p.ranks[rank], dtype=np.int64) for p in self.pairings},
            apart=not self.executor_facts().equal_ranks,
        )

    def counts(self, rank: int) -> dict[str, int]:
        return {la.axis: la.counts()[rank] for la in self.layouts}

    def virtual(self) -> Slots:
        """The slots of all ranks laid end to end: the virtual checkpoint. An axis that the engine pads or copies
        in its own buffers stays as trained."""
        source: dict[str, IntArray] = {}
        for layout in self.layouts:
            stock = self.model.axis(layout.axis).count
            whole = from_runs(run for runs in layout.ranks for run in runs)
            source[layout.axis] = np.arange(stock, dtype=np.int64) if layout.in_engine else whole
        partner: dict[str, IntArray] = {}
        for p in self.pairings:
            f, le = len(source[p.follower]), len(source[p.leader])
            partner[p.follower] = np.arange(f, dtype=np.int64) // max(1, f // max(1, le))
        return Slots(source, partner)

    def is_identity(self) -> bool:
        """Is the virtual checkpoint the stock checkpoint?"""
        stock = self.model.stock()
        return not self.refined and all(
            len(s) == stock[axis] and bool((s == np.arange(stock[axis])).all())
            for axis, s in self.virtual().source.items()
        )

    def owner(self, role: Role) -> int | None:
        """The rank that adds this replicated term to its sum; None for a role that joins none."""
        return dict(self.owners).get(role.name)

    def executor_facts(self) -> Executor:
        return EXECUTORS[self.executor]

    def summed_roles(self, axis: str) -> Iterator[tuple[Role, Dim]]:
        """(row-parallel role, its summed K dim) for each role whose ranks are summed along `axis`."""
        for role in self.model.roles:
            if role.combine == "row" and axis in {a for a, _ in role.dims[-1].axes()}:
                yield role, role.dims[-1]

    # -- running it at another size ------------------------------------------------------------------------

    def at(self, ranks: int) -> Plan:
        """The same slots on another number of ranks.

        A plan for N ranks runs at any M that divides N (consecutive ranks merge), and, with equal ranks, at any
        M that divides every planned count. Raises OddrankError otherwise.
        """
        if ranks == self.tp:
            return self
        if ranks >= 1 and self.tp % ranks == 0:
            layouts, pairings = self._merged(self.tp // ranks)
        elif ranks >= 1 and self.executor_facts().equal_ranks:
            layouts, pairings = self._recut(ranks)
        else:
            raise OddrankError(
                f"a plan for {self.tp} ranks does not run at {ranks}: its ranks merge only where the new number "
                f"divides {self.tp} ({', '.join(str(m) for m in range(1, self.tp + 1) if self.tp % m == 0)})."
            )
        owners = tuple((name, rank * ranks // self.tp) for name, rank in self.owners)
        by = self.tp // ranks
        return msgspec.structs.replace(
            self,
            tp=ranks,
            layouts=layouts,
            pairings=pairings,
            owners=owners,
            shares=tuple(sum(self.shares[i : i + by]) for i in range(0, self.tp, by)) if self.shares else (),
            constraints=Constraints(),  # the user's were about the planned size
        )

    def _merged(self, by: int) -> tuple[tuple[Layout, ...], tuple[Pairing, ...]]:
        spans = [range(i, i + by) for i in range(0, self.tp, by)]
        layouts = []
        for la in self.layouts:
            if la.in_engine:
                layouts.append(self._engine_axis(la, len(spans)))
                continue
            ranks = [np.concatenate([la.slots(r) for r in span]) for span in spans]
            layouts.append(Layout.of(la.axis, ranks))
        made = {la.axis: la for la in layouts}
        pairings = []
        for p in self.pairings:
            if self.layout(p.leader).in_engine:  # the engine's ranks have copies, not parts, of the leaders
                pairings.append(even_pairing(made[p.follower], made[p.leader]))
                continue
            counts = self.layout(p.leader).counts()
            maps = []
            for span in spans:
                offset, whole = 0, []
                for r in span:
                    whole += [offset + i for i in p.ranks[r]]
                    offset += counts[r]
                maps.append(tuple(whole))
            pairings.append(Pairing(p.follower, p.leader, tuple(maps)))
        return tuple(layouts), tuple(pairings)

    def _recut(self, ranks: int) -> tuple[tuple[Layout, ...], tuple[Pairing, ...]]:
        layouts = []
        for la in self.layouts:
            if la.in_engine:
                layouts.append(self._engine_axis(la, ranks))
                continue
            total = la.total()
            if total % ranks:
                raise OddrankError(
                    f"the plan for {self.tp} ranks has {total} {la.axis}, which {ranks} ranks do not divide; it "
                    f"runs at sizes that divide every planned count, and at divisors of {self.tp}."
                )
            whole, per = from_runs(run for runs in la.ranks for run in runs), total // ranks
            layouts.append(Layout.of(la.axis, [whole[i * per : (i + 1) * per] for i in range(ranks)]))
        self._require_whole_units(layouts)
        made = {la.axis: la for la in layouts}
        return tuple(layouts), tuple(even_pairing(made[p.follower], made[p.leader]) for p in self.pairings)

    def _require_whole_units(self, layouts: list[Layout]) -> None:
        """Raises OddrankError where these layouts of widths cut inside a stored entry, naming a width that does not."""
        from oddrank.layout.storage import storage_problem, units

        stock, refined = self.model.stock(), dict(self.refined)
        for la in layouts:
            ranks = len(la.ranks)
            for rank in range(ranks) if self.model.axis(la.axis).kind == "width" else ():
                source = {name: np.arange(n, dtype=np.int64) for name, n in stock.items()} | {la.axis: la.slots(rank)}
                if storage_problem(self.model, self.uses, Slots(source, {}), {la.axis}, refined) is None:
                    continue
                unit = units(self.model, self.uses, refined.get(la.axis, refined.get("*", 0)))[la.axis]
                step = unit * math.lcm(self.tp, ranks)
                raise OddrankError(
                    f"the plan for {self.tp} ranks has {la.total()} {la.axis}: {la.total() // ranks} on each of "
                    f"{ranks} ranks, which cuts inside the units of {unit} in which it is stored. "
                    f"{la.axis}={-(-stock[la.axis] // step) * step} is whole units at both sizes."
                )

    def _engine_axis(self, layout: Layout, ranks: int) -> Layout:
        """An axis the engine cuts by its own rule, at another size: as it would have been planned there."""
        from oddrank.layout.heads import PairSizes, engine_copies
        from oddrank.layout.widths import engine_vocab

        axis = self.model.axis(layout.axis)
        if axis.kind == "vocab":
            candidate = engine_vocab(axis.name, axis.count, ranks, self.executor_facts().vocab_multiple)
            assert candidate is not None
            return candidate.layouts[0]
        if axis.kind == "experts":
            return Layout.of(axis.name, [range(axis.count)] * ranks, in_engine=True)
        pair = next(p for p in self.model.pairs if p.leader == axis.name)
        if axis.count % ranks == 0:
            per = axis.count // ranks
            return Layout.of(axis.name, [range(i * per, (i + 1) * per) for i in range(ranks)])
        if ranks % axis.count:
            raise OddrankError(
                f"the plan for {self.tp} ranks leaves the copies of {axis.count} {axis.name} to the engine, which "
                f"makes them only where the ranks divide {axis.count} or are a multiple of it; {ranks} is neither. "
                f"Plan for {ranks} ranks instead."
            )
        stock = self.model.stock()
        sizes = PairSizes(pair.follower, pair.leader, stock[pair.follower], axis.count, (1, 1))
        return engine_copies(sizes, ranks).layouts[1]

    # -- JSON ----------------------------------------------------------------------------------------------

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> Plan:
        """Raises OddrankError for anything that is not a plan of this version."""
        try:
            plan = msgspec.json.decode(data, type=Plan)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise OddrankError(f"this is not an oddrank plan: {error}.") from error
        if plan.version != VERSION:
            raise OddrankError(f"this plan is of version {plan.version}; this oddrank reads version {VERSION}.")
        from oddrank.layout.wellformed import faults

        fault = next(faults(plan), None)
        if fault is not None:
            raise OddrankError(f"this is not an oddrank plan: {fault}. Plan the model again.")
        return plan
