#!/usr/bin/env bash
# Fuzzes the parsers of bytes from outside with libFuzzer, on the stable toolchain.
#
#   scripts/fuzz.sh [TARGET [SECONDS]]   searches for inputs that break a target, or each of them
#   scripts/fuzz.sh mutation [TARGET]    fails if the search does not notice the target's mutation
#   scripts/fuzz.sh check                mutations of all targets, and then a short search of each
#   scripts/fuzz.sh merge [TARGET]       adds the inputs that searches have found to the corpus
#   scripts/fuzz.sh replay TARGET FILE   runs a target on one input
#
# The targets are the folders in tests/fuzz/corpus. Searches begin with these files; new inputs
# are in target/fuzz/corpus, and inputs that break a target are in target/fuzz/findings.
#
# AQUIFER_FUZZ_SECONDS: seconds of each search in `check`.
set -euo pipefail
cd "$(dirname "$0")/.."

corpora=tests/fuzz/corpus
work=target/fuzz
host=$(rustc -vV | sed -n 's/^host: //p')
fuzzer=$work/$host/release/aquifer-libfuzzer
# Seconds in which a mutation must be noticed.
mutation_seconds=60
# Exit status of libFuzzer when an input breaks the target.
broken=77
# Most files of a corpus beside its seeds.
files_max=30

# The passes are those of cargo-fuzz. Only sanitizers need a nightly toolchain; coverage does not.
build() {
    local flags="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
    flags="$flags -Cllvm-args=-sanitizer-coverage-inline-8bit-counters"
    flags="$flags -Cllvm-args=-sanitizer-coverage-pc-table"
    flags="$flags -Cllvm-args=-sanitizer-coverage-trace-compares"
    # With --target, the flags do not apply to build scripts and macros.
    CARGO_TARGET_DIR=$work RUSTFLAGS=$flags cargo build --quiet --release --target "$host" \
        --manifest-path tests/fuzz/libfuzzer/Cargo.toml
}

targets() { (cd $corpora && printf '%s\n' *); }

# run TARGET [ARGUMENT…]: runs libFuzzer. Its output goes to target/fuzz/logs/TARGET.
run() {
    local target=$1
    shift
    mkdir -p $work/logs
    AQUIFER_FUZZ_TARGET=$target "$fuzzer" -max_len=4096 -timeout=10 -rss_limit_mb=1024 "$@" \
        >"$work/logs/$target" 2>&1
}

# search TARGET SECONDS: fails if an input breaks the target.
search() {
    local target=$1 seconds=$2 findings=$work/findings/$1 status=0
    mkdir -p "$work/corpus/$target" "$findings"
    run "$target" -max_total_time="$seconds" -artifact_prefix="$findings/" \
        "$work/corpus/$target" "$corpora/$target" || status=$?
    if [ $status != 0 ]; then
        tail -40 "$work/logs/$target" >&2
        echo "fuzz: $target is broken by an input in $findings; to run it again:" >&2
        echo "  scripts/fuzz.sh replay $target FILE" >&2
        return 1
    fi
    echo "$target: nothing found in $seconds s, $(runs_of "$target") inputs"
}

runs_of() { sed -n 's/^Done \([0-9]*\) runs.*/\1/p' "$work/logs/$1"; }

# mutation TARGET: fails if the search does not notice the mutation.
mutation() {
    local target=$1 folder=$work/mutation/$1 status=0 started
    rm -rf "$folder"
    mkdir -p "$folder/corpus"
    started=$(date +%s%N)
    AQUIFER_FUZZ_MUTATION=1 run "$target" -max_total_time=$mutation_seconds \
        -artifact_prefix="$folder/" "$folder/corpus" "$corpora/$target" || status=$?
    if [ $status != $broken ]; then
        tail -5 "$work/logs/$target" >&2
        echo "fuzz: the mutation of $target was not noticed within $mutation_seconds s" >&2
        return 1
    fi
    echo "$target: mutation noticed after $((($(date +%s%N) - started) / 1000000)) ms"
}

# merge TARGET: replaces the files of the corpus that the fuzzer has found by those that add to the
# coverage, the smallest first.
merge() {
    local target=$1 folder=$work/merged/$1 found file
    rm -rf "$folder"
    mkdir -p "$folder" "$work/corpus/$target"
    cp "$corpora/$target"/seed-* "$folder"
    find "$corpora/$target" -name 'fixed-*' -exec cp -t "$folder" {} +
    run "$target" -merge=1 -use_counters=0 "$folder" "$corpora/$target" "$work/corpus/$target"
    found=(-type f ! -name 'seed-*' ! -name 'fixed-*')
    find "$corpora/$target" "${found[@]}" -delete
    find "$folder" "${found[@]}" -printf '%s %p\n' | sort -n | head -n $files_max |
        while read -r _ file; do
            # A file that notices the mutation would leave nothing to search for.
            if AQUIFER_FUZZ_MUTATION=1 run "$target" "$file"; then
                cp "$file" "$corpora/$target"
            fi
        done
    echo "$target: $(find "$corpora/$target" -type f | wc -l) files"
}

each() {
    local target
    for target in $(targets); do
        "$@" "$target"
    done
}

build
case ${1:-all} in
all) for target in $(targets); do search "$target" "${2:-60}"; done ;;
mutation) if [ $# = 2 ]; then mutation "$2"; else each mutation; fi ;;
check)
    each mutation
    for target in $(targets); do search "$target" "${AQUIFER_FUZZ_SECONDS:-20}"; done
    ;;
merge) if [ $# = 2 ]; then merge "$2"; else each merge; fi ;;
replay) AQUIFER_FUZZ_TARGET=$2 "$fuzzer" "$3" ;;
*)
    if [ ! -d "$corpora/$1" ]; then
        echo "fuzz: no target $1; the targets are: $(targets | tr '\n' ' ')" >&2
        exit 2
    fi
    search "$1" "${2:-60}"
    ;;
esac
