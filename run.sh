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

commands() { # one line each: every module of jaxtrain that can be run, with the first line of its docstring
  local file name first
  for file in "$root"/jaxtrain/*.py "$root"/jaxtrain/*/__main__.py; do
    case $file in
      */jaxtrain/__*__.py) continue ;;
      */__main__.py) name=$(basename "${file%/__main__.py}") ;;
      *) name=$(basename "${file%.py}") ;;
    esac
    is_command "$name" || continue
    IFS= read -r first <"$file" || true
    first=${first#\"\"\"}
    printf '  %-12s %s\n' "$name" "${first%\"\"\"}"
  done
}

is_command() {
  [[ $1 =~ ^[a-z][a-z0-9_]*$ ]] || return 1
  [[ -f $root/jaxtrain/$1/__main__.py ]] || grep -qs '^if __name__ ==' "$root/jaxtrain/$1.py"
}

usage() {
  cat <<'TEXT'
usage: ./run.sh                         train configs/tiny.py
       ./run.sh --config=FILE [--...]   train any config (python -m jaxtrain.main with these arguments)
         --nodes=HOST,HOST,...          on several machines, reached by ssh; this one is the first. HOST:PORT for the first says
                                        where the others find it (12321). The repository has the same path and commit on
                                        all of them; they see one --workdir
         --no-preflight                 without looking first whether the GPUs are fit to train
       ./run.sh COMMAND [...]           python -m jaxtrain.COMMAND; COMMAND --help tells more
       ./run.sh test [pytest args]      the tests, run in the repository's folder
       ./run.sh lint                    ruff, pyright and shellcheck
       ./run.sh setup                   only prepare the environment

commands:
TEXT
  commands
  cat <<'TEXT'

On GPUs training begins with jaxtrain.preflight; where that finds a fault, run.sh says so and ends with 3. It looks again, without
measuring, before each restart. What run.sh sets for the run, it prints; your own shell stays as it is.

The environment is .venv, brought in line with requirements/*.txt whenever those change: packages that you add by hand are
removed then. Delete .venv to start anew.

  JAXTRAIN_CUDA=12|13   install CUDA 12 or 13. Not set: 12 with an NVIDIA GPU; without one the CPU and, on Linux, the
                        compiler that plans for GPUs
  JAXTRAIN_CUDNN=1      install cuDNN (1.3 GB) beside that compiler: plans then ask it for the workspace of attention. 0 takes it
                        away. Not set: as before. CUDA 12 brings it along
  JAXTRAIN_DRY_RUN=1    say what would be installed and run, and do neither

Training is started again, and goes on from its newest checkpoint, after exit 75 (a peer died, a signal to it alone) and 124 (the
watchdog ended a hang); but not after a signal to run.sh, which is passed on, nor once train.max_minutes are over, counted from the
first attempt, nor in the last ten minutes of a Slurm job. Restarts need bash 4.3.

  JAXTRAIN_RESTARTS=N       at most N restarts in a row without progress; default 3. 0: none, and Python takes run.sh's place
  JAXTRAIN_RESTART_WAIT=S   seconds before the first of them, doubled up to 60; default 1
  JAXTRAIN_RESTART_RESET=S  an attempt that lasted S seconds and did not hang made progress; default 600

  JAXTRAIN_PREFLIGHT_ALLOW=NAME,...
                            checks of preflight whose fault does not stop training, as 'NUMA balancing'
  JAXTRAIN_SSH=COMMAND      how --nodes reaches a machine; default: ssh -n -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15
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

choose() { # sets packages (plan, cuda12, cuda13), why, dev (dev or -), cudnn (cudnn or -); $1: dev or -
  local had_packages='' had_dev='' had_cudnn='' _
  if [[ -f $stamp ]]; then read -r _ had_packages had_dev had_cudnn _ <"$stamp" || true; fi
  dev=$1
  if [[ $had_dev == dev ]]; then dev=dev; fi # once there they stay, or `test` and `train` in turn would reinstall each time
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
}

locked() { # the requirement files in force, one a line
  echo "$root/requirements/$packages.txt"
  if [[ $cudnn == cudnn && $packages == plan ]]; then echo "$root/requirements/plan-cudnn.txt"; fi
  if [[ $dev == dev ]]; then echo "$root/requirements/dev.txt"; fi
}

state() { # all that an installation depends on, to be compared as a whole; the first word is the version of this script's ways
  echo "2 $packages $dev $cudnn python $(<"$root/.python-version")"
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

prepare() { # prepare dev|-
  choose "$1"
  if current; then return; fi
  if [[ -n ${JAXTRAIN_DRY_RUN-} ]]; then
    announce "would install"
  else
    install
  fi
}

start() { # becomes the environment's Python, with the repository importable and the exit code its own
  if [[ -n ${JAXTRAIN_DRY_RUN-} ]]; then
    say "would run:$(printf ' %q' "$venv/bin/python" "$@")"
    exit 0
  fi
  PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$venv/bin/python" "$@"
}

# --- What a run begins with ------------------------------------------------------------------------------------------------

host_class() { # what kind of machine this is, in a few words, whoever it is
  local names model=''
  # By how many there are: a node of eight says "8 NVIDIA H200". From the driver's files, because nvidia-smi may hang on a dead GPU.
  names=$(cat /proc/driver/nvidia/gpus/*/information 2>/dev/null | sed -n 's/^Model:[[:space:]]*//p')
  if [[ -z $names ]]; then names=$(timeout 20 nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null) || names=''; fi
  if [[ -n $names ]]; then
    sort <<<"$names" | uniq -c | sed 's/^ *//' | paste -sd+ -
    return
  fi
  if [[ -r /proc/cpuinfo ]]; then model=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1); fi
  echo "$(getconf _NPROCESSORS_ONLN) CPUs${model:+, $model}"
}

