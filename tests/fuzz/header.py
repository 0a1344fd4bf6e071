"""The safetensors header, beside the `safetensors` package: what both accept reads the same, and the package refuses
nothing that is accepted here.

    python tests/fuzz/header.py --seconds 1800
"""

from __future__ import annotations

import copy
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from builders import safetensors_bytes
from fuzz import fuzzing
from property.test_header_fuzz import BASE, SNIPPETS, compare

from pyengine.safetensors_header import DTYPE_BITS

CORPUS: tuple[int, ...] = ()
EDGES = [0, 1, 2, 3, 7, 8, 24, 32, 33, 2**31, 2**48 - 1, 2**48, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -1]
ODD = [None, True, False, 1.0, "", "F32", "\u0000", "\ud800", [], {}, [[]], 1e308, -0.0]


def number(rng: random.Random) -> object:
    return rng.choice(EDGES) if rng.random() < 0.3 else rng.randrange(40) if rng.random() < 0.9 else rng.choice(ODD)


def layout(rng: random.Random) -> tuple[dict[str, object], bytes]:
    """A valid header and its data; names, dtypes and shapes of any kind."""
    header: dict[str, object] = {}
    at = 0
    for index in range(rng.randrange(6)):
        dtype = rng.choice(sorted(DTYPE_BITS))
        shape = [rng.randrange(5) for _ in range(rng.randrange(4))]
        bits = DTYPE_BITS[dtype]
        for side in shape:
            bits *= side
        if bits % 8:
            continue
        letters = [chr(rng.randrange(32, 127) if rng.random() < 0.5 else rng.randrange(0x400)) for _ in range(5)]
        name = "".join(letters[: rng.randrange(1, 6)])
        header[f"{name}{index}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + bits // 8]}
        at += bits // 8
    if rng.random() < 0.3:
        header["__metadata__"] = {"format": "pt"}
    return header, rng.randbytes(at)


def spoil(rng: random.Random, header: dict[str, object]) -> None:
    """One thing in the header becomes another."""
    names = [name for name, entry in header.items() if name != "__metadata__" and isinstance(entry, dict)]
    if not names or rng.random() < 0.1:
        header[rng.choice(["", "x", "__metadata__", "a\nb"])] = copy.deepcopy(rng.choice([*ODD, {"dtype": "F32"}]))
        return
    entry = header[rng.choice(names)]
    assert isinstance(entry, dict)
    key = rng.choice(["dtype", "shape", "data_offsets", "more"])
    if key in ("shape", "data_offsets") and isinstance(entry.get(key), list) and entry[key] and rng.random() < 0.8:
        entry[key][rng.randrange(len(entry[key]))] = number(rng)
    elif rng.random() < 0.2:
        entry.pop(key, None)
    else:
        odd = rng.choice([*ODD, *sorted(DTYPE_BITS), "F128", [number(rng) for _ in range(rng.randrange(4))]])
        entry[key] = copy.deepcopy(odd)


def case(rng: random.Random) -> None:
    kind = rng.randrange(3)
    if kind == 0:  # bytes of a good file
        data = bytearray(BASE)
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        compare(bytes(data[: rng.randrange(len(data) + 1)] if rng.random() < 0.1 else data))
    elif kind == 1:  # pieces of its header
        length = int.from_bytes(BASE[:8], "little")
        header = BASE[8 : 8 + length]
        for _ in range(rng.randrange(1, 4)):
            begin = rng.randrange(len(header) + 1)
            header = header[:begin] + rng.choice(SNIPPETS) + header[begin + rng.randrange(12) :]
        compare(safetensors_bytes(header, BASE[8 + length :]))
    else:  # a layout, mostly with something wrong
        made, data = layout(rng)
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            spoil(rng, made)
        text = json.dumps(made, ensure_ascii=rng.random() < 0.5) + " " * rng.randrange(9)
        compare(safetensors_bytes(text.encode("utf-8", "surrogatepass"), data + bytes(rng.choice([0, 0, 0, 1, 8]))))


if __name__ == "__main__":
    fuzzing.main("header", case, CORPUS)
