"""pyengine.h through cffi: the structs filled in as C would, every status checked."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import cffi
import numpy as np

ORIGIN = importlib.util.find_spec("pyengine._core")
assert ORIGIN is not None
assert ORIGIN.origin is not None
FOLDER = Path(ORIGIN.origin).parent
HEADERS = (FOLDER / "include" / "pyengine.h", Path(__file__).resolve().parents[1] / "csrc" / "include" / "pyengine.h")

OP_IDS = (
    *("layer", "input", "output", "scratch", "routing", "rows", "weight", "weight2", "bias", "bias2", "norm", "norm2"),
    *("norm_bias",),
    *("rope", "kv_group", "kv_layer"),
)
OK, REQUEST, FORMAT, UNSUPPORTED, RESOURCE, COMPUTE, CANCELLED = range(7)


def declarations(text: str) -> str:
    """The header without what cffi does not read: comments, preprocessor lines, extern "C", PE_API."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    constants = re.findall(r"^#define\s+(PE_\w+)\s+(\d+)\s*$", text, flags=re.M)
    text = re.sub(r'#ifdef __cplusplus\n(extern "C" \{|\})\n#endif', "", text)
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return "\n".join(f"#define {name} {value}" for name, value in constants) + text.replace("PE_API ", "")


class Client:
    """The library through cffi, with the calls that several tests need."""

    def __init__(self) -> None:
        self.ffi = cffi.FFI()
        header = next(path for path in HEADERS if path.is_file())
        self.ffi.cdef(declarations(header.read_text(encoding="ascii")))
        self.lib: Any = self.ffi.dlopen(str(FOLDER / "libpyengine_cpu.so"))
        self.kept: list[Any] = []  # memory that C structs point to

    def struct(self, name: str, **fields: Any) -> Any:
        s = self.ffi.new(f"{name}*")
        s.struct_size = self.ffi.sizeof(name)
        for key, value in fields.items():
            setattr(s, key, value)
        return s

    def array(self, a: np.ndarray, kind: str = "float*") -> Any:
        self.kept.append(a)
        return self.ffi.cast(kind, a.ctypes.data)

    def error(self) -> str:
        return self.ffi.string(self.lib.pe_last_error()).decode()

    def good(self, status: int) -> None:
        assert status == OK, self.error()

    def bad(self, status: int, expected: int, says: str) -> None:
        assert status == expected, (status, self.error())
        assert re.search(says, self.error()), self.error()

    def backend(self, isa: str, threads: int = 1) -> Any:
        name = self.ffi.new("char[]", isa.encode())
        out = self.ffi.new("pe_backend**")
        self.good(self.lib.pe_backend_create(self.struct("pe_backend_config", threads=threads, isa=name), out))
        return out[0]

    def tensor(self, backend: Any, fmt: int, rows: int, cols: int, group: int = 0) -> int:
        out = self.ffi.new("int32_t*")
        desc = self.struct("pe_tensor_desc", format=fmt, rows=rows, cols=cols, group=group)
        self.good(self.lib.pe_tensor_create(backend, desc, out))
        return int(out[0])

    def pack_args(self, source: np.ndarray, /, rows: int | None = None, **fields: Any) -> Any:
        address = self.array(source, "void*")
        defaults = {"panel_stride": 1, "source": address, "rows": len(source) if rows is None else rows}
        return self.struct("pe_pack_args", **{**defaults, **fields})

    def data(self, backend: Any, tensor: int) -> np.ndarray:
        """The tensor's own memory as uint8: writes go to the core."""
        start, size = self.ffi.new("void**"), self.ffi.new("size_t*")
        self.good(self.lib.pe_tensor_data(backend, tensor, start, size))
        return np.frombuffer(self.ffi.buffer(start[0], size[0]), np.uint8)

    def op(self, kind: int, **fields: int) -> Any:
        return self.struct("pe_op", kind=kind, **{**dict.fromkeys(OP_IDS, -1), **fields})

    def program(self, backend: Any, ops: list[Any], buffers: list[tuple[int, int]], tokens: int) -> Any:
        out = self.ffi.new("pe_program**")
        self.good(self.lib.pe_program_create(backend, self.program_desc(ops, buffers, tokens), out))
        return out[0]

    def program_desc(self, ops: list[Any], buffers: list[tuple[int, int]], tokens: int, **fields: Any) -> Any:
        c_ops = self.ffi.new("pe_op[]", [op[0] for op in ops])
        c_buffers = self.ffi.new("pe_buffer_desc[]", len(buffers))
        for at, (quantized, width) in enumerate(buffers):
            c_buffers[at].struct_size = self.ffi.sizeof("pe_buffer_desc")
            c_buffers[at].quantized, c_buffers[at].width = quantized, width
        self.kept += [c_ops, c_buffers]
        sizes = {
            "op_count": len(ops),
            "buffer_count": len(buffers),
            "max_batch_tokens": tokens,
            "max_sequences": tokens,
        }
        return self.struct("pe_program_desc", ops=c_ops, buffers=c_buffers, **{**sizes, **fields})

    def linear_ops(self, weight: int, bias: int = -1) -> list[Any]:
        lib = self.lib
        return [
            self.op(lib.PE_OP_LOAD_HIDDEN, output=0),
            self.op(lib.PE_OP_QUANTIZE, input=0, output=1),
            self.op(lib.PE_OP_LINEAR, input=1, output=2, weight=weight, bias=bias),
            self.op(lib.PE_OP_TAP, input=2, head_dim=0),
        ]

    def batch(self, hidden: np.ndarray, out: np.ndarray, /, **fields: Any) -> Any:
        tokens = len(hidden)
        positions = self.array(np.arange(tokens, dtype=np.int32), "int32_t*")
        ends = self.array(np.array([0, tokens], np.int32), "int32_t*")
        given = {
            "tokens": tokens,
            "sequences": 1,
            "positions": positions,
            "query_start": ends,
            "hidden": self.array(hidden),
        }
        taps = self.ffi.new("float*[]", [self.array(out)])
        self.kept.append(taps)
        given["taps"] = taps
        return self.struct("pe_batch", **{**given, **fields})
