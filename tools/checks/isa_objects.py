#!/usr/bin/env python3
"""Check the per-ISA objects of a build: nothing in them may run, or be linked, on a CPU without that ISA.

    python tools/checks/isa_objects.py [BUILD_DIR]        (default: build, where `pip install .` leaves its objects)

Each isa_<name>.cc.o must define exactly one global symbol, a constant table in read-only data; no weak, common or
unique symbols (an inline function compiled for AVX2 could be the copy that the linker keeps); no static initialisers
(they would run at load). On x86-64 and aarch64 the disassembly may use only the registers and instructions of its ISA,
and no other object may use more than the baseline. Needs nm and objdump (binutils; for objects of another machine also
its cross objdump). Exit 0 if all is well, else 1 with one line per finding.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

READ_ONLY = (".rodata", ".data.rel.ro")
INITIALISERS = (".init_array", ".preinit_array", ".ctors", ".init")
MASK_OR_HIGH = r"%k[0-7]\b|%[xyz]mm(?:1[6-9]|2\d|3[01])\b"  # only EVEX, that is AVX-512, can name these
TILE = r"%tmm\d|\t(?:ldtilecfg|tilerelease)"
VEX_DOT = r"\{vex\} vpdp"  # AVX-VNNI; without {vex} it is the form of AVX512-VNNI
NEWER_ARM = r"\b[zp]\d+[./]|\tbf(?:dot|mmla|mlal)|\t(?:casp?|swp|ld(?:add|clr|eor|set))a?l?[bh]?\t"  # SVE, bf16, LSE
MATMUL = r"\t(?:us|su)dot\t|\t(?:[su]|us)mmla\t"
FORBIDDEN = {
    "x86-64": {
        "baseline": re.compile(rf"%[yz]mm|{MASK_OR_HIGH}|{TILE}|\t(?:\{{vex\}} )?v[a-z0-9]+ .*%xmm"),
        "avx2": re.compile(rf"%zmm|{MASK_OR_HIGH}|{TILE}|vpdp"),
        "avxvnni": re.compile(rf"%zmm|{MASK_OR_HIGH}|{TILE}|\tvpdp"),
        "avx512vnni": re.compile(rf"{TILE}|{VEX_DOT}"),
        "avx512vnni_amx": re.compile(VEX_DOT),
        "avxvnni_evex": re.compile(rf"{TILE}|{VEX_DOT}"),  # of builds with PYENGINE_TEST_ISAS
        "avx512vnni_amx_emulated": re.compile(rf"{TILE}|{VEX_DOT}"),
    },
    "aarch64": {
        "baseline": re.compile(rf"{NEWER_ARM}|{MATMUL}|\t[su]dot\t"),
        "neon": re.compile(rf"{NEWER_ARM}|{MATMUL}|\t[su]dot\t"),
        "neon_dotprod": re.compile(rf"{NEWER_ARM}|{MATMUL}"),
        "neon_i8mm": re.compile(NEWER_ARM),
    },
}
ELF_MACHINES = {62: "x86-64", 183: "aarch64"}


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def isa_of(path: Path) -> str | None:
    """'avx2' for isa_avx2.cc.o, None for an object of no ISA."""
    match = re.fullmatch(r"isa_(\w+)\.cc\.o", path.name)
    return match.group(1) if match else None


def section_names(path: Path) -> list[str]:
    return re.findall(r"^\s*\d+ (\S+)", run("objdump", "-h", str(path)), re.MULTILINE)


def symbol_sections(path: Path) -> dict[str, str]:
    """Global symbols of the object -> the section that defines them."""
    sections = {}
    for line in run("objdump", "-t", str(path)).splitlines():
        match = re.match(r"[0-9a-f]+ g.{6} (\S+)\s+[0-9a-f]+\s+(?:\.(?:hidden|protected|internal) )?(\S+)$", line)
        if match and match.group(1) != "*UND*":
            sections[match.group(2)] = match.group(1)
    return sections


def symbol_findings(path: Path) -> list[str]:
    findings = []
    exported = []
    for line in run("nm", str(path)).splitlines():
        kind, name = line[17:].split(" ", 1)
        if kind in "WVuCi":
            findings.append(f"symbol {name} is '{kind}' (weak, unique, common or indirect); expected none")
        elif kind.isupper() and kind != "U":
            exported.append(name)
        if name.startswith(("_GLOBAL__sub_I", "_ZGV", "__cxx_global_var_init")):
            findings.append(f"symbol {name} belongs to a static initialiser; expected none")
    if len(exported) != 1:
        findings.append(f"exports {exported}; expected exactly one constant table")
    defined = symbol_sections(path)
    for name in exported:
        section = defined.get(name, "?")
        if not section.startswith(READ_ONLY):
            findings.append(f"{name} lies in {section}; expected read-only data")
    findings += [f"section {s}; expected none" for s in section_names(path) if s.startswith(INITIALISERS)]
    return findings


def machine_of(path: Path) -> str:
    """'x86-64', 'aarch64', or the number of another machine."""
    number = int.from_bytes(path.read_bytes()[18:20], "little")
    return ELF_MACHINES.get(number, str(number))


def disassembler(machine: str) -> str:
    """objdump, or the cross one for objects of another machine than this."""
    own = "x86-64" if platform.machine() == "x86_64" else platform.machine()
    return "objdump" if machine == own else f"{machine.replace('-', '_')}-linux-gnu-objdump"


def instruction_findings(path: Path, machine: str, isa: str) -> list[str]:
    text = run(disassembler(machine), "-d", "--no-show-raw-insn", str(path))
    hits = [line.strip() for line in text.splitlines() if FORBIDDEN[machine][isa].search(line)]
    if not hits:
        return []
    return [f"{len(hits)} instructions beyond {isa}; the first: {' '.join(hits[0].split())}"]


def check(path: Path) -> list[str]:
    """The findings of one object file, empty if it is as it should be."""
    isa, machine = isa_of(path), machine_of(path)
    findings = [] if isa is None else symbol_findings(path)
    name = isa if isa is not None and isa != "scalar" else "baseline"
    known = FORBIDDEN.get(machine, {"baseline": None})
    if name not in known:
        findings.append(f"ISA {name} is unknown to this check; expected one of {sorted(known)}")
    elif machine in FORBIDDEN:
        findings += instruction_findings(path, machine, name)
    return findings


def main(arguments: list[str]) -> int:
    build = Path(arguments[0] if arguments else "build")
    objects = sorted(build.rglob("*.o"))
    isas = [path for path in objects if isa_of(path)]
    if not isas:
        print(f"{build}: no isa_*.cc.o; expected the objects of a build (run `pip install .` first)", file=sys.stderr)
        return 1
    failed = 0
    for path in objects:
        findings = check(path)
        failed += bool(findings)
        for finding in findings:
            print(f"{path}: {finding}", file=sys.stderr)
    print(f"ISA objects: {len(isas)} checked, {len(objects) - len(isas)} baseline objects, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
