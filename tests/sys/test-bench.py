#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""`residentctl bench` against a private service: what it prints and writes, and how it ends. No speed is looked at."""
import csv
import io
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import xml.etree.ElementTree as ElementTree

from rd import BUILD, WAIT, Daemon, case, eventually, main, slow, user

RESIDENTCTL = os.path.join(BUILD, "residentctl")
SVG = "{http://www.w3.org/2000/svg}"
COLUMNS = ["point", "run", "context", "prompt_tokens", "prompt_us", "prompt_tokens_per_second", "answer_tokens", "answer_us",
           "answer_tokens_per_second", "queue_us", "others"]
SHORT = ["--context", "96", "--tokens", "4"]


def command(daemon, *args):
    return [RESIDENTCTL, *args], {**os.environ, "RESIDENTD_SOCKET": daemon.socket}


def bench(daemon, *args, status=0, **kw):
    argv, env = command(daemon, *args)
    p = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=4 * WAIT, check=False, **kw)
    assert p.returncode == status, f"{args}: ended with {p.returncode}: {p.stdout}{p.stderr}"
    return p


def rows_of(text):
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows and list(rows[0]) == COLUMNS, text
    return rows


def check_row(row, point):
    assert int(row["point"]) == point, row
    assert point - 4 <= int(row["context"]) <= point + 1, row  # the words are counted before
    assert 0 < int(row["prompt_tokens"]) <= point and float(row["prompt_tokens_per_second"]) > 0, row
    assert int(row["answer_tokens"]) >= 4 and float(row["answer_tokens_per_second"]) > 0, row
    assert row["others"] in "01", row


def picture_of(text):
    root = ElementTree.fromstring(text)
    assert root.tag == SVG + "svg", root.tag
    for circle in root.iter(SVG + "circle"):
        assert 0 < float(circle.get("cx")) < float(root.get("width")), circle.attrib
        assert 0 < float(circle.get("cy")) < float(root.get("height")), circle.attrib
    return root


@case
def table_csv_and_picture(daemon):
    with tempfile.TemporaryDirectory() as d:
        data, picture = os.path.join(d, "x.csv"), os.path.join(d, "x.svg")
        p = bench(daemon, "bench", "--context", "600", "--tokens", "4", "--repeat", "2", "--csv", data, "--svg", picture)
        with open(data, encoding="utf-8") as f:
            rows = rows_of(f.read())
        with open(picture, encoding="utf-8") as f:
            root = picture_of(f.read())
    lines = p.stdout.splitlines()
    assert lines[0].startswith("Tiny Qwen35MoE stories; "), lines[0]
    table = [line for line in lines[3:] if re.match(r" +\d+ +[\d.]+ \([\d.]+ to [\d.]+\) +[\d.]+ \([\d.]+ to [\d.]+\)", line)]
    assert [line.split()[0] for line in table] == ["512", "600"], p.stdout
    assert [(r["point"], r["run"]) for r in rows] == [("512", "1"), ("512", "2"), ("600", "1"), ("600", "2")], rows
    for row in rows:
        check_row(row, int(row["point"]))
    # A run is one conversation that grows: what is there already is not read again.
    assert all(int(r["prompt_tokens"]) <= 600 - 512 for r in rows if r["point"] == "600"), rows
    assert len(list(root.iter(SVG + "circle"))) == 4 and len(list(root.iter(SVG + "polyline"))) == 2


@case
def one_of_them_on_standard_output(daemon):
    check_row(rows_of(bench(daemon, "bench", *SHORT, "--csv", "-").stdout)[0], 96)
    picture_of(bench(daemon, "bench", *SHORT, "--svg", "-").stdout)
    got = json.loads(bench(daemon, "--json", "bench", *SHORT).stdout)
    assert set(got) == {"model", "backend", "threads", "points"} and len(got["points"]) == 1, got
    run = got["points"][0]["runs"][0]
    assert set(run) == set(COLUMNS) - {"point", "run"}, run
    bench(daemon, "--json", "bench", *SHORT, "--csv", "-", status=2)


