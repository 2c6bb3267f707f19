#!/bin/bash
# @ORIGIN@
# Submit it with `sbatch FILE`. Lines with ## are left out until they name your partition or account.
#
#SBATCH --job-name=@NAME@
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=@CPUS@
@GPUS@#SBATCH --time=24:00:00
##SBATCH --partition=PARTITION
##SBATCH --account=ACCOUNT
##SBATCH --mem=0
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
@KEEP@#SBATCH --signal=B:USR1@600
#
# Ten minutes before the time limit, this script is sent USR1: it lets the run save, and queues the
# job again. The command continues from its own checkpoints. Crashes, time-outs and lost nodes are
# started again as well; mistakes in settings, bad data and `scancel` are not.
# shellcheck disable=SC1003,SC2016,SC2329
set -uo pipefail

PYTHON=@PYTHON@ # an environment with Meshwright, on every node
FOLDER=@FOLDER@ # where relative paths in the command begin
PORT=@PORT@ # on the first node
RESTARTS=20 # most starts after the first

COMMAND=(
@COMMAND@
)
@EXPORTS@
cd -- "$FOLDER" || exit 74
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# Only the tasks of the step get TERM: srun itself would kill them at once.
warned=
warn() {
    warned=yes
    scancel --signal=TERM "$SLURM_JOB_ID.0"
}
trap warn USR1

# Each node knows its own SLURM_NODEID.
srun@STEP@ --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 \
    bash -c 'exec "$0" -u -m meshwright launch --node-rank "$SLURM_NODEID" "$@"' "$PYTHON" \
    --nproc-per-node @DEVICES@ --nnodes @NODES@ --master-addr "${hosts[0]}" --master-port "$PORT" \
    @LAUNCH@ "${COMMAND[@]}" &
step=$!
wait "$step"
status=$?
while [[ $status -eq 138 ]] && kill -0 "$step" 2>/dev/null; do # USR1 has interrupted the wait
    wait "$step"
    status=$?
done

again=
case $status in
    0) ;;
    @FINAL@ | 126 | 127) echo "status $status: another start would end the same way" >&2 ;;
    130 | 143) again=$warned ;; # without a warning, somebody stopped the job
    *) again=yes ;;
esac
if [[ -n $again ]]; then
    if [[ ${SLURM_RESTART_COUNT:-0} -lt $RESTARTS ]]; then
        echo "status $status: queued again" >&2
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "status $status after $RESTARTS restarts, the limit of this script" >&2
    fi
fi
exit "$status"
