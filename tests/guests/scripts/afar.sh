#!/usr/bin/env bash
# In the first of two guests: run the conformance suite with endpoints in the other.
#
#   afar.sh SUITE
# shellcheck source=tests/guests/scripts/pool.sh
. "$(dirname "$0")/pool.sh"
await_port 10.9.0.2 9000
"$1" --nocapture
code=$?
await_port 10.9.0.2 9001
exit "$code"
