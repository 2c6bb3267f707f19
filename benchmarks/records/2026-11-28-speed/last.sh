# The final figures: layouts beside one GPU in the same run, generation, Muon, ZeRO 3 beside one process: four GPUs, three minutes.
#     OUT=FOLDER bash last.sh, in the root of the project
set -u
here=$(dirname $0)
export PYTHONPATH=$PWD/src:${PYTHONPATH:-} PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
LIMIT=${LIMIT:-180} began=$SECONDS back=$OUT OUT=/tmp/out
left() { echo $((LIMIT - SECONDS + began)); }
rm -rf $OUT; mkdir -p $OUT
(while sleep 10; do tar czf $back/all.part -C $OUT . 2> /dev/null && mv $back/all.part $back/all.tar.gz; done) & archiving=$!
bench() { timeout $(left) $cpus python3 -m meshwright bench "$@"; }
layouts() {
    export CUDA_VISIBLE_DEVICES=0,1; cpus="taskset -c 0-31"
    bench layouts --gpus 2 --rows '^2.7B( TP2 SP)?$' --out $OUT/2.7B-TP2 -- --micro-batch-size 4 --global-batch-size 4
    bench layouts --gpus 2 --rows '^1.3B( DP2)?$' --out $OUT/1.3B-DP2
    bench layouts --gpus 2 --rows '^345M( DP2)?$' --out $OUT/345M-DP2
}
generation() {
    export CUDA_VISIBLE_DEVICES=2; cpus="taskset -c 32-47"
    timeout 60 $cpus python3 $here/variants.py 345M 1.3B > $OUT/variants.txt 2>&1
    timeout 40 $cpus python3 benchmarks/gpu_decode.py --rows 1 --quick > $OUT/decode.txt 2>&1
}
muon() {
    export CUDA_VISIBLE_DEVICES=3; cpus="taskset -c 48-63"
    bench 345m --profile --rows '^345M( Muon)?$' --out $OUT/muon-64k -- --micro-batch-size 64 --global-batch-size 64
    timeout 30 $cpus python3 -m pytest -q -n 6 -p no:cacheprovider -m "not long" tests/kernels/test_decode.py tests/kernels/test_symmetric.py tests/optim/test_muon.py tests/kernels/test_addition.py > $OUT/tests.txt 2>&1
}
zero() {
    export CUDA_VISIBLE_DEVICES=2,3; cpus="taskset -c 32-63"
    bench layouts --gpus 2 --rows '^2.7B DP2 ZeRO-3$' --out $OUT/2.7B-ZeRO-3 -- --micro-batch-size 4 --global-batch-size 8 --data-parallel-sums copies
}
verify() {
    for sums in collectives copies; do
        CUDA_VISIBLE_DEVICES=2,3 timeout $(left) taskset -c 32-63 python3 -m meshwright launch --nproc-per-node 2 verify-layout --preset gpt2-345m --bf16 --micro-batch-size 4 --global-batch-size 8 --zero-stage 3 --data-parallel-sums $sums > $OUT/verify-$sums.txt 2>&1
    done
}
(layouts) > $OUT/layouts.txt 2>&1 & a=$!
(zero) > $OUT/zero.txt 2>&1
generation & b=$!
(muon) > $OUT/muon.txt 2>&1 & c=$!
wait $b $c
verify
wait $a
cat $OUT/variants.txt $OUT/decode.txt; tail -n 3 $OUT/tests.txt; grep -v "^ *$" $OUT/layouts.txt $OUT/zero.txt $OUT/muon.txt | cut -c1-130; grep -h "optimizer state\|verified\|differs" $OUT/verify-*.txt
kill $archiving; tar czf $back/all.tar.gz -C $OUT .