provenance() { # what the run starts from, before Python does: files may change while it runs
  local commit='' dirty='' state='this is no git checkout' refused
  local -x GIT_OPTIONAL_LOCKS=0 LC_ALL=C # on a shared file system nobody needs to write the index
  if commit=$(git -C "$root" rev-parse HEAD 2>/dev/null) && git -C "$root" ls-files --error-unmatch run.sh >/dev/null 2>&1; then
    dirty=no state=unchanged
    # What a run is made of: changed files that git knows, and new ones where they count.
    if [[ -n $(git -C "$root" status --porcelain --untracked-files=no)$(git -C "$root" ls-files --others --exclude-standard jaxtrain configs) ]]; then
      dirty=yes state='changed since'
    fi
  else
    commit=''
    refused=$(git -C "$root" rev-parse HEAD 2>&1) || true
    if [[ $refused == *dubious* ]]; then state="git refuses: this checkout belongs to somebody else (git config --global --add safe.directory $root)"; fi
  fi
  if [[ -n ${JAXTRAIN_EXPECTED-} && $JAXTRAIN_EXPECTED != "$commit $dirty" ]]; then
    fail 2 "this machine has commit ${commit:-none} (changed: ${dirty:-unknown}), and the one that started the run has ${JAXTRAIN_EXPECTED% *} \
(changed: ${JAXTRAIN_EXPECTED##* }): bring $root to the same state on all nodes"
  fi
  # The first process says it for all.
  if [[ ${SLURM_PROCID:-${RANK:-${JAXTRAIN_PROCESS_ID:-${JOB_COMPLETION_INDEX:-0}}}} != 0 || -n ${JAXTRAIN_EXPECTED-} ]]; then
    quiet=yes
  fi
  export JAXTRAIN_COMMIT=$commit JAXTRAIN_DIRTY=$dirty JAXTRAIN_HOST_CLASS
  JAXTRAIN_HOST_CLASS=$(host_class)
  [[ -n $quiet ]] || say "${commit:+commit ${commit:0:12}, }$state; on $JAXTRAIN_HOST_CLASS"
}

