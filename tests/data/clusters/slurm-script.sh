#!/bin/bash
#SBATCH --job-name=first
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --output=first-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue

exec srun --ntasks-per-node=1 --cpus-per-task=2 --wait=30 python -m polyreme launch -n 2 train.py 'it'"'"'s $HOME'
