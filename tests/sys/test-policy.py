#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What policy allows: to whom, how much, how many at once; shares of time; what changes with a reload; idle exit."""
import contextlib
import os
import resource
import shutil
import signal
import socket
import tempfile
import time

from rd import OURS, Client, Daemon, Error, Skip, case, check_error, eventually, main, slow, text_of, user

QUESTION = {"messages": user("What is 17 x 23?"), "options": {"temperature": 0, "max_thinking_tokens": 0}}


class Ruled(contextlib.AbstractContextManager):
    """A residentd with a root of its own for policy and state; `rules` is the text of one policy file."""

    def __init__(self, rules, files=None, **daemon):
        self.root = tempfile.mkdtemp(prefix="rp-", dir="/tmp")
        os.chmod(self.root, 0o755)
        self.put("etc/residentd/policy.d/50-test.conf", rules)
        for path, text in (files or {}).items():
            self.put(path, text)
        os.makedirs(os.path.join(self.root, "state"))
        env = {"RESIDENTD_ROOT": self.root, "STATE_DIRECTORY": os.path.join(self.root, "state")}
        self.daemon_options = dict(daemon, env=dict(env, **daemon.get("env", {})))
        self.daemon = None

    def put(self, path, text):
        path = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as f:
            f.write(text)

    def start(self):
        self.daemon = Daemon(**self.daemon_options)
        return self.daemon

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *e):
        try:
            if self.daemon:
                self.daemon.__exit__(*e)
        finally:
            shutil.rmtree(self.root, ignore_errors=True)

    def rules(self, text):
        """New rules, in force when this returns."""
        before = self.daemon.log().count("policy read anew")
        self.put("etc/residentd/policy.d/50-test.conf", text)
        self.daemon.process.send_signal(signal.SIGHUP)
        eventually("the rules are read", lambda: self.daemon.log().count("policy read anew") > before)


@contextlib.contextmanager
def as_user(path, uid):
    """A client of another user: connected by a child, which hands the connection over."""
    if os.getuid() != 0:
        raise Skip("needs root to become another user")
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
                s.connect(path)
                socket.send_fds(theirs, [b"x"], [s.fileno()])
        finally:
            os._exit(0)
    theirs.close()
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    os.waitpid(pid, 0)
    ours.close()
    client = Client.__new__(Client)
    client.__dict__.update(vars(Client(path)))
    client.sock.close()
    client.sock = socket.socket(fileno=fds[0])
    client.sock.settimeout(60)
    try:
        yield client
    finally:
        client.close()


@case
def who_is_not_allowed():
    with Ruled("[User root]\nAllow=no\n") as r:
        with r.daemon.client() as c:
            for method, parameters in (("Chat", QUESTION), ("Complete", {"prompt": "a"}), ("OpenSession", {}),
                                       ("Tokenize", {"text": "a"})):
                refused = c.expect(OURS + "NotAuthorized", method, parameters)
                assert refused["number"] == 13, refused
            assert c.call("GetAvailability")["state"] == "available"
        with as_user(r.daemon.socket, 65534) as c:
            assert c.call("Chat", QUESTION)["text"] == "17 x 23 = 391."
        r.rules("[Default]\nAllow=yes\n")
        r.daemon.check_alive()


@case
def group_and_default():
    with Ruled("[Default]\nAllow=no\n[Group 0]\nAllow=yes\n") as r:
        r.daemon.check_alive()
        with as_user(r.daemon.socket, 65534) as c:
            c.expect(OURS + "NotAuthorized", "Chat", QUESTION)


@case
def model_not_allowed():
    with Ruled("[Default]\nModels=Qwen* Llama*\n") as r:
        with r.daemon.client() as c:
            refused = c.expect(OURS + "NotAuthorized", "Chat", QUESTION)
            assert "model" in refused["message"], refused
        r.rules("[Default]\nModels=Tiny*\n")
        r.daemon.check_alive()


@case
def sessions_and_queue():
    with Ruled("[Default]\nSessions=2\nQueueMax=1\n") as r:
        with r.daemon.client() as c, r.daemon.client() as other:
            first = c.call("OpenSession")["session"]
            c.call("OpenSession")
            c.expect(OURS + "TooManySessions", "OpenSession")
            c.call("CloseSession", {"session": first})
            c.call("OpenSession")
            c.send("Chat", {"messages": user("Tell me a story."), "options": slow()}, more=True)
            assert c.reply()[0]["request"]
            refused = other.expect(OURS + "QueueFull", "Chat", QUESTION)
            assert refused["retry_after_ms"] > 0, refused


