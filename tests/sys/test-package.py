#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What `make install` installs is what is meant to be installed, every file of it can be read by whom it is for, and the
packages name the same files. Nothing is built: the programs are those of the build folder."""
import atexit
import fnmatch
import functools
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from rd import BUILD, ROOT, Skip, case, main

OUT = os.path.relpath(BUILD, ROOT)
UNITS = "/usr/lib/systemd/system"
MODEL = "/usr/share/residentd/models/tiny-qwen35moe-stories-q8_0.gguf"
FILES = {
    "/etc/apparmor.d/usr.sbin.residentd",
    "/usr/bin/resident",
    "/usr/bin/residentctl",
    "/usr/include/resident-control.h",
    "/usr/include/resident.h",
    "/usr/lib/libresident.a",
    "/usr/lib/libresident.so",
    "/usr/lib/libresident.so.0",
    "/usr/lib/pkgconfig/libresident.pc",
    "/usr/lib/residentd/residentd.conf",
    "/usr/lib/systemd/catalog/residentd.catalog",
    UNITS + "/residentd-import.socket",
    UNITS + "/residentd-bpf.service",
    UNITS + "/residentd-bpf.socket",
    UNITS + "/residentd-oomd.socket",
    UNITS + "/residentd-import@.service",
    UNITS + "/residentd.service",
    UNITS + "/residentd.socket",
    "/usr/lib/sysusers.d/residentd.conf",
    "/usr/lib/tmpfiles.d/residentd.conf",
    "/usr/libexec/residentd/residentd-bpf",
    "/usr/libexec/residentd/residentd-import",
    "/usr/sbin/residentd",
    "/usr/share/bash-completion/completions/resident",
    "/usr/share/bash-completion/completions/residentctl",
    "/usr/share/bash-completion/completions/residentd",
    "/usr/share/dbus-1/interfaces/org.residentd1.xml",
    "/usr/share/dbus-1/system-services/org.residentd1.service",
    "/usr/share/dbus-1/system.d/org.residentd1.conf",
    "/usr/share/doc/residentd/MODEL_CARD.md",
    "/usr/share/doc/residentd/examples/README.md",
    "/usr/share/doc/residentd/examples/gamemode.ini",
    "/usr/share/doc/residentd/examples/residentd-power-profile",
    "/usr/share/doc/residentd/examples/residentd-power-profile.service",
    MODEL,
    "/usr/share/residentd/org.residentd.varlink",
    "/usr/share/residentd/policy.d/10-example.conf",
    "/usr/share/polkit-1/actions/org.residentd1.policy",
    "/usr/share/zsh/site-functions/_resident",
    "/usr/share/zsh/site-functions/_residentctl",
    "/usr/share/zsh/site-functions/_residentd",
}
EMPTY_DIRECTORIES = {"/etc/residentd/policy.d", "/etc/residentd/residentd.conf.d"}
PROGRAMS = {path for path in FILES if re.match(r"/usr/(s?bin|libexec)/", path)}


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as f:
        return f.read()


def run(*command, **kw):
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          cwd=ROOT, timeout=120, **kw)


def check(*command):
    if not shutil.which(command[0]):
        raise Skip(f"{command[0]} is not installed")
    got = run(*command)
    assert got.returncode == 0, f"{' '.join(command)}:\n{got.stdout}"
    return got.stdout


def make(target, stage, *places):
    """Without the variables of a make that runs this test. -o: taken as it is, although it was built for another PREFIX."""
    env = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR", "PKG_CONFIG_PATH")}
    got = run("make", "-o", "all", "-o", f"{OUT}/places", "-o", f"{OUT}/residentd.service",
              "-o", f"{OUT}/residentd-import@.service", f"O={OUT}", target, "PREFIX=/usr", f"DESTDIR={stage}", *places, env=env)
    assert got.returncode == 0, got.stdout


@functools.cache
def install(*places):
    """A folder with what `make install` writes when PREFIX=/usr and these are set."""
    stage = tempfile.mkdtemp(prefix="rd-stage-")
    atexit.register(shutil.rmtree, stage)
    make("install", stage, *places)
    return stage


def files(stage):
    """Files and links as absolute paths, without drop-ins: these depend on the version of systemd."""
    found = {os.path.join(folder, name)[len(stage):] for folder, _, names in os.walk(stage) for name in names}
    return {path for path in found if "/residentd.service.d/" not in path}


def manuals():
    return {f"/usr/share/man/man{path[-1]}/{os.path.basename(path)}" for path in glob.glob(ROOT + "/packaging/man/*.[1-8]")}


@case
def exactly_these_files_are_installed():
    stage = install()
    expected = FILES | manuals()
    found = files(stage)
    assert found == expected, f"missing: {sorted(expected - found)}, not expected: {sorted(found - expected)}"
    for path in found:
        mode = os.lstat(stage + path).st_mode & 0o7777
        if not os.path.islink(stage + path):
            assert mode in ({0o755} if path in PROGRAMS or path.endswith((".so.0", "/residentd-power-profile")) else {0o644}), f"{path} has mode {mode:o}"
    for path in EMPTY_DIRECTORIES:
        assert os.listdir(stage + path) == [], f"{path}: the administrator's own"


@case
def uninstall_removes_what_install_wrote():
    stage = tempfile.mkdtemp(prefix="rd-stage-")
    try:
        shutil.copytree(install(), stage, symlinks=True, dirs_exist_ok=True)
        make("uninstall", stage)
        assert files(stage) == set(), f"left over: {sorted(files(stage))}"
    finally:
        shutil.rmtree(stage)


@case
def no_trace_of_the_build_folder():
    stage = install()
    for path in files(stage):
        if os.path.islink(stage + path) or path == MODEL:
            continue
        name = stage + path
        with open(name, "rb") as f:
            data = f.read()
        # Debugging information names the sources' folder, until a package takes it away.
        if data.startswith((b"\x7fELF", b"!<arch>")):
            if not shutil.which("objcopy"):
                raise Skip("objcopy is not installed")
            with tempfile.NamedTemporaryFile() as stripped:
                check("objcopy", "--strip-debug", name, stripped.name)
                with open(stripped.name, "rb") as f:
                    data = f.read()
        for folder in {ROOT, stage}:
            assert folder.encode() not in data, f"{path} names {folder}"


@case
def xml_files_are_well_formed():
    for path in ("dbus-1/interfaces/org.residentd1.xml", "dbus-1/system.d/org.residentd1.conf",
                 "polkit-1/actions/org.residentd1.policy"):
        root = xml.etree.ElementTree.parse(f"{install()}/usr/share/{path}").getroot()
        assert root.tag in ("node", "busconfig", "policyconfig") and len(root), path


@case
def bash_completions_parse():
    for path in glob.glob(install() + "/usr/share/bash-completion/completions/*"):
        check("bash", "-n", path)


@case
def zsh_completions_parse():
    for path in glob.glob(install() + "/usr/share/zsh/site-functions/*"):
        with open(path, encoding="utf-8") as f:
            assert f.readline().startswith("#compdef "), path
        check("zsh", "-n", path)


@case
def user_can_be_made():
    check("systemd-sysusers", "--dry-run", install() + "/usr/lib/sysusers.d/residentd.conf")


@case
def unit_names_the_installed_program():
    # The build folder's unit has the place that it was built for.
    for unit, program in (("residentd.service", r"/s?bin/residentd"),
                          ("residentd-import@.service", r"/residentd/residentd-import")):
        command = re.search(r"^ExecStart=(\S+)", read(BUILD, unit), re.M).group(1)
        assert re.fullmatch(r"/[\w./-]*" + program, command), command


@case
def message_identities_are_in_the_catalog():
    catalog = read("packaging/catalog/residentd.catalog")
    explained = re.findall(r"^-- ([0-9a-f]{32})$", catalog, re.M)
    named = re.findall(r'^#define MESSAGE_ID_\w+\s+"MESSAGE_ID=([0-9a-f]{32})"', read("daemon/messages.h"), re.M)
    assert named and len(set(named)) == len(named), "an identity stands twice in messages.h"
    assert sorted(named) == sorted(explained), f"only in one: {set(named) ^ set(explained)}"
    assert catalog.count("\nSubject: ") == catalog.count("\nDefined-By: residentd\n") == len(named)


@case
def journal_takes_the_catalog():
    stage = install()
    os.makedirs(stage + "/var/lib/systemd/catalog", exist_ok=True)
    try:
        check("journalctl", "--update-catalog", "--root", stage)
        listed = check("journalctl", "--list-catalog", "--root", stage)
    finally:
        shutil.rmtree(stage + "/var")
    assert len(listed.splitlines()) == read("daemon/messages.h").count("#define MESSAGE_ID_"), listed


# ---- packages ----


def check_lists(found, patterns):
    """Every file belongs to one pattern (a folder has what is below it), and no pattern is idle."""
    def matches(path, pattern):
        return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern.rstrip("/") + "/*")

    for path in sorted(found):
        owners = [p for p in patterns if matches(path, p)]
        assert len(owners) == 1, f"{path} belongs to {owners}"
    for pattern in patterns:
        assert any(matches(path, pattern) for path in found), f"{pattern} matches nothing"


@case
def debian_packages_share_the_files():
    rules = read("packaging/debian/rules")
    places = re.search(r"^PLACES = ((?:.*\\\n)*.*)", rules, re.M).group(1).replace("\\\n", " ")
    stage = install(*places.replace("$(DEB_HOST_MULTIARCH)", "multi-arch").split())
    patterns = ["/" + line for path in glob.glob(ROOT + "/packaging/debian/*.install") for line in read(path).split()]
    check_lists(files(stage), patterns)


@case
def rpm_packages_share_the_files():
    spec = read("packaging/residentd.spec")
    macros = {"_prefix": "/usr", "_bindir": "/usr/bin", "_sbindir": "/usr/sbin", "_libdir": "/usr/lib64",
              "_libexecdir": "/usr/libexec", "_docdir": "/usr/share/doc", "_includedir": "/usr/include", "_datadir": "/usr/share", "_mandir": "/usr/share/man",
              "_sysconfdir": "/etc", "_unitdir": UNITS, "_sysusersdir": "/usr/lib/sysusers.d",
              "_tmpfilesdir": "/usr/lib/tmpfiles.d", "_journalcatalogdir": "/usr/lib/systemd/catalog"}

    def expand(text):
        return re.sub(r"%\{(\w+)\}", lambda m: macros[m.group(1)], text)

    sections = re.findall(r"^%files.*\n((?:(?!%changelog|%files).*\n)*)", spec, re.M)
    lines = [line.split()[-1] for section in sections for line in section.splitlines()
             if line and not line.startswith(("#", "%license", "%doc", "%dir"))]
    patterns = [expand(line) for line in lines]
    patterns.remove(UNITS + "/residentd.service.d/")
    places = expand(re.search(r"^%global places (.*)", spec, re.M).group(1))
    check_lists(files(install(*places.split())), patterns)


@case
def rpm_spec_parses():
    check("rpmspec", "-P", "packaging/residentd.spec")


@case
def scripts_of_the_packages_parse():
    for path in glob.glob(ROOT + "/packaging/debian/residentd.p*"):
        check("sh", "-n", path)
    check("bash", "-n", "packaging/PKGBUILD")


@case
def user_then_bus_then_service():
    """The bus resolves user= when it reads its files: before the user is there it would refuse the name for ever."""
    steps = [r"systemd-sysusers residentd\.conf", r"ReloadConfig", r"#DEBHELPER#"]
    at = [re.search(rf"^[^#\n]*{step}|^{step}", read("packaging/debian/residentd.postinst"), re.M).start() for step in steps]
    assert at == sorted(at), at


@case
def symbols_are_those_of_the_library():
    exported = set(re.findall(r"^\t(resident_\w+);", read("client/libresident.map"), re.M))
    listed = set(re.findall(r"^ (resident_\w+)@RESIDENT_0 ", read("packaging/debian/libresident0.symbols"), re.M))
    assert listed == exported, f"only in one: {sorted(listed ^ exported)}"


@case
def versions_agree():
    version = re.search(r"^VERSION = (\S+)", read("Makefile"), re.M).group(1)
    for path, pattern in (("debian/changelog", r"^residentd \(([^)]+)\)"), ("residentd.spec", r"^Version:\s+(\S+)"),
                          ("PKGBUILD", r"^pkgver=(\S+)")):
        got = re.search(pattern, read("packaging", path), re.M).group(1)
        assert got == version, f"packaging/{path} says {got}, the Makefile {version}"


if __name__ == "__main__":
    main()
