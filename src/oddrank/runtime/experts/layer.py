"""The routed experts of one layer, as a model uses them."""

from collections.abc import Callable

import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.families.experts import NAMED
from oddrank.native.elementwise import zeros
from oddrank.runtime.experts.backend import Backend, Layer
from oddrank.runtime.experts.backends import BACKENDS, require
from oddrank.runtime.experts.bank import BankLayout, ExpertSlice, LayerBanks
from oddrank.runtime.experts.copier import pin
from oddrank.runtime.experts.kernel import Activation, ExpertKernel, add_up, route
from oddrank.runtime.experts.loading import Release, fill
from oddrank.runtime.experts.share import ExpertShare
from oddrank.runtime.layers.module import Module


class Experts(Module):
    """This rank's part of every expert of a layer: down(act(gate(x)) * up(x)), `width` channels of each, or a family's
    own unit in place of the product.

    x [tokens, hidden], weights and ids [tokens, k] -> [tokens, hidden]: this rank's term of the sum over ranks, in x's
    type. Each token's ids are all different. Experts are computed in float64 for float64 activations, else in fp32.
    """

    def __init__(
        self,
        part: ExpertSlice,
        name: str,
        *,
        experts: int,
        hidden: int,
        width: int,
        activation: Activation,
        weights: torch.dtype,
        share: ExpertShare,
        names: tuple[str, str, str] = NAMED,
        unit: Activation | None = None,
        adds_bias: bool | None = None,
    ) -> None:
        """name: what the experts' tensors begin with ("...mlp.experts"), stacked or one by one (`names`: gate, up and
        down of one). width: this rank's of each expert. weights: dense weights stored wider than this are held in
        it; where it has 32 bits or more the compiled kernels are exact (see Precision). unit, adds_bias: see
        ExpertKernel.

        OddrankError where the experts are not stored alike, or the backend asked for cannot take them.
        """
        self.name, self.width, self.share = name, width, share
        try:
            part.matrix(f"{name}.gate_up_proj")
            up: list[list[str]] | str = f"{name}.gate_up_proj"
            down: list[list[str]] | str = f"{name}.down_proj"
            rows = 2 * width
        except KeyError:
            gate_name, up_name, down_name = names
            up = [[f"{name}.{e}.{gate_name}", f"{name}.{e}.{up_name}"] for e in range(experts)]
            down, rows = [[f"{name}.{e}.{down_name}"] for e in range(experts)], width
        biased = adds_bias is not None
        self.layouts = (
            BankLayout(part, up, experts, rows, hidden, weights, share.device, biased=biased),
            BankLayout(part, down, experts, hidden, width, weights, share.device, biased=biased),
        )
        require(share.options.kind, self.layouts)
        share.add(self.layouts)
        self._idle = not width and not adds_bias
        self._kernel = ExpertKernel(
            self.layouts[0].decoder, self.layouts[1].decoder, activation, weights.itemsize >= 4, unit, adds_bias
        )
        self._host: LayerBanks | None = None
        self._device: LayerBanks | None = None
        self._backend: Backend | None = None
        self._unpin: Callable[[], None] | None = None

    # Loading ------------------------------------------------------------------------------------------------

    def own_tensors(self) -> list[str]:
        return [n for layout in self.layouts for n in (*(s.name for s in layout.sources), *layout.ignored)]

    def load_own(self, part: ExpertSlice, release: Release | None = None) -> int:
        """Fill the banks, where the backend asked for has them."""
        options = self.share.options
        resident = options.kind != "auto" and BACKENDS[options.kind].on_device
        home = self.share.device if resident else "cpu"
        banks = LayerBanks(*(layout.allocate(layout.experts, home) for layout in self.layouts))
        read = fill(banks, part, release, threads=1 if options.load == "serial" else self.share.threads)
        if resident:
            self._device = banks
        else:
            self._host = banks
            if self.share.device.type == "cuda":
                self._unpin = pin(list(banks.tensors()))
        return read

    def held(self) -> int:
        return sum(banks.nbytes() for banks in (self._host, self._device) if banks is not None)

    def device_nbytes(self) -> int:
        """Bytes on the rank's device: banks that are there, and what the backend keeps."""
        there = (self._host, self._device) if self.share.device.type == "cpu" else (self._device,)
        return sum(banks.nbytes() for banks in there if banks is not None) + self.backend.nbytes()

    # Who computes -------------------------------------------------------------------------------------------

    def use(self, kind: str) -> None:
        """Have backend `kind` compute from now on. Banks in host memory stay; `settle` drops what is not used.

        OddrankError before the experts are loaded, and where they are on the device only.
        """
        backend = BACKENDS[kind]
        self._backend = None  # its cache goes before another is made
        if backend.on_device:
            if self._device is None:
                self._device = self._loaded().to(self.share.device)
            banks = self._device
        else:
            self._device = None if self._host is not None else self._device
            banks = self._loaded()
        self._backend = backend(Layer(banks, self._kernel, self.share.device), self.share)

    def settle(self) -> None:
        """Drop the copy of the banks that the backend does not use."""
        if self._device is not None and self._host is not None:
            if self._unpin is not None:
                self._unpin()
            self._host = None

    def _loaded(self) -> LayerBanks:
        if self._host is None:
            raise OddrankError(
                f"{self.name} is used before it was loaded."
                if self._device is None
                else f"{self.name} is on the device only and cannot be computed elsewhere."
            )
        return self._host

    @property
    def backend(self) -> Backend:
        """Who computes: what the options say, until `use` says otherwise."""
        if self._backend is None:
            kind = self.share.options.kind
            self.use("cpu" if kind == "auto" else kind)
        assert self._backend is not None
        return self._backend

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if self._idle or not len(x):
            return zeros(x.shape, x.dtype, x.device)
        whole = self.backend.whole(x, weights, ids)
        if whole is not None:
            return whole.to(x.dtype)
        batch = route(x, weights, ids)
        return add_up(batch, self.backend.terms(batch)).to(x.dtype)
