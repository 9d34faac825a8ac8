#!/bin/bash
#SBATCH --job-name=second
#SBATCH --nodes=2-8
#SBATCH --cpus-per-task=1
#SBATCH --output=second-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300

step= warned= again=
# srun hands it to each node's launcher, and the ranks save
trap 'warned=1 again=1; [ -z "$step" ] || kill -USR1 "$step"' USR1
srun --ntasks-per-node=1 --cpus-per-task=1 --wait=30 polyreme launch --saves train.py &
step=$!
[ -z "$warned" ] || kill -USR1 "$step"
while again=; wait "$step"; status=$?; [ -n "$again" ]; do :; done  # the signal ends a wait, too
if [ -n "$warned" ] && [ "$status" -eq 75 ] && \
   [ "${SLURM_RESTART_COUNT:-0}" -lt 1000 ]; then
  # Slurm ends this script then; one that has ended before may fail the job
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$status"
