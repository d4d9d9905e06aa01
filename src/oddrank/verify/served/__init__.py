"""Two servings of a model, compared from outside: what each answered, and where they part.

Works with any OpenAI-compatible server and imports nothing that computes.
"""

from oddrank.verify.served.answers import Answer, Candidate, Capture, Prompt, Token, read_capture, write_capture
from oddrank.verify.served.client import capture
from oddrank.verify.served.compare import Comparison, Divergence, Pair, Tolerance, compare
from oddrank.verify.served.suites import suite

__all__ = [
    "Answer",
    "Candidate",
    "Capture",
    "Comparison",
    "Divergence",
    "Pair",
    "Prompt",
    "Token",
    "Tolerance",
    "capture",
    "compare",
    "read_capture",
    "suite",
    "write_capture",
]
