#!/usr/bin/env bash
# All of this suite on a machine with a GPU, the published wheel and vLLM: tests/interop/run_on_gpu.sh OUT_DIRECTORY
# With TILERT_REF_INTEROP_WORKERS=N in N processes (pytest-xdist), a log for each.
# Buffers in host memory (all cases), then in GPU memory (one shard), then models of full depth in vLLM.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=$(realpath "${1:?the directory for logs and results}")
mkdir -p "$out"
python=${TILERT_REF_INTEROP_PYTHON:-python3}
suite() { "$python" -m pytest -p no:cacheprovider -q ${TILERT_REF_INTEROP_WORKERS:+-n $TILERT_REF_INTEROP_WORKERS} "$@"; }

status=0
TILERT_REF_INTEROP_LOG=$out/interop-host.json suite tests/interop || status=1
TILERT_REF_INTEROP_LOG=$out/interop-cuda.json TILERT_REF_INTEROP_DEVICE=cuda \
  suite tests/interop/test_interop_receiver.py tests/interop/test_interop_connector.py || status=1
if "$python" -c 'import vllm' 2>/dev/null; then
  "$python" tests/interop/run_full_depth.py --device cuda --out "$out/full-depth.json" || status=1
else
  echo "no vLLM here: models of full depth are left out"
fi
exit $status
