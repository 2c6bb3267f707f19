# Variants of the kernels of generation, then layouts: four GPUs, under five minutes.
#     OUT=FOLDER bash fourth.sh, in the root of the project
set -u
given=${PYTHONPATH:-} here=$(dirname $0)
export PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
LIMIT=${LIMIT:-270} began=$SECONDS back=$OUT OUT=/tmp/out
left() { echo $((LIMIT - SECONDS + began)); }
rm -rf $OUT; mkdir -p $OUT
(while sleep 15; do tar czf $back/all.part -C $OUT . 2> /dev/null && mv $back/all.part $back/all.tar.gz; done) & archiving=$!
lab() { CUDA_VISIBLE_DEVICES=$1 PYTHONPATH=$PWD/src:$given timeout 90 taskset -c $((16 * $1))-$((16 * $1 + 15)) python3 trials/decode_lab.py $2 > $OUT/lab-$2.txt 2>&1; }
first() {
    if [ -e trials/decode_lab.py ]; then lab 0 345M & lab 1 1.3B & wait; fi
    CUDA_VISIBLE_DEVICES=0,1 LIMIT=$(left) OUT=$OUT/tp taskset -c 0-31 bash $here/layouts.sh tp one-2.7B > $OUT/tp.txt 2>&1
}
second() {
    CUDA_VISIBLE_DEVICES=2,3 LIMIT=$(left) OUT=$OUT/zero taskset -c 32-63 bash $here/layouts.sh zero-before zero-after dp one-2.7B-8 > $OUT/zero.txt 2>&1
}
first & a=$!
second & b=$!
wait $a $b
cat $OUT/lab-*.txt $OUT/tp.txt $OUT/zero.txt
kill $archiving; tar czf $back/all.tar.gz -C $OUT .
