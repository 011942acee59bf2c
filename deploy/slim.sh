#!/bin/sh
# Takes out of an image's environment what no service there reads: `slim.sh FOLDER [PACKAGE ...]`.
# The packages are those that other services compute with; the rest is tests, what compilers,
# linkers and debuggers read, Arrow's own RPC (ours is gRPC) and its clouds' file systems (DuckDB
# has its own), and what installs packages.
set -eu
folder=$1
shift
"$folder/bin/python" -m pip uninstall --yes setuptools "$@"
find "$folder/lib" -depth -type d -name tests -exec rm -r {} +
find "$folder/lib" -type f -regex '.*\.\([ch]\|cpp\|hpp\|pyx\|pxd\|pxi\)' -delete
arrow=$(echo "$folder"/lib/python*/site-packages/pyarrow)
rm -f "$arrow"/*flight* "$arrow"/*s3* "$arrow"/*gcsfs* "$arrow"/*azurefs*
# Wheels hold no links, but copies: programs load the one with the first number of the version.
find "$arrow" -regex '.*/lib[a-z_]*\.so\(\.[0-9]+\.[0-9]+\.[0-9]+\)?' -delete
find "$folder/lib" -regex '.*/\(pyarrow\|llvmlite\)/.*\.so.*' -exec strip --strip-unneeded {} +
"$folder/bin/python" -m pip uninstall --yes pip
