"""Does the plan compute what the model computes? The runtime, and the padded checkpoint, against the oracle."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from oddrank.checkpoint import Checkpoint
from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.runtime.expert_options import ExpertOptions
from oddrank.transform.pad import pad
from oddrank.verify.compare import Comparison, Logits, compare
from oddrank.verify.oracle import transformers_logits

TOLERANCE = {"fp64": 1e-5, "fp32": 1e-4, "fp16": 3e-2, "bf16": 1e-1}
"""Largest |difference| allowed over the largest |logit|, by compute dtype. Different orders of summation differ by a
few hundred roundings; bf16 rounds by 2^-9. In fp64 it is transformers that rounds: it computes norms and rotary angles
in fp32 whatever the dtype (2e-7 to 6e-7 seen on tiny models)."""


class Verdict(msgspec.Struct, frozen=True):
    """One comparison with the oracle. what: whose logits. layout: what its plan is called."""

    what: str
    layout: str
    tp: int
    tolerance: float
    ok: bool
    comparison: Comparison


def verify_runtime(
    model: str | os.PathLike[str],
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    reference: Sequence[Logits],
    dtype: str,
    experts: ExpertOptions = ExpertOptions(),  # noqa: B008 (immutable)
) -> Verdict:
    """The runtime at `plan.tp` ranks, one process each."""
    from oddrank.runtime.generate import Session

    with Session(model, plan, dtype=dtype, experts=experts) as session:
        logits = [np.asarray(session.logits(ids).double().numpy(), dtype=np.float64) for ids in prompts]
    return _verdict("runtime", plan, reference, logits, dtype)


def verify_padded(
    model: str | os.PathLike[str],
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    reference: Sequence[Logits],
    dtype: str,
    scratch: str | None = None,
) -> Verdict:
    """The virtual checkpoint, written to a temporary directory, in plain transformers."""
    with tempfile.TemporaryDirectory(prefix="oddrank-verify-", dir=scratch) as folder:
        out = Path(folder) / "padded"
        with Checkpoint.open(model) as checkpoint:
            pad(plan, checkpoint, out)
        logits = transformers_logits(out, prompts, dtype)
    vocab = reference[0].shape[1]
    return _verdict("padded checkpoint", plan, reference, [x[:, :vocab] for x in logits], dtype)


def _verdict(what: str, plan: Plan, reference: Sequence[Logits], logits: Sequence[Logits], dtype: str) -> Verdict:
    try:
        found = compare(reference, logits)
    except ValueError as error:
        raise OddrankError(f"{what} at TP={plan.tp}: {error}.") from None
    tolerance = TOLERANCE[dtype]
    return Verdict(what, plan.kind, plan.tp, tolerance, found.max_rel <= tolerance, found)
