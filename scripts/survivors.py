#!/usr/bin/env python3
"""Changes functions at random, and reports the changes that no test notices.

    scripts/survivors.py [--seed N] [--count N] [--only TEXT] [--list]

cargo-mutants makes the changes, such as an empty body or a negated condition. Chosen are functions
that write, release or fence something, in crates of which simulators play little or nothing. All
happens in a copy of the committed tree, target/survivors. A change is first shown to the tests of
its crate, and then to the end-to-end tests. A change that survives is no fault by itself: read it,
and write a test if it loses data, lets others wait or opens access.

Changes that do not compile are counted apart: they show nothing.

Exit status: 0 if all others were noticed, 1 if some survived, 2 if something went wrong.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "target/survivors/tree"
MUTANTS = ROOT / "target/survivors/bin/cargo-mutants"
VERSION = "27.1.0"
# The crates, and the end-to-end tests that concern each.
CRATES = {
    "aquifer-agent": "package(aquifer-tests-e2e)",
    "aquifer-cache-cluster": "package(aquifer-tests-memcached)",
    "aquifer-client": "package(aquifer-tests-e2e)",
    "aquifer-heaps": "package(aquifer-tests-e2e) & test(/heap|kv|object/)",
    "aquifer-host": "package(aquifer-tests-e2e)",
    "aquifer-keeper": "package(aquifer-tests-e2e) & test(/restart|keep|resume|success/)",
    "aquifer-swap": "package(aquifer-tests-e2e) & test(/swap/)",
}
# Words in the names of functions whose errors may lose data.
NAMES = re.compile(
    "abandon|claim|clear|close|delete|drain|drop|end|expel|expire|fail|fence|forget|free|give|keep|leave"
    "|lose|put|receive|record|refuse|release|remove|renew|revoke|save|seal|send|set|stop|store|take|write"
)
# For a build, or for the tests of one change.
STEP_TIMEOUT_S = 1800

UNUSABLE = "no code"


def run(command, **options):
    return subprocess.run(command, cwd=COPY, text=True, **options)


def install():
    if MUTANTS.exists():
        return
    print(f"survivors: installing cargo-mutants {VERSION} into target/survivors", flush=True)
    root = MUTANTS.parent.parent
    command = ["cargo", "install", "--quiet", "--locked", "--root", root, "--version", VERSION]
    subprocess.run([*command, "cargo-mutants"], check=True)


def copy_tree():
    """Checks the present commit out into the copy. Its build output stays."""
    if not COPY.exists():
        subprocess.run(["git", "clone", "--quiet", "--local", ROOT, COPY], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    run(["git", "fetch", "--quiet", "origin"], check=True)
    run(["git", "checkout", "--quiet", "--force", "--detach", head.stdout.strip()], check=True)


def list_mutants():
    packages = [option for crate in CRATES for option in ("--package", crate)]
    command = [MUTANTS, "mutants", "--list", "--json", "--diff", "--no-config", *packages]
    listed = json.loads(run(command, check=True, capture_output=True).stdout)
    return [m for m in listed if m.get("function") and NAMES.search(m["function"]["function_name"].lower())]


def tests_pass(filterset, environment):
    """Whether the copy passes these tests; `None` if it cannot be compiled."""
    for command in (
        ["cargo", "build", "--quiet", "--workspace", "--all-targets"],
        ["cargo", "nextest", "run", "--workspace", "--fail-fast", "--no-tests", "pass", "-E", filterset],
    ):
        try:
            outcome = run(command, env=environment, capture_output=True, timeout=STEP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return False
        if outcome.returncode != 0:
            return None if command[1] == "build" else False
    return True


def notice(mutant, environment):
    """Names the tests that failed with a change, or a failed build; `None` if it has survived."""
    # The second line of the diff is a description where the name of the file should be.
    before, _, changes = mutant["diff"].split("\n", 2)
    patch = "\n".join([before, f"+++ {mutant['file']}", changes])
    run(["git", "apply", "-p0", "-"], input=patch, check=True)
    package = mutant["package"]
    try:
        for who, filterset in (("its crate", f"package({package})"), ("end to end", CRATES[package])):
            passed = tests_pass(filterset, environment)
            if not passed:
                return UNUSABLE if passed is None else who
        return None
    finally:
        run(["git", "checkout", "--quiet", "--force", "."], check=True)


def main():
    parser = argparse.ArgumentParser(description="Reports changes of functions that no test notices.")
    parser.add_argument("--seed", type=int, help="draws the same changes of the same commit again")
    parser.add_argument("--count", type=int, default=20, help="number of changes (default: 20)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only changes whose names contain this")
    parser.add_argument("--list", action="store_true", help="only lists the changes")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    install()
    copy_tree()
    mutants = list_mutants()
    chosen = random.Random(seed).sample(mutants, min(arguments.count, len(mutants)))
    chosen = [mutant for mutant in chosen if arguments.only in mutant["name"]]
    print(f"survivors: {len(chosen)} of {len(mutants)} changes, --seed {seed}", flush=True)
    if arguments.list:
        print("\n".join(mutant["name"] for mutant in chosen))
        return 0
    environment = {
        **os.environ,
        "AQUIFER_BIN": str(COPY / "target/debug/aquifer"),
        "PATH": f"{ROOT / 'target/tools/bin'}:{os.environ['PATH']}",
    }
    if not tests_pass(" | ".join(f"package({crate})" for crate in CRATES), environment):
        print("survivors: the tests fail without any change", file=sys.stderr)
        return 2
    survivors, unusable = [], 0
    for number, mutant in enumerate(chosen, 1):
        by = notice(mutant, environment)
        print(f"{number:3} {by or 'SURVIVED':12} {mutant['name']}", flush=True)
        survivors += [] if by else [mutant]
        unusable += by == UNUSABLE
    compiled = len(chosen) - unusable
    print(f"\nsurvivors: {len(survivors)} of {compiled}; {unusable} did not compile; --seed {seed}")
    for mutant in survivors:
        print(f"\n{mutant['name']}\n{mutant['diff']}")
    return 1 if survivors else 0


if __name__ == "__main__":
    if shutil.which("cargo") is None:
        sys.exit("survivors: cargo is missing")
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        print(f"survivors: {error}\n{error.stderr or ''}", file=sys.stderr)
        sys.exit(2)
