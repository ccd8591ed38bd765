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

# Runs each bench for a short time: the figures do not matter, but each must succeed.
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

# The parts of `make test-long`; PART names some of them.
#
#   checks      licences, the build without features, Miri
#   fuzz        each parser for a while
#   benches     each bench for a short time
#   simulators  new schedules, and the other long tests of crates
#   peers       memcached and `aquifer cache` side by side
#   programs    programs on real clusters, with the release build
#   chaos       daemons that die, stop and are cut off; random programs
#   guests      virtual machines
PARTS="checks fuzz benches simulators peers programs chaos guests"

check_part_names() {
    for name in ${PART:-}; do
        case " $PARTS " in
        *" $name "*) ;;
        *)
            echo "PART=$name: the parts are $PARTS" >&2
            return 2
            ;;
        esac
    done
}

is_asked() {
    for asked in ${PART:-$PARTS}; do
        for name in "$@"; do
            [ "$asked" != "$name" ] || return 0
        done
    done
    return 1
}

# A nextest filter of the tests of the requested parts.
filter_of_parts() {
    e2e='package(aquifer-tests-e2e)'
    of_chaos="$e2e & test(/^(chaos|soak)::/)"
    elsewhere="$e2e | package(aquifer-tests-memcached) | package(aquifer-tests-guests)"
    filter='none()'
    if is_asked simulators; then filter="$filter | not ($elsewhere)"; fi
    if is_asked peers; then filter="$filter | package(aquifer-tests-memcached)"; fi
    if is_asked programs; then filter="$filter | ($e2e - ($of_chaos))"; fi
    if is_asked chaos; then filter="$filter | ($of_chaos)"; fi
    if is_asked guests; then filter="$filter | package(aquifer-tests-guests)"; fi
    echo "$filter"
}

test_long() {
    check_part_names
    step "install missing packages" scripts/install-deps.sh long
    if is_asked checks; then
        step "licences and duplicates of dependencies" check_dependencies
        step "build without features" check_without_features
        step "miri" miri
    fi
    if is_asked fuzz; then
        step "fuzzing" scripts/fuzz.sh check
    fi
    if is_asked benches simulators programs chaos guests; then
        step "release build" build_release
    fi
    if is_asked benches; then
        step "benches, for a short time" short_benches
    fi
    if is_asked simulators peers programs chaos guests; then
        step "build with lints" build
        AQUIFER_BIN="$PWD/target/release/aquifer" step "tests" run_tests long -E "$(filter_of_parts)"
    fi
}
