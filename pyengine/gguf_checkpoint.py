"""Stage 1, gguf_checkpoint: the tensors of a GGUF file read like those of a folder, blocks of integers as float32."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.checkpoint import Checkpoint, allocate
from pyengine.errors import RequestError
from pyengine.gguf_file import BLOCKS, PLAIN, GgufHeader, is_gguf, open_header, read_header
from pyengine.safetensors_header import CheckpointFile, TensorInfo
from pyengine.strict_json import shown

FREQUENCIES = "rope_freqs.weight"  # divides RoPE's frequencies; the config's matter and not a weight
INT4_BITS = 5.0  # files of at most so many bits per weight are int4 unless told otherwise
CHUNK_WEIGHTS = 1 << 18  # that are made float32 at once: the temporaries are several times their size

Float32 = npt.NDArray[np.float32]


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file under its own names. `folder` is the file. Values are those of ggml's formulas."""

    def __init__(self, file: CheckpointFile, header: GgufHeader) -> None:
        tensors = {name: info for name, info in header.tensors.items() if name != FREQUENCIES}
        super().__init__(file.path, [file], tensors)

    def read(self, name: str) -> npt.NDArray[Any]:
        """As `Checkpoint.read`; float32 where integers are stored."""
        info = self.tensors.get(name)
        if info is None or info.dtype in PLAIN:
            return super().read(name)
        return self._values(info, 0, math.prod(info.shape[:-1])).reshape(info.shape)

    def read_range(self, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        """As `Checkpoint.read_range`."""
        info = self.tensors.get(name)
        if info is None or info.dtype in PLAIN:
            return super().read_range(name, begin, end)
        if len(info.shape) not in (2, 3) or not 0 <= begin <= end <= math.prod(info.shape[:-1]):
            found = f"rows {begin} to {end} of {list(info.shape)}"
            raise RequestError(f"{info.file}: tensor {shown(name)}: {found}; expected rows of a matrix")
        return self._values(info, begin, end)

    def read_rows(self, name: str, rows: npt.NDArray[Any]) -> Float32:
        """As `Checkpoint.read_rows`."""
        info = self.tensors.get(name)
        if info is None or info.dtype in PLAIN:
            return super().read_rows(name, rows)
        if len(rows) == 0:
            return np.empty((0, info.shape[-1]), np.float32)
        return np.concatenate([self.read_range(name, int(row), int(row) + 1) for row in rows])

    def _values(self, info: TensorInfo, begin: int, end: int) -> Float32:
        """Rows begin .. end - 1 as float32 [end - begin, K], made in parts."""
        import gguf

        columns = info.shape[-1]
        weights, size = BLOCKS[info.dtype]
        row_bytes = columns // weights * size
        kind = gguf.GGMLQuantizationType[info.dtype]
        out = allocate(info, (end - begin, columns), np.dtype(np.float32))
        step = max(1, CHUNK_WEIGHTS // columns)
        for first in range(begin, end, step):
            last = min(first + step, end)
            raw = np.empty((last - first, row_bytes), np.uint8)
            self._files[info.file].read_into(raw.reshape(-1).data, info.begin + first * row_bytes)
            with np.errstate(over="ignore", invalid="ignore"):  # a scale that is Inf or NaN is refused as a weight
                out[first - begin : last - begin] = gguf.dequantize(raw, kind)
        return out


def open_checkpoint(model: Path) -> Checkpoint:
    """The checkpoint of a MODEL: a folder of safetensors, or a GGUF file. Errors: as `Checkpoint.open`."""
    if not is_gguf(model):
        return Checkpoint.open(model)
    file = CheckpointFile(model)
    try:
        return GgufCheckpoint(file, read_header(file))
    except BaseException:
        file.close()
        raise


def block_types(model: Path) -> tuple[float, list[str]]:
    """(bits per weight, types of blocks) of the matrices inside a GGUF file's layers."""
    infos = open_header(model).tensors.values()
    matrices = [info for info in infos if len(info.shape) > 1 and re.match(r"blk\.\d+\.", info.name)]
    if not matrices:
        return 32.0, []
    bits = 8 * sum(info.end - info.begin for info in matrices) / sum(math.prod(info.shape) for info in matrices)
    return bits, sorted({info.dtype for info in matrices} - {*PLAIN})


def default_quant(model: Path) -> str:
    """The format of a MODEL's weights unless told otherwise: int8, int4 for a GGUF of at most 5 bits per weight."""
    return "int4" if is_gguf(model) and block_types(model)[0] <= INT4_BITS else "int8"


def say_blocks(path: Path, quant: str, log: Callable[[str], None]) -> None:
    """One line where blocks of integers are read as floats: quantized again, they are rounded twice."""
    bits, types = block_types(path)
    if types:
        again = f" and quantized again to {quant}" if quant in ("int8", "int4") else f" to {quant}"
        log(f"{path.name}: {', '.join(types)}, {bits:.1f} bits per weight, dequantized{again}")