told() { # what is set for the run that was not there, or was something else
  local name line="sets PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}"
  for name in JAXTRAIN_COMMIT JAXTRAIN_DIRTY JAXTRAIN_HOST_CLASS JAXTRAIN_LAUNCHED JAXTRAIN_NOTE JAXTRAIN_PREFLIGHT; do
    if [[ -n ${!name-} ]]; then line+=" $(printf '%s=%q' "$name" "${!name}")"; fi
  done
  [[ -n $quiet ]] || say "$line, for the run alone"
}

no_gpus_wanted() { [[ ${JAX_PLATFORMS-} == cpu* || ${CUDA_VISIBLE_DEVICES-all} == '' || ${CUDA_VISIBLE_DEVICES-} == -1 ]]; }

preflight() { # preflight yes|no ARGUMENTS: are the GPUs here, and on all nodes, fit to train? Sets code: 0, or why to try again
  local measure=$1 here=("--json=$scratch/preflight.json") # yes: measure
  shift
  code=0
  # Before a restart it only looks; what the run keeps is what was measured at the start.
  if [[ $measure == no ]]; then set -- "$@" --no-measure && here=(); fi
  if [[ $looks == no ]] || no_gpus_wanted || ! gpu_here; then return; fi
  everywhere preflight "$@"
  if [[ -n $asked ]]; then gone; fi
  case $code in
    0) if [[ $measure == yes ]]; then export JAXTRAIN_PREFLIGHT=$scratch/preflight.json; fi ;;
    2) exit 2 ;; # a mistake in the command, which is told above
    3) fail 3 "not started: preflight found the faults above. Mend them, or give --no-preflight to train all the same" ;;
    75 | 124 | 134 | 143) ;; # a process of it was lost, or they have not met
    *) fail "$code" "not started: preflight ended with $code. --no-preflight trains without it" ;;
  esac
}

# --- Several machines ------------------------------------------------------------------------------------------------------

nodes=() # host names, this machine first; none: this one alone, or a scheduler's
coordinator=''

