"""`titan5d data build` and `titan5d data info`: token shards from the command line.

    titan5d data build --dataset text --path corpus/ --tokenizer bpe4k --out shards/ --workers 8
    titan5d data info shards/ --verify

Exit status: 0 done, 2 refused with the reason on stderr, 1 stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from titan5d.data.build import build_shards, summary
from titan5d.data.errors import DataError
from titan5d.data.shards import TokenShards
from titan5d.data.sources import KEYED_NAMES, TEXT_NAMES, text_source
from titan5d.data.tokenizer import load_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-commands `build` and `info` and their flags."""
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="build|info")
    build = commands.add_parser(
        "build", help="tokenize a text data set into token shards; continues a stopped build"
    )
    build.add_argument("--dataset", required=True, choices=TEXT_NAMES, help="kind of source")
    build.add_argument("--path", help="file, folder or glob; for hub owner/name[:config[:split]]")
    build.add_argument(
        "--key",
        default="text",
        help=f"JSON key or column of the text ({', '.join(KEYED_NAMES)}); default: text",
    )
    build.add_argument(
        "--split",
        default="train",
        choices=("train", "validation"),
        help="part of pysrc or hub; default: train",
    )
    build.add_argument(
        "--tokenizer", required=True, help="bytes, bpe4k, a tokenizer.json or a folder that holds one"
    )
    build.add_argument("--out", required=True, type=Path, help="folder for the shards")
    build.add_argument("--workers", type=int, help="processes; default: one per core")
    build.add_argument(
        "--shard-mib", type=int, help="MiB of source per shard; default: a 64th of the whole, 4 to 256"
    )
    info = commands.add_parser("info", help="what a folder of token shards holds")
    info.add_argument("folder", type=Path, help="folder of shards")
    info.add_argument("--verify", action="store_true", help="read every byte and compare with the checksums")
    info.add_argument("--json", action="store_true", help="print meta.json as one object")


def run(args: argparse.Namespace) -> int:
    """Runs the sub-command. 0: done; 2: refused, with the reason on stderr; 1: stopped by Ctrl-C."""
    try:
        return _build(args) if args.data_command == "build" else _info(args)
    except DataError as error:
        print(f"titan5d data: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "titan5d data: stopped. Finished shards are kept; the same command goes on from there",
            file=sys.stderr,
        )
        return 1


def _build(args: argparse.Namespace) -> int:
    source = text_source(args.dataset, args.path, args.key, args.split)
    piece_bytes = None if args.shard_mib is None else args.shard_mib << 20
    build_shards(source, load_tokenizer(args.tokenizer), args.out, args.workers, piece_bytes)
    return _print_info(TokenShards(args.out))


def _info(args: argparse.Namespace) -> int:
    shards = TokenShards(args.folder)
    if args.verify:
        shards.verify()
    if args.json:
        print(json.dumps(shards.meta))
        return 0
    return _print_info(shards, ", checksums right" if args.verify else "")


def _print_info(shards: TokenShards, verified: str = "") -> int:
    meta = shards.meta
    tokenizer = meta["tokenizer"]
    size = shards.n_tokens * shards.dtype.itemsize / 1e6
    print(f"folder       {shards.folder}")
    print(f"source       {meta['source']['description']}")
    print(f"holds        {summary(meta)}")
    print(f"files        {len(meta['shards'])} shards, {size:.1f} MB of {shards.dtype.name}{verified}")
    print(f"tokenizer    {tokenizer['name']} ({tokenizer['fingerprint']})")
    print(f"             BOS {tokenizer['bos_id']}, EOS {tokenizer['eos_id']}")
    print(f"token ids    up to {shards.max_token_id} of {tokenizer['vocab_size']}")
    print(f"fingerprint  {shards.fingerprint}")
    return 0
