"""python -m mtp_kernels.bench.peers slim OUT.whl IN.whl: a wheel with only the files that the loaders read."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import slim


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mtp_kernels.bench.peers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("slim", help="write OUT with only the files of IN that the loaders read")
    command.add_argument("out", type=Path, metavar="OUT.whl")
    command.add_argument("wheel", type=Path, metavar="IN.whl")
    args = parser.parse_args(argv)
    try:
        slim(args.out, args.wheel)
    except ValueError as error:
        parser.error(str(error))
    print(f"{args.out}: {args.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
