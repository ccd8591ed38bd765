#!/usr/bin/env bash
# All that must hold: formatting, tidy, lints, unit tests, simulators, then the end-to-end tests on the release build, and a few of those in guests.
# The last lines are cargo's own results, one for each test program. What ran before a failure is shown too.
set -euo pipefail
# A shell that starts this in the background has it ignore SIGINT, and so would all programs that tests end by it.
if [ -z "${AQUIFER_SIGNALS:-}" ]; then
    AQUIFER_SIGNALS=default exec env --default-signal=INT,QUIT "$BASH" "$0" "$@"
fi
cd "$(dirname "$0")/.."

log=$(mktemp)
results() {
    status=$?
    echo
    echo "results:"
    grep '^test result:' "$log" || echo "no test was run"
    rm -f "$log"
    if [ "$status" = 0 ]; then echo "make test: all passed"; else echo "make test: FAILED (status $status)"; fi
}
trap results EXIT

step() {
    echo
    echo "== $*"
}

step "what is missing is installed"
guests=guests
[ "${AQUIFER_GUESTS:-}" != skip ] || guests=
# shellcheck disable=SC2086 # A list, or nothing.
scripts/install-deps.sh test $guests

step "formatting"
cargo fmt --all --check

# Before what takes long.
step "tidy"
cargo test -p aquifer-tests-tidy 2>&1 | tee -a "$log"

step "lints"
cargo clippy --workspace --all-targets --quiet -- -D warnings
# What is no part of `cargo test`.
cargo clippy --workspace --quiet --test conformance-verbs --test initiators-verbs --test client-verbs --test killed-verbs --test long -- -D warnings
if command -v shellcheck >/dev/null 2>&1; then
    shellcheck scripts/*.sh .ci/run
fi

step "unit tests, conformance suites, simulators"
cargo test --workspace --exclude=aquifer-tests-{tidy,e2e,guests} 2>&1 | tee -a "$log"

step "release build"
cargo build --release

step "end to end"
AQUIFER_BIN=$PWD/target/release/aquifer cargo test -p aquifer-tests-e2e -- --test-threads=1 2>&1 | tee -a "$log"

step "in guests (AQUIFER_GUESTS=skip goes on without)"
AQUIFER_BIN=$PWD/target/release/aquifer cargo test -p aquifer-tests-guests -- --test-threads=1 2>&1 | tee -a "$log"
