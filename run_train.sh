#!/usr/bin/env bash
# Trains:  ./run_train.sh [--config NAME|FILE] [--section.key value ...]      (--help lists every key)
#
# NAME is looked up in train_configs/; without --config it is the quick start. On a fresh clone .venv is made first.
# Environment: NGPU      ranks on this node (default: all GPUs, else 2 on the CPU, or what the degrees ask for)
#              NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT      for several nodes: call it once on each; NNODES=2:4 goes
#                        on with 2 to 4 of them (docs/multinode.md; scripts/ has SLURM and ssh)
#              MAX_RESTARTS   how often failed ranks are started again, from the last checkpoint
#              DEVICE    cpu or cuda
#              TITAN5D_PYTHON   a Python of your own that has the packages; .venv is then neither made nor used
# Exit status: 0 all steps done, 2 refused, 3 stopped by a signal after saving, 1 anything else.
set -euo pipefail
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if [[ -z ${TITAN5D_PYTHON:-} ]]; then
    source "$repo/scripts/setup_venv.sh"
    setup_venv core
    python=$repo/.venv/bin/python
elif ! python=$(command -v -- "$TITAN5D_PYTHON"); then
    echo "refused: TITAN5D_PYTHON=$TITAN5D_PYTHON is no program; give the path of a Python, or unset it" >&2
    exit 2
fi
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m titan5d.launch.torchrun_ranks "$@"
