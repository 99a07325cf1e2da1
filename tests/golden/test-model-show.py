#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""residentctl model show: the bundled model word for word, the same split, of another family, damaged, and ones too large for any machine."""
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../sys"))
from rd import BUILD, MODEL, WAIT, case, main
from splitgguf import align, split, string

CTL = os.path.join(BUILD, "residentctl")
U32, STRING, F32 = 4, 8, 0
TOY = """\
         file  {path}
        title  Tiny Qwen35MoE stories
  description  Toy model with learned weights for tests of inference engines
 architecture  qwen35moe
 quantization  Q8_0
      license  other
 license_name  see MODEL_CARD.md
         size  8.4 MB
   parameters  7716464
      context  2048 tokens
       layers  8, 2 with attention, 6 with a recurrent state
        trunk  1.64 MB that every token uses
       blocks  256, together 6.68 MB
               layers 0-7: 32 experts of 26.1 kB, Q8_0 Q8_0 Q8_0
      a token  uses 4 experts a layer, reads 2.2 MB
        needs  1.85 MB at least, 8.32 MB for everything; scratch and a conversation come on top
"""
MACHINE = r" this machine  [0-9.e+]+ \wB, of which a model may take [0-9.e+]+ \w?B now: (.*)\n"
NEEDS = {"supported": True, "layers": 8, "attention_layers": 2, "recurrent_layers": 6, "trunk_bytes": 1639424, "blocks": 256,
         "block_bytes": 6684672, "unused_bytes": 0, "comfortable_bytes": 8324096, "experts_used": 4,
         # The trunk less 2047 of 2048 rows of 136 bytes, and 4 of 32 blocks of all 8 layers; the trunk and twice 4 blocks.
         "token_bytes": 1639424 - 2047 * 136 + 8 * 4 * 26112, "floor_bytes": 1639424 + 2 * 4 * 26112,
         "expert_layers": [{"layer": n, "experts": 32, "block_bytes": 26112, "types": ["Q8_0"] * 3} for n in range(8)]}


def show(*args, status=0, models="/nonexistent/models", cwd=None):
    """Returns standard output and standard error."""
    env = {**os.environ, "RESIDENTD_MODELS": models, "RESIDENTD_SOCKET": "/nonexistent/socket", "LC_ALL": "C.UTF-8"}
    done = subprocess.run([CTL, "model", "show", *args], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT,
                          env=env, cwd=cwd, check=False)
    assert done.returncode == status, f"{args}: {done.returncode}, expected {status}: {done.stdout!r} {done.stderr!r}"
    return done.stdout, done.stderr


def without_machine(text):
    """The text but for its last line, and the verdict in that."""
    rest, last = text[:text.rindex("\n", 0, -1) + 1], text[text.rindex("\n", 0, -1) + 1:]
    m = re.fullmatch(MACHINE, last)
    assert m, last
    return rest, m[1]


def patched(target, *changes):
    with open(MODEL, "rb") as f:
        data = f.read()
    for old, new in changes:
        assert len(old) == len(new) and old in data, old
        data = data.replace(old, new)
    with open(target, "wb") as f:
        f.write(data)
    return target


def key(name, kind, value):
    return string(name) + struct.pack("<I", kind) + (string(value) if kind == STRING else struct.pack("<I", value))


def write_sparse(path, keys, tensors):
    """A model of zeros that take no space: (name, dimensions) of F32, at most one TiB or so."""
    head, at = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys), 0
    for name, dims in tensors:
        head += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, F32, at)
        size = 4
        for n in dims:
            size *= n
        at += size + align(size)
    head += bytes(align(len(head)))
    with open(path, "wb") as f:
        f.write(head)
        f.truncate(len(head) + at)
    return path


