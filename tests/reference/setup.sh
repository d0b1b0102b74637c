#!/usr/bin/env bash
# A Python with torch, transformers, PEFT and TRL in .reference, and llama.cpp's converter, for the tests that compare jaxtrain
# with them. Any other Python that has them does as well: JAXTRAIN_REFERENCE_PYTHON names it. On Linux, PyPI's torch brings CUDA
# packages of several GB along.
set -euo pipefail
here=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
venv=$here/../../.reference
stamp=$venv/.installed
if [[ -f $stamp ]] && cmp -s "$stamp" "$here/requirements.txt"; then exit 0; fi
"${PYTHON:-python3}" -m venv --clear "$venv"
# torch first: where it is there already, nothing that asks for it looks for a newer one.
"$venv/bin/pip" install --quiet --disable-pip-version-check "$(grep '^torch==' "$here/requirements.txt")"
"$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
# llama.cpp's converter of Hugging Face folders is in the source of its Python binding. Nothing is built.
llama="llama-cpp-python==0.3.36"
"$venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --dest "$venv/llama" "$llama"
tar --extract --gzip --file "$venv"/llama/*.tar.gz --directory="$venv/llama" --strip-components=3 --wildcards \
    '*/vendor/llama.cpp/convert_hf_to_gguf.py' '*/vendor/llama.cpp/conversion' '*/vendor/llama.cpp/gguf-py'
rm "$venv"/llama/*.tar.gz
cp "$here/requirements.txt" "$stamp"
