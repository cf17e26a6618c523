#!/bin/bash
# What needs vLLM and two GPUs, in two calls of ten minutes, each GPU and each core with a part of its own.
#
#   tests/bench/two_gpus.sh one OUT    GPU 0: Qwen3-8B's verdict, then load generators; GPU 1: servers that take turns
#   tests/bench/two_gpus.sh two OUT    servers on a GPU each; torchrun on one and two; tensor parallel, failures, a killed rank
#
# scalegate and vLLM have to be importable, `vllm` on PATH. Weights are made in memory (WORK, 170 GB for `two`). LIMIT
# seconds (565) end it. Rows are printed as they end, tables last; logs are in OUT. NCCL's multicast stays off.
set -u
cd "$(dirname "$0")/../.." || exit 2
BEGAN=$(date +%s) LIMIT=${LIMIT:-565}
left() { echo $(( BEGAN + LIMIT - $(date +%s) - ${1:-0} )); }
say() { echo "[$(( $(date +%s) - BEGAN )) s] $*"; }
[ $# = 2 ] && [[ $1 =~ ^(one|two)$ ]] || { sed -n '2,9s|^# \{0,1\}||p' "$0"; exit 2; }
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
  engines turns "$HIGH" 1 "$(left 14)" --only turns --seconds "$(left 30)" --out "$OUT/engines_turns.json" &
  (
    engines 8b "$LOW" 0 "$(left 14)" --only qwen3-8b --made "$WORK" --seconds "$(left 60)" --out "$OUT/engines_8b.json"
    model=qwen3-8b
    [ -f "$WORK/qwen3-8b/source/config.json" ] && ln -sfn "$WORK/qwen3-8b/source" "$WORK/name/qwen3-8b" && model=$WORK/name/qwen3-8b
    [ "$(left)" -gt 110 ] && lane load-generators "$LOW" 0 "$(left 14)" python3 -P tests/bench/load_generators.py "$model" \
      --device cuda --m 64 1 32 --rounds 3 --vllm vllm --folder "$WORK/tmp" --out "$OUT/load_generators.json"
  ) &
  wait
}

two() {
  local shape=70b-16-layers cut=""
  engines make-70b "$HIGH" 1 170 --only --make $shape --made "$WORK" & local make70b=$!
  ( for _ in $(seq 60); do [ -f "$WORK/$shape/source/tokenizer_config.json" ] && break; sleep 1; done
    quantizing make-32b "$HIGH" 0 150 --parts make --source "$WORK/32b" ) & local make32b=$!
  engines two-gpus "$ALL" 0,1 270 --only two-gpus --shared --seconds 245 --out "$OUT/engines_two.json"
  wait $make70b $make32b
  [ -f "$WORK/32b/model.safetensors.index.json" ] || { rm -rf "$WORK/32b"; cut="--layers 24"; say "no weights of 32B: $cut"; }
  # shellcheck disable=SC2086
  quantizing speed "$ALL" 0,1 "$(left 14)" --parts speed --source "$WORK/32b" $cut --gpus 1 2 --seconds "$(left 60)" \
    --out "$OUT/distributed_2.json" & local speed=$!
  # What is timed has ended when both have written their seconds; what follows compares bytes.
  while kill -0 $speed 2>/dev/null && ! ls "$WORK"/tmp/*/on-2-seconds.json >/dev/null 2>&1; do sleep 0.3; done
  engines tensor-parallel "$LOW" 0,1 "$(left 14)" --only tensor-parallel --made "$WORK" --shared --seconds "$(left 25)" \
    --out "$OUT/engines_tp.json" &
  engines failures "$HALF-$(( CORES - 7 ))" 1 "$(left 14)" --only failures --shared --seconds "$(left 35)" \
    --out "$OUT/engines_failures.json" & local failures=$!
  # "share too small" measures free memory, which nobody may give back meanwhile.
  for _ in $(seq 140); do
    grep -a -q -E '^== *(ok|MISS) share too small' "$LOGS/failures.txt" 2>/dev/null && break
    kill -0 $failures 2>/dev/null || break
    sleep 1
  done
  quantizing resume "$(( CORES - 6 ))-$(( CORES - 1 ))" 0,1 "$(left 14)" --parts resume --out "$OUT/distributed_resume.json"
  wait
}

"$1"
say "GPUs at the end: $(nvidia-smi --query-gpu=index,memory.used --format=csv,noheader | tr '\n' ';')"
for log in "$LOGS"/*.txt; do
  echo "#### $(basename "$log" .txt)"
  sed -e 's/\r/\n/g' -e 's/^== //' "$log" | grep -a -E '^( *(ok|MISS) |GPUs |  *[124]  |one of two|.*, no disk$)' |
    cut -c1-600 | awk '!seen[$0]++' | tail -14
done
rm -rf "$WORK"
