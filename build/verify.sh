#!/usr/bin/env bash
# Runs the executable where no Python is: an empty root folder with the C library alone, and no network.
#
#     build/verify.sh dist/hetero .venv/bin/hetero [MODEL]
#
# Run as root. The second program is the same one as a Python package: what it answers is what the executable has to
# answer. MODEL is the packaged default one unless another is named.
set -euo pipefail

if [ -z "${HETERO_VERIFY:-}" ]; then # mounts and the network are its own, and gone when it ends
  HETERO_VERIFY=$(mktemp -d /tmp/hetero-verify-XXXXXX)
  export HETERO_VERIFY
  status=0
  unshare --mount --net "$0" "$@" || status=$?
  rm -rf --one-file-system "$HETERO_VERIFY"
  exit "$status"
fi
here=$(cd "$(dirname "$0")" && pwd)
file=$(realpath "$1") program=$(realpath --no-symlinks "$2")
python=$(dirname "$program")/python
model=${3:-$("$python" -c 'from hetero.models import resolve; print(resolve(None).path)')}
work=$HETERO_VERIFY
root=$work/root port=8099 pid='' worker='' collector='' failed=0
url=http://127.0.0.1:$port
clean() {
  kill -9 $pid $worker $collector 2>/dev/null || true
}
trap clean EXIT
ip link set lo up

say() { # NAME STATUS DETAIL
  [ "$2" = 0 ] || failed=$((failed + 1))
  printf '%-6s %s%s\n' "$([ "$2" = 0 ] && echo ok || echo FAILED)" "$1" "${3:+: $3}"
}
expect() { # NAME COMMAND…: it must succeed
  local name=$1 output status=0
  shift
  output=$("$@" 2>&1) || status=$?
  say "$name" "$status" "$(printf '%s' "$output" | tail -n 1)"
}
refused() { # NAME WORD ARGUMENTS…: one line with that word, and exit code 1
  local name=$1 word=$2 output status=0
  shift 2
  output=$(run -- "${user[@]}" -- "${hetero[@]}" "$@" 2>&1) || status=$?
  [ "$status" = 1 ] && [ "$(printf '%s\n' "$output" | wc -l)" = 1 ] && [[ $output == *"$word"* ]] && status=0
  say "$name: one sentence" "$status" "$output"
}
seconds() { "$python" -c 'import sys, time; print(f"{time.time() - float(sys.argv[1]):.2f}")' "$1"; }
now() { date +%s.%N; }

# -- the root folder -------------------------------------------------------------------------------------------

mkdir -p "$root"/{bin,lib,lib64,proc,dev/shm,tmp,var/tmp,models,home/user,"opt/Büro – Ort"}
for name in libc.so.6 libm.so.6 libpthread.so.0 libdl.so.2 librt.so.1 libutil.so.1 ld-linux-x86-64.so.2 ld-linux-aarch64.so.1; do
  path=$(ldconfig -p | awk -v name="$name" '$1 == name { print $NF; exit }')
  [ -z "$path" ] || cp -L "$path" "$root/lib/"
