#!/usr/bin/env bash
# In a guest: both ends of `aquifer fabric check` over its RDMA device.
#
#   check.sh AQUIFER
aquifer=$1
# shellcheck source=tests/guests/scripts/pool.sh
. "$(dirname "$0")/pool.sh"
"$aquifer" fabric check --listen 10.9.0.1:7401 >"$state/lender.log" &
until grep -q Lending "$state/lender.log"; do sleep 0.2; done
"$aquifer" fabric check 10.9.0.1:7401
