# Other programs beside ours, one model a GPU, and variants of the kernels of generation: four GPUs, under seven minutes.
#     OUT=FOLDER bash second.sh, in the root of the project; megatron-core and einops must be installed
set -u
given=${PYTHONPATH:-}
export PYTHONPATH=$PWD/src:$given PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
LIMIT=${LIMIT:-420} began=$SECONDS back=$OUT OUT=/tmp/out
left() { echo $((LIMIT - SECONDS + began)); }
rm -rf $OUT; mkdir -p $OUT
(while sleep 15; do tar czf $back/all.part -C $OUT . 2> /dev/null && mv $back/all.part $back/all.tar.gz; done) & archiving=$!
on() { export CUDA_VISIBLE_DEVICES=$1; cpus="taskset -c $((16 * $1))-$((16 * $1 + 15))"; }
bench() { timeout $(left) $cpus python3 -m meshwright bench --peer-seconds 230 "$@"; }
generation() {
    on 0
    for size in 345M 1.3B; do [ -e trials/decode_lab.py ] && timeout 100 $cpus python3 trials/decode_lab.py $size > $OUT/lab-$size.txt 2>&1; done
    bench sizes --rows '^2.7B dropout 0.1$' --peer-names megatron-core --out $OUT/2.7B -- --micro-batch-size 4 --global-batch-size 4
}
llama() {
    on 1
    [ -e trials/reduce_try.py ] && timeout 40 $cpus python3 trials/reduce_try.py > $OUT/reduce.txt 2>&1
    bench sizes --rows '^1.3B Llama$' --peer-names transformers-compiled --out $OUT/llama
}
small() { on 2; bench 345m --rows '^345M dropout 0.1$' --peer-names megatron-core transformers-compiled --out $OUT/345M; }
middle() { on 3; bench sizes --rows '^1.3B dropout 0.1$' --peer-names megatron-core transformers-compiled --out $OUT/1.3B; }
(generation) > $OUT/generation.txt 2>&1 & a=$!
(llama) > $OUT/llama.txt 2>&1 & b=$!
(small) > $OUT/small.txt 2>&1 & c=$!
(middle) > $OUT/middle.txt 2>&1 & d=$!
wait $a $b $c $d
cat $OUT/lab-*.txt $OUT/reduce.txt; grep -v "^ *$" $OUT/generation.txt $OUT/llama.txt $OUT/small.txt $OUT/middle.txt | cut -c1-150 | tail -n 70
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
kill $archiving; tar czf $back/all.tar.gz -C $OUT .
