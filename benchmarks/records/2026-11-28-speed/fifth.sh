# Layouts beside one GPU, ZeRO 3 by collectives and by copies, and both beside one process in float64: four GPUs, under four minutes.
#     OUT=FOLDER bash fifth.sh, in the root of the project
set -u
given=${PYTHONPATH:-} here=$(dirname $0)
export PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
LIMIT=${LIMIT:-220} began=$SECONDS back=$OUT OUT=/tmp/out
left() { echo $((LIMIT - SECONDS + began)); }
rm -rf $OUT; mkdir -p $OUT
(while sleep 15; do tar czf $back/all.part -C $OUT . 2> /dev/null && mv $back/all.part $back/all.tar.gz; done) & archiving=$!
layouts() { PROFILE=${PROFILE---profile} CUDA_VISIBLE_DEVICES=$1 LIMIT=$(left) OUT=$OUT/$2 taskset -c $3 bash $here/layouts.sh ${@:4} > $OUT/$2.txt 2>&1; }
verify() {
    CUDA_VISIBLE_DEVICES=2,3 PYTHONPATH=$PWD/src:$given timeout $(left) taskset -c 32-63 python3 -m meshwright launch --nproc-per-node 2 verify-layout --preset gpt2-345m --bf16 --micro-batch-size 4 --global-batch-size 8 "$@"
}
first() { PROFILE= layouts 0,1 two 0-31 one-2.7B tp one-1.3B dp one-345M dp-345M; }
second() {
    layouts 2,3 zero 32-63 zero-before zero-after
    verify --tensor-model-parallel-size 2 --sequence-parallel --tp-overlap on > $OUT/verify-tp.txt 2>&1
    verify --zero-stage 3 --data-parallel-sums copies > $OUT/verify-zero.txt 2>&1
    PROFILE= layouts 2,3 one-8 32-63 one-2.7B-8
}
first & a=$!
second & b=$!
wait $a $b
cat $OUT/two.txt $OUT/zero.txt $OUT/one-8.txt; tail -n 12 $OUT/verify-*.txt
kill $archiving; tar czf $back/all.tar.gz -C $OUT .
