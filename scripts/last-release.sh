#!/bin/sh
# Builds the last release, for the tests of two versions together, and prints the folder of its
# binaries. Prints nothing if the repository has no history, as in a shallow clone.
set -eu
cd "$(dirname "$0")/.."
commit=$(cat scripts/last-release)
out=$PWD/target/last-release
if [ "$(cat "$out/built" 2>/dev/null || true)" != "$commit" ]; then
    git cat-file -e "$commit^{commit}" 2>/dev/null || exit 0
    rm -rf "$out/source"
    mkdir -p "$out/source"
    git archive "$commit" | tar -x -C "$out/source"
    (cd "$out/source" && CARGO_TARGET_DIR=$out cargo build --quiet -p aquifer -p aquifer-shim >&2)
    echo "$commit" > "$out/built"
fi
echo "$out/debug"
