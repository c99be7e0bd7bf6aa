"""Which memory a transport may touch: registered regions, looked up by address."""

import threading
from dataclasses import dataclass

import torch

from tilert_ref.connector.transport import TransferError


@dataclass(frozen=True)
class Region:
    start: int
    nbytes: int
    tensor: torch.Tensor  # kept: its owner may drop it while a transfer still runs

    def holds(self, address: int, nbytes: int) -> bool:
        return self.start <= address and address + nbytes <= self.start + self.nbytes


class Regions:
    """Registered regions by start address. Thread-safe; `find` takes no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}

    def add(self, start: int, nbytes: int, tensor: torch.Tensor) -> Region:
        region = Region(start, nbytes, tensor)
        with self._lock:
            self._regions = self._regions | {start: region}
        return region

    def remove(self, start: int) -> Region | None:
        with self._lock:
            region = self._regions.get(start)
            self._regions = {key: value for key, value in self._regions.items() if key != start}
        return region

    def holding(self, address: int, nbytes: int) -> Region | None:
        return next((region for region in self._regions.values() if region.holds(address, nbytes)), None)

    def find(self, address: int, nbytes: int) -> Region:
        """The region that holds the whole range. TransferError if none does."""
        if (region := self.holding(address, nbytes)) is not None:
            return region
        known = ", ".join(f"{r.start:#x}+{r.nbytes}" for r in self._regions.values()) or "none"
        raise TransferError(f"{nbytes} bytes at {address:#x} are not in registered memory ({known})")