done
for loader in "$root"/lib/ld-linux-*; do ln -sf "/lib/$(basename "$loader")" "$root/lib64/"; done
mount -t proc proc "$root/proc"
for device in null zero urandom; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
chmod 1777 "$root/tmp" "$root/var/tmp" "$root/dev/shm"
chown 65534:65534 "$root/home/user"
cp "$file" "$root/bin/hetero"
cp "$model" "$root/models/model.gguf"
user=(--userspec=65534:65534)
in_root() { # [NAME=VALUE…] -- [chroot's options] -- PROGRAM ARGUMENTS…
  local variables=() options=()
  while [ "$1" != -- ]; do variables+=("$1") && shift; done
  shift
  while [ "$1" != -- ]; do options+=("$1") && shift; done
  shift
  exec env -i "HOME=/home/user" "${variables[@]}" /usr/sbin/chroot "${options[@]}" "$root" "$@"
}
run() { (in_root "$@"); }
compiled() { # the files of kernels that the executable did not bring
  local cache=$root/home/user/.cache/hetero key
  for key in "$cache"/jit/*/; do
    diff -rq "$key" "$cache"/app/*/_internal/jit/"$(basename "$key")" 2>&1 || true
  done
}
nothing_compiled() { # NAME
  local found
  found=$(compiled)
  say "$1" "$([ -z "$found" ] && echo 0 || echo 1)" "$(head -n 1 <<<"$found")"
}
forget() { rm -rf --one-file-system "$root"/home/user/.cache "$root"/tmp/* "$root"/var/tmp/* "$root"/dev/shm/*; }

# -- a server --------------------------------------------------------------------------------------------------

serve() { # as in_root; waits until it is ready
  in_root "$@" >"$work/log" 2>&1 &
  pid=$!
  ready
}
ready() {
  for _ in $(seq 1200); do
    curl -fs "$url/health" >/dev/null 2>&1 && return 0
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.05
  done
  tail -n 3 "$work/log"
  return 1
}
stop() { # SIGTERM must end it well, within 20 s
  kill -TERM "$pid"
  for _ in $(seq 200); do kill -0 "$pid" 2>/dev/null || break && sleep 0.1; done
  if kill -9 "$pid" 2>/dev/null; then return 1; fi
  local status=0
  wait "$pid" || status=$?
  pid=''
  return "$status"
}
answer() { # the text of 16 greedy tokens
  curl -fsS "$url/v1/chat/completions" -H 'Content-Type: application/json' \
    -d '{"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 16, "temperature": 0}' |
    "$python" -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["message"]["content"])'
}
serving=(serve /models/model.gguf --port "$port" --ctx 2048)
same_answer() { # NAME, then as in_root: serve, answer as the Python package does, stop
  local name=$1 started text='' status=0
  shift
  started=$(now)
  if serve "$@" "${serving[@]}"; then
    local taken
    taken=$(seconds "$started")
    text=$(answer) || true
    [ "$text" = "$wanted" ] || status=1
    stop || status=2
    say "$name" "$status" "ready after $taken s: ${text%%$'\n'*}"
  else
    pid=''
    say "$name" 1 "does not serve: $(tail -n 1 "$work/log")"
  fi
}

# -- what the Python package says ------------------------------------------------------------------------------

for _ in 1 2; do # the second start is the one to compare with
  started=$(now)
  "$program" serve "$model" --port "$port" --ctx 2048 >"$work/log" 2>&1 &
  pid=$!
  ready
  from_source=$(seconds "$started")
  wanted=$(answer)
  stop
done
echo "as a Python package: ready after $from_source s: ${wanted%%$'\n'*}"
size=$(stat -c %s "$file")
say "size" "$([ "$size" -le 130000000 ] && echo 0 || echo 1)" "$((size / 1000000)) MB"

# -- the checks ------------------------------------------------------------------------------------------------

hetero=(/bin/hetero)
forget
started=$(now)
expect "the version" run -- "${user[@]}" -- "${hetero[@]}" --version
say "unpacked" 0 "$(seconds "$started") s"
started=$(now)
run -- "${user[@]}" -- "${hetero[@]}" --version >/dev/null || true
taken=$(seconds "$started")
say "--version again within 2 s" "$("$python" -c "print(int($taken > 2))")" "$taken s"
forget
same_answer "first start, as an unprivileged user" -- "${user[@]}" -- "${hetero[@]}"
nothing_compiled "nothing was compiled"
same_answer "second start" -- "${user[@]}" -- "${hetero[@]}"

expect "quantize" run -- "${user[@]}" -- "${hetero[@]}" quantize /models/model.gguf /home/user/q.gguf Q8_0 --allow-requantize
rm -f "$root/home/user/q.gguf"
expect "experts, hybrids, formats of the KV cache, guesses, embeddings, two devices" "$python" "$here/exercise.py" \
  "$root/models/tiny" --inside /models/tiny -- env -i HOME=/home/user /usr/sbin/chroot "${user[@]}" "$root" "${hetero[@]}"
nothing_compiled "nothing was compiled for them"
expect "devices" run -- "${user[@]}" -- "${hetero[@]}" devices
expect "families" run -- "${user[@]}" -- "${hetero[@]}" models --families
expect "quality" run -- "${user[@]}" -- "${hetero[@]}" quality /models/tiny/dense.gguf --kv-type fp8 --tokens 128 --ctx 64
refused "a hub that cannot be reached" "cannot be reached" pull hf:owner/model
refused "no pictures" "matplotlib" bench --plot /home/user/x.png
expect "licences" run -- "${user[@]}" -- "${hetero[@]}" --licenses

# -- other processes, https, traces -----------------------------------------------------------------------------

"$python" - "$root/models" "$work/ca.pem" <<'END'
import sys, trustme
from pathlib import Path
authority = trustme.CA()
pair = authority.issue_cert("127.0.0.1")
pair.private_key_and_cert_chain_pem.write_to_path(str(Path(sys.argv[1], "pair.pem")))
authority.cert_pem.write_to_path(sys.argv[2])
END
chmod 644 "$root/models/pair.pem"
"$python" - "$work/spans" 8097 <<'END' &
import http.server, sys
from pathlib import Path
class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        Path(sys.argv[1]).write_bytes(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Collector).serve_forever()
END
collector=$!
export CURL_CA_BUNDLE=$work/ca.pem
url=https://127.0.0.1:$port
if serve -- "${user[@]}" -- "${hetero[@]}" serve /models/tiny/dense.gguf --port "$port" --ctx 128 --isolate all \
  --tls-cert /models/pair.pem --tls-key /models/pair.pem --trace /home/user/trace.json --otlp http://127.0.0.1:8097/v1/traces
then
  expect "the page, over https" grep -q "<html" <(curl -fsS "$url/")
  expect "an answer of a device in its own process" curl -fsS -o "$work/answer" "$url/v1/completions" \
    -H 'Content-Type: application/json' -d '{"prompt": "a", "max_tokens": 4}'
  status=0
  stop || status=$?
  say "SIGTERM ends both processes" "$status"
  expect "a trace" "$python" -c 'import json, sys; assert len(json.load(open(sys.argv[1]))) > 4' "$root/home/user/trace.json"
  expect "spans" test -s "$work/spans"
else
  pid='' && say "a device in its own process, https, traces" 1 "does not serve"
fi
kill "$collector" && wait "$collector" 2>/dev/null || collector=''
unset CURL_CA_BUNDLE
url=http://127.0.0.1:$port

secret=HETERO_WORKER_SECRET=$(head -c 18 /dev/urandom | base64)
in_root "$secret" -- "${user[@]}" -- "${hetero[@]}" worker --listen 127.0.0.1:8098 >"$work/worker" 2>&1 &
worker=$!
for _ in $(seq 600); do (: </dev/tcp/127.0.0.1/8098) 2>/dev/null && break || sleep 0.05; done
if serve "$secret" -- "${user[@]}" -- "${hetero[@]}" serve /models/tiny/experts.gguf --port "$port" --ctx 128 \
  --device CPU:threads=1 --device worker=127.0.0.1:8098
then
  expect "a worker" curl -fsS -o "$work/answer" "$url/v1/completions" -H 'Content-Type: application/json' \
    -d '{"prompt": "a", "max_tokens": 4}'
  expect "bench" run -- "${user[@]}" -- "${hetero[@]}" bench "$url" -n 2 -c 1 --endpoint completions --prompt-tokens 8 \
    --output-tokens 2
  status=0
  stop || status=$?
  say "SIGTERM ends a server of a worker" "$status"
else
  pid='' && say "a worker" 1 "does not serve"
fi
kill "$worker" && wait "$worker" 2>/dev/null || worker=''
nothing_compiled "nothing was compiled there either"

# -- other uses --------------------------------------------------------------------------------------------------

PYTHONPATH=$here/..:$here/../tests "$python" - "$root/models/fim.gguf" <<'END'
import sys
from pathlib import Path
import numpy as np
from tests.tiny_models import bpe_vocab, tiny_model
vocab, names = bpe_vocab(), ["prefix", "suffix", "middle"]
count = len(vocab["tokenizer.ggml.tokens"])
vocab["tokenizer.ggml.tokens"] += [f"<|fim_{name}|>" for name in names]
vocab["tokenizer.ggml.token_type"] = np.append(vocab["tokenizer.ggml.token_type"], [3, 3, 3]).astype(np.int32)
vocab |= {f"tokenizer.ggml.fim_{name[:3]}_token_id": count + i for i, name in enumerate(names)}
tiny_model(Path(sys.argv[1]), metadata=vocab)
END
if serve -- "${user[@]}" -- "${hetero[@]}" serve /models/fim.gguf --port "$port"; then
  expect "fill in the middle" curl -fsS "$url/v1/completions" -H 'Content-Type: application/json' \
    -d '{"prompt": "def add(a, b):\n", "suffix": "\n    return c", "max_tokens": 4}'
  status=0
  stop || status=$?
  say "SIGTERM ends it" "$status"
else
  pid='' && say "fill in the middle" 1 "does not serve"
fi

PYTHONPATH=$here/..:$here/../tests "$python" -c \
  'import sys, pathlib, llama_models; llama_models.mamba2(pathlib.Path(sys.argv[1]))' "$root/models/mamba2.gguf"
expect "packing a family of libllama" run -- "${user[@]}" -- "${hetero[@]}" package -m /models/mamba2.gguf \
  --out /home/user/mamba2
expect "a family of libllama, inside" run -- "${user[@]}" -- /home/user/mamba2 run x --raw --max-tokens 4
rm "$root/home/user/mamba2"

cp "$file" "$root/opt/Büro – Ort/hetero"
same_answer "a path with spaces and accents" -- "${user[@]}" -- "/opt/Büro – Ort/hetero"
rm "$root/opt/Büro – Ort/hetero"

mkdir -p "$root/wrong"
echo 'int wrong;' >"$work/wrong.c"
for name in libggml.so.0 libggml-base.so.0 libllama.so.0 libstdc++.so.6 libgomp.so.1 libgcc_s.so.1 libz.so.1 libpython3.so; do
  cc -shared -fPIC -Wl,-soname,"$name" -o "$root/wrong/$name" "$work/wrong.c"
done
same_answer "a misleading LD_LIBRARY_PATH" LD_LIBRARY_PATH=/wrong -- "${user[@]}" -- "${hetero[@]}"
if grep -qw avx2 /proc/cpuinfo; then
  for level in avx2 avx_vnni; do
    found=$(run "HETERO_CPU_LEVEL=$level" -- "${user[@]}" -- "${hetero[@]}" doctor 2>&1 || true)
    if grep -q "$level kernels" <<<"$found"; then
      same_answer "a CPU of the level $level" "HETERO_CPU_LEVEL=$level" -- "${user[@]}" -- "${hetero[@]}"
      nothing_compiled "nothing was compiled for $level"
    fi
  done
fi

if command -v qemu-x86_64-static >/dev/null && [ "$(uname -m)" = x86_64 ]; then
  status=0
  output=$(qemu-x86_64-static -cpu Nehalem "$file" --version 2>&1) || status=$?
  [ "$status" = 1 ] && [ "$(printf '%s\n' "$output" | wc -l)" = 1 ] && [[ $output == *AVX2* ]] && status=0
  say "a CPU without AVX2: one sentence" "$status" "$output"
fi

forget
mount --rbind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t tmpfs -o size=600m,mode=1777 tmpfs "$root/tmp"
same_answer "read-only but for TMPDIR" TMPDIR=/tmp -- "${user[@]}" -- "${hetero[@]}"
umount "$root/tmp"
mount -t tmpfs -o noexec,size=600m,mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o size=600m,mode=1777 tmpfs "$root/home/user"
same_answer "/tmp mounted noexec" -- "${user[@]}" -- "${hetero[@]}"
umount "$root/home/user"
status=0
output=$(run -- "${user[@]}" -- "${hetero[@]}" --version 2>&1) || status=$?
[ "$status" = 1 ] && [ "$(printf '%s\n' "$output" | wc -l)" = 1 ] && [[ $output == *noexec* ]] && status=0
say "nowhere to unpack to: one sentence" "$status" "$output"
umount "$root/tmp"
umount -R "$root"

forget
run -- "${user[@]}" -- "${hetero[@]}" --version >"$work/a" &
first=$!
run -- "${user[@]}" -- "${hetero[@]}" --version >"$work/b" &
status=0
wait "$first" || status=1
wait $! || status=1
cmp -s "$work/a" "$work/b" || status=1
say "two copies at once, the first time" "$status" "$(ls "$root/home/user/.cache/hetero/app")"

forget
for delay in 0.05 0.1 0.2 0.4; do # killed while it unpacks
  run -- "${user[@]}" -- "${hetero[@]}" --version >/dev/null 2>&1 &
  sleep "$delay"
  kill -9 $! 2>/dev/null || true
  wait $! 2>/dev/null || true
done
same_answer "after killed starts" -- "${user[@]}" -- "${hetero[@]}"
serve -- "${user[@]}" -- "${hetero[@]}" "${serving[@]}"
kill -9 "$pid" && wait "$pid" 2>/dev/null || pid=''
for _ in $(seq 50); do run -- "${user[@]}" -- "${hetero[@]}" --version >/dev/null; done
left=$(find "$root/tmp" "$root/var/tmp" "$root/dev/shm" "$root/home/user/.cache/hetero/app" -mindepth 1 -maxdepth 1 \
  ! -name .lock | wc -l)
say "50 starts and a killed server leave one unpacked copy" "$((left != 1))" "$left in temporary folders and the cache"

printf 'port = %s\nctx = 2048\n' "$port" >"$root/home/user/hetero.toml"
expect "package" run -- "${user[@]}" -- "${hetero[@]}" package --model /models/model.gguf \
  --config /home/user/hetero.toml --out /home/user/hetero-office
rm "$root/home/user/hetero.toml"
mv "$root/models" "$root/gone"
serving=()
same_answer "the packaged file alone, with no argument" -- "${user[@]}" -- /home/user/hetero-office
mv "$root/gone" "$root/models"

private=$("$python" -c 'import sys; print(sys.base_prefix)')
status=0
for name in "$(dirname "$here")" "$private"; do
  [[ $name == /usr* ]] || ! grep -rqF "$name" "$root/home/user/.cache/hetero" || status=1
done
say "no paths of the builder" "$status"

echo
if [ "$failed" -gt 0 ]; then
  echo "$failed checks failed"
  exit 1
fi
echo "all checks passed"
