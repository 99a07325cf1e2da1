#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The daemon as a service: start with good, bad and no model, activation, readiness, signals, log, introspection."""
import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time

from rd import (BUILD, INTERFACE, MODEL, OURS, SERVICE, Client, Closed, Daemon, Error, case, check_error, eventually, main,
                slow, text_of, user)

QUESTION = {"messages": user("What is 17 x 23?"), "options": {"temperature": 0, "max_thinking_tokens": 0}}


@case
def introspection(daemon):
    info = daemon.call(SERVICE + "GetInfo")
    assert set(info) == {"vendor", "product", "version", "url", "interfaces"}, info
    assert info["product"] == "residentd" and info["version"] == daemon.status()["version"], info
    assert {"org.varlink.service", "org.residentd.Inference"} <= set(info["interfaces"]), info
    with open(INTERFACE, encoding="utf-8") as f:
        text = f.read()
    with daemon.client() as c:
        got = c.call(SERVICE + "GetInterfaceDescription", {"interface": "org.residentd.Inference"})["description"]
        assert got == text, "the description is not policy/org.residentd.varlink"
        got = c.call(SERVICE + "GetInterfaceDescription", {"interface": "org.varlink.service"})["description"]
        assert "method GetInfo()" in got and "error InvalidParameter" in got, got
        c.expect(SERVICE + "InterfaceNotFound", SERVICE + "GetInterfaceDescription", {"interface": "org.example.No"})
        c.expect(SERVICE + "InvalidParameter", SERVICE + "GetInterfaceDescription")
        # Every method that the text promises exists: none answers MethodNotFound or MethodNotImplemented.
        for method in re.findall(r"^method (\w+)\(", text, re.M):
            try:
                c.call(method, {"no such parameter": 1})
            except Error as e:
                assert e.name == SERVICE + "InvalidParameter", f"{method}: {e}"
            else:
                raise AssertionError(f"{method} takes any parameter")


def check_unavailable(daemon, error, words):
    got = daemon.call("GetAvailability")
    assert got["state"] == "unavailable", got
    for word in words:
        assert word in got["reason"], f"{word!r} is not in the reason: {got['reason']!r}"
    with daemon.client() as c:
        c.expect(OURS + error, "Chat", QUESTION)
        c.expect(OURS + error, "Complete", {"prompt": "Hello"})
        c.expect(OURS + error, "Tokenize", {"text": "Hello"})
        assert c.call("GetStatus")["state"] == "unavailable"
    return got


@case
def no_model():
    with tempfile.TemporaryDirectory() as empty:
        with Daemon(model=None, conf={"Model": {"Path": os.path.join(empty, "absent.gguf")}}) as daemon:
            check_unavailable(daemon, "NoModel", ["absent.gguf"])


def broken(data, words):
    with tempfile.NamedTemporaryFile(suffix=".gguf") as f:
        f.write(data)
        f.flush()
        with Daemon(model=f.name) as daemon:
            check_unavailable(daemon, "ModelBroken", words)
            lines = [line for line in daemon.log().splitlines() if os.path.basename(f.name) in line]
            assert len(lines) == 1, f"{len(lines)} lines of log about one bad file: {lines}"


def model_bytes():
    with open(MODEL, "rb") as f:
        return f.read()


@case
def truncated_models():
    data = model_bytes()
    for size in (0, 3, 4, 24, 1000, 60_000, len(data) // 2, len(data) - 1):
        broken(data[:size], [])


@case
def wrong_magic():
    broken(b"FUGG" + model_bytes()[4:], ["GGUF"])


@case
def wrong_architecture():
    broken(model_bytes().replace(b"qwen35moe", b"qwen99moe"), ["qwen99moe"])


@case
def model_that_is_a_directory():
    with tempfile.TemporaryDirectory() as d:
        with Daemon(model=d) as daemon:
            assert daemon.call("GetAvailability")["state"] == "unavailable"


@case
def socket_activation():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "s")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(64)
            early = Client(path)
            early.send("GetAvailability")  # before there is a daemon
            with Daemon(wait=False, sockets=[listener]) as daemon:
                assert "state" in early.reply()[0]
                early.close()
                daemon.socket = path
                daemon.wait_until_up()
                daemon.check_alive()
            assert os.path.exists(path), "a socket that was handed over is not the daemon's to remove"


