#!/usr/bin/env bash
# Runs the program of the demo without Aquifer. `aquifer demo` runs the same command under limits.
#
# Debian's sqlite3 builds a search index of the Linux kernel's documentation (Debian's linux-doc) in
# memory, and queries it.
#
#   scripts/demo-program.sh [PREFIX…]
#
# PREFIX is put before the command, such as `/usr/bin/time -v`.
# The packages are installed by `scripts/install-deps.sh demo`.
set -euo pipefail

script=$(cd "$(dirname "$0")" && pwd)/demo/kernel-docs.sql

# The newest of the installed versions: names end in a version number.
# shellcheck disable=SC2012 # Names of packages have no characters that ls would change.
pages=$({ ls -d /usr/share/doc/linux-doc-*/html 2>/dev/null || true; } | sort -V | tail -n 1)
if [ -z "$pages" ] || ! command -v sqlite3 >/dev/null 2>&1; then
    echo "demo-program: sqlite3 or linux-doc is not installed: run scripts/install-deps.sh demo" >&2
    exit 1
fi
cd "$pages"
exec "$@" sqlite3 -batch :memory: <"$script"
