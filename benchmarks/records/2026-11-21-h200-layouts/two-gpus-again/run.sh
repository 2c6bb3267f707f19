# two GPUs, what changed since the first run. $1 OUT, $2 seconds in all
out=$1; until=$(($(date +%s) + $2 - 15)); mkdir -p $out/run
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=8 TORCHINDUCTOR_COMPILE_THREADS=8 PYTHONPATH="$PWD/src:$PYTHONPATH" NCCL_NVLS_ENABLE=0
pack() { tar czf $out/all.tgz -C $out run 2>/dev/null; }
{ date '+%F %T'; nvidia-smi --query-gpu=index,name,driver_version --format=csv; } > $out/run/log.txt
timeout -k 5 $2 python3 -m torch.distributed.run --nproc-per-node 2 --max-restarts 5 benchmarks/gpu_layouts.py $out/run 2.7B --steps ${STEPS:-6 12} --data prose_text_document --limit 80 --until $until --cells "one GPU" "PP2" "PP2 micro-batch 2" "TP2" "DP2 ZeRO-3" "DP2 ZeRO-1" "PP2 not interleaved" >> $out/run/log.txt 2>&1 &
while sleep 4; do pack; kill -0 $! 2>/dev/null || break; done
timeout -k 5 $((until - $(date +%s))) python3 -m torch.distributed.run --nproc-per-node 2 --max-restarts 5 benchmarks/gpu_layouts.py $out/run 1.3B --steps 6 12 --data prose_text_document --limit 80 --until $((until - 10)) --cells "one GPU" "PP2" "TP2" >> $out/run/log.txt 2>&1
pack; cp $out/run/*.md $out/run/*.png $out 2>/dev/null; grep -h "tokens/s\|FAILED\|^|\|no time\|rror" $out/run/log.txt | cut -c1-520; rm -rf $out/run
