#!/bin/sh
# Takes out of an image's environment what no service there reads: `slim.sh FOLDER [PACKAGE ...]`.
# The packages are those that other services compute with; the rest is tests, what compilers read,
# Arrow's own RPC (ours is gRPC), and what installs packages.
set -eu
folder=$1
shift
"$folder/bin/python" -m pip uninstall --yes setuptools "$@"
find "$folder/lib" -depth -type d -name tests -exec rm -r {} +
find "$folder/lib" -type f -regex '.*\.\([ch]\|cpp\|hpp\|pyx\|pxd\|pxi\)' -delete
rm -f "$folder"/lib/python*/site-packages/pyarrow/*flight*
"$folder/bin/python" -m pip uninstall --yes pip