@case
def own_socket_is_removed_and_a_dead_one_replaced():
    with Daemon() as daemon:
        path = daemon.socket
        daemon.stop()
        assert not os.path.exists(path), "the socket stays behind"
    with tempfile.TemporaryDirectory() as d:
        dead = os.path.join(d, "s")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.bind(dead)
        with Daemon(path=dead) as daemon:
            daemon.check_alive()


@case
def living_socket_is_left_alone():
    with Daemon() as first:
        with Daemon(path=first.socket, wait=False) as second:
            second.expected_status = 1
            second.process.wait(20)
            assert first.socket in second.log(), second.log()
        first.check_alive()


@case
def readiness_status_and_watchdog():
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "notify")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.bind(path)
            s.settimeout(30)
            got = []

            def read_until(word):
                while not any(line.startswith(word) for line in got):
                    got.extend(s.recv(4096).decode().splitlines())

            with Daemon(env={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "600000"}) as daemon:
                read_until("READY=1")
                read_until("STATUS=")
                read_until("WATCHDOG=1")
                del got[:]
                read_until("WATCHDOG=1")
                with daemon.client() as c:  # a long request must not hold the watchdog up
                    c.send("Chat", {"messages": user("Tell me a story."), "options": slow()}, more=True)
                    del got[:]
                    read_until("WATCHDOG=1")
                daemon.stop()
                read_until("STOPPING=1")


@case
def hangup_reads_the_configuration_again():
    with Daemon(conf={"Service": {"QueueMax": 4}}) as daemon:
        with daemon.client() as c:
            stream = c.stream("Chat", {"messages": user("Tell me a story."), "options": slow(300)})
            next(stream)
            daemon.write_conf({"Service": {"QueueMax": 5, "NoSuchKey": 1}, "Log": {"Level": "debug"}})
            daemon.process.send_signal(signal.SIGHUP)
            eventually("the log names the bad key", lambda: "NoSuchKey" in daemon.log())
            assert list(stream)[-1]["stop_reason"] in ("length", "context"), "the running request suffered"
        daemon.check_alive()


@case
def bad_configuration_is_told_and_ignored():
    with Daemon(conf={"Service": {"QueueMax": "many"}, "Nonsense": {"A": 1}}) as daemon:
        lines = [line for line in daemon.log().splitlines() if "ignoring" in line]
        assert any("residentd.conf:2" in line for line in lines), lines
        daemon.check_alive()


@case
def terminate_drains():
    """What runs or waits is answered or told, what is new is refused with a hint, and the end comes within 5 s."""
    with Daemon() as daemon:
        with daemon.client() as running, daemon.client() as waiting, daemon.client() as late:
            stream = running.stream("Chat", {"messages": user("Tell me a story."), "options": slow()})
            next(f for f in stream if f.get("text"))
            waiting.send("Chat", QUESTION, more=True)
            assert waiting.reply()[0]["request"]
            assert late.call("GetAvailability")["state"] == "available"
            begin = time.monotonic()
            daemon.process.send_signal(signal.SIGTERM)
            eventually("the state is stopping", lambda: late.call("GetAvailability")["state"] == "stopping")
            refused = late.expect(OURS + "Stopping", "Chat", QUESTION)
            assert refused["retry_after_ms"] > 0, refused
            for frames in (stream, waiting.frames()):
                try:
                    last = list(frames)[-1]
                    assert last["stop_reason"], last
                except Error as e:
                    assert e.name in (OURS + "Stopping", OURS + "Cancelled"), str(e)
                    check_error(e)
            daemon.process.wait(10)
            assert time.monotonic() - begin < 5.5, f"took {time.monotonic() - begin:.1f} s to end"
        assert daemon.process.returncode == 0, daemon.process.returncode


