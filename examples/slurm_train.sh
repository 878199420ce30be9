#!/bin/bash
# One run on 8 GPUs of 2 machines, under Slurm. The words after the script are those of kalmannorm train:
#
#     sbatch examples/slurm_train.sh --dataset cifar10 --setting 128,2 --out runs/cifar10
#
# Every task of srun is one rank. All tasks of a node see all of its GPUs, and a rank takes the one of its number: do
# not bind GPUs to tasks. Two minutes before the time limit Slurm sends SIGTERM. The run then saves a checkpoint and
# ends with status 130, and the job is put back into the queue. The same command resumes the run. Slurm also requeues the
# job after a preemption or the loss of a machine. --out must be on a disk that all machines share.
#SBATCH --job-name=kalmannorm-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

srun kalmannorm train "$@"
status=$?
if [ "$status" -eq 130 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