@case
def tokens_of_a_day():
    """The quota counts, refuses with the time until midnight, cuts an answer at what is left, and survives a restart."""
    with Ruled("[Default]\nTokensPerDay=60\n") as r:
        with r.daemon.client() as c:
            said = c.call("Chat", QUESTION)
            used = said["usage"]["prompt_tokens"] + said["usage"]["answer_tokens"]
            said = c.call("Complete", {"prompt": "Once", "options": slow()})
            assert said["stop_reason"] == "length" and said["usage"]["answer_tokens"] <= 60 - used, said
            refused = c.expect(OURS + "QuotaExceeded", "Chat", QUESTION)
            assert 0 < refused["retry_after_ms"] <= 25 * 3600 * 1000, refused
            for _ in range(3):
                c.expect(OURS + "QuotaExceeded", "Chat", QUESTION)
        assert r.daemon.log().count("used up today's tokens") == 1, "told once a day"
        r.daemon.stop()
        r.start()
        with r.daemon.client() as c:
            c.expect(OURS + "QuotaExceeded", "Chat", QUESTION)
        r.rules("[Default]\nTokensPerDay=infinity\n")
        r.daemon.check_alive()


@case
def tokens_of_a_day_by_many_at_once():
    """What is set aside for requests that run counts; a prompt that is refused costs nothing."""
    with Ruled("[Default]\nTokensPerDay=100\n") as r, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(r.daemon.client()) for _ in range(20)]
        for c in clients:
            c.send("Complete", {"prompt": "Once", "options": slow()})
        for c in clients:
            with contextlib.suppress(Error):
                c.reply()
        usage = clients[0].call("GetUsage")
        assert 0 < usage["prompt_tokens"] + usage["answer_tokens"] <= 100, usage
    with Ruled("[Default]\nTokensPerDay=5000\n") as r:
        with r.daemon.client() as c:
            for _ in range(3):
                with contextlib.suppress(Error):
                    c.call("Complete", {"prompt": "a b c d " * 1000})
            assert c.call("GetUsage")["prompt_tokens"] == 0
            assert c.call("Chat", QUESTION)["text"] == "17 x 23 = 391."


@case
def two_users_do_not_end_each_other():
    """Memory for one long answer: the second user's waits until the first has ended, neither fails."""
    with Ruled("[Default]\n", conf={"Engine": {"KvBytesMax": 2500000}}) as r:
        with r.daemon.client() as a, as_user(r.daemon.socket, 65534) as b:
            streams = [c.stream("Complete", {"prompt": "Once", "options": slow(max_tokens=30000)}) for c in (a, b)]
            first = next(streams[0])
            assert first["request"]
            for s in streams:
                last = list(s)[-1]
                assert last["stop_reason"] in ("length", "context"), last


@case
def clones_count():
    with Ruled("[Default]\n") as r:
        with r.daemon.client() as c:
            session = c.call("OpenSession")["session"]
            c.call("Send", dict(QUESTION, session=session))
            one = r.daemon.status()["kv_bytes_used"]
            r.rules(f"[Default]\nKvBytesMax={one + one // 2}\n")
            for _ in range(10):
                c.call("CloneSession", {"session": session})
            c.call("Send", dict(QUESTION, session=session))
            used = r.daemon.status()["kv_bytes_used"]
            assert used <= one + one // 2, f"{used} bytes, one session has {one}"


@case
def rules_that_cannot_be_read_change_nothing():
    """Without descriptors left the files are not empty: who was denied stays denied."""
    with Ruled("[User 65534]\nAllow=no\n") as r:
        with as_user(r.daemon.socket, 65534) as c, contextlib.ExitStack() as stack:
            c.expect(OURS + "NotAuthorized", "Chat", QUESTION)
            resource.prlimit(r.daemon.pid, resource.RLIMIT_NOFILE, (r.daemon.n_fds() + 5, 4096))
            for _ in range(8):
                stack.enter_context(r.daemon.client())
            eventually("no descriptor is left", lambda: "cannot accept" in r.daemon.log())
            r.daemon.process.send_signal(signal.SIGHUP)
            eventually("the policy cannot be read", lambda: "cannot read the policy" in r.daemon.log())
            c.expect(OURS + "NotAuthorized", "Chat", QUESTION)


@case
def context_and_thinking():
    with Ruled("[Default]\nContextMax=64\nMaxThinkingTokens=0\n") as r:
        with r.daemon.client() as c:
            said = c.call("Chat", {"messages": user("What is 17 x 23?"), "options": {"temperature": 0, "max_thinking_tokens": 100}})
            assert said["usage"]["thought_tokens"] == 0 and said["text"] == "17 x 23 = 391.", said
            assert c.call("OpenSession")["context_max"] == 64
            c.expect(OURS + "ContextFull", "Chat", {"messages": user("a b c d e f g h " * 20)})
            said = c.call("Complete", {"prompt": "Once", "options": slow()})
            assert said["stop_reason"] == "context" and said["context_used"] <= 64, said


@case
def memory_of_a_user():
    with Ruled("[Default]\nKvBytesMax=1K\n") as r:
        with r.daemon.client() as c:
            refused = c.expect(OURS + "NoMemory", "Chat", QUESTION)
            assert "KvBytesMax" in refused["message"], refused
        r.rules("[Default]\nKvBytesMax=64M\n")
        r.daemon.check_alive()


