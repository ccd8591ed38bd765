#!/usr/bin/env python3
"""Summarises JUnit reports of nextest: slowest tests, skipped and failed tests, numbers of results.

A test that cannot run on a machine prints a line "skipped: REASON" (aquifer_tests_support::skip).
If the variable CI is set, a skipped test is a failure, because CI has everything that tests need.
"""

import os
import sys
import xml.etree.ElementTree as xml

SLOWEST = 10


def cases(paths):
    for path in paths:
        if not os.path.exists(path):
            continue
        for suite in xml.parse(path).getroot().iter("testsuite"):
            for case in suite.iter("testcase"):
                yield suite.get("name"), case


def skip_reason(case):
    out = case.find("system-out")
    lines = (out.text or "").splitlines() if out is not None else []
    return next((line[len("skipped: ") :] for line in lines if line.startswith("skipped: ")), None)


def main():
    tests = list(cases(sys.argv[1:]))
    if not tests:
        return 0
    names = {id(case): f"{suite} {case.get('name')}" for suite, case in tests}
    failed = [case for _, case in tests if case.find("failure") is not None or case.find("error") is not None]
    skipped = [(names[id(case)], reason) for _, case in tests if (reason := skip_reason(case)) is not None]

    print("\nslowest tests:")
    by_time = sorted((case for _, case in tests), key=lambda case: -float(case.get("time")))
    for case in by_time[:SLOWEST]:
        print(f"  {float(case.get('time')):6.1f} s  {names[id(case)]}")
    for heading, lines in (
        ("skipped", [f"{name}: {reason}" for name, reason in skipped]),
        ("failed", [names[id(case)] for case in failed]),
    ):
        if lines:
            print(f"\n{heading}:")
            print("\n".join(f"  {line}" for line in lines))
    passed = len(tests) - len(failed) - len(skipped)
    print(f"\nresults: {passed} passed, {len(failed)} failed, {len(skipped)} skipped")
    return 1 if skipped and os.environ.get("CI") else 0


if __name__ == "__main__":
    sys.exit(main())
