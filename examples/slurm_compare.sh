#!/bin/bash
# Many runs on the 8 GPUs of 2 machines, under Slurm. The words after the script are those of kalmannorm compare:
#
#     sbatch examples/slurm_compare.sh --dataset cifar10 --setting 128,2 --methods bn,gn,bkn --out runs/cifar10
#
# Every task of srun is a Dask worker with a GPU of its own, and trains one run at a time. If a worker is lost, another one
# resumes its run. Two minutes before the time limit all runs are saved, and the job is put back into the queue. The same
# command skips finished runs. The current folder and --out must be on a disk that all machines share.
#SBATCH --job-name=kalmannorm-compare
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

file=$PWD/scheduler-$SLURM_JOB_ID.json
rm -f "$file"
dask scheduler --scheduler-file "$file" --port 0 --no-dashboard &
scheduler=$!
until [ -f "$file" ]; do sleep 1; done
srun dask worker --scheduler-file "$file" --no-nanny --nthreads 1 --no-dashboard --local-directory "${TMPDIR:-/tmp}" &
workers=$!

kalmannorm compare --cluster "$file" "$@" &
comparison=$!
trap 'kill -INT $comparison' TERM
wait $comparison
status=$?
if kill -0 $comparison 2>/dev/null; then # the wait was ended by the signal
    wait $comparison
    status=$?
fi
kill $workers $scheduler
wait
rm -f "$file"
if [ "$status" -eq 130 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
