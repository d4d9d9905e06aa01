"""Verification: the same answer as TP=1, by logits against transformers."""
