"""Lets torchvision import beside a CPU build of torch.

PyPI's torchvision is compiled against the CUDA build; beside the CPU build its operator library does not load, and its
Python code then describes operators that do not exist. vLLM's qwen3_5 imports torchvision and, for text, calls none of
them, so naming the two that matter is enough. Python reads this file at start where its folder is on PYTHONPATH.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_loader

NAMED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _Loader:
    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        import torch

        self.kept = torch.library.Library("torchvision", "FRAGMENT")
        for schema in NAMED:
            if not hasattr(torch.ops.torchvision, schema.split("(")[0]):
                self.kept.define(schema)
        self.loader.exec_module(module)


class _Finder:
    """Finds torchvision's `_meta_registrations` only, where the operators are first looked up."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision._meta_registrations":
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is None or found.loader is None:
            return found
        spec = spec_from_loader(name, _Loader(found.loader), origin=found.origin)
        spec.has_location = True
        return spec


sys.meta_path.insert(0, _Finder)
