#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What the documents promise is there: the example in README.md is the one that is compiled, and manuals are well formed."""
import glob
import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../sys"))
from rd import BUILD, INTERFACE, ROOT, Daemon, Skip, case, main


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as f:
        return f.read()


def run(*command, env=None):
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          cwd=ROOT, timeout=120, env={**os.environ, **(env or {})})


@case
def example_in_the_readme_is_the_compiled_one():
    blocks = re.findall(r"^```c\n(.*?)^```", read("README.md"), re.M | re.S)
    assert blocks == [read("client/example.c")], "README.md's C block is not client/example.c"


@case
def example_runs(daemon):
    got = run(os.path.join(BUILD, "example"), env={"RESIDENTD_SOCKET": daemon.socket})
    assert got.returncode == 0 and got.stdout.strip(), got


@case
def make_targets_in_the_documents_exist():
    makefile = read("Makefile")
    for name in ("README.md", "CONTRIBUTING.md"):
        for target in set(re.findall(r"`make ([a-z-]+)", read(name))):
            assert re.search(rf"^{target}:", makefile, re.M), f"{name}: make {target} does not exist"


@case
def make_alone_makes_everything():
    # What the README begins with; a rule that is included too early would be the goal instead.
    assert re.match(r"(?:#.*\n|\s*\n)*\.DEFAULT_GOAL := all\n", read("Makefile"))


@case
def folders_in_contributing_exist():
    text = read("CONTRIBUTING.md")
    for folder in re.findall(r"^\*\*`([a-z/]+)/`\*\*", text, re.M):
        assert os.path.isdir(os.path.join(ROOT, folder)), f"{folder}/ is described but not there"


@case
def manuals_are_well_formed():
    pages = glob.glob(os.path.join(ROOT, "packaging/man/*.[1-8]"))
    if not shutil.which("mandoc"):
        raise Skip("mandoc is not installed")
    assert pages, "no manual pages"
    got = run("mandoc", "-T", "lint", "-W", "warning", *pages)
    assert got.returncode == 0, got.stdout


@case
def options_are_in_the_manuals():
    for program, page in (("residentd", "residentd.8"), ("resident", "resident.1"), ("residentctl", "residentctl.1"),
                          ("residentd-import", "residentd-import.8")):
        manual = read("packaging/man", page).replace("\\-", "-")
        helped = run(os.path.join(BUILD, program), "--help").stdout
        options = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", helped))
        assert options, f"{program} --help names no options"
        missing = [o for o in sorted(options) if not re.search(rf"(-|Fl ){re.escape(o)}\b", manual)]
        assert not missing, f"{page} does not have {missing}"


@case
def public_names_are_the_header_s():
    """What libresident.so exports is what the two headers declare, and nothing else."""
    if not shutil.which("nm"):
        raise Skip("nm is not installed")
    headers = read("client/resident.h") + read("client/resident-control.h")
    declared = set(re.findall(r"\b(resident_[a-z_]+)\(", re.sub(r"/\*.*?\*/", "", headers, flags=re.S)))
    got = run("nm", "-D", "--defined-only", os.path.join(BUILD, "libresident.so"))
    exported = {line.split()[2].split("@")[0] for line in got.stdout.splitlines() if line.split()[1] == "T"}
    exported -= {name for name in exported if name.startswith(("_", "__"))}
    assert exported == declared, f"only in one of the two: {sorted(exported ^ declared)}"


@case
def interface_file_is_balanced():
    text = re.sub(r"#.*", "", read(os.path.relpath(INTERFACE, ROOT)))
    assert text.count("(") == text.count(")"), "parentheses"
    names = re.findall(r"^(?:type|method|error) (\w+)", text, re.M)
    assert len(names) == len(set(names)), "a name is defined twice"
    types = {"bool", "int", "float", "string", "object"} | set(re.findall(r"^type (\w+)", text, re.M))
    for name in re.findall(r"\w+: \??(?:\[(?:string)?\])?(\w+)", text):
        assert name in types, f"{name} is not defined"


if __name__ == "__main__":
    main(Daemon)
