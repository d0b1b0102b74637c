#!/usr/bin/env bash
# From a machine with Python and git to a working environment in .venv, and then to the command asked for.
# `./run.sh --help` says what it can do. Works from any folder; relative paths in arguments mean your folder, not this one.
if [[ ${BASH_SOURCE[0]} != "$0" ]]; then # its options and variables would stay in that shell
  echo "run.sh: run it (./run.sh), do not source it" >&2
  return 2
fi
set -euo pipefail

self=${BASH_SOURCE[0]}
while [[ -L $self ]]; do # a link to this script, say in ~/bin, still finds the repository
  target=$(readlink "$self")
  [[ $target == /* ]] || target=$(dirname -- "$self")/$target
  self=$target
done
root=$(CDPATH='' cd -P -- "$(dirname -- "$self")" && pwd)
venv=$root/.venv
stamp=$venv/.jaxtrain # what is installed; written last, so a broken installation has none

say() { printf 'run.sh: %s\n' "$*" >&2 || true; } # where a terminal was lost, nobody reads it

fail() { # fail EXIT_CODE MESSAGE
  say "$2"
  exit "$1"
}

# --- What can be asked for -------------------------------------------------------------------------------------------------

is_command() { [[ $1 =~ ^[a-z][a-z0-9_]*$ ]] && grep -q "^$1 " "$root/jaxtrain/config/commands.txt"; }

unknown() { # names the nearest command, by any Python
  local python
  for python in "$venv/bin/python" python3 python; do
    if "$python" -c '' 2>/dev/null; then exec "$python" -I "$root/jaxtrain/config/commands.py" "$1"; fi
  done
  fail 2 "unknown command '$1'. Fix: one of those that ./run.sh --help lists"
}

usage() {
  cat <<'TEXT'
usage: ./run.sh                         train configs/tiny.py
       ./run.sh --config=FILE [--...]   train any config, or resume its run
         --no-preflight                 train without a check of the GPUs
       ./run.sh COMMAND [...]           run a command; COMMAND --help lists its options
       ./run.sh test [pytest args]      run the tests, in the repository's folder
       ./run.sh lint                    run ruff, pyright and shellcheck
       ./run.sh setup                   only prepare the environment
       ./run.sh notebooks               open notebooks/ in JupyterLab, installed beside the rest
       ./run.sh docs [--serve]          build the pages of docs/ as a web site in build/docs, and serve it to this machine

commands:
TEXT
  sed 's/^/  /' "$root/jaxtrain/config/commands.txt"
  cat <<'TEXT'

On GPUs training begins with a preflight. If it finds a fault, run.sh exits with 3. Before each restart it looks again, without
measurements. Variables that run.sh sets are set for the run alone.

The environment is .venv, brought in line with requirements/*.txt whenever those change: packages that you add by hand are
removed then. Delete .venv to start anew.

  JAXTRAIN_CUDA=12|13   install CUDA 12 or 13. Not set: 12 with an NVIDIA GPU; without one the CPU and, on Linux, the
                        compiler that plans for GPUs
  JAXTRAIN_CUDNN=1      install cuDNN (1.3 GB) beside that compiler: plans then ask it for the workspace of attention. 0 removes
                        it. Not set: as before. CUDA 12 includes it
  JAXTRAIN_JAX=0.11|0.12  install jax 0.11.2, or 0.12.0.1. Not set: as before, at first 0.11.2
  JAXTRAIN_DRY_RUN=1    print what would be installed and run, and do neither
  JAXTRAIN_VERBOSE=1    print the variables that run.sh sets for a run

Training restarts from its newest checkpoint after exit 75 (a process was lost, or a signal came to the trainer alone) and after
124 (the watchdog ended a hang). It does not restart after a signal to run.sh, which forwards it, after train.max_minutes (counted
from the first attempt), or in the last ten minutes of a Slurm job.

  JAXTRAIN_RESTARTS=N       at most N restarts in a row without progress; default 3. 0: none, and the trainer replaces run.sh
  JAXTRAIN_RESTART_WAIT=S   seconds before the first of them, doubled up to 60; default 1
  JAXTRAIN_RESTART_RESET=S  an attempt that lasted S seconds and did not hang made progress; default 600

  JAXTRAIN_PREFLIGHT_ALLOW=NAME,...
                            checks of preflight whose fault does not stop training, as 'NUMA balancing'
TEXT
}

# --- Which packages --------------------------------------------------------------------------------------------------------

gpu_here() {
  local device
  for device in /dev/nvidia[0-9]*; do
    [[ -e $device ]] && return 0
  done
  # Asked second: on a node of eight it can take seconds. WSL has GPUs without these devices.
  [[ $(timeout 30 nvidia-smi -L 2>/dev/null) == *GPU\ * ]]
}

choose() { # sets packages (plan, cuda12, cuda13), why, dev, notebooks, docs and cudnn (their name or -), jax (0.11, 0.12);
  # $1: the tools that a command needs: dev, notebooks, docs or -
  local had_packages='' had_dev='' had_cudnn='' had_jax='' had_notebooks='' had_docs='' _
  if [[ -f $stamp ]]; then read -r _ had_packages had_dev had_cudnn had_jax had_notebooks had_docs _ <"$stamp" || true; fi
  dev=- notebooks=- docs=-
  # Installed tools stay, or `test` and `train` in turn would reinstall each time.
  if [[ $1 == dev || $had_dev == dev ]]; then dev=dev; fi
  if [[ $1 == notebooks || $had_notebooks == notebooks ]]; then notebooks=notebooks; fi
  if [[ $1 == docs || $had_docs == docs ]]; then docs=docs; fi
  case ${JAXTRAIN_CUDA-} in
    12 | 13)
      [[ $OSTYPE == linux* ]] || fail 2 "JAXTRAIN_CUDA=$JAXTRAIN_CUDA: CUDA packages exist for Linux only, and this is $OSTYPE; unset it"
      packages=cuda$JAXTRAIN_CUDA
      why="jax with CUDA $JAXTRAIN_CUDA, as JAXTRAIN_CUDA=$JAXTRAIN_CUDA asks"
      ;;
    '')
      if [[ $had_packages == cuda* ]]; then
        # A login node must not take CUDA from under the jobs that run on the GPU nodes, nor these change what was chosen there.
        packages=$had_packages
        why="jax with CUDA ${packages#cuda}, as before (JAXTRAIN_CUDA=12 or 13 chooses anew)"
      elif gpu_here; then
        packages=cuda12
        why="jax with CUDA 12, because there is an NVIDIA GPU (JAXTRAIN_CUDA=13 takes CUDA 13)"
      elif [[ $OSTYPE == linux* ]]; then
        packages=plan
        why="jax for the CPU and the compiler that plans for GPUs, because no NVIDIA GPU is visible (JAXTRAIN_CUDA=12 takes CUDA all the same)"
      else
        packages=plan # its GPU part is marked as for Linux
        why="jax for the CPU; this is $OSTYPE, and training on GPUs and planning for them need Linux"
      fi
      ;;
    *) fail 2 "JAXTRAIN_CUDA=$JAXTRAIN_CUDA: must be 12 or 13; unset it for the default" ;;
  esac
  cudnn=-
  case ${JAXTRAIN_CUDNN-} in
    0) ;;
    1) cudnn=cudnn ;;
    '') if [[ $had_cudnn == cudnn ]]; then cudnn=cudnn; fi ;;
    *) fail 2 "JAXTRAIN_CUDNN=$JAXTRAIN_CUDNN: must be 0 or 1; unset it to keep what is there" ;;
  esac
  case ${JAXTRAIN_JAX-} in
    0.11 | 0.12) jax=$JAXTRAIN_JAX ;;
    '') if [[ $had_jax == 0.12 ]]; then jax=0.12; else jax=0.11; fi ;;
    *) fail 2 "JAXTRAIN_JAX=$JAXTRAIN_JAX: must be 0.11 or 0.12; unset it to keep what is there" ;;
  esac
}

locked() { # the requirement files in force, one a line
  if [[ $jax == 0.11 ]]; then echo "$root/requirements/$packages.txt"; else echo "$root/requirements/$packages-jax$jax.txt"; fi
  if [[ $cudnn == cudnn && $packages == plan ]]; then echo "$root/requirements/plan-cudnn.txt"; fi
  if [[ $dev == dev ]]; then echo "$root/requirements/dev.txt"; fi
  if [[ $notebooks == notebooks ]]; then echo "$root/requirements/notebooks.txt"; fi
  if [[ $docs == docs ]]; then echo "$root/requirements/docs.txt"; fi
}

state() { # all that an installation depends on, to be compared as a whole; the first word is the version of this script's ways
  echo "4 $packages $dev $cudnn $jax $notebooks $docs python $(<"$root/.python-version")"
  local file
  locked | while IFS= read -r file; do cat "$file"; done
}

announce() { # announce installing|"would install"
  local file
  say "$1 into .venv: $why"
  locked | while IFS= read -r file; do say "$1 from ${file#"$root"/}"; done
}

current() { [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$(state)" ]]; }

# --- Installing ------------------------------------------------------------------------------------------------------------

working_uv() { # sets uv: the one on PATH if it runs (a pyenv shim may be there and not run), else a private one in .uv
  uv=uv
  if uv --version >/dev/null 2>&1; then return; fi
  uv=.uv/venv/bin/uv
  if "$uv" --version >/dev/null 2>&1; then return; fi
  local name python tried=''
  for name in python3 python3.12 python3.14 python3.13 python3.11 python3.10 python3.9 python; do
    while IFS= read -r python; do
      "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 9))' >/dev/null 2>&1 || {
        tried="$tried $python"
        continue
      }
      say "uv into .uv, with $python: this machine has no uv that runs"
      "$python" -m venv --clear .uv/venv
      .uv/venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt
      return
    done < <(type -aP "$name" || true)
  done
  fail 1 "neither uv nor a Python 3.9 or later with its venv module runs here (tried:${tried:- none found}); \
install uv, or Python with venv (on Debian and Ubuntu: apt install python3-venv)"
}

find_python() { # prints an interpreter of version $1, or the version itself for uv to download
  "$uv" python find --system --no-python-downloads "$1" 2>/dev/null && return
  local python
  for python in "${PYENV_ROOT:-${HOME-}/.pyenv}/versions/$1".*/bin/python; do # pyenv's, also where no shim leads to it
    if [[ -x $python ]]; then
      echo "$python"
      return
    fi
  done
  echo "$1"
}

install() ( # a subshell: what it exports and where it changes to ends with it
  cd "$root"
  mkdir -p .uv
  if command -v flock >/dev/null; then # several nodes may start on one shared folder at once
    exec 9>.uv/lock
    flock -n 9 || {
      say "waiting for another run.sh that installs"
      flock 9 || say "this file system has no locks: going on without"
    }
    if current; then return; fi
  fi
  announce installing
  rm -f "$stamp"
  # Trust what the machine trusts (a company's proxy, say), where it keeps such a list.
  local certificates
  for certificates in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/ca-bundle.pem /etc/ssl/cert.pem; do
    if [[ -s $certificates ]]; then export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS-1}"; fi
  done
  local uv python version file files=()
  version=$(<.python-version)
  working_uv
  if [[ $(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) != "$version" ]]; then
    python=$(find_python "$version")
    UV_VENV_CLEAR=1 "$uv" venv --quiet --python "$python" .venv ||
      fail 1 "no environment with Python $version (uv says why above): install Python $version so that python$version is on PATH, and start again"
  fi
  while IFS= read -r file; do files+=("$file"); done < <(locked)
  # Compiled now (about 10 s, once): where Python may not write bytecode itself, each start would take 3 s longer.
  "$uv" pip sync --python .venv/bin/python --require-hashes --compile-bytecode "${files[@]}" ||
    fail 1 "the installation failed (uv says why above); start again, it goes on where it stopped"
  state >"$stamp"
)

