"""What a comparison of logits says of numbers that are none."""

from __future__ import annotations

import numpy as np
import pytest

from oddrank.verify.compare import compare


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_logits_that_are_no_numbers_agree_with_nothing(wrong: float) -> None:
    """On neither side: the largest of a difference and NaN is either, by which comes first."""
    good, bad = np.zeros((2, 3)), np.zeros((2, 3))
    bad[1, 2] = wrong
    assert compare([good], [good]).max_rel == 0
    with pytest.raises(ValueError, match="prompt 1: 1 logits are not finite"):
        compare([good, good], [good, bad])
    for other in (good, bad):
        with pytest.raises(ValueError, match=r"prompt 1: 1 logits( of the reference)? are not finite"):
            compare([good, bad], [good, other])
