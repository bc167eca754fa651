#!/usr/bin/env bash
# One torchrun agent on each node, all at one rendezvous:
#
#   launch.sh WORLD_SIZE SCRIPT [ARGUMENT ...]
#
# Under SLURM srun starts the agents, on the nodes of the job. Elsewhere NODES names the nodes, the
# first of which keeps the rendezvous; ssh starts an agent there, but `localhost` needs none.
# PORT is the rendezvous' (29500). So many nodes are used as divide the number of workers.
# Ends as soon as one agent fails, and takes the others along.
set -euo pipefail

world_size=$1
shift
if [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
else
    read -ra nodes <<< "${NODES:?names the nodes, for instance NODES=\"node-a node-b\"}"
fi
num_nodes=${#nodes[@]}
while ((world_size % num_nodes)); do num_nodes=$((num_nodes - 1)); done

head=${nodes[0]/localhost/127.0.0.1}
agent=(
    torchrun "--nnodes=$num_nodes" "--nproc-per-node=$((world_size / num_nodes))"
    --rdzv-backend=c10d "--rdzv-id=entrenar-$$" "--rdzv-endpoint=$head:${PORT:-29500}"
    --rdzv-conf=join_timeout=120 "$@"
)

if [ -n "${SLURM_JOB_NODELIST:-}" ]; then # srun hands this environment on to the nodes
    exec srun "--nodes=$num_nodes" "--ntasks=$num_nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 \
        "${agent[@]}"
fi

# ssh hands nothing on: the folder to work in, and what entrenar-check tells the ranks.
told=("PATH=$PATH")
for name in "${!ENTRENAR_@}" "${!PYTHON@}"; do told+=("$name=${!name}"); done
there="cd $(printf '%q' "$PWD") && exec env $(printf '%q ' "${told[@]}" "${agent[@]}")"

agents=()
trap 'kill "${agents[@]}" 2>/dev/null || true' EXIT TERM INT
for node in "${nodes[@]:0:num_nodes}"; do
    if [ "$node" = localhost ]; then
        "${agent[@]}" &
    else
        ssh -tt -o BatchMode=yes "$node" "$there" &
    fi
    agents+=($!)
done
for _ in "${agents[@]}"; do wait -n; done
