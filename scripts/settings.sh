#!/usr/bin/env bash
# Run the quick tests in every setting that must not change a result: the processor's vector width, the number of
# threads, ignored signals, a user without root, and an environment without the optional packages.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$PWD/.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=()

quick() { # a name, then words before python: settings of the environment
  local name=$1
  shift
  echo "== $name"
  "$@" "${interpreter:-$python}" -m pytest -q -n 2 --dist loadgroup -m "not slow and not example" \
    -p no:cacheprovider ${ARGS:-} >"$work/log" 2>&1 </dev/null || { failed+=("$name"); grep -E "^(FAILED|ERROR)" "$work/log"; }
  tail -n 1 "$work/log"
}

for setting in "default 1" "avx2 2" "avx512 4"; do
  read -r capability threads <<<"$setting"
  width=$(ATEN_CPU_CAPABILITY=$capability "$python" -c "import torch; print(torch.backends.cpu.get_cpu_capability())")
  if [ "${width,,}" = "$capability" ]; then
    quick "$capability, $threads threads" env ATEN_CPU_CAPABILITY="$capability" OMP_NUM_THREADS="$threads"
  else
    echo "== $capability: this processor does not have it"
  fi
done

ignoring() (trap '' INT TERM HUP && exec "$@")
quick "with Ctrl-C, TERM and HUP ignored, as in the background" ignoring env OMP_NUM_THREADS=1

if [ "$(id -u)" != 0 ]; then
  echo "== without root: the runs above were"
elif setpriv --reuid 65534 --regid 65534 --clear-groups "$python" -c "" 2>/dev/null; then
  mkdir "$work/home" && chown 65534 "$work/home" && chmod 755 "$work"
  quick "without root" setpriv --reuid 65534 --regid 65534 --clear-groups \
    env HOME="$work/home" TMPDIR="$work/home" OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY="$work/home"
else
  echo "== without root: another user cannot run $python"
fi

python3 -m venv "$work/bare" && "$work/bare/bin/pip" install -qq -c constraints.txt torch &&
  "$work/bare/bin/pip" install -qq -c constraints.txt numpy pytest pytest-xdist hypothesis
interpreter=$work/bare/bin/python quick "without the optional packages" env PYTHONPATH="$PWD/src" OMP_NUM_THREADS=1

[ ${#failed[@]} = 0 ] || { printf 'failed: %s\n' "${failed[@]}"; exit 1; }
