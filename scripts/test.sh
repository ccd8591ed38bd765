#!/usr/bin/env bash
# The test loop.
#
#   scripts/test.sh check   formatting, rules, lints, documents, unit tests, simulators; 5 minutes
#   scripts/test.sh test    all tests except the long ones, as in CI; 15 minutes from a clean clone
#   scripts/test.sh long    virtual machines, other languages, chaos, the release build
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
# A signal is no success, whatever ended last.
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

lint() {
    cargo clippy --workspace --all-targets --quiet -- -D warnings
    # Tests that need RDMA devices, which --all-targets does not include.
    cargo clippy --workspace --quiet --test conformance-verbs --test initiators-verbs \
        --test client-verbs --test killed-verbs --test heaps-verbs -- -D warnings
    if command -v shellcheck >/dev/null 2>&1; then
        shellcheck -x scripts/*.sh .ci/run
    fi
}

check_documentation() {
    RUSTDOCFLAGS="-D warnings -A rustdoc::private-intra-doc-links" \
        cargo doc --workspace --no-deps --document-private-items --quiet
}

build() {
    cargo build --workspace --all-targets --quiet
    ln -sf libaquifer_malloc.so target/debug/libaquifer-malloc.so
}

run_tests() { cargo nextest run --workspace --profile "$1"; }

# Tests leave the processors idle half of the time, so lints run beside them, with what is left. The
# tests are found before that: cargo locks the folder of the build.
run_tests_beside_lints() {
    cargo metadata --format-version 1 >target/metadata.json
    cargo nextest list --workspace --list-type binaries-only --message-format json >target/binaries.json
    nice -n 19 bash -c "$(declare -f lint); set -e; lint" >target/lints.log 2>&1 &
    lints=$!
    tested=0
    cargo nextest run --profile "$1" --test-threads $(($(nproc) + 4)) \
        --cargo-metadata target/metadata.json --binaries-metadata target/binaries.json || tested=$?
    if ! wait "$lints"; then
        cat target/lints.log
        echo "the lints have failed"
        return 1
    fi
    return "$tested"
}

rm -rf "$reports"
case $loop in
check)
    step "install missing packages" scripts/install-deps.sh check
    step "formatting" cargo fmt --all --check
    step "lints" lint
    step "documentation" check_documentation
    step "build" build
    step "tests" run_tests check
    ;;
test)
    step "install missing packages" scripts/install-deps.sh test
    step "formatting" cargo fmt --all --check
    step "build" build
    step "lints and tests" run_tests_beside_lints default
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
