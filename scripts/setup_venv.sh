# shellcheck shell=bash
# Sourced by run_train.sh and run_tests.sh. `setup_venv core` (or `dev`) makes $repo/.venv with the pinned packages, or
# finds it ready and returns at once. $repo is set by the caller.
#
# A marker in .venv, written last, holds a checksum of what was installed and where. When it does not match (first
# call, an interrupted one, new pins, a moved clone), pip installs what is missing and keeps what is there.

venv=$repo/.venv
venv_child= # the process that is waited for, so that a signal can end it

say() { echo "titan5d: $*" >&2; }

setup_venv() { # core or dev
    local sum
    sum=$( (cat "$repo/pyproject.toml" "$repo/constraints.txt" && echo "$repo") | cksum) || return 1
    venv_ready "$1" "$sum" && return 0
    trap 'venv_interrupted' INT TERM HUP
    exec 9>"$repo/.venv.lock" # two first calls side by side: the second waits for the first
    if command -v flock >/dev/null && ! flock -n 9; then
        say "another call is installing; waiting for it"
        in_background flock 9
    fi
    if ! venv_ready "$1" "$sum" && ! venv_install "$1" "$sum"; then
        say "the packages could not be installed, see above. The next call tries again; or set"
        say "TITAN5D_PYTHON=/path/to/python to use a Python that has them"
        exit 1
    fi
    exec 9>&-
    trap - INT TERM HUP
}

venv_ready() { # what, checksum
    local marker
    [[ -x $venv/bin/python ]] || return 1
    for marker in "$venv/titan5d-$1.ok" "$venv/titan5d-dev.ok"; do # dev holds all of core
        [[ -f $marker && $(<"$marker") == "$2" ]] && return 0
    done
    return 1
}

venv_install() { # what, checksum
    local python package=$repo source
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python) || return 1
        say "making $venv with $("$python" --version)"
        in_background "$python" -m venv --clear "$venv" || return 1
    fi
    [[ $1 == core ]] || package="$repo[$1]"
    source=$(torch_source)
    say "installing the pinned packages ($1); a minute or more the first time"
    in_background "$venv/bin/python" -m pip install --disable-pip-version-check ${source:+"$source"} \
        -c "$repo/constraints.txt" -e "$package" >&2 || return 1
    echo "$2" >"$venv/titan5d-$1.ok.part" && mv "$venv/titan5d-$1.ok.part" "$venv/titan5d-$1.ok"
}

in_background() { # bash handles a signal while it waits for a background process, not while one is in front
    "$@" &
    venv_child=$!
    wait "$venv_child"
}

venv_interrupted() {
    [[ -z $venv_child ]] || kill "$venv_child" 2>/dev/null || true
    wait
    say "interrupted; the next call goes on from here"
    exit 1
}

find_python() { # the first Python that is new enough and can make environments
    local candidate found=
    for candidate in python3 python3.13 python3.12 python3.11; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        found=$candidate
        "$candidate" -c 'import venv, ensurepip' 2>/dev/null && echo "$candidate" && return 0
    done
    if [[ -n $found ]]; then
        say "$found cannot make environments (no ensurepip); on Debian and Ubuntu: apt install python3-venv"
    else
        say "no Python 3.11 or newer was found; install one, or set TITAN5D_PYTHON=/path/to/python"
    fi
    return 1
}

# On Linux the torch that pip takes by default is built for CUDA, several GB. Without a GPU take the CPU build, unless
# pip has been told where to look: then that decides.
torch_source() {
    [[ $(uname -s) == Linux ]] || return 0
    if command -v nvidia-smi >/dev/null || [[ -e /dev/kfd ]]; then return 0; fi
    if "$venv/bin/python" -m pip config list | grep -E 'index-url|find-links' >/dev/null; then return 0; fi
    echo "--extra-index-url=https://download.pytorch.org/whl/cpu"
}
