#!/usr/bin/env bash
# What `make test-long` runs, called by scripts/test.sh, which defines `step`. AQUIFER_SOAK_S is how long random programs and each kind of chaos go on;
# AQUIFER_SCHEDULES how many new schedules each simulator plays.

check_dependencies() { cargo deny --all-features check --hide-inclusion-graph licenses bans sources; }

# Undefined behaviour in the code that works on memory which others write. Miri maps no files: memory is this process' own there.
miri() {
    if ! cargo +nightly miri --version >/dev/null 2>&1; then
        echo "skipped: there is no nightly toolchain with miri"
        return
    fi
    CARGO_TARGET_DIR=target/miri MIRIFLAGS=-Zmiri-disable-isolation cargo +nightly miri test --quiet -p aquifer-fabric --lib -- memory:: mailbox::
    CARGO_TARGET_DIR=target/miri MIRIFLAGS=-Zmiri-disable-isolation cargo +nightly miri test --quiet -p aquifer-ipc --lib -- ring::
}

# Without RDMA and etcd the build needs neither clang nor cmake nor protoc.
check_without_features() {
    folder=$(mktemp -d)
    for tool in clang cmake protoc; do
        printf '#!/bin/sh\necho "%s was called in a build without features" >&2\nexit 1\n' "$tool" >"$folder/$tool"
        chmod +x "$folder/$tool"
    done
    PATH="$folder:$PATH" LIBCLANG_PATH="$folder" CARGO_TARGET_DIR=target/bare \
        cargo check --quiet -p aquifer -p aquifer-bench --no-default-features
    rm -rf "$folder"
}

build_release() {
    cargo build --release --quiet
    ln -sf libaquifer_malloc.so target/release/libaquifer-malloc.so
}

test_long() {
    step "install what is missing" scripts/install-deps.sh long
    step "licences and duplicates of dependencies" check_dependencies
    step "build without features" check_without_features
    step "build" build
    step "release build" build_release
    step "miri" miri
    AQUIFER_BIN="$PWD/target/release/aquifer" step "tests, end to end on the release build" run_tests long
}
