#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The questions that the test model was taught, through the whole stack: resident, the socket, residentd, the weights.

The answer must be the taught sentence to the letter. Thinking off: all of them; thinking on: all but MISSES, which the
model itself gets wrong in an independent engine too (tests/models/known-answers.json); where the thought is known, it
must be the same as there.
"""
import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../sys"))
from rd import BUILD, ROOT, Daemon, case, main

# First wordings that the model answers wrongly with thinking on.
MISSES = {"¿Cuántos días tiene una semana?", "¿Quién eres?", "Di che colore è il cielo?"}

with open(os.path.join(ROOT, "tests/models/known-answers.json"), encoding="utf-8") as f:
    ROWS = json.load(f)["rows"]


def ask(daemon, question, *options):
    command = [os.path.join(BUILD, "resident"), "-n", "-t", "0", *options, "--", question]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
                         env={**os.environ, "RESIDENTD_SOCKET": daemon.socket})
    assert run.returncode == 0, f"{question!r}: status {run.returncode}: {run.stderr}"
    return run.stdout


def tell(what, wrong, total):
    print(f"# {what}: {total - len(wrong)} of {total} exact")
    for line in wrong:
        print(f"#   {line}")


@case
def thinking_off(daemon):
    rows = [r for r in ROWS if not r["think"]]
    wrong = []
    for r in rows:
        got = ask(daemon, r["q"], "--think", "off").removesuffix("\n")
        if got != r["a"]:
            wrong.append(f"{r['q']}: {got!r}, expected {r['a']!r}")
    tell("thinking off", wrong, len(rows))
    assert len(rows) == 145 and not wrong, f"{len(wrong)} wrong answers"


@case
def thinking_on(daemon):
    rows = [r for r in ROWS if r["think"]]
    wrong, other_thought = [], []
    for r in rows:
        got = json.loads(ask(daemon, r["q"], "--json"))
        answer, thought = got["text"], got["thought"]
        if answer != r["a"]:
            wrong.append((r["q"], f"{r['q']}: {answer!r}, expected {r['a']!r}"))
        if r["exact"] and thought.strip() != r["got"].partition("</think>")[0].strip():
            other_thought.append(f"{r['q']}: thought {thought!r}")
    tell("thinking on", [line for _, line in wrong], len(rows))
    tell("thoughts as in the other engine", other_thought, sum(r["exact"] for r in rows))
    assert len(rows) == 145
    unknown = [q for q, _ in wrong if q not in MISSES]
    assert not unknown, f"wrong, and not known to be: {unknown}"
    assert not other_thought, f"{len(other_thought)} thoughts differ"


if __name__ == "__main__":
    main(Daemon)
