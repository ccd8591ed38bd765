#!/usr/bin/env python3
"""Counts lines of Rust code that are neither blank nor comments. Benches are counted separately.

    scripts/count_code.py [REVISION]     the working tree, or a revision
"""

import subprocess
import sys

# Benches, demo and peers, in this revision and in earlier ones.
BENCHES = (
    "crates/bench/",
    "crates/research/",
    "crates/aquifer/src/bench/",
    "crates/aquifer/src/demo/",
    "crates/aquifer/src/peers/",
)


def git(*arguments):
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def is_test(path):
    is_module = path.endswith(("/tests.rs", "_tests.rs"))
    return is_module or path.startswith("tests/") or "/tests/" in path or "/sim/" in path


def code_lines(text):
    lines = (line.strip() for line in text.splitlines())
    return sum(1 for line in lines if line and not line.startswith("//"))


def main():
    revision = sys.argv[1] if len(sys.argv) > 1 else None
    names = git("ls-tree", "-r", "--name-only", revision) if revision else git("ls-files")
    counts = {"product": 0, "unit tests in its files": 0, "other tests": 0, "benches": 0}
    for path in names.splitlines():
        if not path.endswith(".rs"):
            continue
        text = git("show", f"{revision}:{path}") if revision else open(path, encoding="utf-8").read()
        if path.startswith(BENCHES):
            counts["benches"] += code_lines(text)
        elif is_test(path):
            counts["other tests"] += code_lines(text)
        else:
            product, _, tests = text.partition("\n#[cfg(test)]\nmod tests {")
            counts["product"] += code_lines(product)
            counts["unit tests in its files"] += code_lines(tests)
    for name, count in counts.items():
        print(f"{count:7}  {name}")
    print(f"{sum(counts.values()) - counts['benches']:7}  all but benches")


if __name__ == "__main__":
    main()
