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

# A signal to a child is lost if it comes before the child has let go of this script's traps, which it
# does as it becomes another program. So a new shell says that it is there, becomes the agent, and
# only what has said so stands in the list of those to be ended.
exec {said}<> <(:)
start() {
    sh -c 'echo >&3; exec "$@" 3>&-' sh "$@" 3>&"$said" {said}>&- &
    until read -r -t 1 -u "$said" || ! kill -0 $! 2>/dev/null; do :; done
    agents+=($!)
}
end_agents() { # each is told once: torchrun ends its workers then, and a second signal cuts that short
    kill "${agents[@]}" 2>/dev/null || true
    agents=()
}

agents=() told_to_end=
trap end_agents EXIT
trap 'told_to_end=1; end_agents' TERM INT HUP
for node in "${nodes[@]:0:num_nodes}"; do
    if [ "$node" = localhost ]; then
        start "${agent[@]}"
    else
        start ssh -tt -o BatchMode=yes "$node" "$there"
    fi
    [ -z "$told_to_end" ] || exit 1
done
for _ in "${agents[@]}"; do wait -n; done
