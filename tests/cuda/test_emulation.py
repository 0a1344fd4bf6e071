"""The emulated device (tests/cuda_emulation): fragments and exchanges as the PTX ISA has them, and that mistakes show.

With PYENGINE_CUDA_TESTS=device the first part runs on the GPU, which has to agree; the mistakes are for the emulation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DRIVER = "tests/cuda/emulation_driver.cc"
U8S8, S8S8, BF16 = 0, 1, 2
emulated = pytest.mark.skipif(os.environ.get("PYENGINE_CUDA_TESTS") == "device", reason="of the emulation")


@pytest.fixture(scope="module")
def device(build: Callable[..., Any]) -> Any:
    return build(DRIVER)


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


# ---- fragments: the formulas of the PTX ISA, "Matrix fragments for mma.m16n8k32" and "... m16n8k16" ------------------


def place_a(lane: int, i: int, wide: bool) -> tuple[int, int]:
    """Row and column of element i of a lane; wide: k32 of bytes, else k16 of bfloat16."""
    group, thread = lane >> 2, lane % 4
    if wide:
        return (group if i < 4 or 8 <= i < 12 else group + 8), thread * 4 + (i & 3) + (0 if i < 8 else 16)
    return (group if i < 2 or 4 <= i < 6 else group + 8), thread * 2 + (i & 1) + (0 if i < 4 else 8)


def place_b(lane: int, i: int, wide: bool) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    if wide:
        return thread * 4 + (i & 3) + (0 if i < 4 else 16), group
    return thread * 2 + (i & 1) + (0 if i < 2 else 8), group


def place_d(lane: int, i: int) -> tuple[int, int]:
    return (lane >> 2) + (0 if i < 2 else 8), (lane % 4) * 2 + (i & 1)


def fragments(matrix: np.ndarray, elements: int, place: Callable[[int, int], tuple[int, int]]) -> np.ndarray:
    out = np.empty((32, elements), matrix.dtype)
    for lane in range(32):
        for i in range(elements):
            out[lane, i] = matrix[place(lane, i)]
    return out


def product(device: Any, kind: int, a: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
    """a . b + d through the registers of a warp; every matrix as bits."""
    wide = kind != BF16
    ra = fragments(a, 16 if wide else 8, lambda lane, i: place_a(lane, i, wide)).view(np.uint32).copy()
    rb = fragments(b, 8 if wide else 4, lambda lane, i: place_b(lane, i, wide)).view(np.uint32).copy()
    rd = fragments(d, 4, place_d).copy()
    device("run_mma", kind, ra, rb, rd)
    out = np.empty((16, 8), d.dtype)
    for lane in range(32):
        for i in range(4):
            out[place_d(lane, i)] = rd[lane, i]
    return out


@pytest.mark.parametrize("kind", [U8S8, S8S8])
def test_integer_fragments(device: Any, kind: int) -> None:
    rng = random(kind)
    low, high = (0, 256) if kind == U8S8 else (-128, 128)
    a = rng.integers(low, high, (16, 32)).astype(np.uint8 if kind == U8S8 else np.int8)
    b = rng.integers(-128, 128, (32, 8)).astype(np.int8)
    d = rng.integers(-(2**30), 2**30, (16, 8)).astype(np.int32)
    exact = a.astype(np.int64) @ b.astype(np.int64) + d
    assert (product(device, kind, a, b, d) == exact).all()
    assert not (product(device, kind, a[::-1].copy(), b, d) == exact).all()
    for row, column, other in ((0, 0, 0), (15, 31, 7), (8, 16, 3)):  # one element alone: nothing else moves
        a[:], b[:], d[:] = 0, 0, 0
        a[row, column], b[column, other] = 100, -3
        expected = np.zeros((16, 8), np.int64)
        expected[row, other] = -300
        assert (product(device, kind, a, b, d) == expected).all()


def test_bfloat16_fragments(device: Any) -> None:
    """Small integers over 8: exact in bfloat16, and sums exact in float32, in any order."""
    rng = random(3)
    a, b = (rng.integers(-64, 65, shape).astype(np.float32) / 8 for shape in ((16, 16), (16, 8)))
    d = rng.integers(-1000, 1000, (16, 8)).astype(np.float32) / 64
    halves = [(m.view(np.uint32) >> 16).astype(np.uint16) for m in (a, b)]
    assert all((m.view(np.uint32) & 0xFFFF == 0).all() for m in (a, b))
    assert (product(device, BF16, *halves, d) == a @ b + d).all()


# ---- exchanges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [32, 16, 8, 1])
@pytest.mark.parametrize("parameter", [0, 1, 5, 16, 31])
def test_exchanges_of_a_warp(device: Any, width: int, parameter: int) -> None:
    x = random(width).integers(-1000, 1000, 32).astype(np.int32)
    out, wide = np.empty((11, 32), np.int32), np.empty(32, np.uint64)
    device("run_warp", x, parameter, width, out, wide)
    lanes = np.arange(32)
    segment = lanes // width * width
    source = {
        0: segment + parameter % width,
        1: np.where((lanes ^ parameter) < segment + width, lanes ^ parameter, lanes),
        2: np.where(lanes - parameter >= segment, lanes - parameter, lanes),
        3: np.where(lanes + parameter < segment + width, np.minimum(lanes + parameter, 31), lanes),
    }
    for row, lane in source.items():
        assert (out[row] == x[lane]).all(), row
    assert (out[4].view(np.uint32) == int(((x & 1).astype(np.uint64) << lanes.astype(np.uint64)).sum())).all()
    assert (out[5] == (x == parameter).any()).all()
    assert (out[6] == (x > parameter).all()).all()
    assert (out[7] == x.sum()).all()
    assert (out[8] == x.max()).all()
    assert (out[9] == x.min()).all()
    assert (out[10][:16] == np.append(x[1:16], x[15])).all()
    assert (wide == (x.astype(np.uint32).astype(np.uint64) << np.uint64(32) | np.uint64(7))[lanes ^ 1]).all()


@pytest.mark.parametrize("threads", [1, 31, 64, 100, 1024])
def test_votes_of_a_block(device: Any, threads: int) -> None:
    for x in (random(threads).integers(0, 9, threads), np.full(threads, 3), np.full(threads, -1)):
        out = np.empty((3, threads), np.int32)
        device("run_votes", x.astype(np.int32), threads, out)
        assert (out[0] == (x & 1).sum()).all()
        assert ((out[1] != 0) == (x == 3).any()).all()
        assert ((out[2] != 0) == (x >= 0).all()).all()


def test_the_last_block_sees_the_others(device: Any) -> None:
    out = np.empty(1, np.float32)
    device("run_last_block", 37, out)
    assert out[0] == 37 * 38 / 2


# ---- mistakes that change values ------------------------------------------------------------------------------------

STATIC, DYNAMIC, WARP = 0, 1, 2


def reverse(device: Any, how: int, threads: int, wrong: bool) -> bool:
    x, y = np.arange(1, threads + 1, dtype=np.float32), np.empty(threads, np.float32)
    device("run_reverse", how, x, y, threads, int(wrong))
    expected = x.reshape(-1, 32)[:, ::-1].ravel() if how == WARP else x[::-1]
    if wrong:  # no value of an earlier block: where nothing was written there is NaN
        assert np.isnan(y[y != expected]).all()
    return bool((y == expected).all())


@pytest.mark.parametrize("how", [STATIC, DYNAMIC, WARP])
def test_reversal_with_its_barrier(device: Any, how: int) -> None:
    assert all(reverse(device, how, threads, False) for threads in (32, 64, 256))


@emulated
@pytest.mark.parametrize("how", [STATIC, DYNAMIC, WARP])
def test_a_missing_barrier_shows(device: Any, how: int) -> None:
    for threads in (32, 256):
        assert not any(reverse(device, how, threads, True) for _ in range(5))


def copied(device: Any, left: int, commit: int) -> np.ndarray:
    x, y = np.arange(1, 16 * 64 + 1, dtype=np.float32), np.empty(16 * 64, np.float32)
    device("run_copy", x, y, 64, left, commit)
    right: np.ndarray = (x == y).reshape(64, 4, 4)
    assert right.any() or np.isnan(y).all()
    return right


def test_copies_arrive_at_the_wait(device: Any) -> None:
    assert copied(device, 0, 1).all()


@emulated
def test_copies_not_waited_for_show(device: Any) -> None:
    one_left = copied(device, 1, 1)
    assert one_left[:, :3].all()
    assert not one_left[:, 3].any()
    assert not copied(device, 0, 0).any()  # never committed


# ---- mistakes that are errors ---------------------------------------------------------------------------------------

WHERE = r"mistaken_kernel, block \([01], 0, 0\) of \(2, 1, 1\), thread \(\d+, 0, 0\): "
STUCK = r"waits at emulation_driver\.cc:\d+ \(%s\) for threads that do not come: thread "
BARRIER, SHUFFLE, SYNC = (STUCK % name for name in ("a barrier of the block", "__shfl_xor_sync.*", "__syncwarp.*"))
HERE = r"emulation_driver\.cc:\d+: "
MISTAKES = {
    "BARRIER_IN_A_BRANCH": BARRIER + "5 has ended",
    "BARRIER_AFTER_AN_EXIT": BARRIER + "40 has ended",
    "TWO_BARRIERS": HERE + r"a barrier, while other threads of the block wait at emulation_driver\.cc:\d+",
    "SHUFFLE_IN_A_BRANCH": SHUFFLE + r"(7|39) waits at emulation_driver\.cc:\d+ \(a barrier of the block\)",
    "SHUFFLE_OUTSIDE_THE_MASK": HERE + "__shfl_sync: reads a lane that is not in the mask",
    "MASK_WITHOUT_ITSELF": HERE + "__syncwarp: the mask 00000001 lacks the lane itself",
    "MASK_WITH_THE_ENDED": HERE
    + "__syncwarp: the mask ffffffff names lane 1, which has ended|"
    + SYNC
    + "33 has ended",
    "OTHER_MASKS": SYNC + r"(3|35) waits .* with mask 0000000f",
    "MMA_IN_A_BRANCH": HERE + r"mma_s8s8, while lane \d+ is at emulation_driver\.cc:\d+",
    "PAST_SHARED": r"access at byte \d+ of 256 bytes of shared memory",
    "BEFORE_SHARED": r"access at byte -409600 of 256 bytes of shared memory",
    "PAST_AN_ALLOCATION": r"access at byte (25[6-9]|2[6-9]\d|[34]\d\d) of an allocation of 256 bytes",
    "NULL_POINTER": r"access at \(nil\), which is no memory",
    "SPIN": HERE + "spins without end",
    "FULL_STACK": r"the stack of thread \d+ is full",
    "NO_WAIT": None,
    "UNALIGNED_COPY": HERE + "copy_async: .* is not aligned to 16 bytes",
    "COPY_TO_GLOBAL": HERE + "copy_async: .* is not shared memory",
    "UNALIGNED_LOAD": HERE + "load_once: .* is not aligned to 16 bytes",
    "TRAP": HERE + "__trap",
    "WRITE_PAST_SHARED": "a thread wrote past the shared memory",
}


@emulated
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_kernel_block_and_thread(device: Any, name: str) -> None:
    expected, mistake = MISTAKES[name], list(MISTAKES).index(name) + 1
    device("run_mistake", 0)
    match = r"mistaken_kernel: no thread called wait_for_previous" if expected is None else f"{WHERE}({expected})"
    with pytest.raises(RuntimeError, match=match):
        device("run_mistake", mistake)
    device("run_mistake", 0)  # the device goes on


@emulated
@pytest.mark.parametrize(
    ("what", "match"),
    [
        (0, "a grid that no device takes"),
        (1, "a block that no device takes"),
        (2, "a grid that no device takes"),
        (3, "more shared memory than the kernel was given"),
        (4, "argument 1 holds 0x[0-9a-f]+, which is memory of the host"),
        (5, "asks for 102400 bytes of shared memory of 101376"),
    ],
)
def test_a_launch_that_no_device_takes(device: Any, what: int, match: str) -> None:
    with pytest.raises(RuntimeError, match=match):
        device("run_launch", what)


def test_all_of_the_shared_memory(device: Any) -> None:
    device("run_launch", 6)


# ---- graphs ---------------------------------------------------------------------------------------------------------


def test_a_graph_replays_with_the_arguments_it_was_given(device: Any) -> None:
    out = np.empty(64, np.float32)
    device("run_graph", 0, 3, out)
    assert (out == 6).all()


@emulated
@pytest.mark.parametrize("spoil", [2, 3, 4, 5])
def test_what_cannot_be_captured_is_refused(device: Any, spoil: int) -> None:
    what = {2: "cudaStreamSynchronize", 3: "not from cudaHostAlloc", 4: "cudaMemcpy while", 5: "cudaMalloc while"}[
        spoil
    ]
    with pytest.raises(RuntimeError, match=f"cudaErrorStreamCaptureUnsupported: .*{what}"):
        device("run_graph", spoil, 1, np.empty(64, np.float32))
    device("run_graph", 0, 1, np.empty(64, np.float32))


# ---- what overlaps --------------------------------------------------------------------------------------------------


def test_kernels_that_overlap(device: Any) -> None:
    out = np.empty(64, np.float32)
    device("run_overlap", 0, 5, out)
    assert (out == 10).all()


@emulated
def test_what_is_read_before_the_grid_in_front_has_ended_shows(device: Any) -> None:
    """In one block of the two: the one that ran ahead."""
    out = np.empty(64, np.float32)
    device("run_overlap", 1, 5, out)
    wrong = (out != 10).reshape(2, 32)
    assert wrong.any(axis=1).any()
    assert (wrong.all(axis=1) | ~wrong.any(axis=1)).all()


RIGHT, READ_EARLY, OVERWRITE_EARLY, NO_EVENT = range(4)


def test_streams_with_an_event_between_them(device: Any) -> None:
    out = np.empty(64, np.float32)
    device("run_streams", RIGHT, out)
    assert (out == np.arange(2, 66)).all()


@emulated
@pytest.mark.parametrize(
    ("mistake", "wrong"), [(READ_EARLY, slice(None)), (OVERWRITE_EARLY, 5), (NO_EVENT, slice(None))]
)
def test_what_does_not_wait_for_a_stream_shows(device: Any, mistake: int, wrong: Any) -> None:
    out = np.empty(64, np.float32)
    device("run_streams", mistake, out)
    expected = np.arange(2, 66) == out
    assert not np.any(expected[wrong])
    assert mistake != OVERWRITE_EARLY or expected.sum() == 63


# ---- the seed -------------------------------------------------------------------------------------------------------


@emulated
def test_the_order_of_threads_follows_the_seed(device: Any) -> None:
    """In a process of its own: what a missing barrier gives differs with the seed, and repeats with it."""
    code = (
        "import ctypes, numpy as np, sys; library = ctypes.CDLL(sys.argv[1]); y = np.empty(256, np.float32);"
        "x = np.ones(256, np.float32); p = lambda a: ctypes.c_void_p(a.ctypes.data);"
        "n = ctypes.c_int64; library.run_reverse(n(1), p(x), p(y), n(256), n(1)); print(np.isnan(y).tobytes().hex())"
    )
    path = Path(device._library._name)
    seen = [
        subprocess.run(
            [sys.executable, "-c", code, str(path)], env=os.environ | {"PYENGINE_CUDA_EMULATION_SEED": seed},
            check=True, capture_output=True, text=True,
        ).stdout
        for seed in ("1", "1", "2", "3")
    ]  # fmt: skip
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3
