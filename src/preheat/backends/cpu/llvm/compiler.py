"""The program that compiles a source of LLVM. A boot waits for its imports: they are LLVM alone."""

from __future__ import annotations

import sys
from typing import Any

import llvmlite.binding as llvm

from preheat.backends.cpu.llvm.targets import Target

_HALF_TO_FLOAT = """
define float @__extendhfsf2(half %x) {
  %bits = bitcast half %x to i16
  %wide = zext i16 %bits to i32
  %signed = and i32 %wide, 32768
  %sign = shl i32 %signed, 16
  %magnitude = and i32 %wide, 32767
  %moved = shl i32 %magnitude, 13
  %normal = add i32 %moved, 939524096
  %infinite = add i32 %moved, 1879048192
  %biased = add i32 %moved, 947912704
  %number = bitcast i32 %biased to float
  %rest = fsub float %number, 0x3F10000000000000
  %denormal = bitcast float %rest to i32
  %small = icmp ult i32 %moved, 8388608
  %large = icmp uge i32 %moved, 260046848
  %first = select i1 %small, i32 %denormal, i32 %normal
  %second = select i1 %large, i32 %infinite, i32 %first
  %result = or i32 %second, %sign
  %float = bitcast i32 %result to float
  ret float %float
}
"""
"""The function that LLVM calls to widen float16 on x86 without F16C; not every C library has it."""


def optimized(source: str, target: Target) -> tuple[Any, Any]:
    """Return the optimized module of ``source``, and LLVM's machine that writes code of it.

    An error of LLVM's ends the process.
    """
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    chosen = llvm.Target.from_triple(target.triple)
    machine = chosen.create_target_machine(cpu=target.processor, features=target.features, opt=3)
    half = "<16 x half>" in source and not target.arm
    module = llvm.parse_assembly(source + _HALF_TO_FLOAT * half)
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_vectorization = tuning.slp_vectorization = False
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    return module, machine


def main() -> None:
    """Compile standard input to standard output, for the target that the arguments name."""
    module, machine = optimized(sys.stdin.read(), Target(*sys.argv[1:]))
    sys.stdout.buffer.write(machine.emit_object(module))


if __name__ == "__main__":
    main()
