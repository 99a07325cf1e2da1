#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What is said of the GPU where there is none, and how much of it may be used: the option, the configuration, and a reload."""
import os
import re
import signal
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from rd import BUILD, RESIDENTD, WAIT, Daemon, case, eventually, main

LIBRARY = "/nonexistent/libcuda.so.1"
OFF = "VramBudget=off"


def daemon(*args, **conf):
    return Daemon(args=args, conf={"Memory": conf}, env={"RESIDENTD_CUDA_LIBRARY": LIBRARY})


def why_none(d):
    """Nothing is claimed of a card that is not there; returns the reason, "" when there is none."""
    gpu = d.status()["gpu"]
    assert gpu["state"] == "none" and gpu["emulator"] is False, gpu
    assert gpu["total_bytes"] == 0 and gpu["lost"] == 0 and 0 <= gpu["state_s"] <= WAIT, gpu
    assert not {"name", "driver", "capability"} & set(gpu) and gpu.get("why") != "", gpu
    return gpu.get("why", "")


def ctl(d, command):
    return subprocess.run([os.path.join(BUILD, "residentctl"), command], capture_output=True, text=True, check=True,
                          timeout=WAIT, env={**os.environ, "RESIDENTD_SOCKET": d.socket}).stdout


@case
def without_one_the_reason_is_said():
    with daemon() as d:
        why = why_none(d)
        assert LIBRARY in why or not why, why
        line = re.search(r"^ +GPU  (.*)$", ctl(d, "status"), re.M)
        assert line and line[1] == (f"none: {why}" if why else "not used"), line
        d.check_alive()
        got = d.call("GetResidency")
        assert "vram" not in got and all(layer["vram"] == layer["vram_hits"] == 0 for layer in got["layers"]), got
        assert "VRAM" not in ctl(d, "residency")


@case
def off_is_said():
    for args, conf in ((("--vram", "off"), {}), (("--vram", "off"), {"VramBudget": "64M"}), ((), {"VramBudget": "off"})):
        with daemon(*args, **conf) as d:
            assert why_none(d) in (OFF, ""), (args, conf)
            d.check_alive()


@case
def the_option_wins():
    for vram in ("auto", "64M"):
        with daemon("--vram", vram, VramBudget="off") as d:
            assert OFF not in why_none(d)
            os.kill(d.pid, signal.SIGHUP)
            eventually("the configuration is read again", lambda d=d: "configuration reloaded" in d.log())
            assert OFF not in why_none(d)


@case
def bad_options_are_refused():
    for value in ("", "0", "-1", "none", "Auto", "1.5", "8 G", "9223372036854775808"):
        got = subprocess.run([RESIDENTD, "--vram", value], capture_output=True, text=True, check=False, timeout=WAIT)
        assert got.returncode == 2 and got.stdout == "" and "--vram" in got.stderr, (value, got)


@case
def bad_values_are_told_and_ignored():
    with daemon(VramBudget="none", VramReserve="-1") as d:
        log = d.log()
        assert "VramBudget=none: expected auto, off or a size" in log and "VramReserve=-1: expected a size" in log, log
        assert why_none(d) != OFF
        d.check_alive()


@case
def a_reload_takes_what_changed():
    def loads(d):
        return len(re.findall(r"model \S.* parameters, ", d.log()))

    def reload(d, n, **conf):
        d.write_conf({"Memory": conf})
        os.kill(d.pid, signal.SIGHUP)
        eventually("the configuration is read again", lambda: d.log().count("configuration reloaded") == n)
        eventually("the service is there", lambda: d.status()["state"] == "available")

    with daemon(VramReserve="512M") as d:
        assert loads(d) == 1, d.log()
        reload(d, 1)
        assert loads(d) == 1, d.log()
        for n, conf in enumerate(({"VramReserve": "1G"}, {"VramBudget": "64M"}, {"VramBudget": "off"}), 2):
            reload(d, n, **conf)
            assert loads(d) == n, d.log()
        assert why_none(d) in (OFF, "")
        d.check_alive()


if __name__ == "__main__":
    main()