prepare() { # prepare dev|notebooks|docs|-
  choose "$1"
  if current; then return; fi
  if [[ -n ${JAXTRAIN_DRY_RUN-} ]]; then
    announce "would install"
  else
    install
  fi
}

start() { # becomes the environment's Python, with the repository importable and the exit code its own
  local path=:${PYTHONPATH-}:
  while [[ $path == *::* ]]; do path=${path//::/:}; done # an empty item would mean the current folder
  if [[ $* == "-m jaxtrain"* ]]; then export PYTHONSAFEPATH=1; fi # a types.py of the current folder is not Python's
  if [[ -n ${JAXTRAIN_DRY_RUN-} ]]; then
    say "would run:$(printf ' %q' "$venv/bin/python" "$@")"
    exit 0
  fi
  [[ -e /dev/fd/0 ]] || exec </dev/null # a daemon may have closed it
  path=$root$path
  PYTHONPATH=${path%:} exec "$venv/bin/python" "$@"
}

supervise() { # supervise ARGUMENTS: preflight, attempts and restarts of training are Python's (jaxtrain/runtime)
  prepare -
  start -m jaxtrain.commands.supervise "$@"
}

# --- The command line ------------------------------------------------------------------------------------------------------

takes() { # takes ALLOWED COMMAND [ARGUMENTS]: helps if asked to, and refuses arguments other than ALLOWED
  local allowed=$1 command=$2
  shift 2
  case $* in
    '' | "$allowed") ;;
    --help | -h)
      usage
      exit
      ;;
    *) fail 2 "$command $*: it takes ${allowed:-no arguments}. Fix: ./run.sh $command${allowed:+ $allowed}" ;;
  esac
}

