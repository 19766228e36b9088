"""The command `mtp-kernels`: demo, bench and report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from . import __version__
from ._report import report
from .ops import ArgumentError, ImplementationError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; 2 with a one-line message when something it needs is missing or an argument is wrong."""
    parser = _Parser(prog="mtp-kernels", description="Fused kernels for frozen-KV MTP drafting.")
    parser.add_argument("--version", action="version", version=f"mtp-kernels {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="decode a held-out prompt, drafting with this library")
    from . import demo as demo_package

    demo_package.add_arguments(demo)
    import mtp_kernels.bench as bench_package

    bench = commands.add_parser("bench", help="measure ops, steps and rounds beside their floors and peers")
    bench_package.add_arguments(bench)
    listing = commands.add_parser("report", help="which implementation serves each op on this machine, and why")
    listing.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    args.words = list(sys.argv[1:] if argv is None else argv)  # for the record of what was run
    if args.command == "report":
        return _report(args.json)
    try:
        return demo_package.run(args) if args.command == "demo" else bench_package.run(args)
    except (demo_package.DemoError, bench_package.BenchError, ArgumentError, ImplementationError) as error:
        print(f"mtp-kernels {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; -h has the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")


def _report(as_json: bool) -> int:
    found = report()
    print(json.dumps(dataclasses.asdict(found)) if as_json else found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