@case
def reload_keeps_sessions():
    with Ruled("[Default]\n") as r:
        with r.daemon.client() as c:
            session = c.call("OpenSession")["session"]
            c.call("Send", dict(QUESTION, session=session))
            r.rules("[Default]\nWeight=300\n")
            said = c.call("Send", dict(QUESTION, session=session))
            assert said["usage"]["cached_tokens"] > 0, said


@case
def users_share_the_time():
    """While one user's long answers wait in line, another's short one begins at once and both go on."""
    with Ruled("[Default]\n") as r, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(r.daemon.client()) for _ in range(3)]
        streams = [c.stream("Chat", {"messages": user("Tell me a story."), "options": slow()}) for c in busy]
        next(f for f in streams[0] if f.get("text"))
        other = stack.enter_context(as_user(r.daemon.socket, 65534))
        assert text_of(other.stream("Chat", QUESTION)) == "17 x 23 = 391."
        # The first of the three still runs: it was not waited for.
        assert r.daemon.status()["running"] >= 1
        assert next(streams[0])


@case
def idle_ones_wait_while_they_are_paused():
    idle = "[Default]\nClass=idle\n"
    with Ruled(idle + "[User 65534]\nClass=normal\n") as r, contextlib.ExitStack() as stack:
        running = stack.enter_context(r.daemon.client())
        frames = running.stream("Complete", {"prompt": "Once", "options": slow(300)})
        next(frames)
        r.rules(idle + "PauseIdle=yes\n[User 65534]\nClass=normal\n")
        waiting = [stack.enter_context(r.daemon.client()) for _ in range(3)]
        for c in waiting:
            c.send("Chat", QUESTION)
        # Gone for good, and nobody misses it.
        waiting.pop().close()
        assert list(frames)[-1]["stop_reason"] == "length", "what ran comes to its end"
        with r.daemon.client() as c:
            assert c.call("Tokenize", {"text": "a"})["tokens"]
            with as_user(r.daemon.socket, 65534) as other:
                assert other.call("Chat", QUESTION)["text"] == "17 x 23 = 391."
            # Another reason to look again, and no other policy.
            r.rules(idle + "PauseIdle=yes\nWeight=7\n")
            assert r.daemon.status()["running"] + r.daemon.status()["queued"] == 0
            assert r.daemon.status()["requests_total"] == 2
        r.rules(idle)
        for c in waiting:
            assert c.reply()[0]["text"] == "17 x 23 = 391."
    # The end does not wait for them.
    with Ruled(idle + "PauseIdle=yes\n") as r, r.daemon.client() as c:
        c.send("Chat", QUESTION)
        assert r.daemon.status()["queued"] == 0
        assert r.daemon.stop() < 4
        try:
            c.reply()
            raise AssertionError("it was answered")
        except Error as e:
            assert e.name == OURS + "Stopping", e


@case
def what_is_wanted():
    files = {"usr/lib/residentd/models.d/10.conf": "[code]\nModels=*Coder*\n[chat]\nModels=Tiny*\n"}
    with Ruled("[Default]\n", files=files) as r:
        with r.daemon.client() as c:
            for want in ("chat", "small", "best"):
                c.call("Chat", {"messages": user("Hello"), "options": {"want": want, "max_tokens": 2}})
            refused = c.expect(OURS + "NoSuchModel", "Chat", {"messages": user("Hello"), "options": {"want": "code"}})
            assert refused["number"] == 18, refused


@case
def bad_rules_are_told_and_ignored():
    with Ruled("[Default]\nAllow=perhaps\nWeight=0\n[Nobody]\nAllow=no\n") as r:
        log = r.daemon.log()
        for line in (2, 3, 4):
            assert f"50-test.conf:{line}: " in log, log
        r.daemon.check_alive()


@case
def idle_exit():
    """With systemd's socket the service ends when nobody needs it; a session that is kept, or a client, keeps it."""
    with tempfile.TemporaryDirectory(prefix="ri-", dir="/tmp") as d:
        path = os.path.join(d, "s")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(64)
            with Daemon(sockets=[listener], path=path, conf={"Service": {"IdleExitSec": "1s"}}) as daemon:
                with daemon.client() as c:
                    session = c.call("OpenSession", {"keep": True})["session"]
                    time.sleep(1.5)
                    c.call("Send", dict(QUESTION, session=session))
                time.sleep(1.5)
                with daemon.client() as c:
                    c.call("CloseSession", {"session": session})
                    # Gone in the middle of an answer: that ends after the connection, and is what the clock starts from.
                    c.send("Complete", {"prompt": "Once", "options": slow()}, more=True)
                    assert c.reply()[0]["request"]
                assert daemon.process.wait(20) == 0
                assert "idle" in daemon.log(), daemon.log()
            # The next client waits in systemd's socket and is answered by the next start.
            with Client(path) as early:
                early.send("Chat", QUESTION)
                with Daemon(sockets=[listener], path=path, wait=False):
                    assert early.reply()[0]["text"] == "17 x 23 = 391."


if __name__ == "__main__":
    main()
