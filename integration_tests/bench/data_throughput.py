"""How fast rows come out of token shards, on one core.

    python integration_tests/bench/data_throughput.py

Builds random shards in a temporary folder, then times shards -> packing -> micro-batches without a prefetch
thread. Prints tokens per CPU second for several row and document lengths, each also as a ratio to copying the
same tokens out of the memory map. Exit status 1 if rows of 2,048 or more come slower than 20 M tokens a second.
"""

from __future__ import annotations

import json
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np

from titan5d.data.build import build_shards
from titan5d.data.corpus import LineFiles
from titan5d.data.loader import DataLoader
from titan5d.data.packing import PackedShards
from titan5d.data.shards import TokenShards
from titan5d.data.tokenizer import ByteTokenizer

TOKENS = 16_000_000
TOKENS_A_STEP = 1 << 19
WANTED = 20e6  # tokens per second and core


def make_shards(folder: Path, document_length: int) -> TokenShards:
    """About TOKENS random byte tokens in documents of `document_length` on average."""
    generator = np.random.default_rng(0)
    letters = generator.integers(97, 123, TOKENS, dtype=np.uint8)
    ends = np.flatnonzero(generator.random(TOKENS) < 1 / document_length)
    letters[ends] = ord("\n")
    folder.mkdir()
    file = folder / "corpus.txt"
    file.write_bytes(letters.tobytes())
    source = LineFiles([file], "random letters")
    return build_shards(source, ByteTokenizer(), folder / "shards", workers=1, log=lambda line: None)


def tokens_per_second(shards: TokenShards, seq_len: int) -> float:
    """Through packing, order and loader, in tokens per CPU second."""
    rows = TOKENS_A_STEP // seq_len
    loader = DataLoader(
        PackedShards(shards, seq_len),
        global_batch_size=rows,
        local_batch_size=max(rows // 8, 1),
        dp_rank=0,
        dp_size=1,
        seed=0,
        prefetch=0,
    )
    batches = iter(loader)
    next(batches)  # maps the files
    start = time.process_time()
    steps = sum(1 for _ in islice(batches, 20))
    return steps * rows * seq_len / (time.process_time() - start)


def copies_per_second(shards: TokenShards) -> float:
    """Copying the same tokens as int64, nothing else: the ceiling."""
    out = np.empty(TOKENS_A_STEP, np.int64)
    start = time.process_time()
    steps = 20
    for step in range(steps):
        shards.read_into(out, step * TOKENS_A_STEP % (shards.n_tokens - TOKENS_A_STEP))
    return steps * TOKENS_A_STEP / (time.process_time() - start)


def main() -> int:
    """Prints the table and one JSON object; 0 if every line with rows of 2,048 and more is fast enough."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for document_length in (100, 1000, 20_000):
            shards = make_shards(Path(folder) / str(document_length), document_length)
            ceiling = copies_per_second(shards)
            for seq_len in (512, 2048, 8192):
                speed = tokens_per_second(shards, seq_len)
                results.append({"documents": document_length, "rows": seq_len, "tokens_per_s": round(speed)})
                shape = f"documents of {document_length:>6} tokens, rows of {seq_len:>5}"
                print(f"{shape}: {speed / 1e6:6.1f} M tokens/s a core, {speed / ceiling:5.1%} of a bare copy")
    slow = [line for line in results if line["rows"] >= 2048 and line["tokens_per_s"] < WANTED]
    print(json.dumps({"wanted": WANTED, "slow": slow, "results": results}))
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
