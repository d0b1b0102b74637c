#!/usr/bin/env bash
# A Python with torch, transformers, PEFT and TRL in .reference, for the tests that compare jaxtrain with them. Any other Python
# that has them does as well: JAXTRAIN_REFERENCE_PYTHON names it. On Linux, PyPI's torch brings CUDA packages of several GB along.
set -euo pipefail
here=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
venv=$here/../../.reference
stamp=$venv/.installed
if [[ -f $stamp ]] && cmp -s "$stamp" "$here/requirements.txt"; then exit 0; fi
"${PYTHON:-python3}" -m venv --clear "$venv"
# torch first: where it is there already, nothing that asks for it looks for a newer one.
"$venv/bin/pip" install --quiet --disable-pip-version-check "$(grep '^torch==' "$here/requirements.txt")"
"$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
cp "$here/requirements.txt" "$stamp"
