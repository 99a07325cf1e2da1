#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The tests of the CPU kernels for 64-bit ARM, under an emulator, on a CPU without and one with the dot product instructions.

Skipped where the cross compiler was not there to build them or the emulator is not there to run them.
"""
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys

BUILD = os.path.join(os.environ.get("O", "build"), "aarch64/tests/unit")
PROGRAMS = ["test-kernels", "test-kernels-float"]
# Model of the emulator, and the tables of kernels that the tests must find there beside the reference.
CPUS = {"cortex-a53": ["neon"], "max": ["neon", "dotprod"]}


def run(emulator, program, cpu):
    p = subprocess.run([emulator, "-cpu", cpu, os.path.join(BUILD, program)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, encoding="utf-8", errors="replace", check=False)
    tables = re.findall(r"^# table: (.+)$", p.stdout, re.M)
    if p.returncode != 0:
        return p.stdout, f"exit status {p.returncode}"
    if tables != CPUS[cpu]:
        return p.stdout, f"tested {', '.join(tables) or 'no table'}, not {', '.join(CPUS[cpu])}"
    return p.stdout, None


def main():
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    missing = [p for p in PROGRAMS if not os.path.exists(os.path.join(BUILD, p))]
    if missing or not emulator:
        why = "not built, for want of a cross compiler" if missing else "no qemu-aarch64"
        print(f"skip - kernels for ARM: {why} (packaging/deps arm installs it)")
        return 0
    jobs = [(program, cpu) for program in PROGRAMS for cpu in CPUS]
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda job: run(emulator, *job), jobs)
        for (program, cpu), (output, why) in zip(jobs, results):
            if why:
                failed += 1
                print(output)
            print(f"not ok - {program} on {cpu}: {why}" if why else f"ok - {program} on {cpu}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
