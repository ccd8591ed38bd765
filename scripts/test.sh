#!/usr/bin/env bash
# The test loop.
#
#   scripts/test.sh check   formatting, rules, lints, documents, unit tests, simulators; 5 minutes
#   scripts/test.sh test    all tests except the long ones, as in CI; 15 minutes from a clean clone
#   scripts/test.sh long    virtual machines, other languages, chaos, the release build; with
#                           PART=NAME a part of that: see scripts/test_long.sh
#
# All steps use one build, with one profile (`dev`), one set of packages and one set of features.
# At the end the script prints the time of each step, the ten slowest tests and the skipped tests.
# In CI a skipped test is a failure.
set -euo pipefail
# A shell starts background jobs with SIGINT ignored. Programs inherit that, and tests end programs
# with SIGINT.
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
    if [ "$status" = 0 ]; then
        echo "make $target: all passed"
    else
        echo "make $target: FAILED (status $status)"
    fi
    exit "$status"
}
trap summary EXIT
# After a signal the exit code is not 0, whatever the last command returned.
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# step NAME COMMAND…: runs a command and records its time.
step() {
    name=$1
    shift
    echo
    echo "== $name"
    started=$SECONDS
    # Not `"$@" || …`: that would switch off `set -e` inside of functions.
    set +e
    (
        set -e
        "$@"
    )
    status=$?
    set -e
    if [ "$status" != 0 ]; then
        printf '  %4d s  %s: failed\n' $((SECONDS - started)) "$name" >>"$times"
        return "$status"
    fi
    printf '  %4d s  %s\n' $((SECONDS - started)) "$name" >>"$times"
}

# Compiles with clippy-driver, which compiles as rustc does, and lints. `cargo clippy` would check
# all dependencies a second time, which takes minutes. Cargo keeps what it builds with and without
# this apart, so the build and the tests both use it.
with_lints() {
    RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS='-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__' "$@"
}

# Tests that need RDMA devices, which --all-targets does not include.
VERBS_TESTS=(conformance-verbs initiators-verbs client-verbs killed-verbs heaps-verbs)

lint_scripts() {
    if command -v shellcheck >/dev/null 2>&1; then
        shellcheck -x scripts/*.sh .ci/run
    fi
}

check_documentation() {
    RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" \
        cargo doc --workspace --no-deps --document-private-items --quiet
}

build() {
    lint_scripts
    with_lints cargo build --workspace --all-targets "${VERBS_TESTS[@]/#/--test=}" --quiet
    ln -sf libaquifer_malloc.so target/debug/libaquifer-malloc.so
}

run_tests() { with_lints cargo nextest run --workspace --profile "$@"; }

# Many tests wait: four more at a time than there are processors keep these busy.
run_many_tests() {
    with_lints cargo nextest run --workspace --profile "$1" --test-threads $(($(nproc) + 4))
}

rm -rf "$reports"
case $loop in
check)
    step "install missing packages" scripts/install-deps.sh check
    step "formatting" cargo fmt --all --check
    step "build with lints" build
    step "documentation" check_documentation
    step "tests" run_tests check
    ;;
test)
    step "install missing packages" scripts/install-deps.sh test
    step "formatting" cargo fmt --all --check
    step "build with lints" build
    step "tests" run_many_tests default
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
