#!/usr/bin/env bash
# The demo's program, run plainly: Debian's sqlite3 builds a search index of the Linux kernel's documentation
# (Debian's linux-doc) in memory, and asks it. `aquifer demo` runs the same command under its limits.
#
#   scripts/demo-program.sh [PREFIX…]     PREFIX is put before the command, such as `/usr/bin/time -v`
#
# Needs `scripts/install-deps.sh demo`.
set -euo pipefail

script=$(cd "$(dirname "$0")" && pwd)/demo/kernel-docs.sql

# The newest version, if there are several: names end in a version number.
# shellcheck disable=SC2012 # Packages' names hold nothing that ls would change.
pages=$({ ls -d /usr/share/doc/linux-doc-*/html 2>/dev/null || true; } | sort -V | tail -n 1)
if [ -z "$pages" ] || ! command -v sqlite3 >/dev/null 2>&1; then
    echo "demo-program: sqlite3 or the kernel's documentation is not installed; run scripts/install-deps.sh demo" >&2
    exit 1
fi
cd "$pages"
exec "$@" sqlite3 -batch :memory: <"$script"
