# Four GPUs, five minutes: quickstart beside 0.11.1 on pairs of cores, drawn layouts of two GPUs, quickstart on a GPU, steps without
# kernels, random cases.
#     OUT=FOLDER PROSE=FILE CHINESE=FILE OLD=FOLDER bash fourth.sh, in the root of the project; OLD/src is that of 0.11.1
set -u
given=${PYTHONPATH:-}
export PYTHONPATH=$PWD/src:$given PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
since() { echo $((SECONDS - began)); }
began=$SECONDS LIMIT=${LIMIT:-310} root=$PWD
back=$OUT OUT=/tmp/out; rm -rf $OUT; mkdir -p $OUT
(while sleep 20; do tar czf $back/all.part -C $OUT . 2> /dev/null && mv $back/all.part $back/all.tar.gz; done) & archiving=$!
library=$(python3 -c "import sysconfig; print(sysconfig.get_paths()['stdlib'])")
pair() {  # NAME CORE FLAGS...: both trees at the same time, two cores each
    local name=$1 core=$2; shift 2
    for tree in old new; do
        path=$([ $tree = old ] && echo $OLD/src || echo $root/src)
        mkdir -p /tmp/tour/$tree-$name
        (cd /tmp/tour/$tree-$name && time PYTHONPATH=$path:$given OMP_NUM_THREADS=2 CUDA_VISIBLE_DEVICES= timeout $((LIMIT - 2)) taskset -c $core,$((core + 1)) \
            python3 -m meshwright quickstart "$@" --minutes 4 --device cpu) > $OUT/quickstart-$name-$tree.txt 2>&1 &
        core=$((core + 2))
    done
}
plans() { CUDA_VISIBLE_DEVICES=0,1 OMP_NUM_THREADS=2 timeout $LIMIT taskset -c 12-27 python3 benchmarks/plan_cases.py $OUT/two-gpus.jsonl --ranks 2 --seed 61 --seconds $((LIMIT - 40)) > $OUT/two-gpus.txt 2>&1; }
one_gpu() {
    export CUDA_VISIBLE_DEVICES=2 OMP_NUM_THREADS=4
    (mkdir -p /tmp/tour/gpu; cd /tmp/tour/gpu; time timeout 130 taskset -c 28-43 python3 -m meshwright quickstart $PROSE --minutes 1.5) > $OUT/quickstart-gpu.txt 2>&1
    timeout $((LIMIT - $(since))) taskset -c 28-43 python3 -m meshwright bench 345m --rows '^345M$|no kernels' --out /tmp/bench-kernels > $OUT/kernels.txt 2>&1
}
fuzzing() {
    export CUDA_VISIBLE_DEVICES=3 OMP_NUM_THREADS=1
    mkdir -p /tmp/f && cd /tmp/f
    local small="--hidden-size 64 --num-attention-heads 4 --num-layers 2 --seq-length 16 --bf16 --mock-data --vocab-size 100 --train-iters 10 --global-batch-size 6 --micro-batch-size 1 --lr 1e-2
        --eval-iters 2 --eval-interval 2 --hidden-dropout 0 --attention-dropout 0 --cuda-graphs on --compile off --attention-impl reference --recompute-granularity selective --no-tensorboard"
    n=0
    for more in "" "--ema 0.9" "--fp8-format hybrid --fp8-amax-history-len 2" "--mup-base-num-layers 3" "--embedding-dropout 0.2" "--weight-decay-incr-style cosine --start-weight-decay 0.4 --end-weight-decay 0.1" \
        "--ema 0.9 --fp8-format hybrid --fp8-amax-history-len 2 --mup-base-num-layers 3 --embedding-dropout 0.2 --weight-decay-incr-style cosine --start-weight-decay 0.4 --end-weight-decay 0.1"; do
        n=$((n + 1))
        (taskset -c 44-63 python3 -m meshwright train $small $more --save /tmp/f/run$n --save-interval 3 --async-save > /tmp/f/$n.txt 2>&1; { echo "status $? of: $more"; grep -iE "graphs|error" /tmp/f/$n.txt; } >> $OUT/given-up.txt) &
    done
    wait
    cat > hunt.py <<'P'
import sys
from fuzz import program
program.SHRUNK = 0  # bad cases are shown at once
if __name__ == "__main__":
    sys.exit(program.main(sys.argv[1:]))
P
    PYTHONPATH=$root/src:$root/tests:$given timeout $((LIMIT - $(since))) taskset -c 44-63 python3 hunt.py --device cuda --cases 200 --jobs 6 --seed 51 --seconds $((LIMIT - 40 - $(since))) > $OUT/fuzz.txt 2>&1
}
pair prose 0 $PROSE
pair chinese 4 $CHINESE
pair python 8 $library --include '*.py' --exclude site-packages dist-packages test
quickstarts=$(jobs -p | grep -v $archiving)
plans & planning=$!
one_gpu & single=$!
fuzzing & fuzzing=$!
wait $quickstarts $planning $single $fuzzing
grep -h "bits per byte: this\|precision:\|^real\|steps:" $OUT/quickstart-*.txt; cat $OUT/given-up.txt; cut -c1-900 $OUT/fuzz.txt | tail -n 40; tail -n 12 $OUT/kernels.txt; cut -c1-150 $OUT/two-gpus.txt | tail -n 20
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader; lscpu | grep -oE "amx[a-z0-9_]*|avx512_bf16" | tr '\n' ' '
kill $archiving; tar czf $back/all.tar.gz -C $OUT .
