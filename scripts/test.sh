#!/usr/bin/env bash
# The test loop.
#
#   scripts/test.sh check            before each commit: formatting, rules, lints, unit tests, conformance, simulators; 5 minutes
#   scripts/test.sh test             that, all other crates' tests, and the end-to-end tests; what CI runs; 15 minutes from a clean clone
#   scripts/test.sh long             what takes longer: guests, other languages, chaos, soak, the release binary, one large run
#
# All of it is built once, with one profile (`dev`), one set of packages and one set of features. At the end come the time of each step, the ten
# slowest tests and what was skipped; in CI nothing may be.
set -euo pipefail
# A shell that starts this in the background has it ignore SIGINT, and so would all programs that tests end by it.
if [ -z "${AQUIFER_SIGNALS:-}" ]; then
    AQUIFER_SIGNALS=default exec env --default-signal=INT,QUIT "$BASH" "$0" "$@"
fi
cd "$(dirname "$0")/.."
loop=${1:-test}
target=$loop
[ "$loop" != long ] || target=test-long
export PATH="$PWD/target/tools/bin:$PATH"
export AQUIFER_BIN="$PWD/target/debug/aquifer"
reports=target/nextest

times=$(mktemp)
summary() {
    status=$?
    set +e
    echo
    echo "steps:"
    cat "$times"
    rm -f "$times"
    scripts/test_report.py "$reports"/*/junit.xml
    reported=$?
    [ "$status" != 0 ] || status=$reported
    if [ "$status" = 0 ]; then echo "make $target: all passed"; else echo "make $target: FAILED (status $status)"; fi
    exit "$status"
}
trap summary EXIT

# step NAME COMMAND…
step() {
    name=$1
    shift
    echo
    echo "== $name"
    started=$SECONDS
    "$@" || {
        status=$?
        printf '  %4d s  %s: failed\n' $((SECONDS - started)) "$name" >>"$times"
        return "$status"
    }
    printf '  %4d s  %s\n' $((SECONDS - started)) "$name" >>"$times"
}

lint() {
    cargo clippy --workspace --all-targets --quiet -- -D warnings
    # What `cargo test` leaves out: it needs RDMA devices.
    cargo clippy --workspace --quiet --test conformance-verbs --test initiators-verbs --test client-verbs --test killed-verbs -- -D warnings
    if command -v shellcheck >/dev/null 2>&1; then
        shellcheck -x scripts/*.sh .ci/run
    fi
}

build() {
    cargo build --workspace --all-targets --quiet
    ln -sf libaquifer_malloc.so target/debug/libaquifer-malloc.so
}

run_tests() { cargo nextest run --workspace --profile "$1"; }

rm -rf "$reports"
case $loop in
check)
    step "install what is missing" scripts/install-deps.sh check
    step "formatting" cargo fmt --all --check
    step "lints" lint
    step "build" build
    step "tests" run_tests check
    ;;
test)
    step "install what is missing" scripts/install-deps.sh test
    step "formatting" cargo fmt --all --check
    step "lints" lint
    step "build" build
    step "tests" run_tests default
    ;;
long)
    # shellcheck source=scripts/test_long.sh
    . scripts/test_long.sh
    test_long
    ;;
*)
    echo "usage: scripts/test.sh check|test|long" >&2
    exit 2
    ;;
esac