@case
def conversations_end(daemon):
    before = daemon.status()["sessions"]
    bench(daemon, "bench", *SHORT, "--repeat", "3")
    eventually("sessions are closed", lambda: daemon.status()["sessions"] == before)


@case
def bad_options(daemon):
    for args in (["--context", "0"], ["--context", "x"], ["--tokens", "1"], ["--tokens", "5000"], ["--repeat", "0"],
                 ["--repeat", "101"], ["--csv"], ["word"]):
        p = bench(daemon, "bench", *args, status=2)
        assert p.stderr and not p.stdout, p
    p = bench(daemon, "bench", "--context", "5000", status=6)
    assert "room for 2048 tokens" in p.stderr, p.stderr


@case
def files_are_tried_first(daemon):
    before = daemon.status()["requests_total"]
    p = bench(daemon, "bench", "--csv", "/nonexistent/x.csv", status=1)
    assert "/nonexistent/x.csv: No such file or directory" in p.stderr, p.stderr
    with tempfile.TemporaryDirectory() as d:
        bench(daemon, "bench", "--csv", os.path.join(d, "x.csv"), "--svg", d, status=1)
        assert not os.listdir(d), "a file was left behind though nothing was measured"
    assert daemon.status()["requests_total"] == before


@case
def requests_of_others_are_said(daemon):
    stop = threading.Event()
    answering = threading.Event()

    def other():
        while not stop.is_set():
            with daemon.client() as c:
                for frame in c.stream("Chat", {"messages": user("Tell me a story."), "options": slow(200)}):
                    answering.set()
                    if stop.is_set():
                        return

    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert answering.wait(WAIT)
        p = bench(daemon, "bench", *SHORT)
    finally:
        stop.set()
        thread.join()
    assert re.search(r"^ +96 .* \*$", p.stdout, re.M) and "others had requests" in p.stdout, p.stdout


@case
def interrupted(daemon):
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "x.csv")
        argv, env = command(daemon, "bench", *SHORT, "--repeat", "100", "--csv", path)
        before = daemon.status()["requests_total"]
        with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
            eventually("some runs are done", lambda: daemon.status()["requests_total"] >= before + 6)
            p.send_signal(signal.SIGINT)
            out, err = p.communicate(timeout=WAIT)
        assert p.returncode == 130, (p.returncode, out, err)
        with open(path, encoding="utf-8") as f:
            rows = rows_of(f.read())
    assert 1 <= len(rows) < 100 and re.search(r"^ +96 ", out, re.M), (rows, out)
    for row in rows:
        check_row(row, 96)


@case
def what_policy_forbids():
    with tempfile.TemporaryDirectory() as d:
        with Daemon(conf={"Model": {"Context": 512}, "Service": {"SessionsMax": 1}}) as daemon:
            # The last point is as far as there is room for the answer.
            rows = rows_of(bench(daemon, "bench", "--tokens", "4", "--csv", "-").stdout)
            assert [r["point"] for r in rows] == [str(512 - 4 - 64)], rows
            bench(daemon, "bench", "--tokens", "480", status=6)
            with daemon.client() as c:
                c.call("OpenSession", {})
                p = bench(daemon, "bench", *SHORT, "--csv", os.path.join(d, "x.csv"), status=5)
                assert p.stderr.startswith("residentctl: ") and not p.stdout, p
                assert not os.listdir(d)


@case
def no_service_and_no_model():
    with Daemon(model=None, conf={}, env={"RESIDENTD_MODELS": "/nonexistent"}) as daemon:
        if daemon.call("GetAvailability")["state"] == "unavailable":
            p = bench(daemon, "bench", *SHORT, status=4)
            assert p.stderr and not p.stdout, p
        daemon.stop()
        bench(daemon, "bench", *SHORT, status=3)


if __name__ == "__main__":
    main(Daemon)