listed() { # listed HOST,HOST,...: sets nodes and coordinator
  local host port seen=' '
  IFS=, read -ra nodes <<<"$1"
  ((${#nodes[@]} > 1)) || fail 2 "--nodes=$1: names one machine; leave it out to stay on this one"
  for host in "${nodes[@]}"; do
    [[ $host =~ ^[A-Za-z0-9][A-Za-z0-9._@-]*(:[0-9]{1,5})?$ ]] || fail 2 "--nodes=$1: '$host' is no host; write HOST,HOST,..."
    [[ $host != *:* || $host == "${nodes[0]}" ]] || fail 2 "--nodes=$1: only the first machine has a port; $host is reached by ssh"
    [[ $seen != *" ${host%:*} "* ]] || fail 2 "--nodes=$1: names ${host%:*} twice"
    seen+="${host%:*} "
  done
  coordinator=${nodes[0]#*@}
  [[ $coordinator == *:* ]] || coordinator+=:12321
  host=${coordinator%:*} port=${coordinator##*:}
  ((10#$port > 0 && 10#$port < 65536)) || fail 2 "--nodes=$1: $port is no port; write one from 1024 to 65535"
  case " $(hostname 2>/dev/null) $(hostname -s 2>/dev/null) $(hostname -f 2>/dev/null) $(hostname -I 2>/dev/null) " in
    *" $host "*) return ;;
  esac
  if [[ $host == localhost || $host == 127.* ]]; then
    say "--nodes=$1: the others will look for process 0 at $host, which is each machine itself; write this one's name, $(hostname)"
  else
    say "--nodes=$1: process 0 runs here, on $(hostname), and the others will look for it at $host"
  fi
}

asked_of_us() { # asked_of_us WORDS: takes the options of this script out of them; sets arguments, looks, nodes and coordinator
  local word
  arguments=() looks=yes
  for word in "$@"; do
    case $word in
      --no-preflight) looks=no ;;
      --nodes=*) listed "${word#*=}" ;;
      --nodes) fail 2 "--nodes needs a value: write --nodes=HOST,HOST,..." ;;
      --no-preflight=*) fail 2 "$word: takes no value; write --no-preflight" ;;
      *) arguments+=("$word") ;;
    esac
  done
  for word in ${arguments[@]+"${arguments[@]}"}; do
    case $word in
      --coordinator* | --num-processes* | --process-id*)
        ((${#nodes[@]} == 0)) || fail 2 "$word contradicts --nodes, which says which processes there are: leave one of them out"
        ;;
    esac
  done
}

listen() { # a folder for this script's files, and ears for signals
  local signal
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  { : <&0; } 2>/dev/null || exec </dev/null # a daemon's stdin may be closed
  # HUP and QUIT too: the run must not outlive this script.
  for signal in TERM INT HUP QUIT USR1 USR2; do
    # shellcheck disable=SC2064 # its value now
    trap "hear $signal" "$signal"
  done
  if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 403)); then
    exec 9<> <(:)
    polls=yes
  fi
}

elsewhere() { # elsewhere INDEX COMMAND ARGUMENTS: a process on the machine of that place in the list; ends as it does
  local index=$1 asked_for=$2 name line
  shift 2
  line="cd $(printf %q "$PWD") && env JAXTRAIN_RESTARTS=0 JAXTRAIN_EXPECTED=$(printf %q "$JAXTRAIN_COMMIT $JAXTRAIN_DIRTY")"
  for name in JAXTRAIN_RESTART JAXTRAIN_LAUNCHED JAXTRAIN_CUDA JAXTRAIN_PREFLIGHT_ALLOW; do # no other variable comes along
    if [[ -n ${!name-} ]]; then line+=" $name=$(printf %q "${!name}")"; fi
  done
  line+=" $(printf %q "$root/run.sh") $asked_for$(printf ' %q' "$@")"
  # shellcheck disable=SC2086 # a command with its options
  ${JAXTRAIN_SSH:-ssh -n -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15} "${nodes[index]}" "$line" </dev/null
}

beside() { # beside INDEX PID ...: runs `elsewhere`, and where that fails does not let process PID wait for it in vain
  local index=$1 pid=$2 there=0
  shift 2
  trap '' HUP INT QUIT TERM USR1 # sent to the process group: what ends it is the end of the process that it reaches
  elsewhere "$index" "$@" || there=$?
  echo "$there" >"$scratch/node.$index"
  if ((there == 0)); then return; fi
  # A trainer finds out by itself that another is gone, and saves if it can. What never got so far is ended.
  if ((there != 2 && there != 255)); then sleep 60 >/dev/null 2>&1; fi # holds no pipe open when it is left behind
  kill -s TERM "$pid" 2>/dev/null || true
}

everywhere() { # everywhere COMMAND ARGUMENTS: here (where it gets `here` too), and on all nodes; sets code
  local command=$1 index others=() there word since
  shift
  if ((${#nodes[@]} == 0)); then
    begin -m "jaxtrain.$command" "$@" ${here[@]+"${here[@]}"}
    await "$child"
    child=''
    return
  fi
  set -- "$@" "--coordinator=$coordinator" "--num-processes=${#nodes[@]}"
  begin -m "jaxtrain.$command" "$@" --process-id=0 ${here[@]+"${here[@]}"}
  word=$command
  if [[ $command == main ]]; then word='main --no-preflight'; fi
  rm -f "$scratch"/node.*
  for ((index = 1; index < ${#nodes[@]}; index++)); do
    beside "$index" "$child" "$word" "$@" "--process-id=$index" &
    others+=($!)
  done
  await "$child"
  child=''
  since=$SECONDS
  for ((index = 1; index < ${#nodes[@]}; index++)); do
    # They leave by themselves, at the latest when they miss this one.
    while [[ ! -s $scratch/node.$index ]] && ((SECONDS - since < 60)); do sleep 0.2 || true; done
    kill -KILL "${others[index - 1]}" 2>/dev/null || true
    wait "${others[index - 1]}" 2>/dev/null || true
    there=$(cat "$scratch/node.$index" 2>/dev/null) || there=unknown
    case $there in
      "$code" | 0) ;;
      unknown) say "${nodes[index]} had not ended 60 s after this machine; it is left alone" ;;
      255) say "${nodes[index]}: ssh could not reach it, or lost it" ;;
      *) say "${nodes[index]} ended with $there" ;;
    esac
    case $there in
      0 | unknown) ;;
      2 | 3 | 124) code=$there ;; # nothing was started there; a hang that this one has left as a lost peer
      255) if ((code == 0 || code == 143)); then code=75; fi ;;
      *) if ((code == 0)) || { ((code == 143)) && [[ -z $asked ]]; }; then code=$there; fi ;;
    esac
  done
}

# --- Training, and again ---------------------------------------------------------------------------------------------------

whole() { # whole NAME DEFAULT: prints what the variable NAME holds, a whole number
  local value=${!1-}
  value=${value:-$2}
  [[ $value =~ ^[0-9]{1,6}$ ]] || fail 2 "$1=$value: must be a whole number from 0 to 999999; unset it for $2"
  echo $((10#$value)) # 010 is ten
}

quiet='' # whether another machine's run.sh says what is to be said
scratch='' # a folder of this run.sh's
child='' # the running process
nap='' # the running sleep between two attempts
asked='' # the last signal that asked this script to end
heard=no # whether a signal ended the last `wait`
polls=no # whether descriptor 9 is there to pause on: nothing is ever read from it

# Whoever signals this script may have signalled the attempt as well (a terminal signals the whole process group, a scheduler
# all processes of the job or only this one), and nobody can tell here. So each signal is passed on, once, whatever its way: the
# trainer takes two within 0.2 s for one request.
hear() {
  heard=yes
  if [[ $1 != USR2 ]]; then # USR2 asks for a trace alone
    asked=$1
    if [[ -n $nap ]]; then kill "$nap" 2>/dev/null || true; fi # `rest` may be about to wait for it
  fi
  if [[ -n $child ]]; then kill -s "$1" "$child" 2>/dev/null || true; fi
}

await() { # await PID: until it has ended; sets code
  # If a signal interrupts `wait` just when the process ends, bash loses its exit code. So `wait` comes last.
  while [[ $polls == yes ]] && kill -0 "$1" 2>/dev/null; do read -r -t 0.1 -u 9 _ || true; done
  while :; do
    heard=no code=0
    wait "$1" 2>/dev/null || code=$? # silent: bash would tell of deaths by a signal with this script's line number
    [[ $heard == yes ]] || return 0
    # A signal came: then `wait` returned because of it, or had the true code already, which it tells a second time.
  done
}

begin() { # begin ARGUMENTS: one process here, in the same process group and with the same stdin; sets child
  (
    trap - INT QUIT # which bash lets everything with & ignore
    trap '' USR2    # until the trainer listens; it would end Python
    start "$@"
  ) <&0 9>&- &
  child=$!
  # A signal that came before there was a child to pass it to. TERM, because the others are lost on a shell that is just forked.
  if [[ -n $asked ]]; then kill -s TERM "$child" 2>/dev/null || true; fi
}

explain() { # what `code` means; sets `why`, and `code` to one of ours where a signal was the death
  local signal=''
  if ((code > 128 && code != 130)); then signal=$(kill -l $((code - 128)) 2>/dev/null) || true; fi
  why=${signal:+killed by signal $((code - 128)), $signal}
  case $signal:$code in
    :75) why="start me again: a peer died, its time limit, or a signal" ;;
    :124) why="the watchdog ended a hang" ;;
    ABRT:*) why="$why, as jax ends a run whose peer died" ;;
    TERM:* | USR1:*) why="$why, before it listened" ;;
    # Not started again: what took all the memory once will again, and whoever sends this signal means an end.
    KILL:*) why="$why: out of memory (dmesg tells), or somebody's kill -9" ;;
    # Nor this: a fault in native code is to be looked at, and it may have harmed what a restart reads.
    SEGV:* | BUS:*) why="$why: a fault outside Python" ;;
  esac
  why="exit $code${why:+ ($why)}"
  case $signal in ABRT | TERM | USR1) code=75 ;; esac
}

