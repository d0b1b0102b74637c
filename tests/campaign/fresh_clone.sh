#!/usr/bin/env bash
# Set up and run a fresh clone, as a new user does: clone the last commit into a folder with a space in its name, run --help, setup twice,
# and then ./run.sh with your arguments. The home is empty, and the environment has only PATH, TERM and JAXTRAIN_JAX.
#   tests/campaign/fresh_clone.sh                  ./run.sh, which trains configs/tiny.py
#   tests/campaign/fresh_clone.sh test -k data     ./run.sh test -k data
# All packages are downloaded, which takes minutes. The campaign runs this script (test_fresh_clone.py). CLONE_PATH replaces PATH, for
# example to leave uv out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
clone="$scratch/a folder/jaxtrain"
mkdir -p "$scratch/home"
git clone --quiet "$PWD" "$clone"
cd "$clone"

fresh() { # fresh ARGUMENTS...: ./run.sh with them, and the seconds it took
  local start=$SECONDS code=0
  env -i HOME="$scratch/home" PATH="${CLONE_PATH:-$PATH}" TERM="${TERM:-dumb}" ${JAXTRAIN_JAX:+JAXTRAIN_JAX="$JAXTRAIN_JAX"} ./run.sh "$@" || code=$?
  echo "fresh_clone: ./run.sh $* took $((SECONDS - start)) s, exit code $code"
  return $code
}

fresh --help
fresh setup
fresh setup
if [[ -n $(git status --porcelain) ]]; then
  git status --short
  echo "fresh_clone: the set-up left files that git does not ignore" >&2
  exit 1
fi
fresh "$@"