export JAXTRAIN_COMMAND_PREFIX # as help and error messages write a command
JAXTRAIN_COMMAND_PREFIX=$(printf %q "$([[ $0 == */* ]] || echo ./)$0")

case ${1-} in
  help | --help | -h)
    usage
    ;;
  '')
    config=configs/tiny.py
    [[ $PWD -ef $root ]] || config=$root/$config
    supervise --config="$config"
    ;;
  -*)
    supervise "$@"
    ;;
  main)
    shift
    supervise "$@"
    ;;
  setup)
    takes '' "$@"
    prepare -
    say "ready: $venv"
    ;;
  test)
    shift
    prepare dev
    cd "$root"
    unset JAXTRAIN_COMMAND_PREFIX # tests start commands in their own ways
    start -m pytest "$@"
    ;;
  lint)
    takes '' "$@"
    prepare dev
    cd "$root"
    (start -m ruff check .)
    (start -m ruff format --check .)
    if [[ -z ${JAXTRAIN_DRY_RUN-} ]]; then "$venv/bin/shellcheck" run.sh requirements/lock.sh .ci/run tests/campaign/*.sh tests/reference/*.sh deploy/*.sbatch; fi
    start -m pyright
    ;;
  notebooks)
    shift
    prepare notebooks
    cd "$root/notebooks"
    start -m jupyterlab "$@"
    ;;
  docs)
    takes --serve "$@"
    shift
    prepare docs
    cd "$root"
    [[ -n ${JAXTRAIN_DRY_RUN-} ]] || rm -rf build/docs # a page that was deleted would stay
    (start -m sphinx --fail-on-warning --keep-going --quiet --jobs=auto docs build/docs)
    [[ -n ${JAXTRAIN_DRY_RUN-} ]] || echo "$root/build/docs/index.html"
    if [[ $# -gt 0 ]]; then start -u -m http.server --bind=127.0.0.1 --directory=build/docs 0; fi # 0: a free port, which it prints
    ;;
  *)
    is_command "$1" || unknown "$1"
    command=$1
    shift
    prepare -
    start -m jaxtrain "$command" "$@"
    ;;
esac