rest() { # rest SECONDS, before an attempt; a signal ends it and this script
  sleep "$1" &
  nap=$!
  while [[ -z $asked ]]; do
    heard=no
    wait "$nap" 2>/dev/null || true
    [[ $heard == yes ]] || break
  done
  if [[ -n $asked ]]; then
    kill "$nap" 2>/dev/null || true # the signal came before `nap` was set
    gone
  fi
  nap=''
}

gone() { # ends the script between two processes, as the last signal asks
  local again=''
  if ((row > 0)); then again=' again'; fi
  say "not started$again, because run.sh was sent $asked"
  if [[ $asked == INT ]]; then exit 130; else exit 75; fi
}

train() { # train ARGUMENTS: python -m jaxtrain.main, and again after an end that asks for it; never returns
  local limit first reset began pause code why word arguments looks here=() row=0 total=0 measure=yes index
  asked_of_us "$@"
  set -- ${arguments[@]+"${arguments[@]}"} # written so for bash before 4.4, in which an empty list is unbound
  for word in "$@"; do
    case $word in
      --help | -h | --explain* | --replay*) # these answer, and train nothing
        prepare -
        start -m jaxtrain.main "$@"
        ;;
    esac
  done
  limit=$(whole JAXTRAIN_RESTARTS 3)
  first=$(whole JAXTRAIN_RESTART_WAIT 1)
  reset=$(whole JAXTRAIN_RESTART_RESET 600)
  # In older ones what is started with & can never be made to hear Ctrl-C.
  if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 403)); then
    if ((${#nodes[@]} > 0)) || { [[ -n ${JAXTRAIN_RESTARTS-} ]] && ((limit > 0)); }; then
      fail 2 "restarts and --nodes need bash 4.3 or later, and this is $BASH_VERSION; leave them out, or install a newer bash"
    fi
    limit=0
  fi
  prepare -
  provenance
  unset JAXTRAIN_RESTART JAXTRAIN_NOTE JAXTRAIN_PREFLIGHT # of another run.sh; the first attempt is none
  if [[ -z ${JAXTRAIN_EXPECTED-} ]]; then unset JAXTRAIN_LAUNCHED; fi
  if [[ -n ${JAXTRAIN_DRY_RUN-} ]]; then
    told
    if ((${#nodes[@]} > 0)); then set -- "$@" "--coordinator=$coordinator" "--num-processes=${#nodes[@]}" --process-id=0; fi
    for ((index = 1; index < ${#nodes[@]}; index++)); do say "would run it on ${nodes[index]} too, with --process-id=$index"; done
    start -m jaxtrain.main "$@"
  fi
  if ((${#nodes[@]} > 0)); then # a mistake in the config is told here, and once
    (start -m jaxtrain.main "$@" "--coordinator=$coordinator" "--num-processes=${#nodes[@]}" --process-id=0 --explain >/dev/null) ||
      exit $?
  fi
  if ((limit == 0 && ${#nodes[@]} == 0)) && { [[ $looks == no ]] || no_gpus_wanted || ! gpu_here; }; then
    told
    start -m jaxtrain.main "$@"
  fi
  listen
  if ((limit == 0 && ${#nodes[@]} == 0)); then
    preflight yes "$@"
    if ((code != 0)); then exit "$code"; fi
    told
    start -m jaxtrain.main "$@" # and the folder stays, with what preflight found
  fi

  # For attempts after the first: since when time counts, and what has been done; and where one says that it is the last.
  export JAXTRAIN_LAUNCHED JAXTRAIN_NOTE=$scratch/note
  JAXTRAIN_LAUNCHED=$(date +%s)
  : >"$JAXTRAIN_NOTE"
  pause=$first
  while :; do
    began=$(date +%s)
    preflight "$measure" "$@" # again before each restart: what ended the run may be a GPU
    if ((code == 0)); then
      if [[ $measure == yes ]]; then told; fi
      measure=no
      everywhere main "$@"
    fi
    # The time says nothing of one that hung: most of it may have been the watchdog's patience.
    if ((code != 124 && $(date +%s) - began >= reset)); then row=0 pause=$first; fi
    explain
    case $code in
      75 | 124) ;;
      *)
        if ((code > 128 && code != 130)); then say "$why: not started again"; fi
        exit "$code"
        ;;
    esac
    if [[ -n $asked ]]; then
      say "$why: not started again, because run.sh was sent $asked"
      exit "$code"
    fi
    if [[ -s $JAXTRAIN_NOTE ]]; then
      say "$why: not started again, because $(<"$JAXTRAIN_NOTE")"
      exit "$code"
    fi
    # Near the end of a Slurm job the time limit (train.max_minutes=auto) is why it ended, and no attempt would get anywhere.
    if [[ ${SLURM_JOB_END_TIME-} =~ ^[0-9]{1,12}$ ]] && ((SLURM_JOB_END_TIME - $(date +%s) < 600)); then
      say "$why: not started again in the last ten minutes of the job (SLURM_JOB_END_TIME=$SLURM_JOB_END_TIME)"
      exit "$code"
    fi
    if ((row == limit)); then
      say "$why: not started again, after $row in a row without progress (JAXTRAIN_RESTARTS=$limit)"
      exit "$code"
    fi
    row=$((row + 1)) total=$((total + 1))
    say "$why: starting again in $pause s, restart $row of $limit"
    rest "$pause"
    if ((pause < 60)); then pause=$((pause * 2 < 60 ? pause * 2 : 60)); fi
    export JAXTRAIN_RESTART=$total # of them all, for the receipt
  done
}

look() { # look ARGUMENTS: python -m jaxtrain.preflight, on a list of machines too; never returns
  local arguments looks here=() code=0
  asked_of_us "$@"
  set -- ${arguments[@]+"${arguments[@]}"}
  prepare -
  if ((${#nodes[@]} == 0)) || [[ -n ${JAXTRAIN_DRY_RUN-} ]]; then start -m jaxtrain.preflight "$@"; fi
  provenance
  listen
  everywhere preflight "$@"
  exit "$code"
}

# --- The command line ------------------------------------------------------------------------------------------------------

case ${1-} in
  help | --help | -h)
    usage
    ;;
  '')
    config=configs/tiny.py
    [[ $PWD -ef $root ]] || config=$root/$config
    train --config="$config"
    ;;
  -*)
    train "$@"
    ;;
  main)
    shift
    train "$@"
    ;;
  preflight)
    shift
    look "$@"
    ;;
  setup)
    prepare -
    say "ready: $venv"
    ;;
  test)
    shift
    prepare dev
    cd "$root"
    start -m pytest "$@"
    ;;
  lint)
    prepare dev
    cd "$root"
    (start -m ruff check .)
    (start -m ruff format --check .)
    if [[ -z ${JAXTRAIN_DRY_RUN-} ]]; then "$venv/bin/shellcheck" run.sh requirements/lock.sh .ci/run tests/campaign/*.sh tests/reference/*.sh deploy/*.sbatch; fi
    start -m pyright
    ;;
  *)
    if ! is_command "$1"; then
      say "unknown command '$1'; it must be test, lint, setup, help, or one of these:"
      commands >&2
      exit 2
    fi
    command=$1
    shift
    prepare -
    start -m "jaxtrain.$command" "$@"
    ;;
esac
