#!/usr/bin/env bash
# In the first of two guests: runs the conformance suite with its endpoints in the second guest.
#
#   afar.sh SUITE
# shellcheck source=tests/guests/scripts/pool.sh
. "$(dirname "$0")/pool.sh"
await_port 10.9.0.2 9000
"$1" --nocapture
code=$?
await_port 10.9.0.2 9001
exit "$code"