@case
def terminate_with_a_client_that_does_not_read():
    with Daemon() as daemon:
        with daemon.client() as c:
            c.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            c.send("Chat", {"messages": user("Tell me a story."), "options": slow(top_logprobs=20)}, more=True)
            time.sleep(0.3)
            seconds = daemon.stop()
            assert seconds < 5, f"took {seconds:.1f} s to end"


@case
def terminate_during_prefill():
    with Daemon() as daemon:
        with daemon.client() as c:
            c.send("Chat", {"messages": user("Once upon a time there was a little girl. " * 150), "options": slow()}, more=True)
            seconds = daemon.stop()
            assert seconds < 5, f"took {seconds:.1f} s to end"


@case
def second_terminate_does_not_wait_for_a_reader():
    with Daemon() as daemon:
        with daemon.client() as c:
            c.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            c.send("Tokenize", {"text": "a b " * 60000})
            daemon.check_alive()
            daemon.process.send_signal(signal.SIGTERM)
            eventually("it is stopping", lambda: "stopping" in daemon.log())
            daemon.process.send_signal(signal.SIGTERM)
            assert daemon.process.wait(10) == 0


@case
def terminate_gives_up_a_reload():
    """A model that waits to be loaded when the end comes is not loaded any more."""
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "m.gguf")
        shutil.copy(MODEL, path)
        with Daemon(model=path) as daemon:
            with daemon.client() as c:
                c.send("Chat", {"messages": user("Tell me a story."), "options": slow()}, more=True)
                assert c.reply()[0]["request"]
                shutil.copy(MODEL, path + ".new")
                os.replace(path + ".new", path)
                daemon.process.send_signal(signal.SIGHUP)
                eventually("it is loading", lambda: daemon.call("GetAvailability")["state"] == "loading")
                daemon.stop()
            assert daemon.log().count("residentd: model ") == 1, daemon.log()


@case
def failed_reload_is_tried_again():
    with Daemon(conf={"Engine": {"BatchTokens": 64}}) as daemon:
        daemon.write_conf({"Engine": {"KvBytesMax": "4K"}})
        for n in (1, 2):
            daemon.process.send_signal(signal.SIGHUP)
            eventually("the failure is told", lambda: daemon.log().count("cannot load the model") == n)
            daemon.check_alive()


@case
def interrupt_ends_too():
    with Daemon() as daemon:
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.process.wait(10) == 0


@case
def nothing_of_a_prompt_in_the_log():
    secret, thrown = "xylophone", "zeppelin"
    with Daemon(conf={"Log": {"Level": "debug"}}) as daemon:
        with daemon.client() as c:
            c.call("Chat", {"messages": user(f"Tell me about the {secret}."), "options": {"max_tokens": 20}})
            c.call("Complete", {"prompt": f"The {secret}", "options": {"max_tokens": 5, "stop": [secret]}})
            c.call("Tokenize", {"text": secret})
            session = c.call("OpenSession")["session"]
            c.call("Send", {"session": session, "messages": user(secret), "options": {"max_tokens": 5}})
            c.expect(OURS + "ContextFull", "Chat", {"messages": user(secret * 5000)})
            c.expect(SERVICE + "InvalidParameter", "Chat", {"messages": user(secret), secret: secret})
            c.expect(SERVICE + "MethodNotFound", OURS + secret.capitalize())
        for bad in (f'{{"method":"{thrown}', f'{{"{thrown}":1}}', f'{thrown}', f'{{"method":"a.{thrown}","parameters":[]}}'):
            with daemon.client() as c:
                c.send_bytes(bad.encode() + b"\0")
                with contextlib.suppress(Closed):
                    c.frame()
        daemon.check_alive()
        answer = daemon.call("Chat", QUESTION)["text"]
        daemon.stop()
        log = daemon.log().lower()
        assert log, "the log is empty, the case proves nothing"
        for word in (secret, thrown, answer, "17 x 23"):
            assert word.lower() not in log, f"{word!r} is in the log"


