#!/usr/bin/env bash
# The steps of `make test-long`, for scripts/test.sh, which defines `step`.
#
# AQUIFER_SOAK_S: seconds of random programs, and of each kind of chaos.
# AQUIFER_SCHEDULES: new schedules that each simulator plays.
# AQUIFER_FUZZ_SECONDS: seconds for which each parser is fuzzed.

check_dependencies() { cargo deny --all-features check --hide-inclusion-graph licenses bans sources; }

# Finds undefined behaviour in code that works on shared memory. Under Miri the memory is private,
# because Miri does not map files.
test_under_miri() {
    CARGO_TARGET_DIR=target/miri MIRIFLAGS=-Zmiri-disable-isolation \
        cargo +nightly miri test --quiet "$@"
}

miri() {
    if ! cargo +nightly miri --version >/dev/null 2>&1; then
        echo "skipped: no nightly toolchain with miri"
        return
    fi
    test_under_miri -p aquifer-fabric --lib -- memory:: mailbox::
    test_under_miri -p aquifer-ipc --lib -- ring::
}

# Checks that a build without RDMA and etcd needs neither clang nor cmake nor protoc.
check_without_features() {
    folder=$(mktemp -d)
    for tool in clang cmake protoc; do
        message="$tool was called in a build without features"
        printf '#!/bin/sh\necho "%s" >&2\nexit 1\n' "$message" >"$folder/$tool"
        chmod +x "$folder/$tool"
    done
    PATH="$folder:$PATH" LIBCLANG_PATH="$folder" CARGO_TARGET_DIR=target/bare \
        cargo check --quiet -p aquifer -p aquifer-bench --no-default-features
    rm -rf "$folder"
}

build_release() {
    cargo build --release --quiet
    cargo build --release --quiet -p aquifer-research
    ln -sf libaquifer_malloc.so target/release/libaquifer-malloc.so
}

# Runs each bench for a short time: the figures do not matter, but each must come to its end.
short_benches() {
    scripts/install-deps.sh bench
    for name in $(target/release/aquifer bench list | cut -d ' ' -f 1); do
        echo "bench $name"
        target/release/aquifer bench "$name" --quick
    done
    for name in $(target/release/aquifer-research list | cut -d ' ' -f 1); do
        echo "research $name"
        target/release/aquifer-research "$name" --quick
    done
}

test_long() {
    step "install missing packages" scripts/install-deps.sh long
    step "licences and duplicates of dependencies" check_dependencies
    step "build without features" check_without_features
    step "build with lints" build
    step "release build" build_release
    step "miri" miri
    step "fuzzing" scripts/fuzz.sh check
    step "benches, for a short time" short_benches
    AQUIFER_BIN="$PWD/target/release/aquifer" step "tests, end to end on the release build" run_tests long
}
