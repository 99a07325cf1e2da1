#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What clients send by mistake or to do harm: the daemon answers or hangs up, stays small, and goes on serving others."""
import contextlib
import json
import os
import random
import select
import socket
import threading
import time

from rd import (INTERFACE, OURS, SERVICE, Client, Closed, Daemon, Error, Skip, case, eventually, main, sanitized, slow,
                text_of, user)

MIB = 1 << 20
MESSAGE_MAX = 4 * MIB  # MessageMax=, the default


def room():
    """How much the daemon may grow through one bad client."""
    return (256 if sanitized() else 48) * MIB


def push(client, chunks, limit):
    """Sends until the daemon hangs up or limit bytes are through; returns how many bytes were taken."""
    n = 0
    with contextlib.suppress(ConnectionError):
        for chunk in chunks:
            client.send_bytes(chunk)
            n += len(chunk)
            if n >= limit:
                break
    return n


def answers_until_closed(client):
    """All error names that still come before the end of the stream."""
    names = []
    while True:
        try:
            names.append(client.frame().get("error"))
        except Closed:
            return names


def refused(daemon, message):
    """One bad message: an error reply, a hang-up, or both; never a normal reply. Returns the error's name or None."""
    with daemon.client() as c:
        with contextlib.suppress(ConnectionError):
            c.send_bytes(message + b"\0")
        try:
            answer = c.frame()
        except Closed:
            return None
        assert "error" in answer, f"{message[:80]!r} was answered with {answer}"
        return answer["error"]


@case
def random_bytes(daemon):
    r = random.Random(7)
    for _ in range(200):
        with daemon.client() as c:
            push(c, [r.randbytes(r.randrange(1, 4000))], 1 << 30)
    with daemon.client() as c:  # without a NUL the bytes are one frame that never ends
        n = push(c, (bytes(r.choices(range(1, 256), k=65536)) for _ in range(1 << 14)), 1 << 30)
        assert n < 4 * MESSAGE_MAX, f"took {n} bytes of a frame without end"


@case
def string_of_a_gigabyte(daemon):
    before = daemon.rss_anon()
    with daemon.client() as c:
        c.send_bytes(b'{"method":"%sTokenize","parameters":{"text":"' % OURS.encode())
        chunk = b"a" * 65536
        n = push(c, (chunk for _ in range(1 << 14)), 1 << 30)
        assert n < 2 * MESSAGE_MAX, f"took {n} bytes, a message may have {MESSAGE_MAX}"
        names = answers_until_closed(c)
    assert names in ([], [OURS + "TooLarge"]), names
    assert names, "closed without an error that says why"
    grown = daemon.rss_anon() - before
    assert grown < room(), f"grew by {grown} bytes"


@case
def many_empty_arrays(daemon):
    before = daemon.rss_anon()
    body = b'{"method":"%sTokenize","parameters":{"text":[%s[]]}}'
    for count in (1_300_000, 5_300_000):  # under the size of a message, and 16 MB
        with daemon.client() as c:
            push(c, [body % (OURS.encode(), b"[]," * count) + b"\0"], 1 << 30)
            names = answers_until_closed(c) if count > 2_000_000 else [c.frame().get("error")]
        assert names and names[0], f"{count} empty arrays: {names}"
        grown = daemon.rss_anon() - before
        assert grown < room(), f"{count} empty arrays: grew by {grown} bytes"


@case
def deep_nesting(daemon):
    for depth in (65, 100_000):
        for a, b in ((b"[", b"]"), (b'{"a":', b"}")):
            inner = a * depth + (b"0" if b == b"}" else b"") + b * depth
            refused(daemon, b'{"method":"%sTokenize","parameters":{"text":%s}}' % (OURS.encode(), inner))


