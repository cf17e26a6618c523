#!/bin/bash
# What needs vLLM and two GPUs, in calls of ten minutes, each GPU and each core with a part of its own.
#
#   tests/bench/two_gpus.sh one OUT     GPU 0: Qwen3-8B's verdict, then load generators; GPU 1: servers that take turns
#   tests/bench/two_gpus.sh two OUT     servers on a GPU each, tensor parallel, then a killed rank (some 500 s)
#   tests/bench/two_gpus.sh three OUT   torchrun on one and two GPUs, quietly, then failures (some 400 s)
#
# scalegate and vLLM have to be importable, `vllm` on PATH. Weights are made in memory (WORK, 110 GB for `three`). LIMIT
# seconds (565) end it. Rows are printed as they end, tables last; logs are in OUT. NCCL's multicast stays off.
set -u
cd "$(dirname "$0")/../.." || exit 2
BEGAN=$(date +%s) LIMIT=${LIMIT:-565}
left() { echo $(( BEGAN + LIMIT - $(date +%s) - ${1:-0} )); }
say() { echo "[$(( $(date +%s) - BEGAN )) s] $*"; }
[ $# = 2 ] && [[ $1 =~ ^(one|two|three)$ ]] || { sed -n '2,10s|^# \{0,1\}||p' "$0"; exit 2; }
command -v vllm >/dev/null || { echo "vllm is not on PATH" >&2; exit 2; }
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
OUT=$(mkdir -p "$2" && cd "$2" && pwd); LOGS=$OUT/logs; mkdir -p "$LOGS"
WORK=${WORK:-/dev/shm/two-gpus}; rm -rf "$WORK"; mkdir -p "$WORK/tmp" "$WORK/name"
CORES=$(nproc) HALF=$(( $(nproc) / 2 )); LOW=0-$(( HALF - 1 )) HIGH=$HALF-$(( CORES - 1 )) ALL=0-$(( CORES - 1 ))

# lane NAME CORES GPUS SECONDS COMMAND...: all it prints goes to a log, its rows to the console at once
lane() {
  local name=$1 cores=$2 gpus=$3 limit=$4; shift 4
  [ "$limit" -lt 20 ] && { say "$name: no time left"; return 1; }
  say "$name begins: GPUs $gpus, cores $cores, at most $limit s"
  CUDA_VISIBLE_DEVICES=$gpus timeout -k 15 "$limit" taskset -c "$cores" "$@" 2>&1 | tee -a "$LOGS/$name.txt" |
    sed -u 's/\r/\n/g' | grep -a --line-buffered -E '^(== | *ok |MISS |M=|one of two|  *[124]  .*(equal|DIFFER|left out)|[A-Za-z]*Error:)' |
    sed -u -E "s/^(.{0,420}).*/[$name] \1/"
  say "$name ended"
}
engines() {
  local name=$1 cores=$2 gpus=$3 limit=$4; shift 4
  lane "$name" "$cores" "$gpus" "$limit" python3 -P tests/bench/engines_gpu.py "$@" --folder "$WORK/tmp" --logs "$LOGS/$name"
}
quantizing() {
  local name=$1 cores=$2 gpus=$3 limit=$4; shift 4
  lane "$name" "$cores" "$gpus" "$limit" python3 -P tests/bench/distributed_quantize.py "$@" --folder "$WORK/tmp"
}

one() {
  (
    engines 8b "$LOW" 0 "$(left 14)" --only qwen3-8b --made "$WORK" --seconds "$(left 60)" --out "$OUT/engines_8b.json"
    model=qwen3-8b
    [ -f "$WORK/qwen3-8b/source/config.json" ] && ln -sfn "$WORK/qwen3-8b/source" "$WORK/name/qwen3-8b" && model=$WORK/name/qwen3-8b
    [ "$(left)" -gt 110 ] && lane load-generators "$LOW" 0 "$(left 14)" python3 -P tests/bench/load_generators.py "$model" \
      --device cuda --m 64 1 32 --rounds 3 --vllm vllm --folder "$WORK/tmp" --out "$OUT/load_generators.json"
  ) &
  for _ in $(seq 150); do [ -f "$WORK/qwen3-8b/int4-hqq/scalegate.json" ] && break; sleep 1; done
  engines turns "$HIGH" 1 "$(left 14)" --only turns --made "$WORK" --seconds "$(left 30)" --out "$OUT/engines_turns.json" &
  wait
}

two() {
  engines make-70b "$HIGH" 1 170 --only --make 70b-16-layers --made "$WORK" & local make70b=$!
  engines make-8b "$LOW" 0 170 --only --make qwen3-8b --made "$WORK"
  wait $make70b
  engines two-gpus "$ALL" 0,1 270 --only two-gpus-8b --made "$WORK" --seconds 245 --out "$OUT/engines_two.json"
  engines tensor-parallel "$ALL" 0,1 "$(left 14)" --only tensor-parallel --made "$WORK" --seconds "$(left 25)" \
    --out "$OUT/engines_tp.json"
  quantizing resume "$ALL" 0,1 "$(left 14)" --parts resume --out "$OUT/distributed_resume.json"
}

three() {
  quantizing speed "$ALL" 0,1 "$(left 14)" --parts make speed --source "$WORK/32b" --gpus 1 2 --seconds "$(left 30)" \
    --out "$OUT/distributed_2.json"
  engines failures "$ALL" 1 "$(left 14)" --only failures --seconds "$(left 35)" --out "$OUT/engines_failures.json"
}

"$1"
say "GPUs at the end: $(nvidia-smi --query-gpu=index,memory.used --format=csv,noheader | tr '\n' ';')"
for log in "$LOGS"/*.txt; do
  echo "#### $(basename "$log" .txt)"
  sed -e 's/\r/\n/g' -e 's/^== //' "$log" | grep -a -E '^( *(ok|MISS) |GPUs |  *[124]  |one of two|.*, no disk$)' |
    cut -c1-600 | awk '!seen[$0]++' | tail -14
done
rm -rf "$WORK"
