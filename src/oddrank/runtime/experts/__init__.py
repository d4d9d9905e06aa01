"""Routed experts: how a layer's are held, who computes them, and where they are meanwhile."""

from oddrank.runtime.expert_options import CacheSize, ExpertOptions
from oddrank.runtime.experts.layer import Experts
from oddrank.runtime.experts.share import ExpertShare
from oddrank.runtime.experts.start import device_nbytes, start_experts

__all__ = ["CacheSize", "ExpertOptions", "ExpertShare", "Experts", "device_nbytes", "start_experts"]
