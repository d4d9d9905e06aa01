"""Layers: placements (linear, vocab), formats (kernels), norms, rotary embedding, attention."""
