"""The Triton kernels themselves. Triton is imported here and nowhere else."""
