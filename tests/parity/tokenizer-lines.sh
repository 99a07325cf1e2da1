#!/bin/sh
# SPDX-License-Identifier: MIT
# tokenizer-lines.sh VTOK: writes the ids of tests/unit/tokenizer-lines.txt as llama.cpp sees them, one file a vocabulary:
# tokenizer-ids-NAME.txt for all lines as plain text, tokenizer-special-NAME.txt for those with a '<', special tokens parsed.
# Run it from the repository root, after adding lines. VTOK is the oracle program that shared/peer/setup builds; the
# vocabularies are in shared/vocab (RESIDENTD_SHARED, else ../shared), the bundled model's is in its file.
# Rules without a vocabulary of their own are put into the file of another: tests/unit/test-tokenizer.c does the same.
# In the lines \n \t \r \\ and \xNN are escapes. A line must not hold a code point above U+10FFFF (it aborts the oracle), nor a
# user-defined token (the oracle parses those in plain text too, this project does not).
set -eu
[ $# -eq 1 ] || { echo "usage: tokenizer-lines.sh VTOK" >&2; exit 2; }
shared=${RESIDENTD_SHARED:-../shared}
unit=tests/unit
one() {
	"$1" "$2" <$unit/tokenizer-lines.txt >$unit/tokenizer-ids-"$3".txt
	grep '<' $unit/tokenizer-lines.txt | "$1" -s "$2" >$unit/tokenizer-special-"$3".txt
	echo "$3: $(wc -l <$unit/tokenizer-ids-"$3".txt) lines, $(wc -l <$unit/tokenizer-special-"$3".txt) with special tokens"
}
for name in qwen35 qwen2 gpt-2 llama-bpe deepseek-llm deepseek-coder starcoder llama-spm phi-3; do
	one "$1" "$shared/vocab/ggml-vocab-$name.gguf" $name
done
changed=$(mktemp)
trap 'rm -f "$changed"' EXIT
for pair in tekken:qwen2 gpt-4o:llama-bpe deepseek-v3:qwen2; do
	python3 - "$shared/vocab/ggml-vocab-${pair#*:}.gguf" "$changed" "${pair%:*}" <<-'END'
		import struct, sys
		data, name = open(sys.argv[1], "rb").read(), sys.argv[3].encode()
		key = b"tokenizer.ggml.pre" + struct.pack("<I", 8)
		at = data.index(key) + len(key)
		end = at + 8 + struct.unpack_from("<Q", data, at)[0]
		open(sys.argv[2], "wb").write(data[:at] + struct.pack("<Q", len(name)) + name + data[end:])
	END
	one "$1" "$changed" "${pair%:*}"
done
one "$1" tests/models/tiny-qwen35moe-stories-q8_0.gguf tiny
