#!/bin/bash
# What needs vLLM and two GPUs, part after part, in calls of ten minutes.
#
#   tests/bench/two_gpus.sh OUT PART...     for instance OUT 8b+turns load-generators
#
# A part, and the seconds that it is known to take; A+B: two parts of one GPU at once, each with half of the cores.
#   one GPU:   8b 156 to 206, load-generators 100, turns 400, failures about 150
#   two GPUs:  two-gpus 206, and 100 to make its weights; tensor-parallel 352, speed about 250, resume about 107
# 8b, turns and two-gpus share weights, which the first of them makes; load-generators takes them where they are made.
#
# scalegate and vLLM have to be importable, `vllm` on PATH. Weights are made in memory (WORK, 110 GB for `speed`). LIMIT
# seconds (565) end it. Rows are printed as they end, tables last; logs are in OUT. NCCL's multicast stays off.
set -u
cd "$(dirname "$0")/../.." || exit 2
BEGAN=$(date +%s) LIMIT=${LIMIT:-565}
left() { echo $(( BEGAN + LIMIT - $(date +%s) - ${1:-0} )); }
say() { echo "[$(( $(date +%s) - BEGAN )) s] $*"; }
ONE='(8b|load-generators|turns|failures)' TWO='(two-gpus|tensor-parallel|speed|resume)'
usage() { sed -n '2,12s|^# \{0,1\}||p' "$0"; exit 2; }
[ $# -ge 2 ] || usage
for part in "${@:2}"; do [[ $part =~ ^($ONE|$TWO|$ONE\+$ONE)$ ]] || { echo "no part $part" >&2; usage; }; done
command -v vllm >/dev/null || { echo "vllm is not on PATH" >&2; exit 2; }
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
OUT=$(mkdir -p "$1" && cd "$1" && pwd); shift; LOGS=$OUT/logs; mkdir -p "$LOGS"
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
  lane "$name" "$cores" "$gpus" "$limit" python3 -P tests/bench/gate/engines_gpu.py "$@" --folder "$WORK/tmp" --logs "$LOGS/$name"
}
quantizing() {
  local name=$1 cores=$2 gpus=$3 limit=$4; shift 4
  lane "$name" "$cores" "$gpus" "$limit" python3 -P tests/bench/quantization/distributed_quantize.py "$@" --folder "$WORK/tmp"
}

made_8b() { [ -f "$WORK/qwen3-8b/int4-hqq/scalegate.json" ]; }

# part NAME [CORES GPU]: a part of two GPUs has all cores
part() {
  local cores=${2:-$ALL} gpu=${3:-0} model=qwen3-8b
  case $1 in
    8b) engines 8b "$cores" "$gpu" "$(left 14)" --only qwen3-8b --made "$WORK" --seconds "$(left 30)" \
      --out "$OUT/engines_8b.json" ;;
    turns) engines turns "$cores" "$gpu" "$(left 14)" --only turns --made "$WORK" --seconds "$(left 30)" \
      --out "$OUT/engines_turns.json" ;;
    failures) engines failures "$cores" "$gpu" "$(left 14)" --only failures --seconds "$(left 35)" \
      --out "$OUT/engines_failures.json" ;;
    load-generators)
      made_8b && ln -sfn "$WORK/qwen3-8b/source" "$WORK/name/qwen3-8b" && model=$WORK/name/qwen3-8b
      lane load-generators "$cores" "$gpu" "$(left 14)" python3 -P tests/bench/server/load_generators.py "$model" \
        --device cuda --m 64 1 32 --rounds 3 --vllm vllm --folder "$WORK/tmp" --out "$OUT/load_generators.json" ;;
    two-gpus)
      made_8b || engines make-8b "$ALL" 0 "$(left 14)" --only --make qwen3-8b --made "$WORK"
      engines two-gpus "$ALL" 0,1 "$(left 14)" --only two-gpus-8b --made "$WORK" --seconds "$(left 25)" \
        --out "$OUT/engines_two.json" ;;
    tensor-parallel)
      engines make-70b "$ALL" 0 "$(left 14)" --only --make 70b-16-layers --made "$WORK"
      engines tensor-parallel "$ALL" 0,1 "$(left 14)" --only tensor-parallel --made "$WORK" --seconds "$(left 25)" \
        --out "$OUT/engines_tp.json"
      rm -rf "$WORK/70b-16-layers" ;;
    speed) quantizing speed "$ALL" 0,1 "$(left 14)" --parts make speed --source "$WORK/32b" --gpus 1 2 \
      --seconds "$(left 30)" --out "$OUT/distributed_2.json" ;;
    resume) quantizing resume "$ALL" 0,1 "$(left 14)" --parts resume --out "$OUT/distributed_resume.json" ;;
  esac
}

pair() {
  part "$1" "$LOW" 0 &
  local first=$!
  # Both would make the same weights: the second waits until the first has.
  if [[ $1 =~ ^(8b|turns)$ && $2 != failures ]]; then
    while kill -0 "$first" 2>/dev/null && ! made_8b; do sleep 1; done
  fi
  part "$2" "$HIGH" 1 &
  wait
}

for parts in "$@"; do
  if [[ $parts == *+* ]]; then pair "${parts%+*}" "${parts#*+}"; else part "$parts"; fi
done
say "GPUs at the end: $(nvidia-smi --query-gpu=index,memory.used --format=csv,noheader | tr '\n' ';')"
for log in "$LOGS"/*.txt; do
  echo "#### $(basename "$log" .txt)"
  sed -e 's/\r/\n/g' -e 's/^== //' "$log" | grep -a -E '^( *(ok|MISS) |GPUs |  *[124]  |one of two|.*, no disk$)' |
    cut -c1-600 | awk '!seen[$0]++' | tail -14
done
rm -rf "$WORK"
