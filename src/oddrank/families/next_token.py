"""The draft layers of GLM and DeepSeek (multi-token prediction): decoder layers numbered on from the last, behind
`eh_proj` [hidden, 2 hidden], with a norm on each of its two inputs and one before the head.

A checkpoint has them completely or not at all. Some releases repeat the embedding and the head beside them
(GLM-4.5, DeepSeek-V3), later ones do not (GLM-4.6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from oddrank.checkpoint.config import ConfigView
from oddrank.families.decoder import Index, Part, in_group, linear, norms, optional
from oddrank.geometry import Along, Role, Whole


def drafts(c: ConfigView, prefix: str, block: Callable[[str, Index], Iterable[Part]]) -> Part:
    """block: (name of a layer, its numbers) -> what a decoder layer of that name holds."""
    hidden, first = c.require_int("hidden_size"), c.count("num_hidden_layers")
    key = "num_nextn_predict_layers" if "num_nextn_predict_layers" in c else "num_mtp_layers"
    count = c.count(key, 1, low=0)
    if not count:
        return Part()
    # a pattern of their own: a term that joins a sum of a draft layer has its own owner
    layer, index = f"{prefix}layers.{{draft}}", (("draft", tuple(range(first, first + count))),)
    own = [
        # eh_proj mixes the embedding and the hidden state, neither of which is ever cut
        *linear(f"{layer}.eh_proj", Whole(hidden), Whole(2 * hidden), "replicated", index),
        *norms(layer, hidden, index, "enorm", "hnorm", "shared_head.norm"),
    ]
    row = (Along("vocab"), Whole(hidden))
    words = [
        Role(f"{layer}.embed_tokens.weight", row, "column", index, matrix=True),
        Role(f"{layer}.shared_head.head.weight", row, "column", index, matrix=True, work=1.0),
    ]
    made = optional([*block(layer, index)], "MTP", *own)
    return msgspec.structs.replace(made, roles=[*made.roles, *in_group(words, "MTP vocabulary")])
