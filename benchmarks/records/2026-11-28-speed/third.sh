# Variants of the kernels of generation, one Muon update by parts, and rows of one GPU after the changes: four GPUs, under four minutes.
#     OUT=FOLDER bash third.sh, in the root of the project
set -u
given=${PYTHONPATH:-}
export PYTHONPATH=$PWD/src:$given PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
LIMIT=${LIMIT:-230} began=$SECONDS back=$OUT OUT=/tmp/out
left() { echo $((LIMIT - SECONDS + began)); }
rm -rf $OUT; mkdir -p $OUT
(while sleep 15; do tar czf $back/all.part -C $OUT . 2> /dev/null && mv $back/all.part $back/all.tar.gz; done) & archiving=$!
on() { export CUDA_VISIBLE_DEVICES=$1; cpus="taskset -c $((16 * $1))-$((16 * $1 + 15))"; }
bench() { timeout $(left) $cpus python3 -m meshwright bench --profile "$@"; }
lab() {
    on $1
    [ -e trials/decode_lab.py ] && timeout 120 $cpus python3 trials/decode_lab.py $2 > $OUT/lab-$2.txt 2>&1
    timeout $(left) $cpus python3 -m pytest -q -n 6 -p no:cacheprovider -m "not long" $3 > $OUT/tests-$1.txt 2>&1
}
muon() {
    on 2
    timeout 100 $cpus python3 benchmarks/gpu_muon.py --sweep > $OUT/muon-sweep.txt 2>&1
    timeout $(left) $cpus python3 benchmarks/gpu_muon.py --models 345M 1.3B > $OUT/muon.txt 2>&1
}
rows() {
    on 3
    bench 345m --rows '^345M( Muon)?$' --out $OUT/muon-64k -- --micro-batch-size 64 --global-batch-size 64
    bench 345m --rows '^345M( micro-batch 64| accumulation 4 x 16)$' --out $OUT/accumulation
}
(lab 0 345M "tests/kernels/test_decode.py tests/generation/test_decoder.py") & a=$!
(lab 1 1.3B "tests/kernels/test_symmetric.py tests/kernels/test_muon_passes.py tests/optim/test_muon.py tests/kernels/test_norm.py tests/kernels/test_column_sums.py") & b=$!
(muon) & c=$!
(rows) > $OUT/rows.txt 2>&1 & d=$!
wait $a $b $c $d
cat $OUT/lab-*.txt $OUT/muon.txt $OUT/muon-sweep.txt; tail -n 3 $OUT/tests-*.txt; grep -v "^ *$" $OUT/rows.txt | cut -c1-150
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
kill $archiving; tar czf $back/all.tar.gz -C $OUT .