@case
def a_file_word_for_word():
    text, err = show(MODEL)
    text, verdict = without_machine(text)
    assert text == TOY.format(path=MODEL) and err == "", text
    assert verdict == "everything fits", verdict
    got = json.loads(show("--json", MODEL)[0])
    needs, memory, files = got["needs"], got["needs"].pop("memory"), got["needs"].pop("files")
    assert needs == NEEDS, needs
    assert files == [{"path": MODEL, "bytes": 8395008}], files
    assert memory["total"] >= memory["budget"] and memory["total"] >= memory["available"], memory
    assert got["file"] == MODEL and got["bytes"] == 8395008 and got["parts"] == 1 and "loaded" not in got, got


@case
def a_name_and_a_path():
    with tempfile.TemporaryDirectory() as d:
        shutil.copy(MODEL, os.path.join(d, "toy.gguf"))
        for name in ("toy", "toy.gguf"):
            text, _ = without_machine(show(name, models=d)[0])
            lines = TOY.format(path="toy.gguf").splitlines()
            assert text.splitlines() == lines[:10] + ["      default  no", "       loaded  no"] + lines[10:], text
        got = json.loads(show("--json", "toy", models=d)[0])
        assert got["file"] == "toy.gguf" and got["loaded"] is False and got["needs"]["blocks"] == 256, got
        # A file that is there wins over a name; one that is not is a name.
        assert show("toy.gguf", cwd=d)[0].startswith("         file  toy.gguf\n")
        assert "models" in show("other.gguf", cwd=d, status=1)[1]
        assert "cannot open" in show("./other.gguf", cwd=d, status=1)[1]
        assert show("./toy.gguf", cwd=d)[0].startswith("         file  ./toy.gguf\n")


@case
def split_models():
    with tempfile.TemporaryDirectory() as d:
        parts = split(MODEL, os.path.join(d, "m"), 2)
        text, _ = without_machine(show(parts[0])[0])
        assert "        parts  2\n" in text, text
        sizes = [os.path.getsize(p) for p in parts]
        assert re.search(rf"\n        files  {parts[0]}, [0-9.]+ MB\n               {parts[1]}, [0-9.]+ MB\n", text), text
        assert "blocks  256, together 6.68 MB" in text, text
        got = json.loads(show("--json", parts[0])[0])
        assert got["needs"]["files"] == [{"path": p, "bytes": n} for p, n in zip(parts, sizes)], got
        assert got["bytes"] == sum(sizes) and got["needs"]["floor_bytes"] <= NEEDS["floor_bytes"], got
        assert "open m-00001-of-00002.gguf" in show(parts[1], status=1)[1]


@case
def another_family():
    with tempfile.TemporaryDirectory() as d:
        path = patched(os.path.join(d, "m.gguf"), (b"qwen35moe", b"qwen99moe"))
        text, _ = without_machine(show(path)[0])
        assert "   the engine  does not know this architecture, only qwen35moe, qwen35, qwen3moe, qwen3, llama, gpt-oss\n" in text, text
        assert "uses 4 experts a layer, reads 2.2 MB" in text, text
        assert json.loads(show("--json", path)[0])["needs"]["supported"] is False
        # How many experts are used is not said under a key of this family.
        path = patched(path, (b"qwen35moe.expert_used_count", b"qwen35moe.expert_user_count"))
        text, verdict = without_machine(show(path)[0])
        assert "how many experts a token uses is not stated\n        needs  8.32 MB for everything\n" in text, text
        assert verdict == "everything fits", verdict
        needs = json.loads(show("--json", path)[0])["needs"]
        assert "floor_bytes" not in needs and needs["comfortable_bytes"] == 8324096, needs


@case
def fewer_layers_than_tensors():
    with tempfile.TemporaryDirectory() as d:
        name = b"qwen35moe.block_count" + struct.pack("<I", U32)
        path = patched(os.path.join(d, "m.gguf"), (name + struct.pack("<I", 8), name + struct.pack("<I", 7)))
        text, _ = without_machine(show(path)[0])
        assert "       layers  7, 1 with attention, 6 with a recurrent state\n" in text, text
        assert "layers 0-6: 32 experts" in text and "\n       unused  1.02 MB, of layers that do not run\n" in text, text


