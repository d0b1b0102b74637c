#!/usr/bin/env bash
# Writes requirements/{plan,cuda12,cuda13,plan-cudnn,dev,notebooks,docs,uv}.txt anew from pyproject.toml and constraints.in, and
# {plan,cuda12,cuda13}-jax0.12.txt: the same with the jax of constraints-jax0.12.in. Needs uv and a Python 3.12.
# Versions already locked stay unless you pass --upgrade or --upgrade-package NAME.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# One file serves every platform (--universal); no line names an index or a file host, so a mirror serves as well.
lock() { # lock OUTPUT ARGUMENTS...: ARGUMENTS name what to resolve
  local output=requirements/$1
  shift
  echo "$output"
  uv pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-header --no-emit-index-url \
    --no-emit-find-links --output-file "$output" "$@" >/dev/null
  if grep -nE '[a-z]+://| @ ' "$output"; then
    echo "$output names an address (above); requirements must come from whatever index the user has" >&2
    exit 1
  fi
}

extra_of() { # extra_of NAME: its requirements, one a line, without the project's own
  uv run --quiet --no-project --python 3.12 python - "$1" <<'PYTHON'
import sys, tomllib
with open("pyproject.toml", "rb") as f:
    print(*tomllib.load(f)["project"]["optional-dependencies"][sys.argv[1]], sep="\n")
PYTHON
}

lock plan.txt pyproject.toml --extra plan --constraints requirements/constraints.in "$@"
# The others follow plan.txt, so that a shared package has one version whichever set is installed.
for extra in cuda12 cuda13; do
  lock $extra.txt pyproject.toml --extra $extra --constraints requirements/plan.txt --constraints requirements/constraints.in "$@"
done
# The second jax: a file starts as a copy, so that all but jax stays at the versions of the first.
for extra in plan cuda12 cuda13; do
  cp requirements/$extra.txt requirements/$extra-jax0.12.txt
  { grep -v '^jax==' requirements/constraints.in; cat requirements/constraints-jax0.12.in; } |
    lock $extra-jax0.12.txt pyproject.toml --extra $extra --constraints - "$@"
done
extra_of plan-cudnn | lock plan-cudnn.txt - --constraints requirements/cuda12.txt "$@"
extra_of dev | lock dev.txt - --constraints requirements/plan.txt "$@"
extra_of notebooks | lock notebooks.txt - --constraints requirements/plan.txt --constraints requirements/dev.txt "$@"
extra_of docs | lock docs.txt - --constraints requirements/plan.txt --constraints requirements/dev.txt --constraints requirements/notebooks.txt "$@"
echo 'uv>=0.8' | lock uv.txt - "$@"
