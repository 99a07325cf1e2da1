#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the seeds of tests/fuzz/fuzz-gguf.c: small GGUF files, well-formed and not, into the folder
given (default: gguf/ beside this script). Output depends on nothing but this file."""

import struct
import sys
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARRAY, U64, I64, F64 = range(13)
TYPE_F32, TYPE_Q8_0, TYPE_Q4_K, TYPE_REMOVED = 0, 8, 12, 4


def string(s):
    data = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(data)) + data


def key(name, kind, value):
    return string(name) + struct.pack("<I", kind) + value


def array(kind, n, elements=b""):
    return struct.pack("<IQ", kind, n) + elements


def u32(v):
    return struct.pack("<I", v)


def tensor(name, kind, ne, offset):
    return (string(name) + u32(len(ne)) + struct.pack(f"<{len(ne)}Q", *ne) +
            struct.pack("<IQ", kind, offset))


def image(keys=(), tensors=(), data=b"", version=3, align=32, n_kv=None, n_tensors=None):
    head = b"GGUF" + struct.pack("<IQQ", version,
                                 len(tensors) if n_tensors is None else n_tensors,
                                 len(keys) if n_kv is None else n_kv)
    head += b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % align if data else 0) + data


SCALARS = (
    key("u32", U32, u32(7)),
    key("i8", I8, b"\xff"),
    key("f32", F32, struct.pack("<f", 1.5)),
    key("yes", BOOL, b"\1"),
    key("name", STR, string("tiny")),
    key("u64", U64, struct.pack("<Q", 1 << 40)),
    key("f64", F64, struct.pack("<d", -0.5)),
)
ARRAYS = (
    key("words", ARRAY, array(STR, 3, string("a") + string("") + string("ccc"))),
    key("types", ARRAY, array(I32, 3, struct.pack("<3i", 1, -3, 6))),
    key("scores", ARRAY, array(F32, 2, struct.pack("<2f", 0.5, -1))),
    key("flags", ARRAY, array(BOOL, 2, b"\1\0")),
    key("nested", ARRAY, array(ARRAY, 2, array(STR, 1, string("x")) + array(U8, 0))),
)
WEIGHTS = (
    tensor("blk.0.attn_norm.weight", TYPE_F32, (4, 2), 0),
    tensor("blk.0.ffn_down_exps.weight", TYPE_Q8_0, (32, 1, 3), 32),
    tensor("output.weight", TYPE_Q4_K, (256,), 160),
)
DATA = bytes(range(256)) + bytes(48)


def split(no, count):
    return (key("split.no", U16, struct.pack("<H", no)),
            key("split.count", U16, struct.pack("<H", count)),
            key("split.tensors.count", I32, struct.pack("<i", 3)))


SEEDS = {
    "empty-directory": image(),
    "scalars": image(SCALARS),
    "arrays": image(ARRAYS),
    "model": image(SCALARS + ARRAYS, WEIGHTS, DATA),
    "model-v2": image(SCALARS, WEIGHTS, DATA, version=2),
    "aligned-64": image((key("general.alignment", U32, u32(64)),),
                        (tensor("w", TYPE_F32, (2,), 0), tensor("v", TYPE_F32, (2,), 64)),
                        bytes(72), align=64),
    "merged-split": image(split(0, 0), WEIGHTS, DATA),
    "bad-split": image(split(0, 3), WEIGHTS, DATA),
    "bad-version-1": image(SCALARS, version=1),
    "bad-big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "bad-n-kv": image(SCALARS, n_kv=(1 << 60) + 1),
    "bad-n-tensors": image(SCALARS, WEIGHTS, DATA, n_tensors=1 << 40),
    "bad-string": image((key("name", STR, struct.pack("<Q", 1 << 63) + b"x"),)),
    "bad-array": image((key("types", ARRAY, array(U64, (1 << 61) + 1, bytes(8))),)),
    "bad-array-type": image((key("types", ARRAY, array(13, 1, bytes(8))),)),
    "bad-nested": image((key("nested", ARRAY, array(ARRAY, 1) * 40),)),
    "bad-bool": image((key("yes", BOOL, b"\2"),)),
    "bad-key-twice": image((SCALARS[0], SCALARS[0])),
    "bad-key-bytes": image((key(b"a\n\x1b[31m\xff", 99, b""),)),
    "bad-alignment": image((key("general.alignment", U32, u32(1 << 31)),), WEIGHTS, DATA),
    "bad-alignment-0": image((key("general.alignment", U32, u32(0)),), WEIGHTS, DATA),
    "bad-dims": image((), (tensor("w", TYPE_F32, (1 << 62, 4), 0),), DATA),
    "bad-dims-quantised": image((), (tensor("w", TYPE_Q4_K, (1 << 63, 256), 0),), DATA),
    "bad-dim-zero": image((), (tensor("w", TYPE_F32, (4, 0), 0),), DATA),
    "bad-type-removed": image((), (tensor("w", TYPE_REMOVED, (32,), 0),), DATA),
    "bad-row": image((), (tensor("w", TYPE_Q8_0, (33,), 0),), DATA),
    "bad-offset": image((), (tensor("w", TYPE_F32, (4,), (1 << 64) - 32),), DATA),
    "bad-end": image((), (tensor("w", TYPE_F32, (77,), 0),), DATA),
    "bad-overlap": image((), (tensor("w", TYPE_F32, (16,), 0), tensor("v", TYPE_F32, (1,), 32)),
                         DATA),
    "bad-name-twice": image((), (tensor("w", TYPE_F32, (1,), 0), tensor("w", TYPE_F32, (1,), 32)),
                            DATA),
}


def main():
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "gguf"
    out.mkdir(exist_ok=True)
    for name, data in SEEDS.items():
        (out / name).write_bytes(data)


if __name__ == "__main__":
    main()
