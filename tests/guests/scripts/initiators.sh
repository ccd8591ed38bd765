#!/usr/bin/env bash
# In the second of two guests: hold endpoints for the conformance suite of the other, until somebody connects to port 9001.
#
#   initiators.sh PROGRAM
"$1" &
python3 -c 'import socket; socket.create_server(("10.9.0.2", 9001)).accept()'
kill %1
