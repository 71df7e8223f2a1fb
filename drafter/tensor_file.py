"""A safetensors file without torch: names, shapes and raw numbers, mapped and never copied whole.

The format: 8 bytes little-endian header length, a JSON header name -> {dtype, shape, data_offsets},
then the tensors' bytes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from drafter.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1}
_NUMPY = {
    "F64": "<f8",
    "I64": "<i8",
    "F32": "<f4",
    "I32": "<i4",
    "F16": "<f2",
    "I16": "<i2",
    "U8": "u1",
    "I8": "i1",
}
_SCAN_ELEMENTS = 1 << 22


class TensorFile:
    """Read access to a safetensors file; iterates over tensor names.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is truncated or not safetensors.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        size = path.stat().st_size
        with open(path, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise _broken(path, f"header of {length} bytes in a file of {size}")
            try:
                header: dict[str, Any] = json.loads(handle.read(length))
                header.pop("__metadata__", None)
                for name, entry in header.items():
                    start, end = entry["data_offsets"]
                    expected = math.prod(entry["shape"]) * _BYTES[entry["dtype"]]
                    if end - start != expected or start < 0 or 8 + length + end > size:
                        raise _broken(path, f"tensor {name} ends beyond the file")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise _broken(path, f"header: {error}") from None
        self._header = header
        self._data_start = 8 + length

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def __contains__(self, name: object) -> bool:
        return name in self._header

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> str:
        """Of the format's names: `BF16`, `F32`, `I64`, ..."""
        return self._header[name]["dtype"]

    def array(self, name: str) -> np.ndarray:
        """A read-only map of a tensor in its shape. bfloat16, which numpy lacks, comes as uint16 bits."""
        dtype = _NUMPY.get(self.dtype(name), {"BF16": "<u2", "BOOL": "u1"}.get(self.dtype(name), "u1"))
        if math.prod(self.shape(name)) == 0:
            return np.empty(self.shape(name), dtype=dtype)
        offset = self._data_start + self._header[name]["data_offsets"][0]
        return np.memmap(self._path, dtype=dtype, mode="r", offset=offset, shape=self.shape(name))

    def count_non_finite(self, name: str) -> int:
        """How many numbers of a tensor are NaN or infinite; 0 for integers."""
        dtype = self.dtype(name)
        if dtype not in ("BF16", "F16", "F32", "F64"):
            return 0
        flat = self.array(name).reshape(-1)
        bad = 0
        for start in range(0, len(flat), _SCAN_ELEMENTS):
            part = flat[start : start + _SCAN_ELEMENTS]
            # bfloat16 is not finite exactly when all eight exponent bits are set.
            wrong = (part & 0x7F80) == 0x7F80 if dtype == "BF16" else ~np.isfinite(part)
            bad += int(np.count_nonzero(wrong))
        return bad


def _broken(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {reason}", "a whole safetensors file", "export the drafter again, or copy the file again"
    )
