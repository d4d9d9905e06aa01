"""The backends by name, and the choice of one that can take what a checkpoint stores."""

from oddrank.errors import OddrankError
from oddrank.runtime.experts.backend import Backend
from oddrank.runtime.experts.bank import BankLayout
from oddrank.runtime.experts.cpu import Cpu
from oddrank.runtime.experts.hybrid import Hybrid
from oddrank.runtime.experts.offload import Offload
from oddrank.runtime.experts.resident import Resident

BACKENDS: dict[str, type[Backend]] = {b.name: b for b in (Resident, Offload, Cpu, Hybrid)}


def able(layouts: tuple[BankLayout, ...]) -> list[str]:
    """The backends that compute with matrices stored so."""
    return [name for name, backend in BACKENDS.items() if backend.takes(layouts)]


def require(kind: str, layouts: tuple[BankLayout, ...]) -> None:
    """OddrankError, naming those that can, where backend `kind` (or, for "auto", every one) cannot take these."""
    names = able(layouts)
    if kind in names or (kind == "auto" and names):
        return
    stored = " and ".join(dict.fromkeys(layout.decoder.name for layout in layouts))
    instead = f"Choose --experts {' or '.join(names)}." if names else "No other backend does either."
    raise OddrankError(f"--experts {kind} does not compute experts stored as {stored} ({layouts[0].name}). {instead}")
