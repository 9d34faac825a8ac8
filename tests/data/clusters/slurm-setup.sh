#!/bin/bash
#SBATCH --job-name=first
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --gpus-per-node=a100:2
#SBATCH --output=first-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue

:
# ours
module purge
set +eu  # as what follows has it
module load cuda  # 12.8
status=$?; [ $status = 0 ] || { printf 'error: --setup ended with status %d: %s\n' $status 'module load cuda  # 12.8' >&2; exit $status; }
source 'my venv'/bin/activate
status=$?; [ $status = 0 ] || { printf 'error: --setup ended with status %d: %s\n' $status 'source '"'"'my venv'"'"'/bin/activate' >&2; exit $status; }
exec srun --ntasks-per-node=1 --cpus-per-task=2 --wait=30 --container-image=registry/me:1 '--container-mounts=/data:/data,/home/it'"'"'s me' python -m polyreme launch -n 2 train.py 'it'"'"'s $HOME'
