#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""residentctl plan: what is given, measured and assumed, and what it refuses. The numbers are those of tests/unit/test-plan.c."""
import json
import os
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../sys"))
from rd import BUILD, MODEL, WAIT, case, main

CTL = os.path.join(BUILD, "residentctl")
REAL = ("--shape", "qwen35moe-35b-a3b-q4_k_m")
PRICES = ("--ram", "11.5G", "--mem", "40G/s", "--disk", "3G/s")
GPU = ("--vram", "8G", "--pcie", "12.6G/s", "--vram-bw", "400G", "--flops", "5T/s")


def plan(*args, status=0, models="/nonexistent/models"):
    """Returns standard output and standard error."""
    env = {**os.environ, "RESIDENTD_MODELS": models, "RESIDENTD_SOCKET": "/nonexistent/socket", "LC_ALL": "C.UTF-8"}
    done = subprocess.run([CTL, "plan", *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT, env=env,
                          check=False)
    assert done.returncode == status, f"{args}: {done.returncode}, expected {status}: {done.stdout!r} {done.stderr!r}"
    return done.stdout, done.stderr


def origins(text):
    return {k: v["origin"] for k, v in json.loads(text)["machine"].items() if k != "context"}


@case
def a_machine_that_is_not_here():
    got = json.loads(plan("--json", *REAL, *PRICES, *GPU)[0])
    assert got["prediction"] is True and set(origins(json.dumps(got)).values()) == {"given"}, got
    assert got["tiers"]["trunk"] == "vram" and got["tiers"]["context_max"] == 262144, got
    r, d = got["routing"], got["decode"]
    assert abs(r["vram_hits"] + r["ram_hits"] + r["disk"] - 1) < 1e-9, r
    parts = ("trunk_us", "overhead_us", "experts_us", "disk_wait_us", "bus_wait_us")
    assert abs(sum(d[k] for k in parts) - d["token_us"]) < 1e-6 * d["token_us"], d
    # The same again, also in words.
    assert json.loads(plan("--json", *REAL, *PRICES, *GPU)[0]) == got
    text, err = plan(*REAL, *PRICES, *GPU)
    assert err == "" and text.startswith("prediction  of qwen35moe-35b-a3b-q4_k_m, "), text
    assert f"    decode  {d['tokens_per_second']:.2f} tokens/s" in text and "nothing was run" in text, text
    assert "assumed" not in text and "measured" not in text, text
    # What is left out is assumed, or measured.
    text, _ = plan(*REAL, "--vram", "8G", "--disk", "3G/s", "--json")
    kinds = origins(text)
    assert kinds["memory_bytes_per_second"] == kinds["ram_bytes"] == "measured" and kinds["vram_bytes"] == "given", kinds
    assert kinds["bus_bytes_per_second"] == kinds["vram_bytes_per_second"] == kinds["operations_per_second"] == "assumed", kinds


@case
def a_file_and_a_name():
    with tempfile.TemporaryDirectory() as d:
        shutil.copy(MODEL, os.path.join(d, "toy.gguf"))
        for name in (MODEL, "toy"):
            got = json.loads(plan("--json", name, models=d)[0])
            assert got["model"] == name and got["tiers"]["trunk"] == "ram", got
            assert got["routing"]["ram_hits"] == 1 and got["tiers"]["disk_block_bytes"] == 0, got
            assert got["machine"]["disk_bytes_per_second"]["origin"] == "measured", got
            assert got["machine"]["context"] == got["tiers"]["context_max"] == 2048, got
        assert "none; --vram" in plan(MODEL)[0]
        _, err = plan("other", models=d, status=1)
        assert "other" in err, err


@case
def a_recording():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "t.jsonl")
        for expert, status in ((31, 0), (32, 1)):
            with open(path, "w", encoding="utf-8") as f:
                for n in range(9):
                    print(json.dumps({"tok": n, "layers": [[0, 1, n, expert][:2 if n < 2 else 4]] * 8}), file=f)
            out, err = plan("--json", "--trace", path, *PRICES, MODEL, status=status)
            assert status or json.loads(out)["routing"]["file"] == path and json.loads(out)["routing"]["steps"] == 3, out
            assert not status or "another model" in err, err
        _, err = plan("--trace", os.path.join(d, "none"), *PRICES, MODEL, status=1)
        assert "No such file" in err, err


@case
def too_little_memory():
    out, err = plan(*REAL, *PRICES[2:], "--ram", "1G", status=1)
    assert out == "" and "cannot run" in err and "2601 MB" in err, err


@case
def wrong_options():
    for args in ((), REAL, (*REAL, *PRICES, MODEL), (MODEL, MODEL), (MODEL, "--ram", "much"), (MODEL, "--vram", "-1"),
                 (MODEL, "--vram", "8Q"), (MODEL, "--mem", "0"), (MODEL, "--mem", "nan"), (MODEL, "--mem", "1e9"),
                 (MODEL, "--mem", "40G/h"), (MODEL, "--mem", "40GG"), (MODEL, "--mem", ""), (MODEL, "--mem", "s"),
                 (MODEL, "--disk", "-3G/s"), (MODEL, "--disk", "0x10"), (MODEL, "--pcie", "12,6G/s"), (MODEL, "--vram-bw", "G/s"),
                 (MODEL, "--flops", "5T/s/s"), (MODEL, "--context", "0"), (MODEL, "--context", "-1"), (MODEL, "--context", "1k")):
        out, err = plan(*args, status=2)
        assert out == "" and "residentctl" in err, (args, out, err)
    _, err = plan("--shape", "other", *PRICES, status=1)
    assert "qwen35moe-35b-a3b-q4_k_m" in err, err
    _, err = plan("/nonexistent.gguf", status=1)
    assert "nonexistent" in err, err


if __name__ == "__main__":
    main()
