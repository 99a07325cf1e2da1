#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The files in units/ and policy/apparmor as far as they can be judged without booting them: tests/sys/boot does that."""
import os
import re
import shutil
import subprocess
import tempfile

from rd import BUILD, RESIDENTD, ROOT, Skip, case, main

UNITS = os.path.join(ROOT, "units")


def tool(*command):
    """Status and output; skips where there is no such program."""
    if not shutil.which(command[0]):
        raise Skip(f"no {command[0]} on this machine")
    p = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return p.returncode, p.stdout + p.stderr


def installed(directory):
    """The units as they lie on a machine, but for the programs' place, which is this build. Returns the services."""
    services = []
    for name in sorted(os.listdir(UNITS)):
        path = os.path.join(UNITS, name)
        if name.endswith(".socket"):
            shutil.copy(path, directory)
        elif name.endswith(".service.in"):
            with open(path, encoding="utf-8") as f:
                text = re.sub(r"@(SBINDIR|LIBEXECDIR/residentd|LIBEXECDIR)@(/residentd(?=/))?", BUILD, f.read())
            services.append(os.path.join(directory, name.removesuffix(".in")))
            with open(services[-1], "w", encoding="utf-8") as f:
                f.write(text)
    return services


@case
def the_build_filled_in_the_places():
    for name in (n.removesuffix(".in") for n in os.listdir(UNITS) if n.endswith(".service.in")):
        with open(os.path.join(BUILD, name), encoding="utf-8") as f:
            text = f.read()
        assert not re.search(r"@\w+@", text) and re.search(r"^ExecStart=/\S+/residentd", text, re.M), name


@case
def systemd_understands_the_units():
    with tempfile.TemporaryDirectory() as directory:
        # Of a template it takes an instance.
        services = [s.replace("@.", "@1.") for s in installed(directory)]
        for service in services:
            if not os.path.exists(service):
                os.symlink(os.path.basename(service).replace("@1.", "@."), service)
        sockets = [os.path.join(directory, n) for n in os.listdir(directory) if n.endswith(".socket")]
        status, output = tool("systemd-analyze", "verify", "--man=no", *services, *sockets)
    complaints = [line for line in output.splitlines() if "residentd" in line]
    assert status == 0 and not complaints, output


@case
def exposure_is_at_most_one_and_a_half():
    with tempfile.TemporaryDirectory() as directory:
        services = installed(directory)
        for service in services:
            status, output = tool("systemd-analyze", "security", "--no-pager", "--offline=true", "--threshold=15", service)
            assert status == 0, output
        # The measure itself works: without the fences it is far more.
        with open(services[0], "w", encoding="utf-8") as f:
            f.write(f"[Service]\nExecStart={RESIDENTD}\n")
        assert tool("systemd-analyze", "security", "--no-pager", "--offline=true", "--threshold=15", services[0])[0] != 0


@case
def clients_keep_their_uids():
    """In a user namespace SO_PEERCRED says 65534 for everybody; PrivateDevices= hides the GPU."""
    with open(os.path.join(UNITS, "residentd.service.in"), encoding="utf-8") as f:
        lines = [line.strip() for line in f if not line.startswith("#")]
    for never in ("PrivateUsers=", "PrivateDevices=", "DynamicUser="):
        assert not [line for line in lines if line.startswith(never)], never
    assert "DeviceAllow=char-nvidia* rw" in lines


@case
def apparmor_understands_the_profile():
    if not os.path.isdir("/etc/apparmor.d/abstractions"):
        raise Skip("no AppArmor abstractions on this machine")
    status, output = tool("apparmor_parser", "--skip-kernel-load", "--skip-cache", "--base", "/etc/apparmor.d",
                          os.path.join(ROOT, "policy/apparmor/usr.sbin.residentd"))
    assert status == 0, output


if __name__ == "__main__":
    main()