@case
def malformed_messages(daemon):
    method = OURS + "GetAvailability"
    for message in (b"", b" ", b"{}", b"[]", b"null", b'"x"', b"5", b"{", b'{"method":}', b'{"method":5}', b'{"method":""}',
                    b'{"method":"."}', b'{"method":"GetAvailability"}', b'{"method":null,"parameters":{}}',
                    b'{"parameters":{}}', b'{"method":"%s","parameters":[]}' % method.encode(),
                    b'{"method":"%s","parameters":5}' % method.encode(), b'{"method":"%s","more":1}' % method.encode(),
                    b'{"method":"%s"} {}' % method.encode(), b'{"method":"%s","method":"%s"}' % (method.encode(), method.encode()),
                    b'{"method":"%s\\u0000"}' % method.encode(), b'{"method":"%s",}' % method.encode(),
                    b'{"method":"' + b"a." * 100_000 + b'x"}'):
        refused(daemon, message)


@case
def invalid_utf8(daemon):
    for bad in (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\\ud800"):
        refused(daemon, b'{"method":"%sTokenize","parameters":{"text":"%s"}}' % (OURS.encode(), bad))
        refused(daemon, b'{"method":"%sTokenize\xff","parameters":{}}' % OURS.encode())


@case
def unknown_names(daemon):
    with daemon.client() as c:
        assert c.expect(SERVICE + "MethodNotFound", OURS + "Nothing") == {"method": OURS + "Nothing"}
        assert c.expect(SERVICE + "InterfaceNotFound", "org.example.Other.Do") == {"interface": "org.example.Other"}
        for method, parameters, bad in (
                ("GetAvailability", {"x": 1}, "x"), ("Tokenize", {"text": "a", "spezial": True}, "spezial"),
                ("Tokenize", {}, "text"), ("Tokenize", {"text": 5}, "text"), ("Tokenize", {"text": "a", "special": 1}, "special"),
                ("Chat", {"messages": user("Hello"), "options": {"temprature": 0}}, "temprature"),
                ("Chat", {"messages": user("Hello"), "options": []}, "options"), ("Chat", {}, "messages"),
                ("Chat", {"messages": {}}, "messages"), ("Send", {"messages": user("Hello")}, "session"),
                ("CloseSession", {"session": 1}, "session")):
            got = c.expect(SERVICE + "InvalidParameter", method, parameters)
            assert bad in got.get("parameter", ""), f"{method} {parameters}: {got}"
        c.call("GetAvailability")


@case
def bad_messages(daemon):
    """Conversations that the template cannot render, roles that do not exist: refused, and the connection goes on."""
    with daemon.client() as c:
        for messages in ([], [{}], [5], [{"role": "user"}], [{"content": "x"}], [{"role": "wizard", "content": "x"}],
                         [{"role": "user", "content": "x", "colour": "red"}], [{"role": "user", "content": None}],
                         [{"role": "user", "content": "x"}, {"role": "system", "content": "late"}],
                         [{"role": "system", "content": "only"}]):
            try:
                got = c.call("Chat", {"messages": messages, "options": {"max_tokens": 4}})
            except Error as e:
                assert e.name in (SERVICE + "InvalidParameter", OURS + "InvalidRequest"), f"{messages}: {e}"
            else:
                raise AssertionError(f"{messages} was answered: {got}")


NOT_A_NUMBER = ["5", True, [], {}]
BAD_INTEGERS = NOT_A_NUMBER + [1.5, 1e300, 9223372036854775807, -9223372036854775808]
BAD_FLOATS = NOT_A_NUMBER + [1e300, -1e300, 9223372036854775807]
BAD_OPTIONS = {
    "max_tokens": BAD_INTEGERS + [-2],
    "max_thinking_tokens": BAD_INTEGERS + [-2],
    "temperature": BAD_FLOATS + [-0.1],
    "top_k": BAD_INTEGERS + [-1],
    "top_p": BAD_FLOATS + [-0.1, 1.1],
    "min_p": BAD_FLOATS + [-0.1, 1.1],
    "typical_p": BAD_FLOATS + [-0.1, 1.1],
    "repeat_penalty": BAD_FLOATS + [-1],
    "presence_penalty": BAD_FLOATS,
    "frequency_penalty": BAD_FLOATS,
    "penalty_last_tokens": BAD_INTEGERS + [-2],
    "seed": NOT_A_NUMBER + [1.5, 1e300],
    "stop": ["x", 5, [5], [""], ["x" * 257], ["x"] * 17, {}],
    "logit_bias": [[], 5, {"x": 1}, {"1": "x"}, {"-1": 1}, {"99999999": 1}, {"1": 1e300}, {"1.5": 1}, {"": 1},
                   {"18446744073709551617": 1}],
    "top_logprobs": BAD_INTEGERS + [-1, 21],
    "want": ["", "Chat", "gpt-9", 5, True, [], {}, "x" * 17],
}


@case
def numbers_out_of_range(daemon):
    with open(INTERFACE, encoding="utf-8") as f:
        options = f.read().partition("type Options (")[2].partition("\n)")[0]
    names = {line.split(":")[0].strip() for line in options.strip().splitlines()}
    assert names == set(BAD_OPTIONS), f"Options and this test disagree: {names ^ set(BAD_OPTIONS)}"
    wrong = []
    with daemon.client() as c:
        for name, values in BAD_OPTIONS.items():
            for value in values:
                try:
                    c.call("Chat", {"messages": user("Hello"), "options": {"max_tokens": 2, name: value}})
                    wrong.append(f"{name}={str(value)[:30]} passes")
                except Error as e:
                    if e.name != SERVICE + "InvalidParameter" or name not in e.parameters.get("parameter", ""):
                        wrong.append(f"{name}={str(value)[:30]}: {e}")
    assert not wrong, "; ".join(wrong)


@case
def numbers_that_json_cannot_hold(daemon):
    for number in (b"1e999", b"-1e999", b"1" + b"0" * 400, b"9223372036854775808", b"NaN", b"Infinity", b"0x10", b"01", b"+1"):
        for name in (b"temperature", b"max_tokens", b"seed"):
            assert refused(daemon, b'{"method":"%sChat","parameters":{"messages":[{"role":"user","content":"a"}],"options":{"%s":%s}}}'
                           % (OURS.encode(), name, number)) != "", name


@case
def client_that_never_reads(daemon):
    """Calls without end from one who reads nothing: the daemon must stop reading from it instead of storing answers."""
    before = daemon.rss_anon()
    call = json.dumps({"method": OURS + "GetStatus", "parameters": {}}).encode() + b"\0"
    with daemon.client() as c:
        c.sock.setblocking(False)
        block, n, quiet_since = memoryview(call * 1000), 0, time.monotonic()
        while n < 400 * MIB:
            try:
                n += c.sock.send(block[n % len(block):])
                quiet_since = time.monotonic()
            except BlockingIOError:
                if time.monotonic() - quiet_since > 2:
                    break
                select.select([], [c.sock], [], 0.1)
            except ConnectionError:
                break
        assert n < 100 * MIB, f"took {n} bytes of calls from a client that reads nothing"
        daemon.check_alive()
        grown = daemon.rss_anon() - before
        assert grown < room(), f"grew by {grown} bytes"


@case
def stream_that_nobody_reads(daemon):
    """An answer in frames that its client does not read: others are served; it is read later, or was cut off."""
    before = daemon.rss_anon()
    with daemon.client() as c:
        c.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        c.send("Chat", {"messages": user("Tell me a story."), "options": slow(1200, top_logprobs=20)}, more=True)
        eventually("another client is served", lambda: daemon.call("GetAvailability")["state"] == "available")
        daemon.check_alive()
        grown = daemon.rss_anon() - before
        assert grown < room(), f"grew by {grown} bytes"
        with contextlib.suppress(Closed):
            frames = list(c.frames())
            assert frames[-1]["stop_reason"] in ("length", "context", "cancelled"), frames[-1]
            assert text_of(frames), "no text"


def long_text(n):
    return "Once upon a time there was a little girl who lived near the forest. " * n


@case
def client_that_dies_during_prefill(daemon):
    for _ in range(5):
        with daemon.client() as c:
            c.send("Chat", {"messages": user(long_text(90)), "options": slow(100)}, more=True)
            for parameters in c.frames():
                if (parameters.get("progress") or {}).get("stage") == "prefill":
                    break
        eventually("nothing runs", lambda: daemon.status()["running"] == 0, 10)
    status = daemon.status()
    assert status["queued"] == 0, status


@case
def client_that_dies_with_half_a_message(daemon):
    for n in (1, 10, 60):
        with daemon.client() as c:
            c.send_bytes((b'{"method":"%sChat","parameters":{"messages":[' % OURS.encode())[:n])
    with daemon.client() as c:
        c.send("Tokenize", {"text": "half"})
        c.sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(Closed):
            c.frame()


@case
def message_in_single_bytes(daemon):
    call = json.dumps({"method": OURS + "Tokenize", "parameters": {"text": "slow"}}).encode() + b"\0"
    with daemon.client() as c:
        for i in range(len(call)):
            c.send_bytes(call[i:i + 1])
        parameters, _ = c.reply()
        assert "".join(parameters["pieces"]) == "slow", parameters


@case
def two_hundred_clients_at_once(daemon):
    failures, served, told_to_wait = [], [], []

    def patiently(client, i, method, parameters):
        while True:
            try:
                return client.call(method, parameters)
            except Error as e:
                assert e.name == OURS + "QueueFull" and e.parameters["retry_after_ms"] > 0, str(e)
                told_to_wait.append(i)
                time.sleep(e.parameters["retry_after_ms"] / 1000)

    def one(i):
        try:
            with daemon.client(timeout=180) as c:
                pieces = patiently(c, i, "Tokenize", {"text": f"client {i}"})["pieces"]
                assert "".join(pieces) == f"client {i}", pieces
                got = patiently(c, i, "Chat", {"messages": user("What is 2 + 2?"),
                                               "options": {"temperature": 0, "max_thinking_tokens": 0}})
                assert got["text"] == "2 + 2 = 4.", got
                served.append(i)
        except Exception as e:
            failures.append(f"client {i}: {type(e).__name__}: {e}")

    threads = [threading.Thread(target=one, args=(i,)) for i in range(200)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, f"{len(failures)} of 200 failed, the first: {failures[0]}"
    assert len(served) == 200


@case
def a_thousand_connections_one_after_the_other(daemon):
    def round_of(n):
        for i in range(n):
            with daemon.client() as c:
                if i % 3 == 0:
                    c.call("OpenSession")
                elif i % 3 == 1:
                    c.send_bytes(b'{"method":"half')
        eventually("all connections are gone", lambda: daemon.status()["sessions"] == 0)

    round_of(200)  # the allocator's and the sanitizer's own growth
    fds, size = daemon.n_fds(), daemon.rss_anon()
    round_of(1000)
    eventually(f"{fds} descriptors as before", lambda: daemon.n_fds() <= fds)
    grown = daemon.rss_anon() - size
    assert grown < (16 * MIB if sanitized() else 2 * MIB), f"grew by {grown} bytes in 1000 connections"


@case
def more_connections_than_allowed():
    with Daemon(conf={"Service": {"ConnectionsMax": 8}}) as daemon:
        held = []
        try:
            for _ in range(20):
                with contextlib.suppress(OSError):
                    held.append(Client(daemon.socket, timeout=2))
            answered = 0
            for c in held:
                with contextlib.suppress(OSError, Closed, Error):
                    c.call("GetAvailability")
                    answered += 1
            # One user may hold half of them and one more, so that there is room for others.
            assert answered == 5, f"{answered} of 20 connections of one user were answered, 5 of the 8 are his"
        finally:
            for c in held:
                c.close()
        eventually("there is room again", lambda: len(open_clients(daemon)) == 1)
        daemon.check_alive()


def open_clients(daemon):
    try:
        return [daemon.call("GetAvailability")]
    except (OSError, Closed, Error):
        return []


def as_nobody(function):
    """Runs function in a child with another uid; its exception comes back as text, None when it returned."""
    if os.getuid() != 0:
        raise Skip("needs root to become another user")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            function()
            text = ""
        except BaseException as e:
            text = f"{type(e).__name__}: {e}"
        os.write(write, text.encode()[:4000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        text = f.read().decode()
    os.waitpid(pid, 0)
    assert not text, text


@case
def other_users_cannot_reach_a_request(daemon):
    with daemon.client() as c:
        stream = c.stream("Chat", {"messages": user("Tell me a story."), "options": slow()})
        request = next(stream)["request"]
        assert request, "the first frame does not name the request"

        def other():
            with daemon.client() as o:
                got = o.call("Cancel", {"request": request})
                assert got == {"cancelled": False}, got

        as_nobody(other)
        assert daemon.call("Cancel", {"request": request}) == {"cancelled": True}, "the owner cannot cancel it either"
        assert list(stream)[-1]["stop_reason"] == "cancelled"


@case
def other_users_cannot_reach_a_session(daemon):
    with daemon.client() as c:
        session = c.call("OpenSession", {"keep": True})["session"]

        def other():
            with daemon.client() as o:
                o.expect(OURS + "NoSuchSession", "OpenSession", {"session": session})
                o.expect(OURS + "NoSuchSession", "Send", {"session": session, "messages": user("Hello")})
                o.expect(OURS + "NoSuchSession", "Complete", {"session": session, "prompt": "Hello"})
                o.expect(OURS + "NoSuchSession", "CloneSession", {"session": session})
                o.expect(OURS + "NoSuchSession", "CloseSession", {"session": session})

        try:
            as_nobody(other)
        finally:
            c.call("CloseSession", {"session": session})


@case
def calls_that_wait_behind_an_unread_reply():
    """What one user has sent and not read is bounded however it is spread: here behind a reply that he does not take."""
    with Daemon() as daemon:
        before = daemon.rss_anon()
        big = json.dumps({"method": OURS + "Chat", "parameters": {"messages": user("x" * (MESSAGE_MAX - 4096))}}).encode() + b"\0"
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                c = stack.enter_context(daemon.client())
                c.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                c.send("Tokenize", {"text": "a b " * 30000})
                taken = push(c, (big for _ in range(60)), 60 * len(big))
                assert taken < 60 * len(big), "all of it was taken"
            daemon.check_alive()
            grown = daemon.rss_anon() - before
            assert grown < 2 * room(), f"grew by {grown // MIB} MiB"


@case
def small_messages_of_many_values_that_wait():
    """A waiting call stays bytes: parsed, these would be fifty times as large."""
    with Daemon() as daemon:
        before = daemon.rss_anon()
        message = b'{"method":"%s","parameters":{"a":[%s]}}\0' % ((OURS + "Chat").encode(), b"{}," * 150000 + b"{}")
        with daemon.client() as c:
            c.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            c.send("Tokenize", {"text": "a b " * 30000})
            push(c, (message for _ in range(60)), 60 * len(message))
            daemon.check_alive()
            grown = daemon.rss_anon() - before
            assert grown < 2 * room(), f"grew by {grown // MIB} MiB"


@case
def nul_in_an_answer(daemon):
    """Token 188 of the test model is the byte 0, which JSON on this wire cannot hold: it is shown as U+FFFD and comes back as history."""
    with daemon.client() as c:
        said = c.call("Complete", {"prompt": "a", "options": {"max_tokens": 3, "temperature": 0, "logit_bias": {"188": 1000}, "top_logprobs": 1}})
        assert said["text"] == "\ufffd" * 3, said
        assert said["logprobs"][0]["text"] == "\ufffd", said["logprobs"][0]
        c.call("Chat", {"messages": user("Hello") + [{"role": "assistant", "content": said["text"]}] + user("Hello"), "options": {"max_tokens": 3}})


@case
def one_user_leaves_room_in_the_queue():
    with Daemon(conf={"Service": {"QueueMax": 8}}) as daemon, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(daemon.client()) for _ in range(7)]
        for c in clients[:6]:
            c.send("Chat", {"messages": user("Tell me a story."), "options": slow()}, more=True)
            assert c.reply()[0]["request"]
        refused = clients[6].expect(OURS + "QueueFull", "Chat", {"messages": user("Hello")})
        assert refused["retry_after_ms"] > 0, refused


@case
def cancel_behind_another_call(daemon):
    """A pipelined Cancel never hits a call that it was not sent for."""
    with daemon.client() as c:
        for method, parameters in (("Tokenize", {"text": "a b " * 60000}), ("Cancel", {})):
            c.send(method, parameters)
        assert len(c.reply()[0]["tokens"]) > 60000
        assert c.reply()[0]["cancelled"] is False


if __name__ == "__main__":
    main(Daemon)
