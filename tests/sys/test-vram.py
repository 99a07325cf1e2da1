#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""
The VRAM tier from outside, on an emulated card (tests/emu): answers are the same with no expert, some and all of them in its memory, and when
anything of it fails; others get the memory that they want; nothing is left behind. No figure of speed is taken here.
"""
import contextlib
import os
import sys
import tempfile
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from rd import BUILD, Daemon, Skip, case, eventually, main, user  # noqa: E402

EMULATOR = os.path.abspath(os.path.join(BUILD, "tests", "libcuda-emu.so"))
QUESTIONS = ["What is 17 x 23?", "What is 9 x 9?", "What is 12 x 31?"]


def card(vram, env=None, **kwargs):
    if not os.access(EMULATOR, os.R_OK):
        raise Skip("the emulator was not built")
    return Daemon(conf={"Memory": {"VramBudget": vram}}, env={"RESIDENTD_CUDA_LIBRARY": EMULATOR, **(env or {})}, **kwargs)


def answers(d, questions=QUESTIONS):
    said = []
    with d.client() as c:
        for q in questions:
            r = c.call("Chat", {"messages": user(q), "options": {"temperature": 0, "max_thinking_tokens": 0}})
            said.append(r["text"])
    return said


def vram(d):
    with d.client() as c:
        return c.call("GetResidency")


def gpu(d):
    return d.status()["gpu"]


def plain():
    """What the CPU alone says."""
    if not plain.said:
        with Daemon(conf={"Memory": {"VramBudget": "off"}}) as d:
            assert gpu(d)["state"] == "none", gpu(d)
            plain.said = answers(d)
    return plain.said


plain.said = None


def with_slots(budget, wanted):
    """A service whose slots may take about so many bytes: what else it takes depends a little on the budget."""
    for _ in range(8):
        d = card(budget)
        tier = vram(d)["vram"] if gpu(d)["state"] == "active" else None
        if tier is None:
            budget += 40000
        elif 0 <= tier["budget_bytes"] - tier["fixed_bytes"] - wanted < 20000:
            return budget, d
        else:
            budget += wanted - (tier["budget_bytes"] - tier["fixed_bytes"])
        with d:
            pass
    raise AssertionError(f"no budget leaves {wanted} bytes for slots")


@case
def the_same_answers_whatever_is_in_slots():
    with card("auto") as d:
        assert gpu(d)["state"] == "active" and gpu(d)["emulator"], gpu(d)
        eventually("all of it moves while nobody asks", lambda: vram(d)["vram"]["block_bytes"] == vram(d)["budget"]["blocks_all"])
        assert answers(d) == plain()
        all_of_it = vram(d)
    budget, blocks = all_of_it["vram"]["fixed_bytes"], all_of_it["budget"]["blocks_all"]
    for share in (0, 0.1, 0.5, 1):
        budget, d = with_slots(budget, int(share * blocks * (1.3 if share == 1 else 1)))
        with d:
            for _ in range(2):
                assert answers(d) == plain(), share
            eventually("no block is in two tiers", lambda: vram(d)["vram"]["overlap_bytes"] == 0)
            now = vram(d)["vram"]
            assert now["slot_bytes"] + now["fixed_bytes"] <= now["budget_bytes"], now
            assert (now["n_blocks"] > 0 and now["hits"] > 0) == (share > 0), (share, now)
            assert abs(now["block_bytes"] / blocks - share) < 0.08, (share, now)
            assert (now["on_cpu"] > 0) or share == 1, (share, now)


@case
def what_fails_on_the_card_goes_on_on_the_cpu():
    for fail in ("lost:3000", "copy:200", "copy:600", "launch:900", "fault:2000"):
        with card("auto", env={"RESIDENTD_EMU_FAIL": fail}) as d:
            assert answers(d, QUESTIONS[:2]) == plain()[:2], fail
            now = gpu(d)
            assert now["lost"] >= 1, (fail, now)
            assert "not used" in d.log(), fail
            # The emulator fails once: the second context is whole.
            eventually("the card is tried again", lambda: gpu(d)["state"] == "active", 30)
            assert answers(d, QUESTIONS[:1]) == plain()[:1], fail


@case
def memory_that_is_not_there():
    for n in range(1, 7):
        with card("auto", env={"RESIDENTD_EMU_FAIL": f"alloc:{n}"}) as d:
            assert answers(d, QUESTIONS[:1]) == plain()[:1], n
            d.check_alive()
    # A chunk that is not there once is asked for again.
    with card(60000000, env={"RESIDENTD_EMU_FAIL": "alloc:5"}) as d:
        eventually("there are slots", lambda: answers(d, QUESTIONS[:1]) and vram(d)["vram"]["slot_bytes"] > 0)
    with card("auto", env={"RESIDENTD_EMU_MEMORY": "1M"}) as d:
        assert gpu(d)["state"] != "active" and "needs at least" in gpu(d)["why"], gpu(d)
        assert answers(d) == plain()
    with card("auto", env={"RESIDENTD_EMU_FAIL": "open:1+"}) as d:
        assert gpu(d)["state"] != "active" and gpu(d)["why"], gpu(d)
        assert answers(d) == plain()


@case
def others_get_their_memory():
    with tempfile.TemporaryDirectory(prefix="rd-") as place:
        used = os.path.join(place, "others")

        def others_use(n):
            with open(used + ".new", "w") as f:
                f.write(str(n))
            os.rename(used + ".new", used)
        others_use(0)
        with card("auto", env={"RESIDENTD_EMU_OTHERS": used, "RESIDENTD_EMU_MEMORY": "1G"}) as d:
            assert answers(d) == plain()
            before = vram(d)["vram"]
            assert before["slot_bytes"] > 0, before
            ends = threading.Event()
            wrong = []

            def talk():
                while not ends.is_set():
                    if answers(d, QUESTIONS[:1]) != plain()[:1]:
                        wrong.append(1)
            t = threading.Thread(target=talk)
            t.start()
            with contextlib.ExitStack() as stack:
                stack.callback(t.join)
                stack.callback(ends.set)
                # All that is free but half the reserve: half of that must come from slots.
                others_use(before["free_bytes"] - before["reserve_bytes"] + before["slot_bytes"] // 2)
                eventually("slots are given back", lambda: vram(d)["vram"]["slot_bytes"] <= before["slot_bytes"] * 0.6)
                others_use(0)
                eventually("and taken again", lambda: vram(d)["vram"]["slot_bytes"] >= before["slot_bytes"] * 0.9, 120)
            assert not wrong
            assert vram(d)["vram"]["chunks_given_back"] > 0
            assert gpu(d)["state"] == "active" and gpu(d)["lost"] == 0, gpu(d)


@case
def conversations_survive_the_loss():
    with card("auto", env={"RESIDENTD_EMU_FAIL": "lost:12000"}) as d, d.client() as c:
        session = c.call("OpenSession")["session"]
        texts = []
        for q in QUESTIONS * 3:
            r = c.call("Send", {"session": session, "messages": user(q), "options": {"temperature": 0, "max_thinking_tokens": 0}})
            texts.append(r["text"])
            if gpu(d)["lost"]:
                break
        with Daemon(conf={"Memory": {"VramBudget": "off"}}) as e, e.client() as p:
            session = p.call("OpenSession")["session"]
            for q, t in zip(QUESTIONS * 3, texts):
                r = p.call("Send", {"session": session, "messages": user(q), "options": {"temperature": 0, "max_thinking_tokens": 0}})
                assert r["text"] == t, (q, t, r["text"])


if __name__ == "__main__":
    main()
