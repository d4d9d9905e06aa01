"""Many requests at once on one set of ranks: what runs in which step, and which pages of the KV cache hold it.

Nothing here imports torch or knows what a model is: the scheduler decides, the ranks carry out.
"""
