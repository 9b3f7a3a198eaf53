"""Measures, and writes the tables of docs/performance.md.

    python -m tests.bench  # every section, some two hours
    python -m tests.bench replies masks  # these
    python -m tests.bench --write processes  # put the new table into docs/performance.md
    python -m tests.bench --short  # a few seconds of each, as CI runs it

Ratios and differences in one run, never absolute times as results; a quiet machine is half of the measurement.
"""

import argparse
import re
import sys
from importlib import import_module
from pathlib import Path

SECTIONS = ("replies", "first_token", "steps", "long_replies", "masks", "processes", "peer")
PAGE = Path(__file__).parent.parent.parent / "docs" / "performance.md"


def write(section: str, lines: list[str]) -> None:
    """Put the table of a section between its two comments on the page."""
    page, (begin, end) = PAGE.read_text(), (f"<!-- {section} -->", f"<!-- end of {section} -->")
    new, found = re.subn(f"{begin}.*?{end}", lambda _: "\n".join([begin, *lines, end]), page, flags=re.S)
    if found != 1:
        raise SystemExit(f"{PAGE} has no place for {section}")
    PAGE.write_text(new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="All, where none is named")
    parser.add_argument("--short", action="store_true", help="A few seconds of each")
    parser.add_argument("--write", action="store_true", help="Put the tables into docs/performance.md")
    options = parser.parse_args()
    for section in options.sections or SECTIONS:
        print(f"\n## {section}\n", flush=True)
        lines = []
        for line in import_module(f"tests.bench.{section}").table(options.short):
            print(line, flush=True)
            lines.append(line)
        if options.write:
            write(section, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
