"""ARM code from our emitters, run in an emulator: compiled by the LLVM of llvmlite, linked by hand."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import unicorn
from llvmlite import binding, ir
from unicorn import arm64_const as arm

from backends.cpu.simd import I64, Emitter

TRIPLE = "aarch64-unknown-linux-gnu"
FEATURES = "+neon,+dotprod"
CODE, STACK, DATA, END = 0x100000, 0x900000, 0x1000000, 0x800000  # addresses; END is what calls return to
PAGE = 0x1000

# Relocations of the small code model (ELF for the Arm 64-bit Architecture, AAELF64), by type
_ADR_PAGE, _ADD_LOW, _BRANCH, _CALL = 275, 277, 282, 283
_LOAD_LOW = {278: 0, 284: 1, 285: 2, 286: 3, 299: 4}  # log2 of the bytes that are loaded


def compile_arm(emit: Callable[..., None], arguments: int) -> bytes:
    """An object file with the function `kernel(int64, …)`; `emit(x, *values)` writes its body."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = TRIPLE
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * arguments), "kernel")
    builder = ir.IRBuilder(function.append_basic_block())
    emit(Emitter(builder), *function.args)
    builder.ret_void()
    machine = binding.Target.from_triple(TRIPLE).create_target_machine(
        cpu="generic", features=FEATURES, opt=2, reloc="static", codemodel="small"
    )
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    return machine.emit_object(parsed)


def link(elf: bytes) -> tuple[bytes, int]:
    """The image of an object file's sections for the address CODE, and where `kernel` is in it."""
    assert elf[:6] == b"\x7fELF\x02\x01"
    (table,) = struct.unpack_from("<Q", elf, 40)
    count, _ = struct.unpack_from("<HH", elf, 60)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + 64 * i) for i in range(count)]
    image, places = bytearray(), {}
    for i, s in enumerate(sections):
        if s[1] == 1 and s[2] & 2:  # PROGBITS in memory
            image += bytes(-len(image) % max(16, s[8]))
            places[i] = len(image)
            image += elf[s[4] : s[4] + s[5]]
    for s in sections:
        if s[1] == 4 and s[7] in places and sections[s[7]][2] & 4:  # RELA of code
            symbols = sections[s[6]]
            for at in range(s[4], s[4] + s[5], 24):
                where, info, addend = struct.unpack_from("<QQq", elf, at)
                _, _, _, section, value, _ = struct.unpack_from(
                    "<IBBHQQ", elf, symbols[4] + 24 * (info >> 32)
                )
                target = CODE + places[section] + value + addend
                _relocate(image, places[s[7]] + where, info & 0xFFFFFFFF, target)
    return bytes(image), _symbol(elf, sections, places, b"kernel")


def dot_products(elf: bytes) -> int:
    """How many SDOT instructions there are."""
    image, _ = link(elf)
    words = np.frombuffer(image[: len(image) // 4 * 4], "<u4")
    return int(((words & 0xFFE0FC00) == 0x4E809400).sum())


def _relocate(image: bytearray, at: int, kind: int, target: int) -> None:
    (word,) = struct.unpack_from("<I", image, at)
    here = CODE + at
    if kind == _ADR_PAGE:
        pages = (target // PAGE - here // PAGE) & 0x1FFFFF
        word |= (pages & 3) << 29 | (pages >> 2) << 5
    elif kind == _ADD_LOW:
        word |= target % PAGE << 10
    elif kind in _LOAD_LOW:
        word |= target % PAGE >> _LOAD_LOW[kind] << 10
    elif kind in (_BRANCH, _CALL):
        word |= (target - here) // 4 & 0x3FFFFFF
    else:
        raise NotImplementedError(f"relocation {kind}")
    struct.pack_into("<I", image, at, word)


def _symbol(elf: bytes, sections: list[Any], places: dict[int, int], wanted: bytes) -> int:
    table = next(s for s in sections if s[1] == 2)
    names = sections[table[6]]
    for at in range(table[4], table[4] + table[5], 24):
        name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", elf, at)
        start = names[4] + name
        if elf[start : elf.index(b"\0", start)] == wanted:
            return places[section] + value
    raise KeyError(wanted)


def run_arm(elf: bytes, arguments: Sequence[np.ndarray | int]) -> None:
    """Call `kernel` with numbers, and with addresses of arrays, whose contents change as it writes them."""
    image, start = link(elf)
    machine = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
    machine.ctl_set_cpu_model(arm.UC_CPU_ARM64_MAX)
    for address, size in ((CODE, 0x100000), (STACK - 0x80000, 0x80000), (END, PAGE), (DATA, 0x1000000)):
        machine.mem_map(address, size)
    machine.mem_write(CODE, image)
    registers = [getattr(arm, f"UC_ARM64_REG_X{i}") for i in range(8)]
    arrays, at = [], DATA
    for register, argument in zip(registers, arguments, strict=False):
        if isinstance(argument, np.ndarray):
            machine.mem_write(at, argument.tobytes())
            machine.reg_write(register, at)
            arrays.append((argument, at))
            at += -(-argument.nbytes // 64) * 64 + 65536  # fetching ahead stays inside
        else:
            machine.reg_write(register, argument)
    machine.reg_write(arm.UC_ARM64_REG_SP, STACK)
    machine.reg_write(arm.UC_ARM64_REG_LR, END)
    machine.emu_start(CODE + start, END)
    for array, address in arrays:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(machine.mem_read(address, array.nbytes), np.uint8)
