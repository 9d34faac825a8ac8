#!/bin/bash
#SBATCH --job-name=llama
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --mem=512G
#SBATCH --time=1-12:00:00
#SBATCH --account=physics
#SBATCH --partition=gpu
#SBATCH --qos=long
#SBATCH --constraint=a100&nvlink
#SBATCH --output=llama-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --exclusive
#SBATCH --mail-type=END,FAIL

step= warned= again=
# srun hands it to each node's launcher, and the ranks save
trap 'warned=1 again=1; [ -z "$step" ] || kill -USR1 "$step"' USR1
srun --ntasks-per-node=1 --cpus-per-task=64 --wait=30 /venv/bin/python -m polyreme train run.toml -n 8 --stopped-status 75 &
step=$!
[ -z "$warned" ] || kill -USR1 "$step"
while again=; wait "$step"; status=$?; [ -n "$again" ]; do :; done  # the signal ends a wait, too
if [ -n "$warned" ] && [ "$status" -eq 75 ] && \
   [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
  # Slurm ends this script then; one that has ended before may fail the job
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit "$status"