@case
def model_replaced_while_it_runs():
    """The file is copied over (another inode) while the daemon has the old one mapped: requests go on."""
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "m.gguf")
        shutil.copy(MODEL, path)
        with Daemon(model=path) as daemon:
            shutil.copy(MODEL, path + ".new")
            os.replace(path + ".new", path)
            daemon.check_alive()
            os.unlink(path)
            daemon.check_alive()


@case
def model_in_the_store_of_systemd():
    """The open model is handed to systemd; a later start goes on with it although its name is gone."""
    with tempfile.TemporaryDirectory() as d:
        path, notify = os.path.join(d, "m.gguf"), os.path.join(d, "n")
        shutil.copy(MODEL, path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as n:
            n.bind(notify)
            n.settimeout(20)
            stored = None
            with Daemon(model=path, env={"NOTIFY_SOCKET": notify}):
                while stored is None:
                    message, fds, _, _ = socket.recv_fds(n, 4096, 4)
                    if b"FDSTORE=1" in message:
                        assert b"FDNAME=model" in message and len(fds) == 1, message
                        stored = os.fdopen(fds[0], "rb")
        os.unlink(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, stored:
            listener.bind(os.path.join(d, "s"))
            listener.listen(64)
            with Daemon(model=path, sockets=[listener, stored], path=os.path.join(d, "s"),
                        env={"LISTEN_FDNAMES": "residentd.socket:model"}) as daemon:
                daemon.check_alive()


@case
def memory_pressure():
    """What systemd or the kernel says: idle conversations give their memory back and lose nothing else."""
    with tempfile.TemporaryDirectory() as d:
        path = os.path.join(d, "pressure")
        os.mkfifo(path)
        with Daemon(env={"MEMORY_PRESSURE_WATCH": path}) as daemon:
            with daemon.client() as c:
                session = c.call("OpenSession")["session"]
                c.call("Send", dict(QUESTION, session=session))
                assert c.call("Send", dict(QUESTION, session=session))["usage"]["cached_tokens"] > 0
                with open(path, "wb", buffering=0) as f:
                    f.write(b"x")
                eventually("it is noticed", lambda: "memory is short" in daemon.log())
                said = c.call("Send", dict(QUESTION, session=session))
                assert said["usage"]["cached_tokens"] == 0 and said["usage"]["prompt_tokens"] > 60, said
    with Daemon(env={"MEMORY_PRESSURE_WATCH": "/nonexistent/file"}) as daemon:
        daemon.check_alive()


@case
def toy_model_says_what_it_is():
    """Without a model of its own the service answers with the toy, and every answer says so, apart from its text."""
    with tempfile.TemporaryDirectory() as d:
        with Daemon(model=None, env={"RESIDENTD_MODELS": d, "RESIDENTD_TOY_MODEL": MODEL}) as daemon:
            answer = daemon.call("Chat", QUESTION)
            assert answer["text"] == "17 x 23 = 391." and "model add" in answer["notice"], answer
            p = subprocess.run([os.path.join(BUILD, "resident"), "-n", "-t", "0", "--think", "off", "What is 17 x 23?"],
                               env=dict(os.environ, RESIDENTD_SOCKET=daemon.socket), stdin=subprocess.DEVNULL,
                               capture_output=True, text=True, timeout=60, check=False)
            assert p.returncode == 0 and p.stdout == "17 x 23 = 391." and "model add" in p.stderr, p
    with Daemon() as daemon:
        assert "notice" not in daemon.call("Chat", QUESTION)


@case
def version_and_help():
    for argument, word in (("--version", "residentd"), ("--help", "--socket")):
        with os.popen(f"'{os.path.join(BUILD, 'residentd')}' {argument}") as out:
            assert word in out.read(), argument
            assert out.close() is None, argument


if __name__ == "__main__":
    main(Daemon)
