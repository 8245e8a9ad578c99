#!/usr/bin/env bash
# Starts a run on several nodes with nothing but ssh:
#
#   scripts/ssh_launch.sh HOST,HOST,... [--config NAME|FILE] [--section.key value ...]
#
# The repository must lie at the same path on all hosts (a shared file system), and ssh must work without a password.
# The first host is node 0. What each node prints is shown here behind its host's name. Ctrl-C, SIGTERM and SIGUSR1 here
# go to every node: all save and leave with 3. Exit status: 0 when all nodes left with 0, else 1, 2 or 3, in this order.
#
# Environment: SSH, the command (default: ssh -o BatchMode=yes with keep-alive); NNODES=2:4 makes the run elastic.
# Handed to the nodes: NGPU DEVICE MASTER_PORT MAX_RESTARTS RDZV_CONF TITAN5D_PYTHON OMP_NUM_THREADS, and all names
# that begin with NCCL_, GLOO_, TORCH_ or CUDA_.
set -uo pipefail

if (($# < 1)) || [[ $1 == -* || -z $1 ]]; then
    echo "refused: the first argument must be the hosts, separated by commas" >&2
    sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
IFS=, read -ra hosts <<<"$1"
shift
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
read -ra ssh_command <<<"${SSH:-ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4}"

settings=("NNODES=${NNODES:-${#hosts[@]}}" "MASTER_ADDR=${hosts[0]#*@}") # user@host -> host
for name in $(compgen -e); do
    case $name in
        NGPU | DEVICE | MASTER_PORT | MAX_RESTARTS | RDZV_CONF | TITAN5D_PYTHON | OMP_NUM_THREADS) ;;
        NCCL_* | GLOO_* | TORCH_* | CUDA_*) ;;
        *) continue ;;
    esac
    settings+=("$name=${!name}")
done

pipes=$(mktemp -d)
trap 'rm -rf "$pipes"' EXIT
pids=() inputs=()
for rank in "${!hosts[@]}"; do
    host=${hosts[rank]}
    # Quoted for the shell at the other end
    printf -v command '%q ' env "${settings[@]}" "NODE_RANK=$rank" "$repo/scripts/ssh_node.sh" "$@"
    mkfifo "$pipes/$rank"
    (
        for input in ${inputs[@]+"${inputs[@]}"}; do # so that a node's input ends when this script does
            exec {input}>&-
        done
        exec "${ssh_command[@]}" "$host" "cd $(printf %q "$PWD") && $command"
    ) <"$pipes/$rank" > >(sed -u "s|^|$host: |") 2>&1 &
    pids+=("$!")
    exec {input}>"$pipes/$rank"
    inputs+=("$input")
done

tell() { # name of a signal
    local input
    for input in "${inputs[@]}"; do
        echo "$1" >&"$input"
    done
} 2>/dev/null
trap '' PIPE # a node that has ended reads no more
trap 'tell INT' INT
trap 'tell TERM' TERM HUP
trap 'tell USR1' USR1

worst=0
for pid in "${pids[@]}"; do
    status=
    while [[ -z $status ]] || kill -0 "$pid" 2>/dev/null; do # a signal ends `wait`, not the node
        wait "$pid"
        status=$?
    done
    case $status in
        0) ;;
        2 | 3) ((worst == 0 || (worst > status && worst != 1))) && worst=$status ;;
        *) worst=1 ;;
    esac
done
exit "$worst"
