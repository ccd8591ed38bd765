#!/usr/bin/env bash
# In the second of two guests: runs the endpoints for the conformance suite in the first guest,
# until a connection to port 9001 arrives.
#
#   initiators.sh PROGRAM
"$1" &
python3 -c 'import socket; socket.create_server(("10.9.0.2", 9001)).accept()'
kill %1