@case
def layers_of_several_kinds():
    with tempfile.TemporaryDirectory() as d:
        tensors = [("token_embd.weight", (8, 4))]
        for n, experts in enumerate((0, 2, 3, 2, 2)):
            if experts:
                tensors += [(f"blk.{n}.ffn_gate_up_exps.weight", (8, 4, experts)), (f"blk.{n}.ffn_down_exps.weight", (2, 8, experts))]
            else:
                tensors += [(f"blk.{n}.ffn_up.weight", (8, 4))]
        keys = [key(b"general.architecture", STRING, b"other"), key(b"other.expert_used_count", U32, 1)]
        path = write_sparse(os.path.join(d, "m.gguf"), keys, [(n.encode(), s) for n, s in tensors])
        text, _ = without_machine(show(path)[0])
        assert text.endswith("       layers  5\n"
                             "        trunk  256 B that every token uses\n"
                             "       blocks  9, together 1.73 kB\n"
                             "               layers 0: no experts\n"
                             "               layers 1, 3-4: 2 experts of 192 B, F32 F32\n"
                             "               layers 2: 3 experts of 192 B, F32 F32\n"
                             # No output matrix: the embeddings are read whole.
                             "      a token  uses 1 experts a layer, reads 1.02 kB\n"
                             "        needs  640 B at least, 1.98 kB for everything; scratch and a conversation come on top\n"), text
        path = write_sparse(os.path.join(d, "dense.gguf"), keys, [(b"token_embd.weight", (8, 4)), (b"output.weight", (8, 4))])
        text, _ = without_machine(show(path)[0])
        assert text.endswith("       layers  0\n"
                             "        trunk  256 B that every token uses\n"
                             "       blocks  none: no experts\n"
                             "      a token  reads 160 B\n"
                             "        needs  256 B at least, 256 B for everything; scratch and a conversation come on top\n"), text


@case
def larger_than_any_machine():
    """2 TiB of experts, 1 GiB each, so that one fits nearly anywhere, all of them nowhere."""
    with tempfile.TemporaryDirectory() as d:
        tensors = [(b"token_embd.weight", (8, 4)), (b"blk.0.ffn_up_exps.weight", (1 << 20, 8, 32768)),
                   (b"blk.0.ffn_down_exps.weight", (1 << 20, 8, 32768))]
        for used, want in ((1, r"\d+ % of the blocks fit"), (32768, "too little")):
            keys = [key(b"general.architecture", STRING, b"other"), key(b"other.expert_used_count", U32, used)]
            text, verdict = without_machine(show(write_sparse(os.path.join(d, "m.gguf"), keys, tensors))[0])
            assert re.fullmatch(want, verdict), (text, verdict)
            assert "layers 0: 32768 experts of 67.1 MB, F32 F32\n" in text, text


@case
def damaged_files():
    with tempfile.TemporaryDirectory() as d:
        path = patched(os.path.join(d, "m.gguf"), (b"blk.3.ffn_down_exps", b"blk.3.ffn_dumb_exps"))
        text, err = show(path, status=1)
        assert "no ffn_down_exps.weight" in err and path in err and "\n         size  8.4 MB\n" in text, (text, err)
        assert "no ffn_down_exps.weight" in show("--json", path, status=1)[1]
        with open(path, "r+b") as f:
            f.truncate(100_000)
        for args, models in (((path,), None), (("m",), d)):
            _, err = show(*args, status=1, models=models or "/nonexistent/models")
            assert path in err and "end beyond the 100000 bytes" in err, err
        assert "is a directory" in show(d + "/", status=1)[1]


@case
def a_record_outlives_its_file():
    """What was written down at import is shown, and what is wrong is said."""
    with tempfile.TemporaryDirectory() as d:
        shutil.copy(MODEL, os.path.join(d, "toy.gguf"))
        with open(os.path.join(d, "toy.json"), "w", encoding="utf-8") as f:
            json.dump({"title": "On record", "parameters": 7}, f)
        os.truncate(os.path.join(d, "toy.gguf"), 1000)
        text, err = show("toy", status=1, models=d)
        assert "        title  On record\n" in text and "toy.gguf" in err, (text, err)


if __name__ == "__main__":
    main()
